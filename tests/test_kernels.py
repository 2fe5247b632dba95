"""The fused kernels under Triton's interpreter, on a CPU, against the formulas in float64."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import attention
from attention import VARIANTS, Phi, Variant
from config import load_config
from errors import UserError
from model import GPT, KVCache, RecordedStep, build_attention
from tests.helpers import ATTENTIONS as ROWS
from tests.helpers import SMALL, record_on_meta, small_config, small_model
from tests.textbook import (
    TEXTBOOK,
    attended,
    build,
    draw,
    draw_off_kinks,
    evaluate,
    without_overflow,
)  # fmt: skip

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

import kernels  # noqa: E402

if not kernels.INTERPRETED:
    pytest.skip("the kernels run on the GPU: tests/test_kernels_cuda.py", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poisoned_buffers")
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
TRITON, REFERENCE = "--attention_impl=triton", "--attention_impl=reference"
LEARNABLE = ("ds", "db", "dp_n", "dsink", "dlog_power")
LENGTHS = [1, 3, 4, 5, 31, 33, 64, 100]
# interpreted blocks are 32 queries and 16 keys: 100 is several of both, and a part of one
FUSED = [
    row
    for row in ROWS
    if build(row, 16)._triton_obstacle(torch.empty(1, dtype=torch.float32)) is None
]


def compare(case, tensors, *settings, formula=None):
    """Asserts that the kernels' error is at most twice the formula's in the same dtype (without a
    formula, the reference path's), plus some roundings, which p multiplies."""
    d, dtype = tensors[0].shape[-1], tensors[0].dtype
    fused, reference = (build(case, d, *settings, impl) for impl in (TRITON, REFERENCE))
    exactly = build(case, d, *settings, REFERENCE).double()
    truth = evaluate(exactly, [x.double() for x in tensors], formula)
    ours, bar = evaluate(fused, tensors), evaluate(reference, tensors, formula)
    if not all(x.isfinite().all() for x in bar.values()):
        bar = without_overflow(reference, tensors, formula, truth)
    roundings = (16 + 2 * (fused.p or 0) if dtype is FLOAT32 else 1) * torch.finfo(dtype).eps
    # Errors are relative, but with few or tied keys most gradients are 0, and then relative to the
    # incoming gradient. A learnable number's gradient is one sum of terms that cancel.
    keys = min(tensors[1].shape[2], fused.window or math.inf)
    size = tensors[-1].double().norm() * (1 if keys <= 5 else 1e-3)
    for name, exact in truth.items():
        scale = max(exact.norm(), size) * (10 if name in LEARNABLE else 1)
        error, allowed = (ours[name] - exact).norm(), 2 * (bar[name] - exact).norm()
        assert error <= allowed + roundings * scale, (name, error / scale, allowed / scale)
    return ours


def test_every_row_of_the_repository_has_a_formula():
    """A row of one's own without one is compared with the reference path."""
    assert {case for case in FUSED if case in ROWS} <= TEXTBOOK.keys()


@pytest.mark.parametrize("case", FUSED)
def test_every_row_against_its_formula(case):
    index = FUSED.index(case)
    for step, dtype in ((0, FLOAT32), (3, FLOAT16)):
        L, d = LENGTHS[(index + step) % len(LENGTHS)], (16, 24, 64)[(index + step) % 3]
        compare(case, draw_off_kinks(L, L, d, dtype, B=1), formula=TEXTBOOK.get(case))


POWERS = [1, 2, 3, 15, 2.5, 100]
BASES = ["lssa.py", "softmax.py", "sigmoid_logn_l1.py", "relu_li.py", "ablations/phi_softplus.py"]


@pytest.mark.parametrize("p", POWERS)
def test_powers(p):
    """Whole powers are computed by multiplication, others by exp2 and log2."""
    for step, base in enumerate(BASES):
        L = (5, 31, 33, 40)[(3 * POWERS.index(p) + step) % 4]
        compare(base, draw_off_kinks(L, L, 16, FLOAT32, B=1), f"--p={p}")


@pytest.mark.parametrize("case", ["lssa.py", "lssar_p15.py", "sigmoid.py", "softmax_p3.py"])
def test_queries_that_follow_a_cache(case):
    for Lq, Lk in ((5, 33), (33, 70), (1, 40)):
        compare(case, draw_off_kinks(Lq, Lk, 16, FLOAT32, B=1))


@pytest.mark.parametrize("case", ["lssar_p15.py", "relu_li.py", "sigmoid.py"])
def test_without_atomics_the_gradients_are_the_same(case):
    """torch.use_deterministic_algorithms takes dq from a kernel of its own."""
    tensors = draw(50, 50, 16, FLOAT32)
    attn = build(case, 16, TRITON)
    atomic = evaluate(attn, tensors)
    torch.use_deterministic_algorithms(True)
    try:
        ordered, again = evaluate(attn, tensors), evaluate(attn, tensors)
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


@pytest.mark.parametrize(
    "case",
    ["softmax_p15.py", "sigmoid_l1.py", "sigmoid_logn_l1_p15.py", "ablations/phi_softplus.py"],
)
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_scores_of_ten_thousand(case, size):
    """Rows where phi underflows or overflows are shifted, tile by tile."""
    q, k, v, gradient = draw(40, 40, 16, FLOAT32)
    q = size / 4 * q.abs()
    k = k.abs() * torch.linspace(0.9, 1.1, 40)[:, None]
    found = evaluate(build(case, 16, TRITON), (q, k, v, gradient))
    exact = evaluate(build(case, 16, REFERENCE).double(), [x.double() for x in (q, k, v, gradient)])
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["out"], exact["out"], rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    "case, size",
    [("ablations/phi_softplus.py", -40), ("ablations/phi_relu2.py", 400),
     ("sigmoid_l1.py", -300)],
)  # fmt: skip
def test_float16_has_the_range_of_float32(case, size):
    """One stage sums weights before normalising them, which in float16 would be 0 or infinite."""
    q, k, v, gradient = draw(40, 40, 16, FLOAT32)
    q, k = q.abs(), k.abs() * torch.linspace(0.5, 1.1, 40)[:, None]
    q = q * (4 * abs(size) / (q * k).sum(-1).mean())
    tensors = [x.to(FLOAT16) for x in (math.copysign(1, size) * q, k, v, gradient)]
    out = build(case, 16, TRITON)(*tensors[:3])
    exact = build(case, 16, REFERENCE).double()(*(x.double() for x in tensors[:3]))
    assert (out - exact).norm() < 4 * torch.finfo(FLOAT16).eps * exact.norm()


