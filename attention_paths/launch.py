"""Fused attention in Triton: forward, backward and decoding, in memory linear in L.

For one head, and row i that sees the keys j < n_i (in attention.py's notation):

    z_ij = c tanh(scale_i s_ij / c) + bias_i + b_j + shift_i,   a_ij = phi(z_ij)

one stage     O_i = gain_i sum_j a_ij v_j             gain is 1 / sum_j |a_ij|, or 1 / norm_i
two stages    x_ij = gain_i a_ij - offset_i           gain is n_i / sum_j a_ij
              t_ij = relu(x_ij) / max_j x_ij          from 0 to 1, so that no power overflows
              O_i = sum_j t_ij^p v_j / W_i            W_i = sum_j t_ij^p

The soft cap c and a bias b_j of each key are choices. So is a sink: one more key, whose value is 0
and whose score is a logit of its head. It enters every sum and maximum over j, but not n_i. A
choice that a variant does not make is not compiled. shift_i, which l1 cancels, keeps phi from
under- or overflowing (phi.Function.shift). With a window of W keys, row i sees the keys
i - W < j <= i, and n_i is min(i, W); tiles in which no row sees a key are never visited.

The second stage needs the row's sum and maximum first, so its forward pass reads the keys twice.
With U_i = sum_j t_ij^(p-1) v_j / R_i, R_i = sum_j t_ij^(p-1), and X_i = max_j x_ij, its backward is

    D_i   = dO_i . O_i
    E_i   = offset_i p R_i / (X_i W_i) (dO_i . U_i - D_i)      = sum_j dL/dA_ij A_ij
    dx_ij = p t_ij^(p-1) / (X_i W_i) (dO_i . v_j - D_i)
    da_ij = gain_i dx_ij - E_i gain_i / n_i
    dz_ij = da_ij phi'(z_ij)

The forward pass sums U, so that the backward pass need not compute E in a pass of its own.

Most of the time goes to arithmetic on scores, so the factor of a whole row is applied outside of
the tiles where possible. Before the forward pass, q is multiplied by its row's scale, in units in
which exp is exp2: the product of a tile is then the argument y of phi. (Where the variant
normalises q and k, they are divided by their lengths here.) Before the backward pass, dO is
multiplied by the factor of its row's weights. Both are rounded to the inputs' dtype.

Matrix products: one stage has 2 in the forward and 5 in the backward pass, as FlashAttention has;
two stages have 4 (3 without gradients) and 5. The backward pass adds up dq with atomics. Where the
order of summation must be fixed (torch.use_deterministic_algorithms), or a bias of rows is learnt,
dq has a kernel of its own, and the backward pass 7 products.

Products are in the inputs' dtype and accumulate in float32; everything else is float32. float32
inputs are multiplied in full precision, or in TF32 if torch.backends.cuda.matmul.allow_tf32 is set.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attention_paths import backward, decode, forward
from attention_paths.phi import PHIS
from attention_paths.tiles import Added, Constants, Functions, Strided

# With TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
INTERPRETED = triton.knobs.runtime.interpret


# ---- block shapes ----

# (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages) of each kernel with tiles, for head sizes
# up to the key: for 16 bits by generation of GPUs; for float32, which takes twice the memory and,
# in full precision, more registers, by precision. They are fixed, not measured at run time, because
# the order of summation depends on them: all processes of a run, and a resumed run, must choose the
# same. They were chosen by instructions for a score, spilled registers and shared memory
# (python -m tests.compile_kernels). At most 128 keys: see softplus_total.
FORWARD, KEYS, QUERIES = "forward", "backward, keys", "backward, queries"
Shapes = dict[str, dict[int, tuple[int, int, int, int]]]
AMPERE: Shapes = {
    FORWARD: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
    KEYS: {128: (32, 128, 8, 2)},
    QUERIES: {128: (64, 32, 4, 2)},
}
SHAPES: dict[str, Shapes] = {
    "hopper": {
        FORWARD: {64: (128, 128, 8, 3), 128: (128, 64, 8, 2)},
        KEYS: {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
        QUERIES: {64: (64, 64, 4, 2), 128: (64, 32, 4, 2)},
    },
    "ampere": AMPERE,
    # 99 KB of shared memory for a block: capabilities 8.6, 8.9 and 12.0
    "small": AMPERE | {KEYS: {64: (32, 128, 8, 2), 128: (32, 64, 8, 2)}},
    "tf32": dict.fromkeys(AMPERE, {64: (32, 32, 4, 2), 128: (32, 16, 4, 1)}),
    "ieee": dict.fromkeys(AMPERE, {128: (32, 32, 8, 1)}),
    "interpreter": dict.fromkeys(AMPERE, {128: (32, 16, 4, 1)}),
}
GENERATIONS = {80: "ampere", 87: "ampere", 90: "hopper", 100: "hopper", 103: "hopper"}


def block_shape(kernel: str, q: Tensor) -> dict[str, int]:
    """The block shape of a kernel for these queries, as arguments of its launch."""
    if INTERPRETED:
        kind = "interpreter"
    elif q.dtype == torch.float32:
        kind = _precision()
    else:
        capability = triton.runtime.driver.active.get_current_target().arch
        kind = GENERATIONS.get(capability, "small")
    shapes = SHAPES[kind][kernel]
    m, n, warps, stages = shapes[min(size for size in shapes if q.shape[3] <= size)]
    return dict(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)


# ---- arguments of kernels ----


class Choices(NamedTuple):
    """What the kernels of a call are compiled for, beside the dtype and the head size."""

    p: float  # the power of stage 2; 0: there is none
    unit: bool  # q and k are normalised to length 1
    phi: str  # an entry of PHIS
    shifted: bool  # its shift applies
    signed: bool  # phi may be negative
    window: int | None  # the number of keys that a row sees
    softcap: float | None  # c makes a scaled product z into c tanh(z / c)


class Numbers(NamedTuple):
    """Tensors that enter the scores, float32 of any strides; gradients flow to all but norm."""

    scale: Tensor  # [B, H, Lq]
    bias: Tensor | None  # [B, H, Lq]; learnt, it takes the backward pass of 7 products
    norm: Tensor | None  # [B, H, Lq]; None: l1
    # [H]: the logit of one more key, whose value is 0, without scale and bias; n does not count it.
    # It needs l1 and a phi that is never 0.
    sink: Tensor | None
    key_bias: Tensor | None  # [B, H, Lk]


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, L, d] laid out as [B, L, H, d], so that joining the heads copies nothing."""
    B, H, L, d = x.shape
    return x.new_empty(B, L, H, d, dtype=dtype).transpose(1, 2)


