"""What a model's windows show its layers: checks before a control is measured."""

import copy

import torch
from torch import Tensor

from errors import UserError
from layers.windows import largest_window, limit_windows
from model import GPT
from runtime.device import autocast

# The share of a visible input's effect that a hidden input may have by rounding, as through forget
# gates, whose logarithms are summed over all keys.
HIDDEN_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


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

    `outputs` [3, n_embd] are the last outputs for a sequence, for the sequence with its
    hidden input changed, and for the sequence with a visible input changed.
    """
    last, hidden, visible = outputs.float()
    return not (hidden - last).norm() <= share * (visible - last).norm()  # also for NaN