def test_dead_rows_are_zero_in_value_and_gradient():
    q, k, v, gradient = draw(33, 33, 16, FLOAT32)
    q, k = -q.abs(), k.abs()  # no score is above 0
    for case in ("relu_li.py", "relu_li.py --p=3"):
        name, *settings = case.split()
        found = evaluate(build(name, 16, *settings, TRITON), (q, k, v, gradient))
        assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "relu_li.py", "softmax_p3.py"])
def test_a_nan_in_q_or_k_comes_out_as_nan(case):
    """Not as a row of zeros, which would hide it."""
    attn = build(case, 16, TRITON)
    for row in (0, 1):
        tensors = draw(20, 20, 16, FLOAT32)
        tensors[row][0, 0, 7, 3] = math.nan
        with torch.no_grad():
            out, last = attn(*tensors[:3]), attn(tensors[0][:, :, -1:], *tensors[1:3])
        seen = slice(7, 8) if row == 0 else slice(7, None)
        assert out[0, 0, seen].isnan().all() and out[0, 0, :7].isfinite().all()
        assert out[0, 1].isfinite().all()
        assert last[0, 0].isnan().all() == (row == 1)


def test_one_hot_keys():
    q, _, v, gradient = draw(16, 16, 16, FLOAT32)
    k = torch.eye(16).expand(1, 2, 16, 16).contiguous()
    for case in ("lssar_p15.py", "lssa.py", "softmax_p3.py"):
        compare(case, (q, k, v, gradient))


# ---- windows ----

# A window's edge in the diagonal's tile, and in another; part of a tile of keys, a whole one, and
# more than a tile of rows and one of keys together, so that some tiles are seen whole.
WINDOWS = [1, 3, 8, 16, 31, 50, 69]


@pytest.mark.parametrize(
    "case",
    ["softmax.py", "lssar_p15.py", "softmax_p3.py", "sigmoid_logn.py", "relu_shen.py",
     "ssmax_bias.py", "ablations/phi_mish.py"],
)  # fmt: skip
def test_rows_with_a_window_against_their_formula(case):
    index = FUSED.index(case)
    for step, (Lq, Lk, dtype) in enumerate([(70, 70, FLOAT32), (33, 70, FLOAT16)]):
        window = WINDOWS[(index + 4 * step) % len(WINDOWS)]
        tensors = draw_off_kinks(Lq, Lk, 16, dtype, B=1, window=window)
        compare(case, tensors, f"--window={window}", formula=TEXTBOOK.get(case))


