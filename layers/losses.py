"""The cross-entropy of a model's head, without the logits of all tokens at once."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens whose logits are in memory at once. A GPU needs more of them to be busy.
CHUNK_CPU = 1024
CHUNK_GPU = 4096
# Rows of the weight gradient that a CPU accumulates at once: the temporary product stays small. A
# GPU accumulates all of them, as a smaller product would not fill it.
VOCABULARY_ROWS = 4096
# Logits whose softmax a CPU computes at once: 2 MB in float32, which stay in its cache.
CACHED_LOGITS = 2**19

# Maps logits [m, n_vocab], modified in place, and targets [m] to log-probabilities [m].
Softmax = Callable[[Tensor, Tensor], Tensor]


def softmax_(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite logits [m, n_vocab] with their softmax; return the targets' log-probabilities [m].

    Negative targets are ignored: their rows and their log-probabilities become 0.
    """
    log_p = F.log_softmax(logits, dim=1, dtype=full_precision(logits))
    has_loss = (targets >= 0).to(log_p.dtype)[:, None]
    target_log_p = log_p.gather(1, targets.clamp_min(0)[:, None]) * has_loss
    logits.copy_(log_p.exp() * has_loss)
    return target_log_p[:, 0]


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy in nats of logits x W^T, whose gradients the forward pass computes.

    This is a fused linear cross-entropy, as Liger Kernel calls it: the logits of a chunk of tokens
    become the gradient of their losses, and the next chunk reuses their memory. There are three
    matrix products, as many as with all logits in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        n_vocab: int,
        softmax: Softmax,
    ) -> Tensor:
        """Return the loss of x [n, n_embd], the hidden states of n tokens, and their targets.

        Targets are [n] or, with k targets per token (PairGPT), [n, k]. The weight
        [k * padded, n_embd] has `padded` rows for each of the k, of which those from n_vocab on are
        padding. `softmax` is softmax_ or the same function compiled.
        """
        losses = torch.empty(targets.shape, dtype=full_precision(x), device=x.device)
        x_gradients = []
        weight_gradient = torch.empty_like(weight)
        for i, chunk in enumerate(chunks(x, weight, targets, losses)):
            for logits, slice_targets, slice_losses in chunk.slices():
                log_p = softmax(logits[:, :n_vocab], slice_targets)
                logits[:, n_vocab:] = 0
                # p - 1 before p is rounded to a 16-bit dtype, where it may be 1
                gradient = log_p.expm1().to(logits.dtype)
                logits.scatter_(1, slice_targets.clamp_min(0)[:, None], gradient[:, None])
                slice_losses.copy_(-log_p)
            # chunk.logits now holds the gradient of the sum of the chunk's losses
            x_gradients.append(chunk.logits @ chunk.weight)
            size = VOCABULARY_ROWS if x.is_cpu else len(weight)
            by_rows = chunk.logits.split(size, dim=1)
            for rows, gradients in zip(weight_gradient.split(size), by_rows, strict=True):
                product = gradients.T @ chunk.x
                if i == 0:
                    rows.copy_(product)
                else:
                    rows += product  # in float32, also where the products are of 16 bits
        count = (targets >= 0).sum()
        ctx.save_for_backward(torch.cat(x_gradients), weight_gradient, count)
        ctx.dtype = x.dtype
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, weight_gradient, count = ctx.saved_tensors
        # only now: loss_gradient has GradScaler's loss scale, which float16 gradients need
        factor = loss_gradient / count
        weight_gradient.mul_(factor)  # autograd refuses a second backward pass
        return x_gradient.to(ctx.dtype) * factor, weight_gradient, None, None, None


def token_losses(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    n_vocab: int,
) -> Tensor:
    """Return the float32 losses of all targets, in their shape; negative targets have loss 0.

    The arguments are as in LinearCrossEntropy.forward.
    """
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    for chunk in chunks(x, weight, targets, losses):
        for logits, slice_targets, slice_losses in chunk.slices():
            logits = logits[:, :n_vocab].to(full_precision(logits))
            ignored = slice_targets.masked_fill(slice_targets < 0, -100)
            slice_losses.copy_(
                F.cross_entropy(logits, ignored, reduction="none", ignore_index=-100)
            )
    return losses


class Chunk(NamedTuple):
    """Some tokens, and the head's weights, in the dtype of their product, the logits."""

    x: Tensor  # [m, n_embd]
    weight: Tensor  # [k * padded, n_embd]
    targets: Tensor  # [m] or [m, k]
    losses: Tensor  # like targets, filled in place: a small tensor per slice fragments the heap
    logits: Tensor  # [m, k * padded]

    def slices(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Split into logits [.., padded], targets and losses [..] of one softmax each."""
        targets = self.targets.flatten()
        losses = self.losses.flatten()
        logits = self.logits.view(len(targets), -1)
        size = len(logits)
        if logits.is_cpu:
            size = max(1, CACHED_LOGITS // logits.shape[1])
        return zip(logits.split(size), targets.split(size), losses.split(size), strict=True)


def chunks(x: Tensor, weight: Tensor, targets: Tensor, losses: Tensor) -> Iterator[Chunk]:
    """Compute logits a chunk of tokens at a time; each chunk overwrites the logits before."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weight = weight.to(dtype)
    size = CHUNK_CPU if x.is_cpu else CHUNK_GPU
    buffer = x.new_empty(min(size, len(x)), len(weight))
    by_chunk = zip(x.split(size), targets.split(size), losses.split(size), strict=True)
    for x_chunk, chunk_targets, chunk_losses in by_chunk:
        logits = torch.mm(x_chunk, weight.T, out=buffer[: len(x_chunk)])
        yield Chunk(x_chunk, weight, chunk_targets, chunk_losses, logits)


def full_precision(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)
