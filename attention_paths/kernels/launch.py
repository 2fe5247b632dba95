"""Fused attention in Triton: forward, backward and decoding, in memory linear in L.

For one head, and row i that sees n_i keys, i - n_i < j <= i (as in attention.py; s_ij = q_i . k_j):

    z_ij = c tanh(scale_i s_ij / c) + bias_i + b_j + shift_i,   a_ij = phi(z_ij)

one stage     O_i = gain_i sum_j a_ij v_j             gain is 1 / sum_j |a_ij|, or 1 / norm_i
two stages    x_ij = gain_i a_ij - offset_i           gain is n_i / sum_j a_ij
              t_ij = relu(x_ij) / max_j x_ij          from 0 to 1, so that no power overflows
              O_i = sum_j t_ij^p v_j / W_i            W_i = sum_j t_ij^p

The soft cap c, the bias b_j of each key and the sink are optional, and are not compiled where a
layer does not use them. A sink is one more key, whose value is 0 and whose score is a logit of its
head. It enters every sum and maximum over j, but not n_i. shift_i, which l1 cancels, keeps phi from
under- or overflowing (phi.Function.shift). With a window of W keys, row i sees the keys
i - W < j <= i, and n_i is min(i, W). With documents, row i sees no key before first_key_i, which
n_i does not count. Tiles in which no row sees a key are never visited.

The second stage needs the row's sum and maximum first, so its forward pass reads the keys twice.
With U_i = sum_j t_ij^(p-1) v_j / R_i, R_i = sum_j t_ij^(p-1), and X_i = max_j x_ij, its backward is

    D_i   = dO_i . O_i
    E_i   = offset_i p R_i / (X_i W_i) (dO_i . U_i - D_i)      = sum_j dL/dA_ij A_ij
    dx_ij = p t_ij^(p-1) / (X_i W_i) (dO_i . v_j - D_i)
    da_ij = gain_i dx_ij - E_i gain_i / n_i
    dz_ij = da_ij phi'(z_ij)

The forward pass computes U, so that the backward pass needs no extra pass over the keys for E.

The kernels work on y, a constant times z for which exp is exp2 (phi.Function.argument), and their
inputs are in its units. Most of the time goes to arithmetic on scores, so the factor of a whole row
is applied outside of the tiles where possible: q arrives multiplied by its row's scale, and dO is
multiplied by the factor of its row's weights before the backward pass, both rounded to the inputs'
dtype. Scaling and normalising q and k is left to torch, so torch.compile fuses it with RoPE
(fused.py).

Matrix products: one stage has 2 in the forward and 5 in the backward pass, as FlashAttention has;
two stages have 4 (3 without gradients) and 5. The backward pass adds up dq with atomics. Where the
order of summation must be fixed (torch.use_deterministic_algorithms), or a bias of rows is learned,
a separate kernel computes dq, and the backward pass has 7 products.

Products are in the inputs' dtype, bfloat16 or float32, and accumulate in float32; everything else
is float32. float32 inputs are multiplied in full precision, or in TF32 if
torch.backends.cuda.matmul allows it.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attention_paths.kernels.backward import backward_keys, backward_queries, backward_rows
from attention_paths.kernels.decode import decode_scores, decode_values
from attention_paths.kernels.forward import forward_one_stage, forward_two_stages
from attention_paths.kernels.phi import PHIS
from attention_paths.kernels.tiles import Constants, Functions, OptionalInputs, Strided

# With TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
INTERPRETED = triton.knobs.runtime.interpret


# ---- block shapes ----

# (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages) of each tiled kernel, by the largest head
# size that they fit. For bfloat16 they depend on the generation of GPU. For float32, which takes
# twice the memory, they depend on the precision of products: full precision takes more registers.
# They are not autotuned at run time: the order of summation depends on them, and all ranks of a
# run, and a resumed run, must use the same shapes. They were chosen by instructions per score,
# spilled registers and shared memory (python -m tests.compile_kernels). At most 128 keys: see
# softplus_total.
FORWARD = "forward"
KEYS = "backward, keys"
QUERIES = "backward, queries"
Shapes = dict[str, dict[int, tuple[int, int, int, int]]]
AMPERE: Shapes = {
    FORWARD: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
    KEYS: {64: (32, 128, 8, 2), 128: (16, 64, 4, 2)},
    QUERIES: {128: (64, 32, 4, 2)},
}
HOPPER: Shapes = {
    FORWARD: {64: (128, 128, 8, 3), 128: (128, 64, 8, 2)},
    KEYS: {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
    QUERIES: {64: (64, 64, 4, 2), 128: (64, 32, 4, 2)},
}
SHAPES: dict[str, Shapes] = {
    "hopper": HOPPER,
    # fits 99 KB of shared memory for a block, as capabilities 8.6, 8.9 and 12.0 have
    "ampere": AMPERE,
    "tf32": dict.fromkeys(AMPERE, {64: (32, 32, 4, 2), 128: (32, 16, 4, 1)}),
    "ieee": dict.fromkeys(AMPERE, {128: (32, 32, 8, 1)}),
    "interpreter": dict.fromkeys(AMPERE, {128: (32, 16, 4, 1)}),
}
HOPPER_LIKE = (90, 100, 103)  # capabilities with 227 KB of shared memory for a block


def block_shape(kernel: str, q: Tensor) -> dict[str, int]:
    """The block shape of a kernel for these queries, as arguments of its launch."""
    if INTERPRETED:
        kind = "interpreter"
    elif q.dtype == torch.float32:
        kind = matmul_precision()
    else:
        capability = triton.runtime.driver.active.get_current_target().arch
        kind = "hopper" if capability in HOPPER_LIKE else "ampere"
    shapes = SHAPES[kind][kernel]
    smallest = min(size for size in shapes if q.shape[3] <= size)
    m, n, warps, stages = shapes[smallest]
    return dict(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)


# ---- arguments of kernels ----


class Inputs(NamedTuple):
    """The tensors that `forward` takes. Gradients flow to all but gain and first_key.

    The optional inputs have any strides. bias, sink and key_bias are in the units of y; gain
    includes 1 / phi.Function.value.
    """

    q: Tensor  # [B, H, Lq, d], the last Lq positions
    k: Tensor  # [B, Hk, Lk, d]: each head serves H / Hk consecutive heads of q
    v: Tensor  # [B, Hk, Lk, d]
    # [B, H, Lq]. A learned bias takes the backward pass of 7 products. Where phi is exp, with l1
    # and without a sink, its gradient is 0: detach it.
    bias: Tensor | None
    gain: Tensor | None  # [B, H, Lq], the factor of a row's weights; None: l1
    # [H], y of one more key, whose value is 0, without scale and bias; n does not count it. It
    # needs l1, and a phi that is never negative and is positive at 0.
    sink: Tensor | None
    key_bias: Tensor | None  # [B, H, Lk]
    # [B, H, Lq], int32: the first key of each row's document, before which it sees none. It is the
    # same in all heads, and never decreases from row to row.
    first_key: Tensor | None


class Choices(NamedTuple):
    """What the kernels of a launch are compiled for, besides the shapes of its inputs."""

    phi: str  # an entry of PHIS
    p: float  # the power of stage 2; 0: there is none
    scale: float  # the factor on all products, in float32
    shifted: bool  # the shift of phi applies
    signed: bool  # phi may be negative
    window: int | None  # the number of keys that a row sees
    softcap: float | None  # c, which makes a scaled product z into c tanh(z / c)
    unit: bool  # the keys of a single query are to be normalised to length 1


# The fields of Inputs and of Choices, as arguments of torch's operators
INPUTS = (
    "Tensor q, Tensor k, Tensor v, "
    "Tensor? bias, Tensor? gain, Tensor? sink, Tensor? key_bias, Tensor? first_key"
)
CHOICES = (
    "str phi, float p, float scale, bool shifted, bool signed, "
    "int? window, float? softcap, bool unit"
)


def matmul_precision() -> str:
    # allow_tf32 raises where a program has set fp32_precision, as transformers does
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def strided(x: Tensor) -> Strided:
    # the kernels compute an offset within a head in 32 bits
    if x.ndim == 4 and (x.stride(3) != 1 or x.shape[2] * x.stride(2) >= 2**31):
        x = x.contiguous()
    return Strided(x, x.stride()[:3])


def empty_heads(x: Tensor, heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, heads, L, d] laid out as [B, L, heads, d]: joining the heads copies nothing."""
    B, _, L, d = x.shape
    return x.new_empty(B, L, heads, d, dtype=dtype).transpose(1, 2)


