"""Measurements of a model: its mean loss and its attention weights."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention_paths.blocked import BLOCK_QUERIES
from attention_paths.module import Attention
from errors import UserError
from layers.windows import largest_window
from model import GPT, Block
from runtime.device import autocast


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
    """Return by layer how many keys a row of each head sees at most; None: no window."""
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
def check_windows(model: GPT, window: int) -> None:
    """Raise UserError if a block's output depends on more than its last `window` inputs.

    All blocks get the same three random sequences. The second differs from the first outside of the
    last position's window alone, the third inside of it alone. The second may change the output at
    the last position only by rounding, as of forget gates, which are cumulative sums.
    """
    if model.trunk.wpe is not None:  # learned positions may end before 2 * window
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2 * window, model.config.n_embd, generator=generator)
    x[1, window:] = x[0, window:]
    x[2, :window] = x[0, :window]
    x[2, -1] = x[0, -1]  # its own input, which the block adds to its output
    x = x.to(model.wte.weight)
    last_outputs = []

    def replace_input(block: Block, arguments: tuple) -> tuple:
        return (x, *arguments[1:])

    def record(block: Block, arguments: tuple, output: Tensor | tuple) -> None:
        y = output if isinstance(output, Tensor) else output[0]
        last_outputs.append(y[:, -1].float())

    with ExitStack() as hooks:
        for block in model.trunk.blocks:
            hooks.enter_context(block.register_forward_pre_hook(replace_input))
            hooks.enter_context(block.register_forward_hook(record))
        model.trunk(x)
    for number, (y, y_hidden, y_visible) in enumerate(last_outputs):
        if (y_hidden - y).norm() > 0.05 * (y_visible - y).norm():
            raise UserError(
                f"block {number} of this model sees more than its last {window} positions, to "
                "which --window or the control limits it: its attention must have an attribute "
                "`window` and keep to it (--no_control, where a command has it, measures without)"
            )