@pytest.mark.parametrize("window", [64, 77])
def test_windows_of_several_tiles(window):
    tensors = draw_off_kinks(100, 100, 16, FLOAT32, B=1, window=window)
    compare("lssar_p3.py", tensors, f"--window={window}", formula=TEXTBOOK["lssar_p3.py"])


@pytest.mark.parametrize(
    "case, atomic", [("lssar_p15.py", True), ("lssar_p15.py", False), ("ssmax_bias.py", False)]
)
def test_tiles_outside_the_window_are_never_visited(case, atomic, monkeypatch):
    """Rows 64 to 95 see keys in tiles from 32 on; keys 0 to 31 are seen in tiles of rows up to 63.

    What is outside is NaN, which any use of it, even with weight 0, would pass on.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not atomic)
    attn = build(case, 16, "--window=20", TRITON)
    q, k, v, gradient = draw(96, 96, 16, FLOAT32)
    clean = evaluate(build(case, 16, "--window=20", REFERENCE), (q, k, v, gradient))
    poison = torch.full((1, 2, 32, 16), math.nan)
    k_late, v_late = (torch.cat((poison, x[:, :, 32:]), dim=2) for x in (k, v))
    q_early, gradient_early = (torch.cat((x[:, :, :64], poison), dim=2) for x in (q, gradient))
    for tensors, inside in (
        ((q, k_late, v_late, gradient), slice(64, 96)),
        ((q_early, k, v, gradient_early), slice(0, 32)),
    ):
        found = evaluate(attn, tensors)
        for name in ("out", "dq", "dk", "dv"):
            ours, expected = (x[name].view(q.shape)[:, :, inside] for x in (found, clean))
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_window_of_all_keys_is_none():
    tensors = draw(20, 20, 16, FLOAT32)
    for case in ("lssar_p15.py", "ssmax_bias.py"):
        whole, windowed = (
            evaluate(build(case, 16, *settings, TRITON), tensors)
            for settings in ([], ["--window=20"])
        )
        assert all(torch.equal(whole[name], windowed[name]) for name in whole)


def test_rows_that_see_no_key_of_their_first_tiles_are_shifted():
    """Scores far from 0, so that a shift that is not the row's own would give 0 / 0 or infinity."""
    q, k, v, gradient = draw(64, 64, 16, FLOAT32)
    k = k.abs() * torch.linspace(0.9, 1.1, 64)[:, None]
    for case, size in (("softmax.py", 100), ("softmax_p3.py", -100), ("sigmoid_l1.py", -100)):
        tensors = size * q.abs(), k, v, gradient
        found = evaluate(build(case, 16, "--window=3", TRITON), tensors)
        exactly = build(case, 16, "--window=3", REFERENCE).double()
        exact = evaluate(exactly, [x.double() for x in tensors])
        assert all(x.isfinite().all() for x in found.values())
        torch.testing.assert_close(found["out"], exact["out"], rtol=0, atol=1e-3)


# ---- every choice, and their combinations ----

HEADS, KEYS = ("sink", "slopes"), ("k", "v", "key_bias")  # given for heads and keys, not for rows
CONSTANT = ("norm", "slopes")  # have no gradient


def inputs_of(choices, B=1, H=2, Hk=2, Lq=20, Lk=20, d=16, dtype=FLOAT32, seed=0):
    """q, k, v, the chosen tensors and the output's gradient, by name, and the other settings."""
    g = torch.Generator().manual_seed(seed)

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
        "slopes": lambda: 2.0 ** -torch.arange(1, H + 1),
        "key_bias": lambda: normal(B, Lk, H).mT,
        "powers": lambda: 2 + 3 * torch.rand(1, H, Lq, generator=g),
    }
    settings = {name: x for name, x in choices.items() if name not in drawn}
    return tensors | {name: draw() for name, draw in drawn.items() if name in choices}, settings


def attend(*, phi, norm=None, **inputs):
    """kernels.attend, with what attention.py would pass for this phi."""
    shifted = norm is None and kernels.PHIS[phi].shift is not None
    defaults = dict(bias=None, p=None, unit=False, window=None, signed=phi == "gelu")
    return kernels.attend(**defaults | inputs, norm=norm, phi=phi, shifted=shifted)


def differentiated(function, gradient, settings, **tensors):
    """A function's output and its gradients, by name."""
    tensors = {name: x.detach().requires_grad_(name not in CONSTANT) for name, x in tensors.items()}
    out = function(**tensors, **settings)
    learnt = {name: x for name, x in tensors.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(learnt.values()), gradient)
    return {"out": out.detach()} | dict(zip(learnt, found, strict=True))


