"""The fused kernels under Triton's interpreter, on a CPU, against the formulas in float64."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attention
import attention_paths.fused
from attention import VARIANTS, Phi, Variant
from attention_paths.fused import obstacle, variant_obstacle
from config import load_config
from errors import UserError
from generation import generate
from model import GPT
from tests.fused import REFERENCE, TRITON, attended, build, draw, draw_off_kinks, evaluate
from tests.helpers import ATTENTIONS, SMALL, small_config

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from attention_paths import launch, phi, tiles  # noqa: E402

if not launch.INTERPRETED:
    pytest.skip("the kernels run on the GPU: tests/test_kernels_cuda.py", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poisoned_buffers")
FLOAT32, FLOAT16 = torch.float32, torch.float16
# interpreted blocks are 32 queries and 16 keys: 37 is more than a block of each, and a part of one
LENGTHS = [1, 3, 4, 5, 31, 33, 37]
FUSED = [case for case in ATTENTIONS if obstacle(build(case, 16), torch.empty(1)) is None]


def compare(case, tensors, *settings):
    """Asserts that the kernels' error is at most twice the reference path's in the same dtype, plus
    some roundings, which p multiplies. The last row is also computed by decoding."""
    d, dtype = tensors[0].shape[-1], tensors[0].dtype
    fused, reference = (build(case, d, *settings, impl) for impl in (TRITON, REFERENCE))
    exactly = build(case, d, *settings, REFERENCE).double()
    truth = evaluate(exactly, [x.double() for x in tensors])
    ours, bar = evaluate(fused, tensors), evaluate(reference, tensors)
    p = fused.p or 0
    roundings = (16 + 2 * p if dtype is FLOAT32 else 1 + p / 4) * torch.finfo(dtype).eps
    # Errors are relative, but with few or tied keys most gradients are 0, and then relative to the
    # incoming gradient. A learnt number's gradient is one sum of terms that cancel.
    keys = min(tensors[1].shape[2], fused.window or math.inf)
    size = tensors[-1].double().norm() * (1 if keys <= 5 else 1e-3)
    for name, exact in truth.items():
        scale = max(exact.norm(), size) * (1 if name in ("out", "dq", "dk", "dv") else 10)
        error, allowed = (ours[name] - exact).norm(), 2 * (bar[name] - exact).norm()
        assert error <= allowed + roundings * scale, (name, error / scale, allowed / scale)
    with torch.no_grad():
        last = fused(tensors[0][:, :, -1:], *tensors[1:3]).double()
    exact = truth["out"].view(tensors[0].shape)[:, :, -1:]
    torch.testing.assert_close(last, exact, rtol=0, atol=2e-5 if dtype is FLOAT32 else 2e-2)
    return ours


@pytest.mark.parametrize("case", FUSED)
def test_every_variant(case):
    index = FUSED.index(case)
    L, d = LENGTHS[index % len(LENGTHS)], (16, 24, 64)[index % 3]
    compare(case, draw_off_kinks(L, L, d, FLOAT32))


@pytest.mark.parametrize(
    "case", ["softmax_p3.py", "lssar_p15.py", "sigmoid.py", "relu_li.py", "softpick.py"]
)
def test_float16(case):
    compare(case, draw_off_kinks(37, 37, 16, FLOAT16))


POWERS = {1: "lssa.py", 2: "softmax.py", 3: "sigmoid_logn_l1.py", 15: "relu_li.py",
          2.5: "lssa.py", 100: "ablations/phi_softplus.py"}  # fmt: skip


@pytest.mark.parametrize("p", POWERS)
def test_powers(p):
    """Whole powers are computed by multiplication, others by exp2 and log2."""
    compare(POWERS[p], draw_off_kinks(33, 33, 16, FLOAT32), f"--p={p}")


@pytest.mark.parametrize("case", ["lssar_p15.py", "sigmoid.py", "softmax_p3.py"])
def test_queries_that_follow_a_cache(case):
    for Lq, Lk in ((5, 33), (33, 70)):
        compare(case, draw_off_kinks(Lq, Lk, 16, FLOAT32))


@pytest.mark.parametrize("case", ["lssar_p15.py", "relu_li.py"])
def test_without_atomics_the_gradients_are_the_same(case):
    """torch.use_deterministic_algorithms takes dq from a kernel of its own."""
    tensors = draw(40, 40, 16, FLOAT32)
    layer = build(case, 16, TRITON)
    atomic = evaluate(layer, tensors)
    torch.use_deterministic_algorithms(True)
    try:
        ordered, again = evaluate(layer, tensors), evaluate(layer, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in atomic:
        assert torch.equal(ordered[name], again[name])
        assert (ordered[name] - atomic[name]).norm() < 1e-5 * atomic[name].norm()


def test_any_strides():
    """q, k and v as slices of one projection, as the model has them, and every other column."""
    packed = torch.randn(2, 33, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = packed[..., ::2].permute(2, 0, 3, 1, 4).unbind()
    gradient = torch.randn(2, 2, 33, 1).expand(-1, -1, -1, 16)  # stride 0 along the head
    compare("lssar_p3.py", (q, k, v, gradient))


# ---- extreme inputs ----


@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py", "sigmoid_logn_l1_p3.py"])
@pytest.mark.parametrize("inputs", ["equal keys", "zero queries"])
def test_tied_rows_stay_uniform_with_bounded_gradients(case, inputs):
    q, k, v, gradient = draw(33, 33, 16, FLOAT32)
    if inputs == "equal keys":
        k = k[:, :, :1].expand_as(k).contiguous()
    else:
        q = torch.zeros_like(q)
    found = evaluate(build(case, 16, TRITON), (q, k, v, gradient))
    exactly = build(case, 16, REFERENCE).double()
    exact = evaluate(exactly, [x.double() for x in (q, k, v, gradient)])
    mean = v.double().cumsum(2) / torch.arange(1, 34)[:, None]
    torch.testing.assert_close(found["out"], mean.flatten(), rtol=0, atol=1e-5)
    for name in found:
        # a zero query's gradient is 1e6 times another's: l2_normalise divides it by 1e-6
        scale = max(gradient.norm(), exact[name].norm())
        assert (found[name] - exact[name]).norm() < 1e-5 * scale


@pytest.mark.parametrize("window", [[], ["--window=3"]])
@pytest.mark.parametrize(
    "case",
    ["softmax_p3.py", "sigmoid_l1.py", "sigmoid_logn_l1_p15.py", "ablations/phi_softplus.py"],
)
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_scores_of_ten_thousand(case, size, window):
    """Rows where phi underflows or overflows are shifted, tile by tile.

    With the window some rows see no key of their first tiles.
    """
    q, k, v, gradient = draw(40, 40, 16, FLOAT32)
    q = size / 4 * q.abs()
    k = k.abs() * torch.linspace(0.9, 1.1, 40)[:, None]
    found = evaluate(build(case, 16, *window, TRITON), (q, k, v, gradient))
    exactly = build(case, 16, *window, REFERENCE).double()
    exact = exactly(q.double(), k.double(), v.double()).detach().flatten()
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["out"], exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    "case, size",
    [("ablations/phi_softplus.py", -40), ("ablations/phi_relu2.py", 400), ("sigmoid_l1.py", -300)],
)
def test_float16_has_the_range_of_float32(case, size):
    """One stage sums weights before normalising them, which in float16 would be 0 or infinite."""
    q, k, v, gradient = draw(40, 40, 16, FLOAT32)
    q, k = q.abs(), k.abs() * torch.linspace(0.5, 1.1, 40)[:, None]
    q = q * (4 * abs(size) / (q * k).sum(-1).mean())
    tensors = [x.to(FLOAT16) for x in (math.copysign(1, size) * q, k, v, gradient)]
    out = build(case, 16, TRITON)(*tensors[:3])
    exact = build(case, 16, REFERENCE).double()(*(x.double() for x in tensors[:3]))
    assert (out - exact).norm() < 4 * torch.finfo(FLOAT16).eps * exact.norm()


@pytest.mark.parametrize("p", [[], ["--p=3"]])
def test_dead_rows_are_zero_in_value_and_gradient(p):
    q, k, v, gradient = draw(20, 20, 16, FLOAT32)
    tensors = -q.abs(), k.abs(), v, gradient  # no score is above 0
    found = evaluate(build("relu_li.py", 16, *p, TRITON), tensors)
    assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "relu_li.py", "softmax_p3.py"])
def test_a_nan_in_q_or_k_comes_out_as_nan(case):
    """Not as a row of zeros, which would hide it."""
    layer = build(case, 16, TRITON)
    for broken in (0, 1):
        tensors = draw(20, 20, 16, FLOAT32)
        tensors[broken][0, 0, 7, 3] = math.nan
        with torch.no_grad():
            out, last = layer(*tensors[:3]), layer(tensors[0][:, :, -1:], *tensors[1:3])
        seen = slice(7, 8) if broken == 0 else slice(7, None)
        assert out[0, 0, seen].isnan().all() and out[0, 0, :7].isfinite().all()
        assert out[0, 1].isfinite().all()
        assert last[0, 0].isnan().all() == (broken == 1)


# ---- windows ----


# The window's edge in the diagonal's tile, and in another; part of a tile of keys, a whole one, and
# more than a tile of rows and a tile of keys together, so that some tiles are seen whole.
@pytest.mark.parametrize(
    "case, window, Lq, Lk",
    [("softmax.py", 1, 40, 40), ("lssar_p15.py", 8, 33, 50), ("softmax_p3.py", 16, 40, 40),
     ("sigmoid_logn.py", 31, 70, 70), ("relu_shen.py", 50, 70, 70), ("ssmax_bias.py", 3, 40, 40),
     ("lssar_p3.py", 77, 100, 100)],
)  # fmt: skip
def test_windows(case, window, Lq, Lk):
    compare(case, draw_off_kinks(Lq, Lk, 16, FLOAT32), f"--window={window}")


@pytest.mark.parametrize("case, atomic", [("lssar_p15.py", True), ("ssmax_bias.py", False)])
def test_tiles_outside_the_window_are_never_visited(case, atomic, monkeypatch):
    """Rows 64 to 95 see keys in tiles from 32 on; keys 0 to 31 are seen in tiles of rows up to 63.

    What is outside is NaN, which any use of it, even with weight 0, would pass on.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not atomic)
    layer = build(case, 16, "--window=20", TRITON)
    q, k, v, gradient = draw(96, 96, 16, FLOAT32)
    clean = evaluate(build(case, 16, "--window=20", REFERENCE), (q, k, v, gradient))
    poison = torch.full((1, 2, 32, 16), math.nan)
    k_late, v_late = (torch.cat((poison, x[:, :, 32:]), dim=2) for x in (k, v))
    q_early, gradient_early = (torch.cat((x[:, :, :64], poison), dim=2) for x in (q, gradient))
    for tensors, inside in (
        ((q, k_late, v_late, gradient), slice(64, 96)),
        ((q_early, k, v, gradient_early), slice(0, 32)),
    ):
        found = evaluate(layer, tensors)
        for name in ("out", "dq", "dk", "dv"):
            ours, expected = (x[name].view(q.shape)[:, :, inside] for x in (found, clean))
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# ---- the arguments of attend, in combinations that no config has ----


