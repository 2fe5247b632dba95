"""The cross-entropy of a model's head, without holding the logits of all tokens."""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# Tokens whose logits training and evaluation hold at once, and how many of a token's logits
# evaluation holds on a CPU: 512 to 4096 differed by less than two runs of the same size.
TRAIN_CHUNK = 1024
EVAL_CHUNK = 1024
EVAL_LOGITS_CPU = 4096


def has_chunked_loss(x: Tensor, n_vocab: int) -> bool:
    """Whether torch computes a mean loss of x [n, n_embd] in chunks, which is faster on a CPU."""
    large = len(x) >= TRAIN_CHUNK and n_vocab > x.shape[1]
    # it would round each loss to a 16-bit dtype of x
    exact = x.dtype.itemsize >= 4 and hasattr(nn, "LinearCrossEntropyOptions")  # torch 2.13
    return large and exact and x.is_cpu


def chunked_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of x [n, n_embd] with the head's weights [n_vocab, n_embd]."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=TRAIN_CHUNK)
    return F.linear_cross_entropy(x, head, targets, options=options)


def chunks(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of hidden states [n, n_embd] and targets [n, ..] whose logits may be held at once."""
    return zip(hidden.split(EVAL_CHUNK), targets.split(EVAL_CHUNK), strict=True)


def losses_by_parts(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The loss of every target [n], from the logits of a part of the vocabulary at a time.

    On a CPU this takes two thirds of the time of torch's linear_cross_entropy, whose chunks are of
    tokens: each chunk reads all of the head's weights again.
    """
    sums, own = [], x.new_zeros(len(x))  # the log-sum-exp of each part; the targets' logits
    for start in range(0, len(head), EVAL_LOGITS_CPU):
        part = head[start : start + EVAL_LOGITS_CPU]
        logits = F.linear(x, part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        sums.append(logits.logsumexp(-1))
        of_part = logits.gather(1, (targets - start).clamp(0, len(part) - 1)[:, None])[:, 0]
        own = torch.where(targets >= start, of_part, own)
    return (torch.stack(sums).logsumexp(0) - own).float()