def with_room(x, room):
    """x [B, .., L, ..] with as many more keys, which must not be read."""
    return torch.cat((x, x.new_full((*x.shape[:2], room, *x.shape[3:]), math.nan)), dim=2)


def decoded(tensors, settings, room=0):
    """The last query's output from the decoding kernels, of a cache with room for more keys."""
    window, keys = settings.get("window"), tensors["k"].shape[2]
    seen = slice(max(0, keys - window) if window else 0, None)
    one = {name: x if name in HEADS else x[:, :, seen] if name in KEYS else x[:, :, -1:]
           for name, x in tensors.items() if name != "gradient"}  # fmt: skip
    if room:
        settings = settings | {"filled": torch.tensor([one["k"].shape[2]])}
        one |= {name: with_room(one[name], room) for name in KEYS if name in one}
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
    roundings = 1e-5 * (1 + settings.get("p", 4)) + 2e-6 * settings.get("softcap", 0)
    # With few keys most gradients are 0. A number's gradient is one sum of terms that cancel.
    keys = min(tensors["k"].shape[2], settings.get("window") or math.inf)
    least = (1 if keys <= 5 else 1e-2) * tensors["gradient"].norm()
    for name, x in exact.items():
        size = max(x.norm(), least) * (1 if x.dim() == 4 else 10)
        error, allowed = (ours[name] - x).norm(), 4 * (bar[name] - x).norm()
        assert error <= allowed + (3e-2 if half else roundings) * size, (name, error / size)
    last = exact["out"][:, :, -1:]
    for room in (0, 40):
        found = decoded(tensors, settings, room).double()
        torch.testing.assert_close(found, last, rtol=0, atol=1e-2 if half else 1e-4)


STAGES = [dict(phi="exp"), dict(phi="softplus", p=3.0, unit=True)]
stages = pytest.mark.parametrize("stage", STAGES, ids=["one stage", "two stages"])


@stages
def test_a_bias_for_each_sequence(stage):
    check(stage | dict(bias=True), B=2)


@pytest.mark.parametrize("p", [None, 3.0])
@pytest.mark.parametrize("phi", ["exp", "softplus", "sigmoid"])
def test_a_sink(phi, p):
    check(dict(phi=phi, sink=True) | ({"p": p} if p else {}), Lq=5, Lk=37)


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


def test_numbers_of_heads_have_any_strides():
    tensors, settings = inputs_of(dict(phi="exp"), Lq=4, Lk=9)
    tensors.pop("gradient")
    out = attend(**tensors, **settings, sink=torch.ones(2), slopes=torch.ones(2))
    one = torch.ones(1).expand(2)
    assert torch.equal(attend(**tensors, **settings, sink=one, slopes=one), out)


@stages
def test_alibi(stage):
    check(stage | dict(slopes=True), Lq=5, Lk=37)
    check(stage | dict(slopes=True), Lq=33, Lk=40)