def inputs_of(choices, B=1, H=2, Hk=2, Lq=20, Lk=20, d=16, dtype=FLOAT32):
    """q, k, v, the chosen tensors and the output's gradient, by name, and the other settings."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    tensors = {"q": normal(B, H, Lq, d), "k": normal(B, Hk, Lk, d), "v": normal(B, Hk, Lk, d)}
    tensors["gradient"] = normal(B, H, Lq, d)
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    scale = 1 if choices.get("unit") else d**-0.5
    tensors["scale"] = (scale * (2 + normal(1, H, Lq))).expand(B, -1, -1)
    drawn = {
        "bias": lambda: normal(B, H, Lq),
        "norm": lambda: 1 + normal(1, H, Lq).square(),
        "sink": lambda: normal(H),
        "key_bias": lambda: normal(B, Lk, H).mT,
    }
    settings = {name: x for name, x in choices.items() if name not in drawn}
    return tensors | {name: draw() for name, draw in drawn.items() if name in choices}, settings


def attend(*, phi, norm=None, **inputs):
    """launch.attend, with what fused.py would pass for this phi."""
    shifted = norm is None and launch.PHIS[phi].shift is not None
    defaults = dict(bias=None, p=None, unit=False, window=None, signed=phi == "gelu")
    return launch.attend(**defaults | inputs, norm=norm, phi=phi, shifted=shifted)


def differentiated(function, gradient, settings, **tensors):
    """A function's output and its gradients, by name."""
    tensors = {name: x.detach().requires_grad_(name != "norm") for name, x in tensors.items()}
    out = function(**tensors, **settings)
    learnt = {name: x for name, x in tensors.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(learnt.values()), gradient)
    return {"out": out.detach()} | dict(zip(learnt, found, strict=True))


