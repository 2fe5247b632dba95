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

The kernels work on y, a constant times z for which exp is exp2 (phi.Function.argument), and their
inputs are in its units. Most of the time goes to arithmetic on scores, so the factor of a whole row
is applied outside of the tiles where possible: q arrives multiplied by its row's scale, and dO is
multiplied by the factor of its row's weights before the backward pass, both rounded to the inputs'
dtype. Scales and lengths of q and k are torch's, which torch.compile fuses with RoPE (fused.py).

Matrix products: one stage has 2 in the forward and 5 in the backward pass, as FlashAttention has;
two stages have 4 (3 without gradients) and 5. The backward pass adds up dq with atomics. Where the
order of summation must be fixed (torch.use_deterministic_algorithms), or a bias of rows is learnt,
dq has a kernel of its own, and the backward pass 7 products.

Products are in the inputs' dtype, bfloat16 or float32, and accumulate in float32; everything else
is float32. float32 inputs are multiplied in full precision, or in TF32 if
torch.backends.cuda.matmul allows it.
"""

import torch
import triton
from torch import Tensor

from attention_paths.kernels.backward import backward_keys, backward_queries, backward_rows
from attention_paths.kernels.decode import decode_scores, decode_values
from attention_paths.kernels.forward import forward_one_stage, forward_two_stages
from attention_paths.kernels.phi import PHIS
from attention_paths.kernels.tiles import Constants, Functions, Numbers, Strided

# With TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
INTERPRETED = triton.knobs.runtime.interpret


# ---- block shapes ----

# (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages) of each kernel with tiles, for head sizes
# up to the key: for bfloat16 by generation of GPUs; for float32, which takes twice the memory and,
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
        kind = GENERATIONS.get(triton.runtime.driver.active.get_current_target().arch, "small")
    shapes = SHAPES[kind][kernel]
    m, n, warps, stages = shapes[min(size for size in shapes if q.shape[3] <= size)]
    return dict(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)


# ---- arguments of kernels ----


def _precision() -> str:
    # allow_tf32 raises where a program has set fp32_precision, as transformers does
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _like(x: Tensor, heads: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, L, d] laid out as [B, L, H, d], so that joining the heads copies nothing."""
    B, H, L, d = x.shape
    return x.new_empty(B, L, heads or H, d, dtype=dtype).transpose(1, 2)


def _strided(x: Tensor | None) -> Strided | None:
    if x is None:
        return None
    if x.ndim == 4 and x.stride(3) != 1:
        x = x.contiguous()
    return Strided(x, x.stride()[:3])


def _compiled(
    q: Tensor, phi: str, p: float, scale: float, shifted: bool, signed: bool, window: int | None,
    softcap: float | None, unit: bool, *numbers: Tensor | None,
) -> tuple[Numbers, Functions, Constants]:  # fmt: skip
    """The last arguments of kernels: their Numbers, and what Triton compiles them for."""
    entry, d = PHIS[phi], q.shape[3]
    if q.dtype == torch.bfloat16:
        entry = PHIS.get(f"{phi}16", entry)
    functions = Functions(entry.function, entry.shift if shifted else None, entry.total)
    return Numbers(*map(_strided, numbers)), functions, Constants(
        D=d, BLOCK_D=max(16, triton.next_power_of_2(d)), SCALE=scale,
        SLOPE=entry.value / entry.argument, RECTIFIED=entry.rectified,
        CAP=None if softcap is None else entry.argument * softcap, P=int(p) if p % 1 == 0 else p,
        SIGNED=signed or entry.rectified, WINDOW=window, UNIT=unit, PRECISION=_precision(),
    )  # fmt: skip


# ---- forward ----


