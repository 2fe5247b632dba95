"""Sampling from a model, with a key-value cache."""

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layers.cache import KVCache
from model import GPT

Prompts = TypeVar("Prompts", Tensor, list[Tensor])


def next_logits(
    model: GPT,
    new: Tensor,
    cache: KVCache,
    is_start: Tensor | None = None,
) -> Tensor:
    """Return the float32 logits [B, n_vocab] of the token after the cache and then new [B, L]."""
    last = model.hidden(new, cache, is_start)[:, -1]
    with torch.autocast(last.device.type, enabled=False):  # bfloat16 logits would tie
        return model.logits(last.type_as(next(model.parameters()))).float()


def prefill(
    model: GPT,
    prompts: Tensor | list[Tensor],
    new_tokens: int,
) -> tuple[Tensor, KVCache]:
    """Return the logits [B, n_vocab] of the token after each prompt, and a cache of all prompts.

    The cache takes `new_tokens` more tokens. Prompts of different lengths are padded on the
    left; the padding is a separate document, so the prompt does not attend to it.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # the last token is not fed to the model
    model.trunk.check_length(longest + new_tokens - 1)
    padded = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    is_start = None
    if min(lengths) < longest:
        column = torch.arange(longest, device=padded.device)
        first = longest - torch.tensor(lengths, device=padded.device)[:, None]  # of the prompt
        is_start = column == first
        if model.document_start is not None:
            is_start |= (padded == model.document_start) & (column > first)
    cache = KVCache(longest + new_tokens)
    return next_logits(model, padded, cache, is_start), cache


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    never: int | None = None,
) -> Prompts:
    """Continue prompts [B, L >= 1], or a list of prompts [L], by max_new_tokens >= 1 tokens each.

    Returns the prompts followed by their new tokens: [B, L + max_new_tokens] or a list. The other
    prompts of the batch change nothing but the random numbers of sampling. Temperature 0 takes the
    likeliest token; the token `never` is excluded. A RoPE scaling that depends on the length uses
    the final length of a text from the start, so that cached keys stay valid. Raises UserError for
    a text beyond the learned positions.
    """
    logits, cache = prefill(model, prompts, max_new_tokens)
    columns: list[Tensor] = []
    while True:
        if never is not None:
            logits[:, never] = -math.inf
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None and top_k < model.n_vocab:
                smallest = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < smallest, -math.inf)
            probabilities = (logits / temperature).softmax(-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
        columns.append(new)
        if len(columns) == max_new_tokens:
            break
        logits = next_logits(model, new, cache)
    added = torch.cat(columns, dim=1)
    texts = [torch.cat(parts) for parts in zip(prompts, added, strict=True)]
    return torch.stack(texts) if isinstance(prompts, Tensor) else texts
