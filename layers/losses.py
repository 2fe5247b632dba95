"""The cross-entropy of a model's head, without holding the logits of all tokens."""

from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# Rows per chunk of logits, in training and in evaluation.
TRAIN_CHUNK = 1024
EVAL_CHUNK = 1024
# Vocabulary entries per chunk in evaluation on a CPU. Times from 512 to 4096 differed by less than
# two runs of the same size.
EVAL_LOGITS_CPU = 4096


def has_chunked_loss(x: Tensor, n_vocab: int) -> bool:
    """Tell whether torch computes the mean loss of x [n, n_embd] in chunks: faster on a CPU."""
    if not x.is_cpu or not hasattr(nn, "LinearCrossEntropyOptions"):  # torch 2.13 has it
        return False
    is_large = len(x) >= TRAIN_CHUNK and n_vocab > x.shape[1]
    is_exact = x.dtype.itemsize >= 4  # it would round each loss to a 16-bit dtype of x
    return is_large and is_exact


def chunked_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of x [n, n_embd] with the head's weights [n_vocab, n_embd]."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=TRAIN_CHUNK)
    return F.linear_cross_entropy(x, head, targets, options=options)


def chunks(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split hidden states [n, n_embd] and targets [n, ..] into rows whose logits fit in memory."""
    return zip(hidden.split(EVAL_CHUNK), targets.split(EVAL_CHUNK), strict=True)


def losses_by_vocabulary(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every target [n], from the logits of a chunk of the vocabulary at a time.

    On a CPU this takes two thirds of the time of torch's linear_cross_entropy, whose chunks are of
    tokens: each chunk reads all of the head's weights again.
    """
    log_sums = []  # of each chunk
    target_logits = x.new_zeros(len(x))
    for start in range(0, len(head), EVAL_LOGITS_CPU):
        chunk = head[start : start + EVAL_LOGITS_CPU]
        logits = F.linear(x, chunk)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_sums.append(logits.logsumexp(-1))
        column = (targets - start).clamp(0, len(chunk) - 1)
        chunk_logits = logits.gather(1, column[:, None])[:, 0]
        target_logits = torch.where(targets >= start, chunk_logits, target_logits)
    losses = torch.stack(log_sums).logsumexp(0) - target_logits
    return losses.float()
