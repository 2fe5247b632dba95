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
from layers.documents import positions_in_documents
from layers.windows import limit_windows

# Where documents begin in a row, besides position_ids, in the words of transformers'
# DataCollatorWithFlattening.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Outputs that other models of transformers have.
OUTPUTS = ("output_attentions", "output_hidden_states")


class SharpAttentionConfig(PreTrainedConfig):
    """`settings` are the settings of the training run, `rope` the arguments of GPT.scale_rope.

    `log_base` is the argument of GPT.scale_scores, `window` the most keys that a query sees in any
    layer, or None, and `document_start` the id that begins a document, if attention stays within
    documents.
    """

    model_type = "sharp_attention"
    settings: Any = None
    rope: Any = None
    log_base: Any = None
    window: Any = None
    document_start: Any = None


class Cache(KVCache):
    """The model's cache, with the attributes and methods that transformers expects of a cache."""

    is_compileable = is_croppable = False
    # [B, 1]: the next position of each row, counted like position_ids: end-of-text restarts nothing
    next_position: Tensor | None = None

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def reorder_cache(self, beams: Tensor) -> None:
        for tensors in self.stored.values():
            tensors[:] = [x[beams] for x in tensors]
        if self.document_length is not None:
            self.document_length = self.document_length[beams]
        if self.next_position is not None:
            self.next_position = self.next_position[beams]


class SharpAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """The transformers interface to this repository's GPT.

    A row is one document, which may be padded on the left or, except in generation, on the right;
    or it is several documents, which begin where position_ids restart from 0. Documents and rows do
    not affect each other.
    """

    config_class = SharpAttentionConfig
    # `forward` takes no num_items_in_batch: Trainer divides the loss by the accumulated batches
    accepts_loss_kwargs = False
    _is_stateful = True  # a cache cannot be rolled back: no assisted generation
    _no_split_modules = ["GPT"]  # device_map="auto" puts all layers on one device

    def __init__(self, config: SharpAttentionConfig) -> None:
        super().__init__(config)
        gpt = build_model(Config(**config.settings)).scale_rope(**config.rope)
        self.gpt = gpt.scale_scores(config.log_base)
        self.gpt.document_start = config.document_start
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
        """Compute the logits [B, L, n_vocab] and, with labels, the mean loss in nats.

        `logits_to_keep` selects positions: a number of last positions (0: all), or a tensor of
        positions. Labels [B, L] are not shifted; -100 is ignored.

        `past_key_values` is a Cache(final length), because a RoPE scaling may depend on that; the
        argument `final_length`, without a cache, gives the same logits.
        Raises ValueError where `document_starts` does, for other marks of packed documents, and if
        outputs are requested that the model does not have.
        """
        for name in OUTPUTS:
            if kwargs.get(name):
                raise ValueError(f"{name} is not supported: the model returns logits and the loss")
        cache = past_key_values
        if cache is None and "final_length" in kwargs:
            cache = Cache(kwargs["final_length"])  # for this call alone
        for name in BOUNDARIES:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported: the documents of a row are known by position_ids "
                    "that restart from 0"
                )
        is_start = self.document_starts(input_ids, attention_mask, position_ids, cache)
        x = self.gpt.hidden(input_ids, cache, is_start)
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

    def document_starts(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> Tensor | None:
        """Return where documents begin in input_ids, bool [B, L]; None if each row is one document.

        They begin where position_ids [1 or B, L] restart from 0 and, with document_mask, at
        end-of-text. Padding, 0 in attention_mask [B, past + L], counts as a document of its own.
        Raises ValueError for zeros between tokens, for padding on the right in generation, and for
        positions that do not count the tokens.
        """
        B, L = input_ids.shape
        past = 0 if cache is None else cache.length
        is_token = input_ids.new_ones(B, past + L, dtype=torch.bool)
        if attention_mask is not None:
            check_padding(attention_mask, is_token.shape, generates=cache is not None)
            is_token = attention_mask.bool()
        is_padded = not is_token.all()
        is_start = is_token.diff(dim=1, prepend=is_token[:, :1])[:, -L:]
        is_token = is_token[:, -L:]
        if position_ids is not None and past == 0:
            is_start = is_start | (is_token & (position_ids == 0))
            is_start[:, 0] = False  # a document begins there anyway
        earlier: Tensor | int = past
        if cache is not None and cache.next_position is not None:
            earlier = cache.next_position
        positions = positions_in_documents(is_start, earlier)
        if position_ids is not None and (is_token & (position_ids != positions)).any():
            first = " or ".join(map(str, positions[:, 0].unique().tolist()))
            where = "on from the cache" if past else "in each document"
            raise ValueError(f"position_ids must count from {first} in steps of 1, {where}")
        if cache is not None:
            cache.next_position = positions[:, -1:] + 1
        if self.gpt.document_start is not None:
            is_start |= is_token & (input_ids == self.gpt.document_start)
            if attention_mask is None and cache is None:
                # lm-eval pads on the right with id 0, without a mask: this is one document
                is_end = (input_ids == self.gpt.document_start).flip(1).cummin(1).values.flip(1)
                is_start[:, 1:] &= ~is_end[:, :-1]
        return is_start if is_padded or is_start.any() else None

    def _prepare_attention_mask_for_generation(  # type: ignore[override]
        self, inputs_tensor: Tensor, *args: Any
    ) -> Tensor:
        # transformers guesses it from the pad token, which a prompt may begin with
        return torch.ones_like(inputs_tensor)

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


def check_padding(attention_mask: Tensor, shape: torch.Size, generates: bool) -> None:
    """Raise ValueError unless a mask has this shape, and zeros only before and after the tokens."""
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask must be {list(shape)}, 1 for each token, cached or new, and 0 for "
            f"padding, and is {list(attention_mask.shape)}"
        )
    is_token = attention_mask.bool()
    if (attention_mask != is_token).any():
        raise ValueError(
            "attention_mask has values other than 0 and 1: position_ids that restart from 0 tell "
            "documents apart"
        )
    runs = (F.pad(is_token.int(), (1, 0)).diff() > 0).sum(1)  # of tokens, in each row
    if (runs > 1).any():
        raise ValueError("attention_mask has zeros between the tokens of a row: pad at its ends")
    if generates and (is_token.int().diff() < 0).any():
        raise ValueError("generation takes padding on the left: tokenizer.padding_side = 'left'")