def _numbers(q: Tensor, count: int) -> Tensor:
    """Room for `count` float32 numbers for each row of q."""
    return q.new_empty(count * q.shape[0] * q.shape[1] * q.shape[2], dtype=torch.float32)


def _strided(x: Tensor | None) -> Strided | None:
    if x is None:
        return None
    if x.ndim == 4 and x.stride(3) != 1:
        x = x.contiguous()
    return Strided(x, x.stride()[:3])


def _compiled(q: Tensor, choices: Choices, l1: bool, biased: bool) -> tuple[Functions, Constants]:
    """What Triton compiles the kernels of a call for."""
    p, unit, phi, shifted, signed, window, softcap = choices
    entry, d = PHIS[phi], q.shape[3]
    if q.dtype.itemsize == 2:
        entry = PHIS.get(f"{phi}16", entry)
    shift = entry.shift if shifted else None
    return Functions(entry.function, entry.slope, shift, entry.total), Constants(
        D=d, BLOCK_D=max(16, triton.next_power_of_2(d)), ARGUMENT=entry.argument,
        VALUE=entry.value, RECTIFIED=entry.rectified,
        CAP=None if softcap is None else entry.argument * softcap, P=int(p) if p % 1 == 0 else p,
        UNIT=unit, EXACT=not (unit or entry.smooth), BIASED=biased, L1=l1,
        SIGNED=signed or entry.rectified, WINDOW=window, PRECISION=_precision(),
    )  # fmt: skip


# ---- forward ----


# the output, U, q', k / |k| if `unit`, ROWS and 1 / |k|
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _outputs(q: Tensor, k: Tensor, save: bool, p: float, unit: bool) -> Outputs:
    """Empty outputs of _forward."""
    u = _like(q) if save and p else q.new_empty(0)
    unit_k = _like(k) if unit else k.new_empty(0)
    return _like(q), u, _like(q), unit_k, _numbers(q, 7 if p else 4), _numbers(k, unit)