def test_alibi_counts_positions_exactly():
    """Near the end of 16K, where a bias of rows and one of keys would cancel to 1e-3."""
    Lk, settings = 2**14, dict(phi="exp", window=40)
    tensors = {"q": torch.zeros(1, 1, 2, 16), "k": torch.zeros(1, 1, Lk, 16)}
    tensors["v"] = torch.eye(16).repeat(Lk // 16, 1)[None, None]
    tensors |= {"scale": torch.ones(1, 1, 2), "slopes": torch.tensor([0.3])}
    exact = attended(**{name: x.double() for name, x in tensors.items()}, **settings)
    assert (attend(**tensors, **settings) - exact).abs().max() < 1e-6


@stages
def test_a_bias_for_each_key(stage):
    check(stage | dict(key_bias=True), Lq=5, Lk=37, B=2)


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


@stages
def test_a_soft_cap(stage):
    check(stage | dict(softcap=1.5), Lq=5, Lk=37)
    check(stage | dict(softcap=50.0, bias=True), Lq=33, Lk=33)


def test_softpick():
    for dtype, Lq, Lk in ((FLOAT32, 5, 37), (FLOAT16, 33, 40)):
        check(dict(phi="softpick"), Lq=Lq, Lk=Lk, dtype=dtype)


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


@pytest.mark.parametrize("phi", ["exp", "softplus"])
def test_a_power_for_each_row(phi):
    check(dict(phi=phi, powers=True), Lq=5, Lk=37, B=2)
    check(dict(phi=phi, powers=True, sink=True), Lq=33, Lk=33)


def test_powers_of_rows_are_those_of_a_number():
    """Of a power of 1 too, whose t^(p - 1) is 0 at t = 0."""
    tensors, settings = inputs_of(dict(phi="softplus", unit=True))
    for p in (1.0, 2.0, 15.0):
        number = differentiated(attend, settings=settings | dict(p=p), **tensors)
        powers = torch.full((1, 2, 20), p)
        found = differentiated(attend, settings=settings, **tensors, powers=powers)
        for name, x in number.items():
            # p multiplies a rounding of log2 t, and a number's gradient is a sum that cancels
            size = x.norm() if x.dim() == 4 else 10 * x.norm()
            assert (found[name] - x).norm() < 1e-5 * (1 + p) * size


PAIRS = [
    dict(phi="softplus", p=3.0, unit=True, sink=True, slopes=True),
    dict(phi="exp", softcap=2.0, sink=True),
    dict(phi="exp", bias=True, key_bias=True, sink=True),
    dict(phi="softplus", powers=True, key_bias=True),
    dict(phi="sigmoid", p=2.0, softcap=3.0, slopes=True),
    dict(phi="softpick", slopes=True, softcap=3.0),
    dict(phi="sigmoid", norm=True, bias=True, key_bias=True),
    dict(phi="softplus", powers=True, sink=True, unit=True),
]


@pytest.mark.parametrize("choices", PAIRS, ids=lambda choices: " ".join(map(str, choices)))
def test_pairs_of_choices_without_atomics_in_a_window_and_with_grouped_heads(choices, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(choices | dict(window=9), Lq=21, Lk=24, Hk=1)


ADDITIONS = {
    "bias": True, "sink": True, "slopes": True, "key_bias": True, "softcap": 2.5, "unit": True
}  # fmt: skip


@st.composite
def combinations(draw):
    """Arguments of kernels.attend that go together, and sizes."""
    phi = draw(st.sampled_from(["exp", "softplus", "sigmoid", "softpick"]))
    names = draw(st.sets(st.sampled_from(sorted(ADDITIONS))))
    if phi == "softpick":
        stage = {}
    else:
        stage = draw(st.sampled_from([{}, {"p": 3.0}, {"p": 1.5}, {"powers": True}]))
    choices = {name: ADDITIONS[name] for name in names if phi != "softpick" or name != "sink"}
    choices |= stage | {"window": draw(st.sampled_from([None, 1, 5]))}
    Lk = draw(st.sampled_from([1, 4, 19, 34]))
    sizes = dict(Lk=Lk, Lq=draw(st.integers(1, Lk)), Hk=draw(st.sampled_from([1, 2])))
    dtype = draw(st.sampled_from([FLOAT32, FLOAT16]))
    return dict(choices, phi=phi), sizes | dict(dtype=dtype, seed=draw(st.integers(0, 9)))


@hypothesis.given(combinations(), st.booleans())
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_any_combination_of_choices(drawn, atomic):
    choices, sizes = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not atomic)
        check(choices, **sizes)


@stages
def test_a_nan_comes_out_as_nan_with_every_choice(stage):
    """In a number of a row, in one of a key, and in a head's sink."""
    names = ["bias", "sink", "slopes", "key_bias"]
    tensors, settings = inputs_of(stage | dict.fromkeys(names, True) | dict(softcap=5.0))
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


def add(monkeypatch, name, variant):
    """Add a row to the table, which config.py reads as well."""
    monkeypatch.setitem(VARIANTS, name, variant)


@pytest.mark.parametrize("name", MINE)
def test_gradients_of_learnable_scale_and_bias(name, monkeypatch):
    add(monkeypatch, "mine", MINE[name])
    settings = ["--attention=mine", *(["--p=3"] if name == "two stages" else [])]
    found = compare("softmax.py", draw(40, 40, 16, FLOAT32, B=2), *settings)
    assert found["ds"].norm() > 0 and found["db"].norm() > 0


@triton.jit
def apply(Z, A, SLOPES, N: tl.constexpr, PHI: tl.constexpr, SLOPE: tl.constexpr):
    at = tl.arange(0, N)
    z = tl.load(Z + at)
    tl.store(A + at, PHI(z))
    tl.store(SLOPES + at, SLOPE(z))


@pytest.mark.parametrize("name", kernels.PHIS.keys() - {"softpick"})
def test_phis_and_their_slopes(name):
    """To float32 precision; in an exponential tail relative to its small numbers."""
    phis = {row.phi.kernel: row.phi for row in VARIANTS.values()}
    z = torch.linspace(-40, 12, 1024)  # no kink among them
    found = torch.empty(2, 1024)
    entry = kernels.PHIS[name]
    apply[(1,)](entry.argument * z, *found, N=1024, PHI=entry.function, SLOPE=entry.slope)
    found[0] = found[0] / entry.value - float(entry.rectified)
    exact = z.double().requires_grad_()
    expected = phis[name.removesuffix("16")].function(exact)
    slopes = torch.autograd.grad(expected.sum(), exact)
    tail = name.startswith(("exp", "sigmoid", "softplus"))
    tolerance = dict(rtol=1.5e-5 if name.endswith("16") else 3e-6, atol=0 if tail else 1e-6)
    torch.testing.assert_close(found[0].double(), expected.detach(), **tolerance)
    torch.testing.assert_close(found[1].double(), *slopes, **tolerance)


@triton.jit
def elu1(z):
    return tl.where(z > 0, z + 1, tl.exp(z))


@triton.jit
def elu1_slope(z):
    return tl.where(z > 0, 1.0, tl.exp(z))


def test_a_phi_of_ones_own(monkeypatch):
    monkeypatch.setitem(kernels.PHIS, "elu1", kernels.Function(elu1, elu1_slope))
    phi = Phi(lambda z: torch.nn.functional.elu(z) + 1, kernel="elu1")
    variant = Variant(phi, scale=attention.log_d_log_n, l2_normalise=True)
    add(monkeypatch, "elu1", variant)
    for settings in (["--attention=elu1"], ["--attention=elu1", "--p=15"]):
        compare("softmax.py", draw(40, 40, 16, FLOAT32), *settings)


# ---- decoding ----


@pytest.mark.parametrize("case", FUSED)
def test_one_query_against_a_cache(case):
    d = (16, 24, 64)[FUSED.index(case) % 3]
    attn, exactly = build(case, d, TRITON), build(case, d, REFERENCE).double()
    for L in (1, 3, 100):
        q, k, v, _ = draw(1, L, d, FLOAT32, B=2)
        with torch.no_grad():
            out, exact = attn(q, k, v), exactly(q.double(), k.double(), v.double())
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["lssar_p15.py", "sigmoid_l1.py", "relu_li.py"])
def test_one_query_against_a_cache_that_is_not_full(case):
    attn = build(case, 16, TRITON)
    for n in (3, 70):
        q, k, v, _ = draw(1, n, 16, FLOAT32, B=2)
        wide = (with_room(x, 100 - n) for x in (k, v))
        with torch.no_grad():
            out, expected = attn(q, *wide, filled=torch.tensor([n])), attn(q, k, v)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_decoding_reads_no_key_outside_the_window():
    q, k, v, _ = draw(1, 100, 16, FLOAT32)
    k[:, :, :67], v[:, :, :67] = math.nan, math.nan
    with torch.no_grad():
        windowed = build("lssar_p15.py", 16, "--window=33", TRITON)(q, k, v)
        alone = build("lssar_p15.py", 16, TRITON)(q, k[:, :, 67:], v[:, :, 67:])
    assert torch.equal(windowed, alone)


