"""The fused kernels against the formulas in float64: on a GPU, or in Triton's interpreter."""

import ast
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import attention
import attention_paths.fused
from attention import VARIANTS, Phi, Variant
from attention_paths.fused import unsupported_reason, variant_unsupported_reason
from attention_paths.reference import Context
from errors import UserError
from generation import generate
from layers.build import build_model
from model import compile_model
from runtime.config_files import load_config
from scripts.common.papers import LSSAR
from tests.helpers import ATTENTIONS, SMALL, small_config, small_model
from tests.kernel_cases import (
    DEVICE,
    FUSED,
    REFERENCE,
    SETTINGS,
    TRITON,
    build_layer,
    compare,
    decode,
    draw,
    draw_off_kinks,
    evaluate,
    exact_evaluation,
    in_float64,
    inputs_of,
    kernels,
    layer_output,
)
from tests.runs import ROOT

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from attention_paths.kernels import launch, phi, tiles  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_buffers")
BFLOAT16 = torch.bfloat16
FLOAT32 = torch.float32
# interpreted blocks are 32 queries and 16 keys: 37 is more than a block of each, and a part of one
LENGTHS = [4, 19, 1, 21, 5, 37, 3]


def test_the_configs_without_a_kernel_are_those_of_the_documentation():
    without_kernel = sorted(set(ATTENTIONS) - set(FUSED))
    assert without_kernel == [
        "ablations/lssa_threshold.py",
        "ablations/softmax_inverse.py",
        "ablations/softmax_recentred.py",
        "ablations/softmax_recentred_l1.py",
        "adaptive_temperature.py",
        "asentmax.py",
        "entmax15.py",
        "scale_invariant.py",
        "sparsemax.py",
        "stick_breaking.py",
    ]
    page = (ROOT / "docs/variants.md").read_text()
    _, _, after = page.partition("They do not compute\n")
    listed, _, _ = after.partition("Variants with any of these")
    names = set(re.findall(r"`(\w+)`", listed)) & VARIANTS.keys()
    of_table_a4 = LSSAR["table_a4"]["rows"].keys() - {"softmax"}  # "the three variants of"
    assert {Path(case).stem for case in without_kernel} == names | of_table_a4


@pytest.mark.parametrize("case", FUSED)
def test_every_variant(case):
    index = FUSED.index(case)
    L = LENGTHS[index % len(LENGTHS)]
    d = (16, 24, 64)[index % 3]
    compare(case, draw_off_kinks(L, L, d, FLOAT32))


@pytest.mark.parametrize(
    "case",
    [
        "softmax.py",
        "sigmoid_l1.py",
        "relu_li.py",
        "softpick.py",
        "ablations/phi_softplus.py",
    ],
)
def test_every_shift_of_phi_within_documents(case):
    tensors = draw_off_kinks(21, 21, 16, FLOAT32)
    compare(f"{case} --document_mask", tensors)


@pytest.mark.parametrize(
    "case",
    [
        "lssar_p15.py",
        "relu_li.py",
        "softpick.py --forget=True",
        "softmax_p3.py --sink=learned",
    ],
)
def test_bfloat16(case):
    tensors = draw_off_kinks(21, 21, 16, BFLOAT16)
    compare(case, inputs_of(case, tensors))


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    Lq, Lk = SETTINGS[case]
    tensors = draw_off_kinks(Lq, Lk, 16, FLOAT32, B=2)
    compare(case, inputs_of(case, tensors))