@torch.library.custom_op("fused_attention::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, save: bool, p: float, unit: bool, phi: str, shifted: bool,
    signed: bool, window: int | None, softcap: float | None, scale: Tensor, bias: Tensor | None,
    norm: Tensor | None, sink: Tensor | None, key_bias: Tensor | None,
) -> Outputs:  # fmt: skip
    (B, H, Lq, _), (Hk, Lk) = q.shape, k.shape[1:3]
    outputs = _outputs(q, k, save, p, unit)
    out, u, scaled_q, unit_k, rows, inverse = outputs
    choices = Choices(p, unit, phi, shifted, signed, window, softcap)
    F, C = _compiled(q, choices, norm is None, bias is not None)
    with torch.cuda.device_of(q):
        forward.scale_queries[B * H, triton.cdiv(Lq, 64)](
            *map(_strided, (q, scale, bias, norm)), scaled_q, rows, H, Lq, C=C, M=64
        )
        if unit:
            forward.normalise_keys[B * Hk, triton.cdiv(Lk, 64)](
                _strided(k), unit_k, inverse, Hk, Lk, C=C, M=64
            )
            k = unit_k
        shape = block_shape(FORWARD, q)
        kernel = forward.forward_two_stages if p else forward.forward_one_stage
        results = (out, u, rows) if p else (out, rows)
        kernel[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
            scaled_q, _strided(k), _strided(v), *results, H, H // Hk, Lq, Lk,
            Added(sink, _strided(key_bias)), F, C=C, SAVE=save, **shape,
        )  # fmt: skip
    return outputs


_forward.register_fake(lambda q, k, v, save, p, unit, *_: _outputs(q, k, save, p, unit))


# ---- backward ----


# dq, dk, dv, and the gradients of scale, bias and sink [B, H, Lq] and of key_bias [B, H, Lk]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _gradients_like(q: Tensor, k: Tensor, learnt: list[bool]) -> Gradients:
    """Empty outputs of _backward. What is not learnt has no elements."""
    (B, H, Lq, d), Lk = q.shape, k.shape[2]
    dk, dv = (k.new_empty(B, Lk, H, d).transpose(1, 2) for _ in range(2))
    dscale, dbias, dsink, dkey_bias = (
        q.new_empty((B, H, L) if learns else (0,), dtype=torch.float32)
        for learns, L in zip(learnt, (Lq, Lq, Lq, Lk), strict=True)
    )
    return _like(q), dk, dv, dscale, dbias, dsink, dkey_bias


@torch.library.custom_op("fused_attention::backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, learnt: list[bool], dout: Tensor, original_q: Tensor | None, v: Tensor,
    sink: Tensor | None, key_bias: Tensor | None, out: Tensor, u: Tensor, rows: Tensor,
    inverse: Tensor, l1: bool, biased: bool, p: float, unit: bool, phi: str, shifted: bool,
    signed: bool, window: int | None, softcap: float | None,
) -> Gradients:  # fmt: skip
    """The sink's gradient has a part for each row, dk and dv have one for each head of q.

    q is q', and k is k / |k| if `unit`. original_q is q itself, if the scale is learnt.
    """
    (B, H, Lq, _), (Hk, Lk) = q.shape, k.shape[1:3]
    outputs = _gradients_like(q, k, learnt)
    dq, dk, dv, *gradients = outputs
    dscale, dbias, dsink, dkey_bias = (x if x.numel() else None for x in gradients)
    atomic = dbias is None and not torch.are_deterministic_algorithms_enabled()
    summed, scaled_dout, terms = _like(q, torch.float32), _like(dout), _numbers(q, 3)
    added = Added(sink, _strided(key_bias))
    choices = Choices(p, unit, phi, shifted, signed, window, softcap)
    F, C = _compiled(q, choices, l1, biased)
    with torch.cuda.device_of(q):
        backward.backward_rows[B * H, triton.cdiv(Lq, 64)](
            _strided(dout), out, u, scaled_dout, rows, terms, dsink, H, Lq, added, F, C=C, M=64
        )
        if atomic:
            summed.zero_()
        inputs = q, _strided(k), _strided(v), scaled_dout
        sizes = H, H // Hk, Lq, Lk, added, F
        shape = block_shape(KEYS, q)
        backward.backward_keys[B * H, triton.cdiv(Lk, shape["BLOCK_N"])](
            *inputs, inverse, rows, terms, summed, dk, dv, dkey_bias, *sizes, C=C, ATOMIC=atomic,
            **shape,
        )  # fmt: skip
        if not atomic:
            shape = block_shape(QUERIES, q)
            backward.backward_queries[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
                *inputs, rows, terms, summed, dbias, *sizes, C=C, **shape
            )
        backward.finish_queries[B * H, triton.cdiv(Lq, 64)](
            summed, q, rows, _strided(original_q), dq, dscale, H, Lq, C=C, M=64
        )
    return outputs