def test_decoding_reads_no_value_of_weight_zero():
    attn = build("lssar_p15.py", 16, TRITON)
    q, k, v, _ = draw(1, 100, 16, FLOAT32)
    zero = attn.weights(q, k)[:, :, 0] == 0  # [B, H, Lk]
    assert 0.2 < zero.double().mean() < 0.9
    poisoned = v.masked_fill(zero[..., None], math.nan)
    with torch.no_grad():
        assert torch.equal(attn(q, k, poisoned), attn(q, k, v))


def test_what_decoding_leaves_out_is_below_rounding():
    """Weights below 2^-24 / L of the largest: no output moves by more than 2^-24 of max |v|."""
    attn = build("softmax.py", 16, "--p=15", TRITON)
    q, k, _, _ = draw(1, 100, 16, FLOAT32)
    exactly = build("softmax.py", 16, "--p=15", REFERENCE).double()
    A = exactly.weights(q.double(), k.double())[:, :, 0]
    left_out = (A > 0) & (A < 2.0**-24 / 100 * A.amax(-1, keepdim=True))
    assert left_out.any()
    v = torch.where(left_out, 1.0, 0.0)[..., None].expand(-1, -1, -1, 16).contiguous()
    with torch.no_grad():
        out = attn(q, k, v)
    assert (out == 0).all()
    assert (exactly(q.double(), k.double(), v.double()) < 2.0**-24).all()


# ---- within torch and the model ----