class Arguments(NamedTuple):
    """The arguments of kernels that do not depend on the pass, by their names there."""

    Q: Strided
    K: Strided
    V: Strided
    H: int
    GROUP: int  # heads of q for each head of k and v
    Lq: int
    Lk: int
    OPTIONAL: OptionalInputs
    F: Functions
    C: Constants


def kernel_arguments(inputs: Inputs, choices: Choices) -> Arguments:
    q, k, v, *optional = inputs
    _, H, Lq, d = q.shape
    _, Hk, Lk, _ = k.shape
    entry = PHIS[choices.phi]
    if q.dtype == torch.bfloat16:
        entry = PHIS.get(f"{choices.phi}16", entry)
    functions = Functions(entry.function, entry.shift if choices.shifted else None, entry.total)
    constants = Constants(
        D=d,
        BLOCK_D=max(16, triton.next_power_of_2(d)),
        SCALE=choices.scale,
        SLOPE=entry.value / entry.argument,
        RECTIFIED=entry.rectified,
        CAP=None if choices.softcap is None else entry.argument * choices.softcap,
        P=int(choices.p) if choices.p % 1 == 0 else choices.p,
        SIGNED=choices.signed or entry.rectified,
        WINDOW=choices.window,
        EDGE=choices.window is not None or inputs.first_key is not None,
        UNIT=choices.unit,
        PRECISION=matmul_precision(),
    )
    return Arguments(
        Q=strided(q),
        K=strided(k),
        V=strided(v),
        H=H,
        GROUP=H // Hk,
        Lq=Lq,
        Lk=Lk,
        OPTIONAL=OptionalInputs(*(None if x is None else strided(x) for x in optional)),
        F=functions,
        C=constants,
    )