_backward.register_fake(lambda q, k, learnt, *_: _gradients_like(q, k, learnt))


def _save_for_backward(ctx, inputs, output):
    q, k, v, _, *choices, _, bias, norm, sink, key_bias = inputs
    out, u, scaled_q, unit_k, rows, inverse = output
    p, unit, _, shifted, *_ = choices
    original_q = q if ctx.needs_input_grad[11] else None
    k = unit_k if unit else k
    ctx.save_for_backward(scaled_q, k, original_q, v, sink, key_bias, out, u, rows, inverse)
    ctx.choices = norm is None, bias is not None or shifted, *choices
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _call_backward(ctx, dout, *_):
    learnt = [ctx.needs_input_grad[i] for i in (11, 12, 14, 15)]  # scale, bias, sink, key_bias
    q, k, *saved = ctx.saved_tensors
    dq, dk, dv, *gradients = _backward(q, k, learnt, dout, *saved, *ctx.choices)
    if k.shape[1] < dk.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    dscale, dbias, dsink, dkey_bias = (x if x.numel() else None for x in gradients)
    dsink = None if dsink is None else dsink.sum((0, 2))
    return dq, dk, dv, *(None,) * 8, dscale, dbias, None, dsink, dkey_bias


_forward.register_autograd(_call_backward, setup_context=_save_for_backward)


# ---- decoding ----


@torch.library.custom_op("fused_attention::decode", mutates_args=())
def _decode(
    q: Tensor, k: Tensor, v: Tensor, p: float, unit: bool, phi: str, shifted: bool, signed: bool,
    window: int | None, softcap: float | None, scale: Tensor, bias: Tensor | None,
    norm: Tensor | None, sink: Tensor | None, key_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The output of a single query, with the cache split over enough programs to fill the GPU."""
    (B, H), (Hk, Lk) = q.shape[:2], k.shape[1:3]
    choices = Choices(p, unit, phi, shifted, signed, None, softcap)
    F, C = _compiled(q, choices, norm is None, bias is not None)
    block_n = 16 if INTERPRETED else 64
    processors = 2
    if q.is_cuda:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    wanted = max(1, min(triton.cdiv(4 * processors, B * H), triton.cdiv(Lk, 2 * block_n), 256))
    chunk = triton.cdiv(triton.cdiv(Lk, wanted), block_n) * block_n
    splits = triton.cdiv(Lk, chunk)
    y = q.new_empty(B, H, Lk, dtype=torch.float32)
    parts = q.new_empty(B, H, splits, 3, dtype=torch.float32)
    sums = q.new_empty(B, H, splits, C.BLOCK_D + 1, dtype=torch.float32)
    out = _like(q)
    scales, biases, norms = (x if x is None else x.contiguous() for x in (scale, bias, norm))
    sizes = H, H // Hk, Lk, chunk, Added(sink, _strided(key_bias)), F
    reduced = triton.next_power_of_2(splits)
    with torch.cuda.device_of(q):
        decode.decode_scores[B * H, splits](
            _strided(q), _strided(k), scales, biases, y, parts, *sizes, C=C._replace(EXACT=True),
            BLOCK_N=block_n,
        )  # fmt: skip
        decode.decode_values[B * H, splits](
            _strided(v), y, parts, norms, sums, *sizes, C=C, BLOCK_N=block_n, SPLITS=reduced
        )
        decode.decode_sum[(B * H,)](sums, out, splits, C=C, SPLITS=reduced)
    return out


_decode.register_fake(lambda q, *_: _like(q))


def attend(q: Tensor, k: Tensor, v: Tensor, choices: Choices, numbers: Numbers) -> Tensor:
    """Causal attention [B, H, Lq, d] of q [B, H, Lq, d] over k, v [B, Hk, Lk, d], Lq <= Lk.

    Each head of k and v serves H / Hk consecutive heads of q. The queries are the last Lq
    positions. A single query for which no gradient is needed sees all keys, whatever the window.
    Where phi is exp, in one stage without a sink, the gradient of the bias is 0: detach it.
    """
    save = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, *numbers)
    )
    if q.shape[2] == 1 and not save:
        return _decode(q, k, v, *choices, *numbers)
    return _forward(q, k, v, save, *choices, *numbers)[0]