@pytest.mark.parametrize(
    "case",
    [
        "lssar_p15.py --window=9",
        "relu_li.py --n_kv_head=1",
        "ssmax_bias.py --sink=learned",
    ],
)
def test_without_atomics(case, monkeypatch):
    """The same bits again."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    tensors = inputs_of(case, draw_off_kinks(35, 37, 16, FLOAT32))
    first = compare(case, tensors)
    second = evaluate(kernels(case, 16), tensors)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("case", ["lssa.py", "lssar_p3.py"])
def test_a_head_of_keys_serves_consecutive_heads_of_queries(case):
    """Two heads of keys: with a single one, any assignment of heads is the same."""
    grouped = ("--n_head=4", "--n_kv_head=2", "--n_embd=64")
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 21), (2, 37), (2, 37), (4, 21)]
    tensors = [torch.randn(1, *shape, 16, generator=generator) for shape in shapes]
    exactly = in_float64(case, 16, *grouped)
    truth = evaluate(exactly, [x.double() for x in tensors])
    layer = kernels(case, 16, *grouped)
    results = evaluate(layer, tensors)
    for name, exact in truth.items():
        assert (results[name] - exact).norm() < 1e-4 * exact.norm(), name
    last = decode(layer, *tensors[:3]).double()
    out = truth["out"].view(1, 4, 21, 16)
    torch.testing.assert_close(last, out[:, :, -1:], rtol=0, atol=1e-4)


def test_decoding_in_three_chunks():
    """On a CPU 80 keys are three chunks: not a power of 2, and the sink counts in one of them."""
    compare("sigmoid_l1.py --p=2 --sink=learned", draw_off_kinks(2, 80, 16, FLOAT32))


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's tiles have these proportions")
@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py --window=24 --document_mask"])
def test_tiles_of_more_keys_than_rows(case, monkeypatch):
    shapes = launch.SHAPES["interpreter"] | {launch.KEYS: {128: (16, 32, 4, 1)}}
    monkeypatch.setitem(launch.SHAPES, "interpreter", shapes)
    compare(case, draw_off_kinks(70, 70, 16, FLOAT32, B=2))


def test_a_bias_that_is_not_learned_has_no_gradient():
    """Not even a NaN of memory that no kernel has written, at which detect_anomaly raises."""
    layer = kernels("sigmoid_logn.py", 16)
    tensors = draw(5, 5, 16, FLOAT32)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        evaluate(layer, tensors)


def test_any_strides():
    """q, k and v as slices of one projection, as the model has them, and every other column."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 19, 3, 2, 32, generator=generator)
    q, k, v = packed[..., ::2].permute(2, 0, 3, 1, 4).unbind()
    gradient = torch.randn(2, 2, 19, 1).expand(-1, -1, -1, 16)  # stride 0 along the head
    compare("lssar_p3.py", (q, k, v, gradient))


def test_rows_that_lie_far_apart():
    """Six rows of q, k and v over 2^31 elements: an offset of 32 bits would overflow."""
    storage = torch.empty(1, 6, 2**29, dtype=torch.bfloat16, device="meta")
    assert storage.numel() > 2**31
    spread = storage.as_strided((1, 1, 6, 16), (1, 1, 2**29, 1))
    assert launch.strided(spread).strides == (96, 96, 16)
    near = torch.empty(1, 6, 1, 2304, device="meta")[..., :16].transpose(1, 2)
    assert launch.strided(near).data is near


@pytest.mark.parametrize("case", ["softmax.py", "lssar_p3.py"])
def test_saved_tensors_that_a_hook_has_repacked(case):
    """As torch's save_on_cpu does on CUDA: the values are the same, the strides are not."""

    def unpack(saved):
        return saved.clone(memory_format=torch.contiguous_format)

    tensors = draw(9, 9, 16, FLOAT32)
    expected = evaluate(kernels(case, 16), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = evaluate(kernels(case, 16), tensors)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value)


# ---- extreme inputs ----


@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py"])
@pytest.mark.parametrize("inputs", ["equal keys", "zero queries"])
def test_tied_rows_stay_uniform_with_bounded_gradients(case, inputs):
    q, k, v, gradient = draw(21, 21, 16, FLOAT32)
    if inputs == "equal keys":
        k = k[:, :, :1].expand_as(k).contiguous()
    else:
        q = torch.zeros_like(q)
    tensors = (q, k, v, gradient)
    results = evaluate(kernels(case, 16), tensors)
    count = torch.arange(1, 22)[:, None]
    mean = v.double().cumsum(2) / count
    torch.testing.assert_close(results["out"], mean.flatten(), rtol=0, atol=1e-5)
    for name, exact in exact_evaluation(case, tensors).items():
        # a zero query's gradient is 1e6 times another's: l2_normalise divides it by 1e-6
        scale = max(gradient.norm(), exact.norm())
        error = (results[name] - exact).norm()
        assert error < 1e-5 * scale, name


