"""Sampling from a model, with a cache of the keys and values of earlier positions."""

import math

import torch
from torch import Tensor

from layers.cache import KVCache
from model import GPT

# The lowest temperature that logits are divided by: float32 may round a lower one to 0.
TINY = torch.finfo(torch.float32).tiny


def next_logits(model: GPT, new: Tensor, cache: KVCache) -> Tensor:
    """Return the float32 logits [B, n_vocab] of the token after the cache and then new [B, L]."""
    last = model.hidden(new, cache)[:, -1]
    with torch.autocast(last.device.type, enabled=False):  # bfloat16 logits would tie
        return model.logits(last.type_as(next(model.parameters()))).float()


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    never: int | None = None,
) -> Tensor:
    """Continue idx [B, L >= 1] by max_new_tokens; returns [B, L + max_new_tokens].

    Temperature 0 takes the likeliest token; the token `never` is excluded. A length-dependent RoPE
    scaling uses the final length from the start, so that cached keys stay valid. Raises
    UserError for a text beyond the learned positions.
    """
    new = idx
    cache = KVCache(idx.shape[1] + max_new_tokens)
    # the last token is not fed to the model
    model.trunk.check_length(idx.shape[1] + max_new_tokens - 1, None)
    for _ in range(max_new_tokens):
        logits = next_logits(model, new, cache)
        if never is not None:
            logits[:, never] = -math.inf
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None and top_k < model.n_vocab:
                smallest = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < smallest, -math.inf)
            # from the largest logit on, so that no temperature overflows: 0 / TINY is 0
            logits = logits - logits.amax(-1, keepdim=True)
            probabilities = (logits / max(temperature, TINY)).softmax(-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
        idx = torch.cat((idx, new), dim=1)
    return idx