def _outputs(q: Tensor, save: bool, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `forward`: the output, U and ROWS."""
    u = _like(q) if save and p else q.new_empty(0)
    return _like(q), u, q.new_empty(5 if p else 2, *q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fused_attention::forward", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, save: bool, phi: str, p: float, scale: float, shifted: bool,
    signed: bool, window: int | None, softcap: float | None, unit: bool, bias: Tensor | None,
    gain: Tensor | None, sink: Tensor | None, key_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal attention of q [B, H, Lq, d] over k, v [B, Hk, Lk, d], Lq <= Lk: the first output.

    Each head of k and v serves H / Hk consecutive heads of q. The queries are the last Lq
    positions; without gradients a single one has kernels of its own. `save` keeps what the backward
    pass needs. The kernels are compiled for

        phi         an entry of PHIS
        p           the power of stage 2; 0: there is none
        scale       the factor on all products, in float32
        shifted     whether the shift of phi applies
        signed      whether phi may be negative
        window      the number of keys that a row sees
        softcap     c, which makes a scaled product z into c tanh(z / c)
        unit        whether the keys of a single query are to be normalised to length 1

    and take these numbers, in the units of y, in float32 of any strides. Gradients flow to all but
    gain.

        bias        [B, H, Lq]. A learnt bias takes the backward pass of 7 products. Where phi is
                    exp, in one stage without a sink, its gradient is 0: detach it.
        gain        [B, H, Lq], the factor of a row's weights; None: l1
        sink        [H], y of one more key, whose value is 0, without scale and bias; n does not
                    count it. It needs l1 and a phi that is never 0.
        key_bias    [B, H, Lk]
    """
    (B, H, Lq, _), (Hk, Lk) = q.shape, k.shape[1:3]
    outputs = out, u, rows = _outputs(q, save, p)
    numbers, F, C = _compiled(
        q, phi, p, scale, shifted, signed, window, softcap, unit, bias, gain, sink, key_bias
    )
    if Lq == 1 and not save:
        _decode(q, k, v, out, numbers, F, C)
        return outputs
    kernel, results = (forward_two_stages, outputs) if p else (forward_one_stage, (out, rows))
    with torch.cuda.device_of(q):
        shape = block_shape(FORWARD, q)
        kernel[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
            *map(_strided, (q, k, v)), *results, H, H // Hk, Lq, Lk, numbers, F, C=C, SAVE=save,
            **shape,
        )  # fmt: skip
    return outputs


forward.register_fake(lambda q, k, v, save, phi, p, *_: _outputs(q, save, p))


def _decode(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, numbers: Numbers, F: Functions, C: Constants
) -> None:
    """The output of a single query, which sees all keys.

    The cache is split over enough programs to fill the GPU.
    """
    (B, H, _, d), (Hk, Lk) = q.shape, k.shape[1:3]
    block_n = 16 if INTERPRETED else 64
    processors = 2
    if q.is_cuda:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    wanted = max(1, min(triton.cdiv(4 * processors, B * H), triton.cdiv(Lk, 2 * block_n), 256))
    chunk = triton.cdiv(triton.cdiv(Lk, wanted), block_n) * block_n
    splits = triton.cdiv(Lk, chunk)
    y, parts, sums = (
        q.new_empty(B, H, *shape, dtype=torch.float32)
        for shape in ((Lk,), (splits, 3), (splits, d + 1))
    )
    sizes = H, H // Hk, Lk, chunk, numbers, F
    with torch.cuda.device_of(q):
        decode_scores[B * H, splits](
            _strided(q), _strided(k), y, parts, *sizes, C=C, BLOCK_N=block_n
        )
        decode_values[B * H, splits](
            _strided(v), y, parts, sums, *sizes, C=C, BLOCK_N=block_n,
            SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
    total, weight = sums.sum(2, keepdim=True).split((d, 1), dim=3)
    if C.P:  # a dead row's sum is 0
        total = total / weight.where(weight != 0, 1)
    out.copy_(total)


# ---- backward ----


# dq in float32, dk and dv for each head of q, and the gradients of the bias [B, H, Lq], of the sink
# in parts of rows [B, H, Lq], and of key_bias [B, H, Lk]; without elements where there are none
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _gradients_like(
    q: Tensor, k: Tensor, bias: Tensor | None, sink: Tensor | None, key_bias: Tensor | None
) -> Gradients:
    """Empty outputs of `backward`."""
    dbias, dsink, dkey_bias = (
        q.new_empty(0 if number is None else (*q.shape[:2], L), dtype=torch.float32)
        for number, L in ((bias, q.shape[2]), (sink, q.shape[2]), (key_bias, k.shape[2]))
    )
    dk, dv = (_like(k, q.shape[1]) for _ in range(2))
    return _like(q, dtype=torch.float32), dk, dv, dbias, dsink, dkey_bias


@torch.library.custom_op("fused_attention::backward", mutates_args=())
def backward(
    dout: Tensor, learns_bias: bool, out: Tensor, u: Tensor, rows: Tensor, q: Tensor, k: Tensor,
    v: Tensor, phi: str, p: float, scale: float, shifted: bool, signed: bool, window: int | None,
    softcap: float | None, unit: bool, bias: Tensor | None, gain: Tensor | None,
    sink: Tensor | None, key_bias: Tensor | None,
) -> Gradients:  # fmt: skip
    (B, H, Lq, _), (Hk, Lk) = q.shape, k.shape[1:3]
    outputs = dq, dk, dv, dbias, dsink, dkey_bias = _gradients_like(q, k, bias, sink, key_bias)
    atomic = not (learns_bias or torch.are_deterministic_algorithms_enabled())
    scaled_dout, terms = _like(dout), q.new_empty(2, B, H, Lq, dtype=torch.float32)
    numbers, F, C = _compiled(
        q, phi, p, scale, shifted, signed, window, softcap, unit, bias, gain, sink, key_bias
    )
    inputs = *map(_strided, (q, k, v)), scaled_dout, rows, terms, dq
    sizes = H, H // Hk, Lq, Lk, numbers, F
    with torch.cuda.device_of(q):
        backward_rows[B * H, triton.cdiv(Lq, 64)](
            _strided(dout), out, u, scaled_dout, rows, terms, dsink, H, Lq, numbers, F, C=C, M=64
        )
        if atomic:
            dq.zero_()
        shape = block_shape(KEYS, q)
        backward_keys[B * H, triton.cdiv(Lk, shape["BLOCK_N"])](
            *inputs, dk, dv, dkey_bias, *sizes, C=C, ATOMIC=atomic, **shape
        )
        if not atomic:
            shape = block_shape(QUERIES, q)
            backward_queries[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
                *inputs, dbias, *sizes, C=C, **shape
            )
    return outputs


@backward.register_fake
def _(dout, learns_bias, out, u, rows, q, k, *others):
    bias, _, sink, key_bias = others[-4:]
    return _gradients_like(q, k, bias, sink, key_bias)


def _save_for_backward(ctx, inputs, output):
    q, k, v, _, *ctx.choices, bias, gain, sink, key_bias = inputs
    ctx.save_for_backward(*output, q, k, v, bias, gain, sink, key_bias)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _call_backward(ctx, dout, *_):
    *saved, bias, gain, sink, key_bias = ctx.saved_tensors
    q, k = saved[3:5]
    dq, dk, dv, *gradients = backward(
        dout, ctx.needs_input_grad[-4], *saved, *ctx.choices, bias, gain, sink, key_bias
    )
    if k.shape[1] < dk.shape[1]:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    dbias, dsink, dkey_bias = (x if x.numel() else None for x in gradients)
    dsink = None if dsink is None else dsink.sum((0, 2))
    return dq.to(q.dtype), dk, dv, *(None,) * 9, dbias, None, dsink, dkey_bias


forward.register_autograd(_call_backward, setup_context=_save_for_backward)