def test_a_long_tied_row_has_bounded_gradients():
    """A plain sum over its tiles would be so inexact that the row would not count as tied."""
    case = "relu_li.py --p=3"
    _, _, v, gradient = draw(1, 4096, 16, FLOAT32)
    q = torch.zeros(1, 2, 1, 16)
    q[..., 0] = 4
    k = torch.zeros(1, 2, 4096, 16)
    k[..., 0] = 1.0709
    tensors = (q, k, v, gradient)
    results = evaluate(kernels(case, 16), tensors)
    for name, exact in exact_evaluation(case, tensors).items():
        error = (results[name] - exact).norm()
        assert error < 1e-4 * max(exact.norm(), gradient.norm()), name


def test_a_nearly_tied_row_is_not_dead_in_bfloat16():
    """Where 16 bits cannot tell the largest weight from the mean, the weights are equal."""
    _, _, v, _ = draw(1, 8, 16, BFLOAT16)
    q = torch.zeros(1, 2, 1, 16)
    q[..., 0] = 4
    k = torch.zeros(1, 2, 8, 16)
    k[..., 0] = torch.tensor([6e-6, -6e-6]).repeat(4)
    layer = kernels("ablations/phi_softplus.py --p=15", 16)
    q.requires_grad_()  # without it a single query is decoded, in float32
    out = layer_output(layer, q.to(BFLOAT16), k.to(BFLOAT16), v)
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True), rtol=0, atol=0.01)