def arguments(case, L=20, requires_grad=True):
    attn = build(case, 16, TRITON)
    q, k, v, _ = (x.requires_grad_(requires_grad) for x in draw(L, L, 16, FLOAT32))
    r = attn._rows(q, k, slice(None), 64)
    scale = torch.as_tensor(attn.variant.scale(r)).expand(1, 2, L, 1)[..., 0]
    phi, p = attn.variant.phi.kernel, float(attn.p or 0)
    return q, k, v, scale, *(None,) * 6, phi, False, p, attn.variant.l2_normalise


@pytest.mark.parametrize("case", ["lssa.py", "lssar_p3.py"])
def test_the_operators_are_well_formed(case):
    """Schema, fake tensors and autograd registration, by torch's own checks."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for save, window in ((True, None), (False, None), (True, 7)):
        inputs = arguments(case, requires_grad=save)
        torch.library.opcheck(
            kernels._forward, (*inputs, False, window, None, save), test_utils=checks
        )
    q, k, v, scale, *rest = arguments(case, requires_grad=False)
    for filled in (None, torch.tensor([12])):
        given = (q[:, :, -1:], k, v, scale[..., -1:], *rest[:6], filled, *rest[6:], None)
        torch.library.opcheck(kernels._decode, given, test_utils=checks)


@pytest.mark.parametrize("case", ["lssar_p15.py", "sigmoid.py"])
def test_compiles_without_graph_breaks(case):
    attn = build(case, 16, TRITON)
    tensors = draw(20, 20, 16, FLOAT32)
    eager = evaluate(attn, tensors)
    compiled = evaluate(torch.compile(attn, fullgraph=True, backend="aot_eager"), tensors)
    torch._dynamo.reset()
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name])


@pytest.mark.parametrize(
    "case",
    [
        "lssar_p15.py",
        "lssar_p3.py --positions=alibi --sink=learned --gate=head --window=9 --p_law=learned",
        "fox.py --n_kv_head=1 --softcap=3 --qk_norm=True",
    ],
)
def test_a_model_trains_and_generates_as_with_the_reference(case):
    def run(impl):
        torch.manual_seed(0)
        model = GPT(small_config(case, impl, "--n_layer=2", "--block_size=16"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        idx = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1))
        losses = []
        for _ in range(3):
            loss = model(idx[:, :-1], idx[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.eval().generate(idx[:, :5], 6, temperature=0)

    (losses, text), (expected, expected_text) = run(TRITON), run(REFERENCE)
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    assert torch.equal(text, expected_text)


@pytest.mark.parametrize(
    "case",
    ["lssar_p15.py", "ssmax_bias.py", "fox.py --n_kv_head=1", "softmax_alibi.py --sink=learned"],
)
def test_a_recorded_step_of_the_kernels_stays_on_its_device(case, monkeypatch):
    record_on_meta(small_model(case, TRITON).float(), monkeypatch)


@pytest.mark.parametrize("case", ["lssar_p15.py --window=9", "fox.py"])
def test_a_recorded_step_of_the_kernels(case, monkeypatch):
    monkeypatch.setattr("model.record", lambda step, device: step)
    model, cache = small_model(case, TRITON).float(), KVCache(12)
    ids = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = small_model(case)(ids)
        model.next_logits(ids[:, :7], cache)
        step = RecordedStep(model, cache, ids[:, 7:8])
        for i in range(7, 12):
            found = step(ids[:, i : i + 1])
            torch.testing.assert_close(found.double(), whole[:, i], rtol=1e-3, atol=1e-3)


def test_the_path_that_is_taken(monkeypatch):
    q = torch.zeros(1, 2, 4, 8)
    assert build_attention(small_config("lssa.py"))._path(q) == "blocked"  # a CPU
    assert build_attention(small_config("softmax.py"))._path(q) == "sdpa"
    assert build_attention(small_config("ssmax.py"))._path(q) == "sdpa"
    for impl in ("triton", "blocked", "reference"):
        attn = build_attention(small_config("softmax.py", f"--attention_impl={impl}"))
        assert attn._path(q) == impl
    for case, path in (("softmax.py", "sdpa"), ("lssa.py", "blocked")):
        assert build_attention(small_config(case, "--window=2"))._path(q, masked=True) == path
    fused = build_attention(small_config("lssa.py", TRITON))
    with pytest.raises(UserError, match="float64"):
        fused(q.double(), q.double(), q.double())
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(UserError, match="NVIDIA GPU.*cpu"):
        fused(q, q, q)
    monkeypatch.setattr(attention, "kernels", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        fused(q, q, q)


def test_what_kernel_obstacle_computes_is_refused_by_the_config():
    with pytest.raises(UserError, match="attention_impl.*softmax_inverse.*not the paper's"):
        load_config([*SMALL, "--attention=softmax_inverse", TRITON])
    with pytest.raises(UserError, match="head size 256 is above 128"):
        load_config([*SMALL, "--attention=lssa", "--n_embd=512", TRITON])


def test_a_phi_without_an_entry_has_kernel_obstacle():
    missing = Variant(Phi(torch.relu, kernel="nothing"))
    assert "no entry" in attention.kernel_obstacle(missing, 16)


def test_constants_and_phis_are_those_of_the_table():
    assert kernels.DEAD.value == attention.DEAD and kernels.TIED.value == attention.TIED
    for row in VARIANTS.values():
        entry = kernels.PHIS[row.phi.kernel]
        assert entry.rectified or (entry.shift is None) == (row.phi.shift is None)


def test_sums_of_softplus_by_products():
    """Far below 0, where a product's logarithm has no digits of it, and where it overflows."""
    keys = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    y = torch.cat([keys - 58, keys - 20, 8 * keys, keys / 1e4, torch.zeros(1, 128)])
    y[2, 5:] = -math.inf  # hidden
    found = torch.empty(len(y))
    total[(len(y),)](y, found, N=128)
    exact = torch.log2(1 + torch.exp2(y.double())).where(y > -40, torch.exp2(y.double()) / LN_2)
    torch.testing.assert_close(found.double(), exact.sum(1), rtol=6e-7, atol=0)