def decoded(tensors, settings):
    """The last query's output from the decoding kernels."""
    window, one = settings.get("window"), dict(tensors)
    one.pop("gradient", None)
    for name in one.keys() & {"k", "v", "key_bias"}:
        one[name] = one[name][:, :, -window:] if window else one[name]
    for name in one.keys() & {"q", "scale", "bias", "norm"}:
        one[name] = one[name][:, :, -1:]
    with torch.no_grad():
        return attend(**one, **settings)


def check(choices, **sizes):
    """Asserts that the kernels' output and all gradients are those of the formula in float64."""
    tensors, settings = inputs_of(choices, **sizes)
    ours = differentiated(attend, settings=settings, **tensors)
    exact, bar = (
        differentiated(attended, settings=settings, **{n: x.to(dtype) for n, x in tensors.items()})
        for dtype in (torch.float64, FLOAT32)
    )
    half = tensors["q"].dtype is FLOAT16
    # a soft cap is exact to its own float32 rounding, whatever the score
    roundings = 1e-5 * (1 + (settings.get("p") or 0)) + 2e-6 * settings.get("softcap", 0)
    # With few keys most gradients are 0. A number's gradient is one sum of terms that cancel.
    keys = min(tensors["k"].shape[2], settings.get("window") or math.inf)
    least = (1 if keys <= 5 else 1e-2) * tensors["gradient"].norm()
    for name, x in exact.items():
        size = max(x.norm(), least) * (1 if x.dim() == 4 else 10)
        error, allowed = (ours[name] - x).norm(), 4 * (bar[name] - x).norm()
        assert error <= allowed + (3e-2 if half else roundings) * size, (name, error / size)
    last, found = exact["out"][:, :, -1:], decoded(tensors, settings).double()
    torch.testing.assert_close(found, last, rtol=0, atol=1e-2 if half else 1e-4)


