"""This repository's model as a Hugging Face transformers model (version 5).

`python -m scripts.export_hf` copies this file, and every file of the repository that it imports,
into the exported folder; from there transformers loads it with trust_remote_code=True.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from config import Config
from layers.build import build_model
from layers.cache import KVCache
from layers.windows import limit_windows

# Where documents begin in a row, in the words of transformers' DataCollatorWithFlattening.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
ONE_DOCUMENT = (
    "this model reads a row as one document, and documents packed into a row would attend to each "
    "other: give each document a row of its own, padded on the right"
)


class SharpAttentionConfig(PreTrainedConfig):
    """`settings` are the settings of the training run, `rope` the arguments of GPT.scale_rope.

    `log_base` is the argument of GPT.scale_scores, `window` the most keys that a query sees in any
    layer, or None.
    """

    model_type = "sharp_attention"
    settings: Any = None
    rope: Any = None
    log_base: Any = None
    window: Any = None


class Cache(KVCache):
    """The model's cache, with the attributes and methods that transformers expects of a cache."""

    is_compileable = is_croppable = False

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def reorder_cache(self, beams: Tensor) -> None:
        for tensors in self.layers.values():
            tensors[:] = [x[beams] for x in tensors]


class SharpAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """The transformers interface to this repository's GPT.

    In `forward` each row is one document, and may be padded on the right, never on the left. In
    `generate` all prompts must have the same length, without padding.
    """

    config_class = SharpAttentionConfig
    # `forward` takes no num_items_in_batch: Trainer divides the loss by the accumulated batches
    accepts_loss_kwargs = False
    _is_stateful = True  # a cache cannot be rolled back: no assisted generation

    def __init__(self, config: SharpAttentionConfig) -> None:
        super().__init__(config)
        gpt = build_model(Config(**config.settings)).scale_rope(**config.rope)
        self.gpt = gpt.scale_scores(config.log_base)
        if config.window is not None:
            limit_windows(self.gpt, config.window)
        # No positions yet: the first call computes them on the weights' device.
        if (table := self.gpt.trunk.rope) is not None:
            table.set(table.rope, 0)
        first_name = {parameter: name for name, parameter in self.named_parameters()}
        self._tied_weights_keys = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if name != first_name[parameter]:
                self._tied_weights_keys[name] = first_name[parameter]
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # whether or not tie_word_embeddings is set, because layers may share parameters too
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.wte

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Return the embedding. Raises ValueError, and changes nothing, for another number of ids.

        The number of ids is a setting of training, from which the model is built.
        """
        ids = self.gpt.n_vocab
        if new_num_tokens not in (None, ids):
            raise ValueError(
                f"this model has {ids} ids, not {new_num_tokens}: for further tokens, train it "
                "with a larger vocab_size"
            )
        return self.gpt.wte

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits [B, L, n_vocab], or of fewer positions with `logits_to_keep`.

        It is the number of last positions, or a tensor of positions; 0 keeps all.

        With labels [B, L] (not shifted; -100 is ignored) also the mean loss in nats.
        `past_key_values` is a Cache(final length), because a RoPE scaling may depend on that; the
        argument `final_length`, without a cache, gives the same logits.
        `position_ids` change nothing: they may only count from 0, or on from the cache's last one.
        Raises ValueError for padding on the left, for any padding in generation, and for several
        documents in a row.
        """
        cache = past_key_values
        if cache is None and "final_length" in kwargs:
            cache = Cache(kwargs["final_length"])  # for this call alone
        if attention_mask is not None:
            check_padding(attention_mask, cache)
        if position_ids is not None:
            check_positions(position_ids, attention_mask, cache)
        for name in BOUNDARIES:
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is not supported: {ONE_DOCUMENT}")
        x = self.gpt.hidden(input_ids, cache)
        if isinstance(logits_to_keep, int):
            x = x[:, -logits_to_keep:]  # all of them for 0
        else:
            x = x[:, logits_to_keep]
        logits = self.gpt.logits(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        # transformers declares FloatTensor, which no tensor has as static type, and its own Cache
        return CausalLMOutputWithPast(loss, logits, past_key_values)  # type: ignore[arg-type]

    # transformers declares -> bool and returns None
    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        if model_kwargs.get("past_key_values") is not None:
            # its size and its keys' RoPE are for the length of the call that made it
            raise ValueError("generate takes no past_key_values: pass it all tokens so far instead")
        length = generation_config.max_length
        if generation_config.use_cache:
            model_kwargs["past_key_values"] = Cache(length)
        else:
            model_kwargs["final_length"] = length


def check_padding(attention_mask: Tensor, cache: Cache | None) -> None:
    """Raise ValueError for padding, 0 in the mask, on the left, and for any in generation."""
    if attention_mask.dtype == torch.bool:
        attention_mask = attention_mask.int()  # the difference of bools has no sign
    if cache is None:
        wrong = attention_mask.diff() > 0
    elif cache.length == 0:
        wrong = attention_mask == 0
    else:  # checked by the first call
        return
    if wrong.any():
        raise ValueError(
            "no padding on the left, and none in generation: give it prompts of equal length "
            "(lm_eval: batch_size=1)"
        )


def check_positions(
    position_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None
) -> None:
    """Raise ValueError unless the positions of all tokens but padding continue those of the cache.

    Without a cache they count from 0.
    """
    length = position_ids.shape[-1]
    first = 0 if cache is None else cache.length
    expected = torch.arange(first, first + length, device=position_ids.device)
    wrong = position_ids != expected
    if attention_mask is not None:
        wrong = wrong & (attention_mask[:, -length:] != 0)
    if wrong.any():
        raise ValueError(f"position_ids must count from {first} in steps of 1: {ONE_DOCUMENT}")