@pytest.mark.parametrize("p", [131000, 140000, 1000000])
def test_powers_of_more_bits_than_the_loop_has(p):
    """Whole powers up to 2^17 are computed by multiplication, and larger ones as any others."""
    case = f"relu_li.py --p={p}"
    q = torch.ones(1, 2, 2, 16)
    k = torch.ones(1, 2, 2, 16)
    k[:, :, 0] -= 1e-5
    v = torch.zeros(1, 2, 2, 16)
    v[:, :, 1] = 1
    tensors = (q, k, v, torch.ones_like(q))
    out = evaluate(kernels(case, 16), tensors)["out"]
    exact = exact_evaluation(case, tensors)["out"]
    torch.testing.assert_close(out, exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("size", [-1e4, 1, 1e4])
@pytest.mark.parametrize(
    "case",
    [
        "softmax.py --sink=learned --window=3",
        "softmax_p3.py",
        "sigmoid_l1.py --window=3",
        "sigmoid_logn_l1_p15.py --sink=learned",
        "ablations/phi_softplus.py --sink=learned",
        "ablations/phi_softplus.py --p=3 --window=3",
    ],
)
def test_scores_and_sinks_of_ten_thousand(case, size):
    """Rows where phi underflows or overflows are shifted, tile by tile.

    A head's sink is far above or far below. With the window rows see no key of their first tiles.
    """
    q, k, v, gradient = draw(21, 21, 16, FLOAT32)
    q = size / 4 * q.abs()
    growing = torch.linspace(0.9, 1.1, 21)[:, None]
    k = k.abs() * growing
    layer = kernels(case, 16)
    exactly = in_float64(case, 16)
    if layer.sink is not None:
        sinks = torch.tensor([1e4, -1e4])
        layer.sink.data.copy_(sinks)
        exactly.sink.data.copy_(sinks)
    results = evaluate(layer, (q, k, v, gradient))
    for name, value in results.items():
        assert value.isfinite().all(), name
    out = layer_output(exactly, q.double(), k.double(), v.double()).detach()
    torch.testing.assert_close(results["out"], out.flatten(), rtol=0, atol=2e-2)
    last = decode(layer, q, k, v).double()
    torch.testing.assert_close(last, out[:, :, -1:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("case", ["relu_li.py", "relu_li.py --p=3"])
def test_dead_rows_are_zero_in_value_and_gradient(case):
    q, k, v, gradient = draw(20, 20, 16, FLOAT32)
    tensors = (-q.abs(), k.abs(), v, gradient)  # no score is above 0
    layer = kernels(case, 16)
    for name, value in evaluate(layer, tensors).items():
        assert (value == 0).all(), name
    assert (decode(layer, *tensors[:3]) == 0).all()


@pytest.mark.parametrize("case", ["softmax.py --forget=True", "lssar_p3.py --forget=True"])
def test_forget_gates_that_are_nearly_closed(case):
    """Biases of rows and keys that nearly cancel, and would make the padding of a tile infinite."""
    generator = torch.Generator().manual_seed(0)
    gates = 10 * torch.randn(1, 2, 37, generator=generator) - 10
    assert F.logsigmoid(gates).sum(-1).max() < -300
    tensors = inputs_of(case, draw(37, 37, 16, FLOAT32), gates)
    incoming = tensors[-1].norm()
    results = evaluate(kernels(case, 16), tensors)
    for name, exact in exact_evaluation(case, tensors).items():
        scale = max(exact.norm(), 1e-2 * incoming)
        error = (results[name] - exact).norm()
        assert error < 1e-4 * scale, name


def test_alibi_is_exact_near_the_last_key():
    """Its biases are counted from there: counted from the first, they would round to 1e-3."""
    case = "softmax_alibi.py --window=40"
    L = 2**14
    q = torch.zeros(1, 2, 2, 16)
    k = torch.zeros(1, 2, L, 16)
    v = torch.eye(16).repeat(L // 16, 1).expand(1, 2, -1, -1)
    visible = slice(-41, None)  # to either query
    exact = layer_output(
        in_float64(case, 16),
        q.double(),
        k[:, :, visible].double(),
        v[:, :, visible].double(),
    )
    layer = kernels(case, 16)
    out = layer_output(layer, q, k, v)
    assert (out - exact).abs().max() < 1e-6
    last = decode(layer, q, k, v)
    assert (last - exact[:, :, -1:]).abs().max() < 1e-6


def test_softpick_of_extreme_scores():
    """Rows of large scores, of zeros, of scores far below 0, which get no weight, and of both."""
    _, _, v, gradient = draw(20, 20, 16, FLOAT32, B=2)
    growing = torch.arange(20.0)
    sign = 1 - 2 * (torch.arange(20) % 2)
    scores = [
        1e4 + growing,
        torch.zeros(20),
        torch.full((20,), -1e4),
        1e4 * sign,
    ]
    q = torch.zeros(2, 2, 20, 16)
    k = torch.zeros(2, 2, 20, 16)
    q[..., 0] = 4
    k[..., 0] = torch.stack(scores).view(2, 2, 20)
    layer = kernels("softpick.py", 16)
    results = evaluate(layer, (q, k, v, gradient))
    for name, value in results.items():
        assert value.isfinite().all(), name
    # each head has one row of `scores`
    out = results["out"].view(4, 20, 16)
    dv = results["dv"].view(4, 20, 16)
    v_by_head = v.view(4, 20, 16)
    assert not out[1:3].any()
    assert not dv[1:3].any()
    last = decode(layer, q, k, v).view(4, 16).double()
    assert not last[1:3].any()
    expected = {
        0: torch.softmax(growing, 0) @ v_by_head[0],
        3: v_by_head[3, ::2].mean(0),
    }
    for head, exact in expected.items():
        torch.testing.assert_close(out[head, -1], exact.double(), rtol=0, atol=2e-3)
        torch.testing.assert_close(last[head], exact.double(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "case",
    [
        "relu_li.py",
        "lssar_p15.py",
        "softmax.py --forget=True --sink=learned --softcap=5",
        "lssar_p3.py --forget=True --sink=learned",
    ],
)
def test_a_nan_comes_out_as_nan(case):
    """Not as a row of zeros, which would hide it."""
    at = 7
    *clean, _ = inputs_of(case, draw(20, 20, 16, FLOAT32))
    layer = kernels(case, 16)
    numbers = {"q": 0, "k": 1}
    if len(clean) == 4:
        numbers["gate"] = 3
    for name, number in numbers.items():
        broken = [x.clone() for x in clean]
        broken[number][0, 0, at] = math.nan
        out = layer_output(layer, *broken).detach()
        last = decode(layer, *broken)
        end = at + 1 if name == "q" else None  # a query is in one row, a key in all later ones
        assert out[0, 0, at:end].isnan().all(), name
        assert out[0, 0, :at].isfinite().all(), name
        assert out[0, 1].isfinite().all(), name
        assert last[0, 1].isfinite().all(), name
        assert last[0, 0].isnan().all() == (name != "q"), name


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's tiles are larger")
@pytest.mark.parametrize("edge", ["--window=12", "--document_mask"])
@pytest.mark.parametrize("case, atomic", [("lssar_p15.py", True), ("ssmax_bias.py", False)])
def test_tiles_that_no_row_sees_are_never_visited(case, atomic, edge, monkeypatch):
    """Rows 32 to 63 see keys in tiles from 16 on; keys 0 to 15 are seen in tiles of rows up to 31.

    What is outside is NaN, which any use of it, even with weight 0, would pass on.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not atomic)
    layer = build_layer(case, 16, edge, TRITON)
    q, k, v, gradient = draw(64, 64, 16, FLOAT32)
    clean = evaluate(build_layer(case, 16, edge, REFERENCE), (q, k, v, gradient))

    def without(x, hidden):
        x = x.clone()
        x[:, :, hidden] = math.nan
        return x

    early_keys = slice(0, 16)
    late_rows = slice(32, 64)
    for tensors, inside in (
        ((q, without(k, early_keys), without(v, early_keys), gradient), late_rows),
        ((without(q, late_rows), k, v, without(gradient, late_rows)), early_keys),
    ):
        results = evaluate(layer, tensors)
        for name in ("out", "dq", "dk", "dv"):
            ours = results[name].view(q.shape)
            expected = clean[name].view(q.shape)
            torch.testing.assert_close(
                ours[:, :, inside],
                expected[:, :, inside],
                rtol=1e-4,
                atol=1e-4,
            )


# ---- a user's own ----


@triton.jit
def elu1(z):
    slope = tl.exp(tl.minimum(z, 0.0))
    a = tl.where(z > 0, z + 1, slope)
    return a, slope


@pytest.mark.parametrize("p", ["", " --p=3"])
def test_a_phi_scale_and_bias_of_ones_own(p, monkeypatch):
    """The scale and the bias are learned, and the queries are normalised."""
    monkeypatch.setitem(launch.PHIS, "elu1", phi.Function(elu1))
    own = Variant(
        Phi(lambda z: F.elu(z) + 1, kernel="elu1"),
        scale=lambda r: r.s * r.n.log() + 1,
        bias=lambda r: r.b,
        l2_normalise=True,
        learnable=("s", "b"),
    )
    monkeypatch.setitem(VARIANTS, "elu1", own)
    tensors = draw(21, 21, 16, FLOAT32, B=2)
    results = compare(f"softmax.py --attention=elu1{p}", tensors)
    assert results["ds"].norm() > 0
    assert results["db"].norm() > 0


# ---- phi ----


@triton.jit
def apply(Z, A, SLOPES, N: tl.constexpr, PHI: tl.constexpr):
    at = tl.arange(0, N)
    a, slope = PHI(tl.load(Z + at))
    tl.store(A + at, a)
    tl.store(SLOPES + at, slope)


@pytest.mark.parametrize("name", [name for name in phi.PHIS if name != "softpick"])
def test_phis_and_their_slopes(name):
    """To float32 precision; in an exponential tail relative to its small numbers."""
    phis = {variant.phi.kernel: variant.phi for variant in VARIANTS.values()}
    z = torch.linspace(-40, 12, 1024)  # no kink among them
    a = torch.empty(1024, device=DEVICE)
    slopes = torch.empty(1024, device=DEVICE)
    entry = phi.PHIS[name]
    argument = (entry.argument * z).to(DEVICE)
    apply[(1,)](argument, a, slopes, N=1024, PHI=entry.function)
    z = z.double().requires_grad_()
    exact = phis[name.removesuffix("16")].function(z)
    (exact_slopes,) = torch.autograd.grad(exact.sum(), z)
    has_tail = name.startswith(("exp", "sigmoid", "softplus", "gelu"))
    tolerance = {
        "rtol": 1.5e-5 if name in ("softplus16", "gelu") else 3e-6,
        "atol": 1e-36 if has_tail else 1e-6,
    }
    value = a.cpu().double() / entry.value
    torch.testing.assert_close(value, exact.detach(), **tolerance)
    torch.testing.assert_close(slopes.cpu().double(), exact_slopes, **tolerance)


class Cap(NamedTuple):
    CAP: float


@triton.jit
def cap(Y, CAPPED, SLOPES, N: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, N)
    capped, slope = tiles.soft_capped(tl.load(Y + at), C)
    tl.store(CAPPED + at, capped)
    tl.store(SLOPES + at, slope)


def test_the_soft_cap_and_its_slope():
    y = torch.cat((torch.linspace(-0.6, 0.6, 512), torch.linspace(-40, 40, 512)))
    capped = torch.empty(1024, device=DEVICE)
    slopes = torch.empty(1024, device=DEVICE)
    cap[(1,)](y.to(DEVICE), capped, slopes, N=1024, C=Cap(3.0))
    y = y.double()
    torch.testing.assert_close(capped.cpu().double(), 3 * (y / 3).tanh(), rtol=2e-6, atol=0)
    torch.testing.assert_close(slopes.cpu().double(), (y / 3).cosh() ** -2, rtol=3e-5, atol=1e-6)


@triton.jit
def total(Y, TOTALS, N: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, N)
    y = tl.load(Y + row[:, None] * N + column[None, :])
    tl.store(TOTALS + row, phi.softplus_total(y))


def test_sums_of_softplus_by_products():
    """Far below 0, where a product's logarithm has no digits of it, and where it overflows."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, 128, generator=generator)
    rows = [
        keys - 58,
        keys - 20,
        8 * keys,
        keys / 1e4,
        torch.zeros(1, 128),
    ]
    y = torch.cat(rows)
    y[2, 5:] = -math.inf  # masked
    sums = torch.empty(len(y), device=DEVICE)
    total[(len(y),)](y.to(DEVICE), sums, N=128)
    exponential = torch.exp2(y.double())
    softplus = torch.log2(1 + exponential)
    softplus = softplus.where(y > -40, exponential / math.log(2))
    torch.testing.assert_close(sums.double().cpu(), softplus.sum(1), rtol=6e-7, atol=0)


def test_constants_and_phis_are_those_of_the_table():
    assert tiles.DEAD.value == attention.DEAD
    assert tiles.TIED.value == attention.TIED
    for variant in VARIANTS.values():
        if variant.phi.kernel is None:
            continue
        entry = phi.PHIS[variant.phi.kernel]
        is_shifted = entry.shift is not None
        assert entry.rectified or is_shifted == (variant.phi.shift is not None)


# ---- within torch and the model ----


def test_the_operators_are_well_formed():
    """Schema, fake tensors and autograd registration, by torch's own checks."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    q, k, v, _ = (x.to(DEVICE) for x in draw(20, 20, 16, FLOAT32))
    ones = torch.ones(1, 2, 20, device=DEVICE)
    position = torch.arange(20, dtype=torch.int32, device=DEVICE)
    first_key = 7 * (position // 7)  # of documents of 7 tokens
    first_key = first_key.expand(1, 2, -1)
    choices = dict(
        phi="softplus",
        p=3.0,
        scale=1.0,
        shifted=False,
        signed=False,
        window=None,
        softcap=None,
        unit=False,
    )
    inputs = launch.Inputs(
        q.clone().requires_grad_(),
        k.clone().requires_grad_(),
        v.clone().requires_grad_(),
        bias=ones,
        gain=None,
        sink=None,
        key_bias=ones,
        first_key=first_key,
    )
    torch.library.opcheck(launch.forward, inputs, dict(save=True, **choices), test_utils=checks)
    last = inputs._replace(
        q=q[:, :, -1:],
        bias=ones[..., -1:],
        first_key=first_key[..., -1:],
    )
    torch.library.opcheck(launch.forward, last, dict(save=False, **choices), test_utils=checks)


def test_compiles_without_graph_breaks():
    layer = kernels("lssar_p15.py", 16)
    tensors = draw(20, 20, 16, FLOAT32)
    eager = evaluate(layer, tensors)
    layer.compile(fullgraph=True, backend="aot_eager")
    compiled = evaluate(layer, tensors)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize(
    "case, task, graphs",
    [
        ("softmax.py", "language", 3),
        ("softmax.py", "recall", 2),
        (f"lssar_p15.py {TRITON}", "recall", 2),
        (f"hybrid.py {TRITON}", "recall", 2),
    ],
)
def test_all_layers_share_a_graph_of_each_length_or_of_any(case, task, graphs, monkeypatch):
    torch._dynamo.reset()
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiled))
    model = small_model(case, "--n_layer=3", f"--task={task}").float().to(DEVICE)
    compile_model(model)
    for length in (16, 12, 9):
        idx = torch.arange(2 * length, device=DEVICE).view(2, length)
        model(idx, idx)
    assert compiled.frame_count == graphs + 2  # two are the loss's


def test_a_model_generates_as_with_the_reference():
    case = "lssar_p3.py --positions=alibi --sink=learned --gate=head --window=9 --n_kv_head=1"
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(257, (2, 17), generator=generator).to(DEVICE)

    def loss_and_text(impl):
        torch.manual_seed(0)
        config = small_config(case, impl, "--n_layer=1", "--block_size=16")
        model = build_model(config).eval().to(DEVICE)
        loss = model(idx[:, :-1], idx[:, 1:]).item()
        text = generate(model, idx[:, :5], 6, temperature=0)
        return loss, text

    loss, text = loss_and_text(TRITON)
    expected_loss, expected_text = loss_and_text(REFERENCE)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert torch.equal(text, expected_text)


def test_what_the_kernels_cannot_compute_is_refused(monkeypatch):
    q = torch.zeros(1, 2, 4, 8)
    layer = build_layer("lssa.py", 8, TRITON)
    for dtype in (torch.float16, torch.float64):
        x = q.to(DEVICE, dtype)
        with pytest.raises(UserError, match=f"bfloat16 and float32, not in {dtype}"):
            layer(x, x, x)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(UserError, match="NVIDIA GPU.*cpu"):
        layer(q, q, q)
    monkeypatch.setattr(attention_paths.fused, "launch", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        layer(q, q, q)
    without_kernel = Variant(Phi(torch.relu, kernel=None))
    assert "no kernel" in variant_unsupported_reason(without_kernel, 16)
    assert "no kernel" in variant_unsupported_reason(Variant(attention.EXPM1), 16)
    shifted = Variant(attention.EXP, row_weights=attention.softpick)
    assert "no kernel" in variant_unsupported_reason(shifted, 16)
    own_rows = Variant(attention.EXPM1, row_weights=lambda z, rows: z.relu())
    assert "whole rows" in variant_unsupported_reason(own_rows, 16)
    norm = Variant(attention.SIGMOID, norm=lambda rows: rows.n * rows.s, learnable=("s",))
    assert "norm may be learned" in variant_unsupported_reason(norm, 16)
    for settings, message in (
        (
            ["--attention=softmax_inverse"],
            "attention_impl.*softmax_inverse.*not LSSAR's",
        ),
        (
            ["--attention=lssa", "--n_embd=512"],
            "head size 256 is above 128",
        ),
    ):
        config = load_config([*SMALL, *settings, TRITON])
        with pytest.raises(UserError, match=message):
            build_model(config)


def test_gpus_that_cannot_run_the_kernels(monkeypatch):
    gpu = SimpleNamespace(major=8, minor=0)
    q = SimpleNamespace(is_cuda=True, device=None, dtype=BFLOAT16, shape=(1, 2, 1, 16))
    layer = build_layer("lssar_p15.py", 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert unsupported_reason(layer, q) is None
    softmax = build_layer("softmax.py", 16)
    assert softmax.path(q, 4) == "sdpa"
    # keys are in a cache, which varlen_attn does not take
    documents = Context(document_positions=torch.zeros(1, 4))
    assert softmax.path(q, 4, documents) == "triton"
    gpu.major = 7
    gpu.minor = 5
    assert "8.0 or newer, and this is 7.5" in unsupported_reason(layer, q)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in unsupported_reason(layer, q)


def test_outputs_beyond_offsets_of_32_bits_take_another_path(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)  # else a meta tensor is refused as no GPU's
    layer = build_layer("lssar_p15.py", 16)
    q = torch.empty(1, 2, 2**26, 16, dtype=BFLOAT16, device="meta")
    assert "2^31 numbers" in unsupported_reason(layer, q)
    assert unsupported_reason(layer, q[:, :, 1:]) is None


@pytest.mark.parametrize(
    "case", ["softmax.py --window=9", "ssmax_bias.py", "lssar_p3.py", "relu_li.py"]
)
def test_factors_on_the_scores(case):
    """YaRN's, which is one number or one for each query, and the factor that grows with log n."""
    q, k, v, _ = draw_off_kinks(5, 21, 16, FLOAT32)
    of_each_query = torch.linspace(0.5, 2, 5)[:, None]
    for score_scale, log_base in ((1.7, None), (of_each_query, None), (1.0, 5.0)):
        outputs = []
        for layer, dtype in ((kernels(case, 16), FLOAT32), (in_float64(case, 16), torch.float64)):
            layer.log_base = log_base
            if isinstance(score_scale, torch.Tensor):
                score_scale = score_scale.to(DEVICE, dtype).expand(1, 1, 5, 1)
            inputs = [x.to(DEVICE, dtype) for x in (q, k, v)]
            outputs.append(layer(*inputs, Context(score_scale)).double().cpu())
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["lssa.py", "lssar_p3.py"])
def test_a_factor_on_bounded_scores_leaves_no_row_without_weights(case):
    q, k, v, _ = draw_off_kinks(5, 21, 16, FLOAT32)
    q[..., 0] = 9
    k[..., 0] = -9
    outputs = []
    for layer, dtype in ((kernels(case, 16), FLOAT32), (in_float64(case, 16), torch.float64)):
        inputs = [x.to(DEVICE, dtype) for x in (q, k, v)]
        outputs.append(layer(*inputs, Context(12.0)).double().cpu())
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


# ---- without a GPU: block shapes and machine code ----


def test_no_kernel_returns_none():
    """Triton 3.6 cannot compile it."""
    for path in (ROOT / "attention_paths" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if "triton.jit" in map(ast.unparse, node.decorator_list):
                returns = [ast.unparse(x) for x in ast.walk(node) if isinstance(x, ast.Return)]
                assert "return None" not in returns, (path, node.name)


def test_shapes_fit_every_kernel():
    """softplus_total takes at most 128 keys, and every head size up to 128 has a shape."""
    for table in launch.SHAPES.values():
        for shapes in table.values():
            assert max(shapes) == 128
            for _, keys, _, _ in shapes.values():
                assert keys <= 128


@pytest.mark.parametrize(
    "arguments, kernels",
    [
        (["--quick"], 3),
        pytest.param([], 48, marks=pytest.mark.long),
        pytest.param(["--variants"], 0, marks=pytest.mark.long),
    ],
)
def test_machine_code_is_that_of_the_table(arguments, kernels):
    """Of one variant's kernels; with -m long of all, and every variant launches."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("instructions") == kernels