# ---- forward ----


def empty_outputs(q: Tensor, save: bool, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `forward`: the output, U and the statistics of rows."""
    H = q.shape[1]
    out = empty_heads(q, H)
    u = empty_heads(q, H) if save and p else q.new_empty(0)
    stats = q.new_empty(5 if p else 2, *q.shape[:3], dtype=torch.float32)
    return out, u, stats


@torch.library.custom_op(
    "fused_attention::forward",
    mutates_args=(),
    schema=f"({INPUTS}, *, bool save, {CHOICES}) -> (Tensor, Tensor, Tensor)",
)
def forward(*tensors: Any, save: bool, **choices: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of Inputs, as Choices say: the output [B, H, Lq, d], U and statistics.

    `save` keeps what the backward pass needs. Without it a single query has kernels of its own.
    """
    q: Tensor = tensors[0]
    B, H, Lq, _ = q.shape
    arguments = kernel_arguments(Inputs(*tensors), Choices(**choices))
    out, u, stats = empty_outputs(q, save, choices["p"])
    if Lq == 1 and not save:
        decode(q, out, arguments)
        return out, u, stats
    with torch.cuda.device_of(q):
        shape = block_shape(FORWARD, q)
        grid = B * H, triton.cdiv(Lq, shape["BLOCK_M"])
        results = dict(OUT=out, STATS=stats, SAVE=save)
        if arguments.C.P:
            forward_two_stages[grid](U=u, **results, **arguments._asdict(), **shape)
        else:
            forward_one_stage[grid](**results, **arguments._asdict(), **shape)
    return out, u, stats


@forward.register_fake
def _(q: Tensor, *others: Any, save: bool, p: float, **choices: Any):
    return empty_outputs(q, save, p)


def decode(q: Tensor, out: Tensor, arguments: Arguments) -> None:
    """Write the output of a single query, which sees every key, or every key of its document.

    The cache is split into enough chunks to fill the GPU.
    """
    B, H, _, d = q.shape
    Lk = arguments.Lk
    block_n = 16 if INTERPRETED else 64
    processors = 2
    if q.is_cuda:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    wanted = min(triton.cdiv(4 * processors, B * H), triton.cdiv(Lk, 2 * block_n), 256)
    chunk_size = triton.cdiv(triton.cdiv(Lk, wanted), block_n) * block_n
    chunks = triton.cdiv(Lk, chunk_size)
    common = dict(
        Y=q.new_empty(B, H, Lk, dtype=torch.float32),
        CHUNKS=q.new_empty(B, H, chunks, 3, dtype=torch.float32),
        H=H,
        GROUP=arguments.GROUP,
        Lk=Lk,
        chunk_size=chunk_size,
        OPTIONAL=arguments.OPTIONAL,
        F=arguments.F,
        C=arguments.C,
        BLOCK_N=block_n,
    )
    sums = q.new_empty(B, H, chunks, d + 1, dtype=torch.float32)
    grid = B * H, chunks
    max_chunks = triton.next_power_of_2(chunks)
    with torch.cuda.device_of(q):
        decode_scores[grid](Q=arguments.Q, K=arguments.K, **common)
        decode_values[grid](V=arguments.V, SUMS=sums, MAX_CHUNKS=max_chunks, **common)
    total, weight = sums.sum(2, keepdim=True).split((d, 1), dim=3)
    if arguments.C.P:  # a dead row's sum is 0
        total = total / weight.where(weight != 0, 1)
    out.copy_(total)


# ---- backward ----


class Gradients(NamedTuple):
    """The outputs of `backward`; a gradient that does not exist has no elements."""

    dq: Tensor  # [B, H, Lq, d], in float32
    dk: Tensor  # [B, H, Lk, d], for each head of q
    dv: Tensor  # [B, H, Lk, d]
    dbias: Tensor  # [B, H, Lq]
    dsink: Tensor  # [B, H, Lq], what each row adds
    dkey_bias: Tensor  # [B, H, Lk]


def empty_gradients(inputs: Inputs) -> Gradients:
    q, k = inputs.q, inputs.k
    B, H, Lq, _ = q.shape
    Lk = k.shape[2]

    def gradient_of(x: Tensor | None, L: int) -> Tensor:
        shape = (0,) if x is None else (B, H, L)
        return q.new_empty(shape, dtype=torch.float32)

    return Gradients(
        dq=empty_heads(q, H, torch.float32),
        dk=empty_heads(k, H),
        dv=empty_heads(k, H),
        dbias=gradient_of(inputs.bias, Lq),
        dsink=gradient_of(inputs.sink, Lq),
        dkey_bias=gradient_of(inputs.key_bias, Lk),
    )


def row_ends(first_key: Tensor | None, Lk: int) -> Strided | None:
    """For each key, the end of the rows whose first key is not after it, int32 [B, H, Lk]."""
    if first_key is None:
        return None
    B, H, _ = first_key.shape
    keys = torch.arange(Lk, dtype=torch.int32, device=first_key.device).repeat(B, 1)
    ends = torch.searchsorted(first_key[:, 0].contiguous(), keys, right=True, out_int32=True)
    return strided(ends[:, None].expand(B, H, Lk))


@torch.library.custom_op(
    "fused_attention::backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, Tensor out, Tensor u, Tensor stats, {INPUTS}, *, "
        f"bool learns_bias, {CHOICES}) -> ({', '.join(['Tensor'] * len(Gradients._fields))})"
    ),
)
def backward(
    dout: Tensor,
    out: Tensor,
    u: Tensor,
    stats: Tensor,
    *tensors: Any,
    learns_bias: bool,
    **choices: Any,
) -> Gradients:
    """Return the Gradients, from dout and the outputs and inputs of `forward`."""
    inputs = Inputs(*tensors)
    q = inputs.q
    B, H, Lq, _ = q.shape
    arguments = kernel_arguments(inputs, Choices(**choices))
    gradients = empty_gradients(inputs)
    atomic = not (learns_bias or torch.are_deterministic_algorithms_enabled())
    scaled_dout = empty_heads(dout, H)
    terms = q.new_empty(2, B, H, Lq, dtype=torch.float32)
    common = dict(
        DOUT=scaled_dout, STATS=stats, TERMS=terms, DQ=gradients.dq, **arguments._asdict()
    )
    with torch.cuda.device_of(q):
        backward_rows[B * H, triton.cdiv(Lq, 64)](
            DOUT=strided(dout),
            OUT=strided(out),
            U=strided(u) if choices["p"] else None,
            SCALED=scaled_dout,
            STATS=stats,
            TERMS=terms,
            DSINK=gradients.dsink,
            H=H,
            L=Lq,
            OPTIONAL=arguments.OPTIONAL,
            F=arguments.F,
            C=arguments.C,
            M=64,
        )
        if atomic:
            gradients.dq.zero_()
        shape = block_shape(KEYS, q)
        backward_keys[B * H, triton.cdiv(arguments.Lk, shape["BLOCK_N"])](
            DK=gradients.dk,
            DV=gradients.dv,
            DKEY_BIAS=gradients.dkey_bias,
            ROW_ENDS=row_ends(inputs.first_key, arguments.Lk),
            ATOMIC=atomic,
            **common,
            **shape,
        )
        if not atomic:
            shape = block_shape(QUERIES, q)
            grid = B * H, triton.cdiv(Lq, shape["BLOCK_M"])
            backward_queries[grid](DBIAS=gradients.dbias, **common, **shape)
    return gradients


