"""A hash of what a layer's attention computes, to recognise results of other formulas."""

import functools
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context
from config import Config
from layers.documents import positions_in_documents
from layers.heads import build_attentions

# Numbers of tokens. The training length and the windows are shorter than the sequence, so that the
# hash also covers what a formula does beyond them.
LENGTH = 48
TRAINED_LENGTH = 16
LARGEST_WINDOW = 24
DOCUMENT_STARTS = (0, 3, 13)
# The keys that single queries see, as formulas may change with n or the distance far beyond LENGTH.
FAR = (64, 128, 256, 512, 1024, 2048, 4096)


def formulas_hash(config: Config) -> str:
    """A hash of the outputs of all layers' attention for fixed random inputs, in float64.

    Code that is written in another way, and a new setting, keep the hash if they keep the outputs.
    """
    digest = hashlib.sha256()
    with torch.random.fork_rng(devices=[]):  # a variant may draw random numbers, as for dropout
        for layer in range(config.n_layer):
            for attention in build_attentions(config, layer):
                for output in example_outputs(attention, config.forget):
                    # rounded, since the last bits depend on the processor; + 0 makes -0.0 a 0.0
                    rounded = output.bfloat16() + 0
                    digest.update(rounded.view(torch.int16).numpy().tobytes())
    return f"outputs {digest.hexdigest()[:16]}"


@torch.no_grad()
def example_outputs(attention: Attention, forget: bool) -> list[Tensor]:
    """The outputs for queries with FAR keys, for one document and for several.

    Seeds the CPU's generator.
    """
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs too
    H = attention.n_head

    def random(*shape: int) -> Tensor:
        state = torch.default_generator.get_state()
        numbers, state_after = draw(state.numpy().tobytes(), shape)
        torch.default_generator.set_state(state_after)
        return numbers.clone()

    attention.double()
    attention.impl = "reference"
    attention.trained_length = TRAINED_LENGTH
    if attention.window is not None:
        attention.window = min(attention.window, LARGEST_WINDOW)
    if attention.p_n is not None:
        attention.p_n = nn.Parameter(attention.p_n[:TRAINED_LENGTH])
    for parameter in attention.parameters():
        parameter.uniform_(0.5, 1.5)
    q, k, v = (random(1, H, LENGTH, attention.head_size) for _ in range(3))
    q *= 4  # scores beyond the kinks of phi, such as relu6's
    row_inputs = {name: random(1, H, LENGTH) for name in attention.variant.from_input}
    log_forget = F.logsigmoid(2 + random(1, H, LENGTH)) if forget else None
    is_start = torch.zeros(1, LENGTH, dtype=torch.bool)
    is_start[0, list(DOCUMENT_STARTS)] = True
    outputs = []
    for length in FAR:
        far_k, far_v = random(2, 1, 1, length, attention.head_size).expand(2, 1, H, -1, -1)
        context = Context(
            row_inputs={name: x[..., -1:] for name, x in row_inputs.items()},
            log_forget=F.logsigmoid(8 + random(1, H, length)) if forget else None,
        )
        outputs.append(attention(q[:, :, -1:], far_k, far_v, context))
    for document_positions in (None, positions_in_documents(is_start)):
        context = Context(
            row_inputs=row_inputs,
            log_forget=log_forget,
            document_positions=document_positions,
        )
        outputs.append(attention(q, k, v, context))
    return outputs


@functools.lru_cache(256)  # layers of the same sizes take the same numbers, which are slow to draw
def draw(state: bytes, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Draw normal random numbers from a generator's state; returns them and its next state."""
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    numbers = torch.randn(shape, dtype=torch.float64, generator=generator)
    return numbers, generator.get_state()