EXP, LSSAR = dict(phi="exp"), dict(phi="softplus", p=3.0, unit=True)
stages = pytest.mark.parametrize("stage", [EXP, LSSAR], ids=["one stage", "two stages"])


@stages
@pytest.mark.parametrize(
    "choice", [dict(bias=True), dict(sink=True), dict(key_bias=True), dict(softcap=1.5)], ids=str
)
def test_a_choice_alone(stage, choice):
    check(stage | choice, B=2, Lq=5, Lk=37)


# With a window and grouped heads. Each once with atomics and once without, where the bias and dq
# have a kernel of their own.
COMBINATIONS = [
    LSSAR | dict(sink=True, key_bias=True),
    EXP | dict(softcap=2.0, sink=True),
    EXP | dict(bias=True, key_bias=True, sink=True),
    dict(phi="softplus", p=1.5, key_bias=True),
    dict(phi="sigmoid", p=2.0, softcap=3.0, sink=True),
    dict(phi="softpick", key_bias=True, softcap=3.0),
    dict(phi="sigmoid", norm=True, bias=True, key_bias=True),
    dict(phi="gelu", bias=True, unit=True),
]


@pytest.mark.parametrize("choices", COMBINATIONS, ids=lambda choices: " ".join(map(str, choices)))
def test_choices_together(choices, monkeypatch):
    check(choices | dict(window=9), Lq=21, Lk=24, Hk=1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(choices, Lq=17, Lk=18, dtype=FLOAT16)


@pytest.mark.parametrize("p", [None, 3.0])
@pytest.mark.parametrize("phi", ["exp", "softplus", "sigmoid"])
def test_sinks_and_scores_of_ten_thousand(phi, p):
    """Sinks far above all scores, far below, and among them, where scores are far from 0 or not."""
    sizes = [(1, 1e4), (1, -1e4), (-1e4, 0), (1e4, 0), (-1e4, -1e4), (1e4, 1e4)]
    tensors, settings = inputs_of(dict(phi=phi, p=p, sink=True), H=len(sizes), Hk=len(sizes))
    scales, tensors["sink"] = torch.tensor(sizes).T.contiguous()
    tensors["scale"] = scales[None, :, None].expand(1, -1, 20)
    tensors["q"], tensors["k"] = tensors["q"].abs() / 16, tensors["k"].abs()
    found = differentiated(attend, settings=settings, **tensors)
    tensors.pop("gradient")
    exact = attended(**{name: x.double() for name, x in tensors.items()}, **settings)
    torch.testing.assert_close(found["out"].double(), exact, rtol=0, atol=2e-2)
    assert phi != "exp" or (found["out"][:, 0] == 0).all()
    assert all(x.isfinite().all() for x in found.values())
    last = found["out"][:, :, -1:]
    torch.testing.assert_close(decoded(tensors, settings), last, rtol=0, atol=1e-2)


@pytest.mark.parametrize("phi", ["exp", "softplus"])
def test_a_forgetting_gate(phi):
    """Biases of rows and keys that nearly cancel, and would make the padding of a tile infinite."""
    tensors, settings = inputs_of(dict(phi=phi, bias=True, key_bias=True), Lq=40, Lk=40)
    gates = torch.nn.functional.logsigmoid(10 * tensors["bias"] - 10).cumsum(-1)
    assert gates.min() < -300
    tensors |= {"bias": gates, "key_bias": -gates}
    ours = differentiated(attend, settings=settings, **tensors)
    exactly = {name: x.double() for name, x in tensors.items()}
    exact = differentiated(attended, settings=settings, **exactly)
    for name, x in exact.items():
        assert (ours[name] - x).norm() < 1e-4 * max(x.norm(), 1e-2 * tensors["gradient"].norm())


def test_alibi_is_exact_near_the_last_key():
    """Its biases are counted from there: counted from the first, they would round to 1e-3."""
    layer, L = build("softmax_alibi.py", 16, "--window=40", TRITON), 2**14
    q, k, v = torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, L, 16), torch.eye(16).repeat(L // 16, 1)
    v = v.expand(1, 2, -1, -1)
    exact = build("softmax_alibi.py", 16, "--window=40", REFERENCE).double()
    exact = exact(q.double(), k[:, :, -41:].double(), v[:, :, -41:].double())
    for found in (layer(q, k, v), layer(q[:, :, -1:], k, v)):
        assert (found - exact[:, :, -found.shape[2] :]).abs().max() < 1e-6


def test_softpick_of_extreme_scores():
    """Rows of large scores, of zeros, of scores far below 0, which get no weight, and of both."""
    tensors, settings = inputs_of(dict(phi="softpick", key_bias=True), H=4, Hk=4)
    tensors["scale"] = torch.zeros(1, 4, 20)
    alternating = 1e4 * (1 - 2 * (torch.arange(20) % 2))
    rows = 1e4 + torch.arange(20.0), torch.zeros(20), torch.full((20,), -1e4), alternating
    tensors["key_bias"] = torch.stack(rows)[None]
    found = differentiated(attend, settings=settings, **tensors)
    assert all(x.isfinite().all() for x in found.values())
    out, v = found["out"][0], tensors["v"][0]
    assert not out[1:3].any() and not found["v"][0, 1:3].any()
    last = decoded(tensors, settings)[0]
    exact = torch.softmax(torch.arange(20.0), 0) @ v[0], v[3, ::2].mean(0)
    for head, expected in zip((0, 3), exact, strict=True):
        torch.testing.assert_close(out[head, -1], expected, rtol=0, atol=2e-3)
        torch.testing.assert_close(last[head, 0], expected, rtol=0, atol=2e-3)


@stages
def test_a_nan_comes_out_as_nan_with_every_choice(stage):
    """In a number of a row, in one of a key, and in a head's sink."""
    choices = dict(bias=True, sink=True, key_bias=True, softcap=5.0)
    tensors, settings = inputs_of(stage | choices)
    tensors.pop("gradient")
    for name, at, seen in (
        ("bias", (0, 0, 7), slice(7, 8)),
        ("key_bias", (0, 0, 7), slice(7, None)),
        ("sink", (0,), slice(0, None)),
    ):
        broken = tensors[name].clone()
        broken[at] = math.nan
        out = attend(**tensors | {name: broken}, **settings)
        assert out[0, 0, seen].isnan().all() and out[0, 0, : seen.start].isfinite().all()
        assert out[0, 1].isfinite().all()
        last = decoded(tensors | {name: broken}, settings)
        assert last[0, 0].isnan().all() == (name != "bias") and last[0, 1].isfinite().all()


# ---- a user's own ----

MINE = {
    "one stage": Variant(
        attention.SIGMOID, scale=lambda r: r.s * r.n.log(), bias=lambda r: r.b - r.n.log(),
        norm=lambda r: 1.0, learnable=("s", "b"),
    ),
    "two stages": Variant(
        attention.SOFTPLUS, scale=lambda r: r.s * r.n.log() + 1, bias=lambda r: r.b,
        l2_normalise=True, learnable=("s", "b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MINE)
def test_gradients_of_learnable_scale_and_bias(name, monkeypatch):
    monkeypatch.setitem(VARIANTS, "mine", MINE[name])
    settings = ["--attention=mine", *(["--p=3"] if name == "two stages" else [])]
    found = compare("softmax.py", draw(37, 37, 16, FLOAT32, B=2), *settings)
    assert found["ds"].norm() > 0 and found["db"].norm() > 0


@triton.jit
def elu1(z):
    return tl.where(z > 0, z + 1, tl.exp(z))


@triton.jit
def elu1_slope(z):
    return tl.where(z > 0, 1.0, tl.exp(z))


def test_a_phi_of_ones_own(monkeypatch):
    monkeypatch.setitem(launch.PHIS, "elu1", phi.Function(elu1, elu1_slope))
    own = Phi(lambda z: torch.nn.functional.elu(z) + 1, kernel="elu1")
    variant = Variant(own, scale=attention.log_d_log_n, l2_normalise=True)
    monkeypatch.setitem(VARIANTS, "elu1", variant)
    for settings in (["--attention=elu1"], ["--attention=elu1", "--p=15"]):
        compare("softmax.py", draw(33, 33, 16, FLOAT32), *settings)


# ---- phi ----


@triton.jit
def apply(Z, A, SLOPES, N: tl.constexpr, PHI: tl.constexpr, SLOPE: tl.constexpr):
    at = tl.arange(0, N)
    z = tl.load(Z + at)
    tl.store(A + at, PHI(z))
    tl.store(SLOPES + at, SLOPE(z))


@pytest.mark.parametrize("name", [name for name in phi.PHIS if name != "softpick"])
def test_phis_and_their_slopes(name):
    """To float32 precision; in an exponential tail relative to its small numbers."""
    phis = {variant.phi.kernel: variant.phi for variant in VARIANTS.values()}
    z = torch.linspace(-40, 12, 1024)  # no kink among them
    found = torch.empty(2, 1024)
    entry = phi.PHIS[name]
    apply[(1,)](entry.argument * z, *found, N=1024, PHI=entry.function, SLOPE=entry.slope)
    exact = z.double().requires_grad_()
    expected = phis[name.removesuffix("16")].function(exact)
    slopes = torch.autograd.grad(expected.sum(), exact)
    tail = name.startswith(("exp", "sigmoid", "softplus"))
    tolerance = dict(rtol=1.5e-5 if name.endswith("16") else 3e-6, atol=0 if tail else 1e-6)
    torch.testing.assert_close(found[0].double() / entry.value, expected.detach(), **tolerance)
    torch.testing.assert_close(found[1].double(), *slopes, **tolerance)


@triton.jit
def total(Y, TOTALS, N: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    y = tl.load(Y + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(TOTALS + row, phi.softplus_total(y))


def test_sums_of_softplus_by_products():
    """Far below 0, where a product's logarithm has no digits of it, and where it overflows."""
    keys = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    y = torch.cat([keys - 58, keys - 20, 8 * keys, keys / 1e4, torch.zeros(1, 128)])
    y[2, 5:] = -math.inf  # hidden
    found = torch.empty(len(y))
    total[(len(y),)](y, found, N=128)
    tail = torch.exp2(y.double()) / math.log(2)
    exact = torch.log2(1 + torch.exp2(y.double())).where(y > -40, tail)
    torch.testing.assert_close(found.double(), exact.sum(1), rtol=6e-7, atol=0)


def test_constants_and_phis_are_those_of_the_table():
    assert tiles.DEAD.value == attention.DEAD and tiles.TIED.value == attention.TIED
    for variant in VARIANTS.values():
        entry = phi.PHIS[variant.phi.kernel]
        assert entry.rectified or (entry.shift is None) == (variant.phi.shift is None)


# ---- decoding ----


def test_decoding_reads_no_value_of_weight_zero():
    layer = build("lssar_p15.py", 16, TRITON)
    q, k, v, _ = draw(1, 100, 16, FLOAT32)
    zero = layer.weights(q, k)[:, :, 0] == 0  # [B, H, Lk]
    assert 0.2 < zero.double().mean() < 0.9
    poisoned = v.masked_fill(zero[..., None], math.nan)
    with torch.no_grad():
        assert torch.equal(layer(q, k, poisoned), layer(q, k, v))


def test_what_decoding_leaves_out_is_below_rounding():
    """Weights below 2^-24 / L of the largest: no output moves by more than 2^-24 of max |v|."""
    layer = build("softmax.py", 16, "--p=15", TRITON)
    q, k, _, _ = draw(1, 100, 16, FLOAT32)
    exactly = build("softmax.py", 16, "--p=15", REFERENCE).double()
    A = exactly.weights(q.double(), k.double())[:, :, 0]
    left_out = (A > 0) & (A < 2.0**-24 / 100 * A.amax(-1, keepdim=True))
    assert left_out.any()
    v = torch.where(left_out, 1.0, 0.0)[..., None].expand(-1, -1, -1, 16).contiguous()
    with torch.no_grad():
        assert (layer(q, k, v) == 0).all()
    assert (exactly(q.double(), k.double(), v.double()) < 2.0**-24).all()


# ---- within torch and the model ----


def test_the_operators_are_well_formed():
    """Schema, fake tensors and autograd registration, by torch's own checks."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    q, k, v, _ = draw(20, 20, 16, FLOAT32)
    scale, none = torch.ones(1, 2, 20), (None,) * 4
    for p, save, window in ((0.0, True, None), (3.0, False, None), (3.0, True, 7)):
        inputs = (x.requires_grad_(save) for x in (q, k, v))
        choices = "softplus", False, p, True, False, window, None, save
        torch.library.opcheck(launch._forward, (*inputs, scale, *none, *choices), test_utils=checks)
    with torch.no_grad():
        one = q[:, :, -1:].detach(), k.detach(), v.detach(), scale[..., -1:]
    choices = "softplus", False, 3.0, True, None
    torch.library.opcheck(launch._decode, (*one, *none, *choices), test_utils=checks)


def test_compiles_without_graph_breaks():
    layer = build("lssar_p15.py", 16, TRITON)
    tensors = draw(20, 20, 16, FLOAT32)
    eager = evaluate(layer, tensors)
    compiled = evaluate(torch.compile(layer, fullgraph=True, backend="aot_eager"), tensors)
    torch._dynamo.reset()
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name])


@pytest.mark.parametrize(
    "case",
    [
        "lssar_p3.py --positions=alibi --sink=learned --gate=head --window=9",
        "fox.py --n_kv_head=1 --softcap=3 --qk_norm=True",
    ],
)
def test_a_model_trains_and_generates_as_with_the_reference(case):
    def run(impl):
        torch.manual_seed(0)
        model = GPT(small_config(case, impl, "--n_layer=1", "--block_size=16"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        idx = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1))
        losses = []
        for _ in range(3):
            loss = model(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, generate(model.eval(), idx[:, :5], 6, temperature=0)

    (losses, text), (expected, expected_text) = run(TRITON), run(REFERENCE)
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    assert torch.equal(text, expected_text)


def test_what_the_kernels_cannot_compute_is_refused(monkeypatch):
    q = torch.zeros(1, 2, 4, 8)
    layer = build("lssa.py", 8, TRITON)
    with pytest.raises(UserError, match="float64"):
        layer(q.double(), q.double(), q.double())
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(UserError, match="NVIDIA GPU.*cpu"):
        layer(q, q, q)
    monkeypatch.setattr(attention_paths.fused, "launch", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        layer(q, q, q)
    assert "no entry" in variant_obstacle(Variant(Phi(torch.relu, kernel=None)), 16)
    for settings, message in (
        (["--attention=softmax_inverse"], "attention_impl.*softmax_inverse.*not the paper's"),
        (["--attention=lssa", "--n_embd=512"], "head size 256 is above 128"),
    ):
        with pytest.raises(UserError, match=message):
            GPT(load_config([*SMALL, *settings, TRITON]))


# ---- without a GPU: block shapes and machine code ----


def test_shapes_fit_every_kernel():
    """softplus_total takes at most 128 keys, and every head size up to 128 has a shape."""
    for table in launch.SHAPES.values():
        for shapes in table.values():
            assert max(shapes) == 128 and all(n <= 128 for _, n, _, _ in shapes.values())


def compile_kernels(*arguments):
    """tests.compile_kernels in a process without Triton's interpreter; what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", *arguments],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_machine_code_is_that_of_the_table():
    assert compile_kernels("--quick").count("instructions") == 3


@pytest.mark.long
def test_machine_code_of_all_kernels_is_that_of_the_table():
    compile_kernels()


@pytest.mark.long
def test_every_variant_launches_on_every_gpu():
    compile_kernels("--variants")


def test_a_register_that_a_product_still_reads_is_found():
    from tests.compile_kernels import overwritten

    product = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"
    wait, write = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "FMUL R6, R6, R8"
    assert overwritten([product, wait, write]) == 0
    assert overwritten([product, write, wait]) > 0
    assert overwritten([product, "LDS.128 R4, [R60]", wait]) > 0
    assert overwritten([product, "STS [R6], R7", wait]) == 0