@backward.register_fake
def _(dout, out, u, stats, *tensors, **choices):
    return empty_gradients(Inputs(*tensors))


def save_for_backward(ctx, inputs, keyword_only_inputs, output):
    ctx.choices = {name: keyword_only_inputs[name] for name in Choices._fields}
    ctx.save_for_backward(*output, *inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def call_backward(ctx, dout, *_):
    """The gradients of Inputs."""
    out, u, stats, *tensors = ctx.saved_tensors
    inputs = Inputs(*tensors)
    learns_bias = Inputs(*ctx.needs_input_grad).bias
    dq, dk, dv, dbias, dsink, dkey_bias = backward(
        dout, out, u, stats, *inputs, learns_bias=learns_bias, **ctx.choices
    )
    Hk = inputs.k.shape[1]
    if Hk < dk.shape[1]:
        dk = dk.unflatten(1, (Hk, -1)).sum(2)
        dv = dv.unflatten(1, (Hk, -1)).sum(2)
    return Inputs(
        q=dq.to(inputs.q.dtype),
        k=dk,
        v=dv,
        bias=dbias if learns_bias else None,  # if not learned, it may be unwritten memory
        gain=None,
        sink=None if inputs.sink is None else dsink.sum((0, 2)),
        key_bias=None if inputs.key_bias is None else dkey_bias,
        first_key=None,
    )


forward.register_autograd(call_backward, setup_context=save_for_backward)