LN_2 = math.log(2)


@triton.jit
def total(Y, TOTALS, N: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    y = tl.load(Y + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(TOTALS + row, kernels.softplus_total(y))


# ---- without a GPU: the choice of shapes, and machine code ----


def test_a_measured_shape_comes_before_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=FakeDriver(80)))
    q = torch.empty(1, 2, 8, 64, dtype=BFLOAT16)

    def chosen(phi):
        for function in (kernels._shape, kernels.measured_shapes):
            function.cache_clear()
        return tuple(kernels.block_shape(kernels.KEYS, q, phi, 15.0).values())

    table = kernels.SHAPES["ampere"][kernels.KEYS][64]
    assert chosen("softplus") == table
    path = tmp_path / "shapes.json"
    name = kernels.shape_name(80, kernels.KEYS, BFLOAT16, 64, "softplus", 15.0)
    path.write_text(json.dumps({"shapes": {name: [16, 64, 4, 1]}}))
    monkeypatch.setattr(kernels, "MEASURED", str(path))
    assert chosen("softplus") == (16, 64, 4, 1) and chosen("exp") == table
    path.write_text("{}")
    with pytest.raises(UserError, match="ATTENTION_SHAPES.*shapes.json"):
        chosen("softplus")
    kernels._shape.cache_clear(), kernels.measured_shapes.cache_clear()


class FakeDriver:
    def __init__(self, capability):
        self.target = SimpleNamespace(arch=capability)

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return self.target


@pytest.mark.parametrize("version, cuda, chosen", [
    ("13.3.33", "13.0", True), ("13.1.80", "13.0", False), ("13.5.37", "12.8", False),
    (None, "13.0", False),
])  # fmt: skip
def test_hopper_takes_an_assembler_without_the_error(version, cuda, chosen, monkeypatch, capsys):
    class Package:
        def __init__(self):
            self.version = version

        def locate_file(self, path):
            return Path("/site-packages") / path

    def distribution(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return Package()

    monkeypatch.setattr(kernels.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    kernels.choose_assembler.cache_clear()
    for _ in range(2):
        kernels.choose_assembler()
    path = os.environ.get("TRITON_PTXAS_PATH")
    assert path == ("/site-packages/nvidia/cu13/bin/ptxas" if chosen else None)
    said = capsys.readouterr().out
    assert said.count("assembled by") == 1 and ("pip install" in said) != chosen
    kernels.choose_assembler.cache_clear()


def test_shapes_fit_every_kernel():
    """softplus_total takes at most 128 keys, and every head size up to 128 has a shape."""
    for table in kernels.SHAPES.values():
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
def test_every_row_launches_on_every_gpu():
    compile_kernels("--rows")


def test_a_register_that_a_product_still_reads_is_found():
    from tests.compile_kernels import overwritten

    product = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"
    wait, write = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "FMUL R6, R6, R8"
    assert overwritten([product, wait, write]) == 0
    assert overwritten([product, write, wait]) > 0
    assert overwritten([product, "LDS.128 R4, [R60]", wait]) > 0
    assert overwritten([product, "STS [R6], R7", wait]) == 0
