"""This repository's model as one of Hugging Face's transformers (version 5).

`python -m scripts.export_hf` copies this file, and every file of the repository that it needs, into
the exported folder; from there transformers loads it with trust_remote_code=True.
"""

import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import Config
from model import GPT, KVCache


class SharpAttentionConfig(PreTrainedConfig):
    """`settings` are those of the training run, `rope` the arguments of GPT.scale_rope."""

    model_type = "sharp_attention"

    def __init__(self, settings: dict | None = None, rope: dict | None = None, **kwargs):
        self.settings = settings or {}
        self.rope = rope or {"scaling": "none"}
        super().__init__(**kwargs)


class Cache(KVCache):
    """The model's cache, under the names by which transformers knows one."""

    is_compileable = is_croppable = False

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def reorder_cache(self, beams: Tensor) -> None:
        for stored in (self.keys, self.values):
            for layer in stored:
                stored[layer] = stored[layer][beams]


class SharpAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """`forward` and `generate` as transformers have them, for sequences of one length: the batch
    may be padded on the right, where nothing is generated, and never on the left."""

    config_class = SharpAttentionConfig
    _is_stateful = True  # a cache cannot be taken back: no assisted generation

    def __init__(self, config: SharpAttentionConfig):
        super().__init__(config)
        self.gpt = GPT(Config(**config.settings)).scale_rope(**config.rope)
        # Made for no position: the first call makes its own, where the weights are by then.
        self.gpt.trunk.set_rope(self.gpt.trunk.rope, 0)
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        shared = {other: first for first, *others in names.values() for other in others}
        self._tied_weights_keys = shared
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # not only where tie_word_embeddings is set: layers may share parameters too
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self):
        return self.gpt.wte

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits [B, L, vocabulary], of the last `logits_to_keep` positions if that is not 0.

        With labels [B, L] (those of input_ids; -100 where there is none) also the mean loss in
        nats. `past_key_values` is a Cache(final length), as a RoPE scaling may depend on that.
        """
        new = past_key_values is None or past_key_values.length == 0
        if attention_mask is not None and new:
            mask = attention_mask.bool()
            gaps = mask[:, 1:] & ~mask[:, :-1] if past_key_values is None else ~mask
            if gaps.any():
                raise ValueError(
                    "this model takes no padding on the left, nor any where it generates: give it "
                    "prompts of one length (lm_eval: batch_size=1)"
                )
        x = self.gpt.trunk(self.gpt.wte(input_ids), past_key_values)
        logits = self.gpt.logits(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args) -> None:
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = Cache(generation_config.max_length)
