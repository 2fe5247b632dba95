"""Measurements of a model: its mean loss and its attention weights."""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention_paths.blocked import BLOCK_QUERIES
from attention_paths.module import Attention
from errors import UserError
from layers.windows import largest_window, limit_windows
from model import GPT
from runtime.device import autocast

# The share of a visible input's effect that a hidden input may have by rounding, as through forget
# gates, whose logarithms are summed over all keys.
HIDDEN_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


@torch.no_grad()
def mean_loss(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Return the mean loss in nats over the batches (x, y) of all ranks.

    Negative targets are ignored. The sum is in float64, over tokens and ranks, so that batch size
    and number of ranks affect only rounding.
    """
    total = 0.0
    count = 0
    for x, y in batches:
        with autocast(device, dtype):
            losses = model.token_losses(x, y)[y >= 0]
        total += losses.cpu().double().sum().item()
        count += losses.numel()
    if dist.is_initialized():
        sums = torch.tensor([total, count], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


@torch.no_grad()
def layer_attention_weights(
    model: GPT,
    idx: Tensor,
    rows: slice,
    reduce: Callable[[Tensor], Tensor] = lambda A: A,
    layers: slice = slice(None),
) -> list[Tensor]:
    """Return the attention weights of each layer, [B, H, rows, L], for idx [B, L].

    `rows` selects queries: slice(-1, None) is the last one. `reduce` is applied to each layer's
    weights (float32 at least), a block of rows at a time so that memory is O(L); rows must stay the
    third dimension.
    """
    reduced: dict[Attention, Tensor] = {}

    def record(attention: Attention, inputs: tuple, output: Tensor) -> None:
        q, k, _, context = inputs
        L = k.shape[2]
        start, stop, _ = rows.indices(L)
        chunks = []
        for begin in range(start, stop, BLOCK_QUERIES):
            end = min(stop, begin + BLOCK_QUERIES)
            # queries must be the last positions: later keys are cut off and get weight 0
            block_context = context.select(queries=slice(begin, end), keys=slice(end))
            A = attention.weights(q[:, :, begin:end], k[:, :, :end], block_context)
            chunks.append(reduce(F.pad(A, (0, L - end))))
        reduced[attention] = torch.cat(chunks, dim=2)

    selected = [layer.attentions() for layer in model.attention_layers()[layers]]
    with ExitStack() as hooks:
        for attentions in selected:
            for attention in attentions:
                hooks.enter_context(attention.register_forward_hook(record))
        model.hidden(idx)
    return [torch.cat([reduced[a] for a in attentions], dim=1) for attentions in selected]


def head_windows(model: GPT) -> list[list[int | None]]:
    """Return by layer how many keys a query of each head sees at most; None: no window."""
    by_layer = []
    for layer in model.attention_layers():
        windows = []
        for attention in layer.attentions():
            windows += [attention.window] * attention.n_head
        by_layer.append(windows)
    return by_layer


def rope_sees_beyond(model: GPT, length: int) -> bool:
    """Tell whether a head with RoPE sees more than its last `length` keys in any layer."""
    if model.trunk.rope is None:
        return False
    for layer in model.attention_layers():
        if layer.nope_heads == layer.n_head:
            continue
        *_, with_rope = layer.attentions()  # RoPE is in the last heads
        window = largest_window(with_rope)
        if window is None or window > length:
            return True
    return False


@torch.no_grad()
def check_windows(model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if layers see more than a window shows them, or outputs are not finite.

    With a window of 2 the last position of n layers depends on the last n + 1 inputs. Of three
    sequences of n + 2 random inputs, the second differs from the first in its first input alone,
    which is hidden, and the third in its last but one. Not checked where learned positions end
    before that.
    """
    config = model.config
    length = config.n_layer + 2
    if model.trunk.wpe is not None and length > config.block_size:
        return
    probe = copy.deepcopy(model)
    limit_windows(probe, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, length, config.n_embd, generator=generator).repeat(3, 1, 1)
    x[1, 0] = torch.randn(config.n_embd, generator=generator)
    x[2, -2] = torch.randn(config.n_embd, generator=generator)
    with autocast(device, dtype):
        outputs = probe.trunk(x.to(model.wte.weight))
    if not outputs.isfinite().all():
        raise UserError("the outputs of this model are not finite: its weights may not be either")
    if depends_on_hidden(outputs[:, -1], HIDDEN_SHARE[dtype]):
        raise UserError(
            "the layers of this model see more than a window shows them, to which --window or the "
            "control limits them: their attention must have an attribute `window` and keep to it "
            "(--no_control, where a command has it, measures without)"
        )


def depends_on_hidden(outputs: Tensor, share: float) -> bool:
    """Tell whether a hidden input changes the output by more than a share of a visible input's.

    `outputs` [3, n_embd] are those of a sequence, of the sequence with its hidden input changed,
    and of the sequence with a visible input changed.
    """
    last, hidden, visible = outputs.float()
    return not (hidden - last).norm() <= share * (visible - last).norm()  # also for NaN
