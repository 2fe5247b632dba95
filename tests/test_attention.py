"""The attention family against the formulas of tests/textbook.py, in float64."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import attention
from attention import VARIANTS, Phi, Variant
from attention_paths import blocked, sdpa
from attention_paths.check import check_variant
from attention_paths.reference import Context, ReferenceAttention
from errors import UserError
from layers.heads import build_attention, check_attention
from tests import textbook
from tests.helpers import ATTENTIONS as ROWS
from tests.helpers import small_config

EPS = 2.0**-23  # float32

# Every config file, and combinations of settings that no config file has.
CASES = [
    *ROWS,
    "lssar_p3.py --positions=alibi --sink=learned",
    "sigmoid_logn_l1.py --softcap=2 --sink=one",
    "ssmax.py --positions=alibi --softcap=1",
    "softmax.py --p=3 --sink=one",
    "relu_shen.py --gamma=3",
    "relu_li.py --p=3",
    "ablations/phi_relu6.py --p=1",
    "ablations/phi_softplus.py --p=2.5",
    "ssmax.py --p=3",
    "ablations/softmax_cosine.py --p=3",
    "ablations/softplus_logn.py --p=3",
    "ablations/ssmax_probe.py --p=3",
]
P_CASES = [case for case in CASES if (c := small_config(case)).p is not None and c.sink == "none"]
SOFTMAX_CASES = ["softmax.py", "ssmax.py", "ssmax_fixed.py", "ssmax_bias.py", "softmax_logn.py"]
SOFTMAX_CASES += ["ablations/ssmax_probe.py", "ablations/softmax_cosine.py"]
SIGNED = ("inverse", "recentred", "linear", "gelu", "mish")
NO_L1 = ("sigmoid.py", "sigmoid_logn.py", "wortsman", "shen", "recentred.py", "linear.py", "exp.py")
NO_L1 += ("sink", "off_by_one", "softpick", "stick_breaking")
BY_DISTANCE = ("alibi", "asentmax", "stick_breaking")
RELU = [case for case in CASES if "relu" in case]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def among(case, names):
    return any(name in case for name in names)


def is_l1(case):
    return not among(case, NO_L1)


def build(case, *more):
    """An attention layer whose parameters are not at their initial values."""
    attn = build_attention(small_config(case, *more))
    values = {"s": (1.3, 0.4), "b": (-0.5, 0.7), "p_n": torch.linspace(0.5, 2, 16).tolist()}
    values |= {"sink": (-0.3, 1.1)}
    for name, parameter in attn.named_parameters():
        value = torch.tensor(values[name])
        parameter.data = value.repeat(len(parameter) // len(value))
    return attn


def draw(Lq, Lk, seed=0, B=2, H=2, d=8, size=1.5, dtype=torch.float64):
    """q [B, H, Lq, d], k and v [B, H, Lk, d]."""
    g = torch.Generator().manual_seed(seed)
    return tuple(
        (size * torch.randn(B, H, L, d, generator=g, dtype=torch.float64)).to(dtype)
        for L in (Lq, Lk, Lk)
    )


def leaves(*tensors):
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def assert_near(actual, expected, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_finite(*tensors):
    assert all(t.isfinite().all() for t in tensors)


# ---- the formulas ----


@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula(case):
    attn = build(case).double()
    shapes = [(L, L) for L in (1, 2, 3, 4, 5, 33)] + [(1, 4), (2, 5), (3, 5), (1, 33), (5, 20)]
    for Lq, Lk in shapes:
        q, k, v = draw(Lq, Lk, seed=Lk)
        expected = textbook.weights(attn, q, k)
        assert_near(attn.weights(q, k), expected)
        assert_near(attn(q, k, v), expected @ v)


@pytest.mark.parametrize("case", CASES)
def test_score_scale_multiplies_scores_also_of_unit_vectors(case):
    attn = build(case).double()
    q, k, v = draw(4, 6)
    context = Context(score_scale=1.7)
    expected = textbook.weights(attn, q, k, context)
    assert_near(attn.weights(q, k, context), expected)
    assert_near(attn(q, k, v, context), expected @ v)


def test_learnables_start_at_their_settings():
    attn = build_attention(small_config("ablations/ssmax_probe.py", "--s_init=0.2", "--b_init=3"))
    assert attn.s.tolist() == pytest.approx([0.2, 0.2]) and attn.b.tolist() == [3, 3]
    assert attn.p_n.tolist() == [1] * 16
    assert {case for case in ROWS if [*build(case).parameters()]} == {
        "ssmax.py", "ssmax_bias.py", "softmax_sink.py", "ablations/ssmax_probe.py"
    }  # fmt: skip
    attn = build_attention(small_config("lssar_p3.py", "--sink=learned"))
    assert attn.sink.tolist() == [0, 0]


def test_a_training_length_of_one_key_has_a_scale():
    attn = build_attention(small_config("softmax_logn.py", "--block_size=1")).double()
    assert_finite(attn.weights(*draw(3, 5)[:2]))


def test_lssar_rows_1_to_4_by_hand():
    """d = 2; the keys' cosines with every query are 1, 0.6, 0 and -1."""
    k = torch.tensor([[1, 0], [0.6, 0.8], [0, 1], [-1, 0]], dtype=torch.float64)
    q = torch.tensor([[2, 0]], dtype=torch.float64).expand(4, 2)
    attn = build("lssar_p3.py", "--n_embd=4")
    A = attn.weights(q[None, None], 5 * k[None, None])[0, 0]
    # log 2 log n = 0, 0.480453, 0.761500, 0.960906; softplus of that times the cosines:
    #   n = 2: 0.961955, 0.847635; no offset yet, the cubes share the row: 0.890160, 0.609020
    #   n = 3: 1.144696, 0.947468, 0.693147; cubes: 1.499933, 0.850530, 0.333025
    #   n = 4: 1.284833, 1.022406, 0.693147, 0.323927; sum 3.324313
    #          4 A - 1 = 0.545983, 0.230217, -0.165966, -0.610233; cubes: 0.162756, 0.012201
    hand = [
        [1, 0, 0, 0],
        [0.593765, 0.406235, 0, 0],
        [0.558947, 0.316952, 0.124101, 0],
        [0.930261, 0.069739, 0, 0],
    ]
    assert_near(A, torch.tensor(hand, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("case", ["sigmoid_l1.py", "ablations/phi_softplus.py"])
def test_rows_far_below_zero_keep_their_shares(case):
    """There sigmoid and softplus are exp, which itself is 0 in float64 from -745."""
    attn = build(case)
    q, k, _ = draw(6, 6)
    q[..., 0], k[..., 0] = 50, -50  # about -880 on every scaled score
    assert_near(attn.weights(q, k), build("softmax.py").weights(q, k))
    assert gradcheck(attn.weights, leaves(q[:1, :1], k[:1, :1]))


def test_softplus_is_not_linear_above_20():
    case = "ablations/phi_softplus.py"
    q, k, _ = draw(20, 20, size=5)
    assert ((q @ k.mT / math.sqrt(8) - 25).abs() < 5).any()
    attn = build(case)
    assert_near(attn.weights(q, k), textbook.weights(attn, q, k), rtol=1e-13)


# ---- the code of others: Lq = 5 queries after 6 keys ----


def assert_same(ours, theirs, inputs, **near):
    """Output and gradients."""
    found = []
    for function in (ours, theirs):
        tensors = leaves(*inputs)
        out = function(*tensors)
        gradient = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        found.append((out, *torch.autograd.grad(out, tensors, gradient)))
    for x, y in zip(*found, strict=True):
        assert_near(x, y, **near)


def causal_mask(window=11):
    """0 for the keys that each query sees, and -inf."""
    distance = torch.arange(6, 11)[:, None] - torch.arange(11)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(5, 11, dtype=torch.float64).masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("size", [0.1, 1.5, 300])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_sparse_rows_are_those_of_the_package_entmax(name, size):
    mapping = getattr(pytest.importorskip("entmax"), name)

    def theirs(q, k, v):
        return mapping(q @ k.mT / math.sqrt(8) + causal_mask(), dim=-1) @ v

    assert_same(build(f"{name}.py"), theirs, draw(5, 11, size=size))


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_windows_and_grouped_queries_are_those_of_gpt_oss(window):
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    masks = pytest.importorskip("transformers.masking_utils")
    attn = build("softmax_sink.py", f"--window={window}").double()
    q, k, v = draw(5, 11)
    positions = torch.arange(6, 11)[:, None], torch.arange(11)
    sees = masks.sliding_window_causal_mask_function(window or 11)(0, 0, *positions)
    mask = torch.zeros(5, 11, dtype=torch.float64).masked_fill(~sees, -math.inf)

    def theirs(q, k, v, sinks):
        module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
        return gpt_oss.eager_attention_forward(module, q, k, v, mask, 8**-0.5)[0].transpose(1, 2)

    def ours(q, k, v, sinks):
        return torch.func.functional_call(attn, {"sink": sinks}, (q, k, v))

    assert_same(ours, theirs, (q, k[:, :1], v[:, :1], attn.sink))


# ---- gradients ----


def gradient_inputs(case, Lq=5, Lk=5, d=4):
    attn = build(case, f"--n_embd={2 * d}").double()
    inputs = leaves(*draw(Lq, Lk, B=1, d=d, seed=3))
    return attn, inputs + tuple(attn.parameters())


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    attn, inputs = gradient_inputs(case, d=2)
    assert gradcheck(lambda q, k, v, *_: (attn(q, k, v), attn.weights(q, k)), inputs)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("Lq", [10, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case not in SOFTMAX_CASES])
def test_blocks_equal_the_whole(case, Lq, keep, monkeypatch):
    """3 queries of one head at a time, or 2 sequences of 4 queries; weights kept or recomputed."""
    rows, product = [], ReferenceAttention.output

    def spy(self, q, *rest):
        rows.append(q.shape[0] * q.shape[1] * q.shape[2])
        return product(self, q, *rest)

    monkeypatch.setattr(ReferenceAttention, "output", spy)
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 3 if Lq == 10 else 256)
    monkeypatch.setattr(blocked, "BLOCK_SCORES_CPU", 3 * 10 if Lq == 10 else 4 * 10 * 4)
    monkeypatch.setattr(blocked, "KEEP_SCORES", 10**9 if keep else 0)
    attn = build(case).double()
    q, k, v = leaves(*draw(Lq, 10, B=3))
    inputs = (q, k, v, *attn.parameters())
    out, whole = attn(q, k, v), attn.weights(q, k) @ v
    assert_near(out, whole)
    assert rows == (6 * [1, 3, 3, 3] if Lq == 10 else [16, 8])
    weights = draw(Lq, 10, B=3, seed=1)[0]
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((whole * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other)
    assert len(rows) == (1 if keep else 2) * (24 if Lq == 10 else 2)


# ---- grouped queries ----


# ---- windows ----

PATHS = ["auto", "blocked", "reference"]


@pytest.fixture
def small_blocks(monkeypatch):
    """4 queries of one head at a time."""
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(sdpa, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(blocked, "BLOCK_SCORES_CPU", 1)


@pytest.mark.parametrize("case", CASES)
def test_a_window_equals_the_formula(case, small_blocks):
    """More than the 16 keys of the training length, too."""
    for Lq, Lk, window in ((11, 11, 1), (11, 11, 3), (10, 12, 5), (1, 9, 6), (3, 30, 20)):
        layers = [
            build(case, f"--window={window}", f"--attention_impl={path}").double() for path in PATHS
        ]
        q, k, v = draw(Lq, Lk, seed=Lk, B=1)
        expected = textbook.weights(layers[0], q, k)
        assert_near(layers[0].weights(q, k), expected)
        for attn in layers:
            assert_near(attn(q, k, v), expected @ v)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", ROWS)
def test_gradients_with_a_window(case, recompute, small_blocks, monkeypatch):
    """Of the reference path by differences, of the others against it."""
    monkeypatch.setattr(blocked, "KEEP_SCORES", 0 if recompute else 10**9)
    layers = [
        build(case, "--n_embd=4", "--window=4", f"--attention_impl={path}").double()
        for path in PATHS
    ]
    inputs = leaves(*draw(6, 7, B=1, d=2, seed=3))
    if not recompute:
        attn = layers[-1]
        assert gradcheck(lambda *_: attn(*inputs), (*inputs, *attn.parameters()), fast_mode=True)
    gradients = [
        torch.autograd.grad(attn(*inputs).sin().sum(), (*inputs, *attn.parameters()))
        for attn in layers
    ]
    for ours in gradients[:2]:
        for one, other in zip(ours, gradients[2], strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("case", ["softmax.py", "lssar_p3.py"])
def test_a_block_reads_the_keys_of_its_window_alone(case, small_blocks, monkeypatch):
    shapes = []

    def spy(owner, name):
        function = getattr(owner, name)

        def record(*args, **settings):
            q, k = [x for x in args if isinstance(x, torch.Tensor)][:2]
            shapes.append((q.shape[2], k.shape[2]))
            return function(*args, **settings)

        monkeypatch.setattr(owner, name, record)

    spy(F, "scaled_dot_product_attention")
    spy(ReferenceAttention, "output")
    attn = build(case, "--window=6")
    attn(*draw(20, 50, B=1, H=1))
    assert shapes == [(4, 9)] * 5


# ---- edge cases ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", P_CASES)
def test_tied_rows_stay_uniform_with_bounded_gradients(case, dtype):
    attn = build(case)
    for n in (2, 4, 5, 7, 33, 1000):
        q, k, v = draw(1, n, seed=n, dtype=dtype)
        k = q.sign() + torch.zeros_like(k)  # equal keys, with a score above 0
        q, k, v = leaves(q, k, v)
        A = attn.weights(q, k)
        assert_near(A, torch.full_like(A, 1 / n), rtol=1e-5)
        out = attn(q, k, v)
        out.backward(torch.ones_like(out))
        for x in (q, k, v):
            assert x.grad.abs().max() < 1e3


@pytest.mark.parametrize("p", [1, 2, 3, 7, 15.0, 100, 999, 1000, 2.5])
def test_normalised_powers_and_their_gradients(p, monkeypatch):
    torch.manual_seed(0)
    exact = torch.randn(3, 50, dtype=torch.float64)
    exact[1] = -1.0  # a dead row
    g, h = torch.randn(2, 3, 50, dtype=torch.float64)
    slopes = {}
    for dtype in (torch.float64, torch.float32):
        x = exact.to(dtype).requires_grad_()
        top = x.detach().amax(-1, keepdim=True).relu()
        A = attention.normalised_power(x, top, p)
        (slope,) = torch.autograd.grad(A, x, g.to(dtype), create_graph=True)
        (curve,) = torch.autograd.grad(slope, x, h.to(dtype))
        slopes[dtype] = A, slope, curve
    t = exact.relu() / exact.amax(-1, keepdim=True)
    A = t**p / (t**p).sum(-1, keepdim=True)
    A[1] = 0
    assert_near(slopes[torch.float64][0], A)
    # the same as a formula, whose gradients are autograd's
    x = exact.clone().requires_grad_()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    A = attention.normalised_power(x, x.detach().amax(-1, keepdim=True).relu(), p)
    (slope,) = torch.autograd.grad(A, x, g, create_graph=True)
    (curve,) = torch.autograd.grad(slope, x, h)
    for found, formula in zip(slopes[torch.float64], (A, slope, curve), strict=True):
        assert_near(found, formula)
    for found, formula in zip(slopes[torch.float32], (A, slope, curve), strict=True):
        # a relative error of an eps in x becomes p of them, and terms of both signs cancel
        size = formula.abs().max().item()
        assert_near(found.double() / size, formula / size, atol=16 * (p + 16) * EPS)


def test_a_sink_needs_weight_at_score_0():
    assert Variant(Phi(F.softplus)).takes_sink
    for phi in (Phi(torch.relu, zero=0.0), Phi(lambda z: z.relu() ** 3)):
        assert not Variant(phi).takes_sink  # its sink would never get a gradient


@pytest.mark.parametrize("p", [2.5, 15, 1e4])
def test_a_row_with_a_single_key_has_no_gradient(p):
    torch.manual_seed(0)
    top = torch.rand(200, 1)
    x = torch.cat((top, -torch.rand(200, 9)), dim=1).requires_grad_()
    A = attention.normalised_power(x, top, p)
    A.backward(torch.randn(200, 10))
    assert A[:, 0].eq(1).all() and not A[:, 1:].any() and not x.grad.any()


@pytest.mark.parametrize("p", [3, 7, 15, 100, 1000])
def test_powers(p):
    x = torch.tensor([math.nan, 0.0, 0.5, 0.999, 1.0])
    found = attention.power(x, p)
    assert found[0].isnan() and x.isnan().tolist() == [True, False, False, False, False]
    assert_near(found[1:].double(), x[1:].double() ** p, rtol=(p + 16) * EPS, atol=1e-30)


@pytest.mark.parametrize("largest, winner", [(15.9 * EPS, 0.1), (16.1 * EPS, 1.0)])
def test_a_row_counts_as_tied_up_to_16_eps(largest, winner):
    A = torch.full((1, 1, 1, 10), 0.1 * (1 - largest / 9), dtype=torch.float64)
    A[..., 3] = 0.1 * (1 + largest)
    last = torch.tensor([[9]])
    keys, head = torch.arange(10), torch.zeros(1, 1, 1)
    rows = attention.Rows(last + 1.0, last, keys, head, None, d=8, L=10, gamma=1.0, p=3)
    out = attention.relu_power(A, rows, 3)
    assert out[0, 0, 0, 3] == pytest.approx(winner, rel=1e-4)
    assert out.sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", RELU)
def test_dead_relu_rows_are_zero_with_zero_gradient(case, dtype):
    attn = build(case)
    q, k, v = draw(6, 6, dtype=dtype)
    k = -q.sign()
    q = q[:, :, :1] + torch.zeros_like(q)  # every query points away from every key
    k = -q.sign()
    q, k, v = leaves(q, k, v)
    out = attn(q, k, v)
    assert not out.any() and not attn.weights(q, k).any()
    out.backward(torch.ones_like(out))
    assert not (q.grad.any() or k.grad.any() or v.grad.any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_zero_queries_and_keys_are_finite(case, dtype):
    attn = build(case)
    q, k, v = draw(6, 6, dtype=dtype)
    k[:, :, 3] = 0
    q, k, v = leaves(torch.zeros_like(q), k, v)
    if dtype == torch.float16 and among(case, ("lss", "cosine")):
        pytest.skip("the bound of the gradient, 1e6 times the scale, is beyond float16")
    out = attn(q, k, v)
    out.backward(torch.ones_like(out))
    assert_finite(out, attn.weights(q, k), q.grad, k.grad, v.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "ablations/exp.py"])
def test_scores_of_ten_thousand_are_finite(case, dtype):
    attn = build(case)
    q, k, v = draw(9, 9, dtype=dtype)
    signs = torch.tensor([-1, -1, -1, -1, -1, 1, -1, 1, 1], dtype=dtype)[:, None]
    side = math.sqrt(1e4 / 8)
    q, k, v = leaves(torch.full_like(q, side), side * signs + torch.zeros_like(k), v)
    assert ((q.float() @ k.float().mT).abs() > 9900).all()
    out, A = attn(q, k, v), attn.weights(q, k)
    out.backward(torch.ones_like(out))
    assert_finite(out, A, q.grad, k.grad, v.grad, *(x.grad for x in attn.parameters()))
    if is_l1(case) and not among(case, ("relu", *SIGNED)):
        assert_near(A.sum(-1), torch.ones_like(A[..., 0]), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py", "sigmoid_logn_l1_p15.py"])
def test_p_of_100_at_2048_keys(case, dtype):
    attn = build(case, "--p=100")
    q, k, v = draw(40, 2048, B=1, dtype=dtype)
    q[:, :, -1] = 4 * k[:, :, 100]  # one winner far ahead: n A is near n
    q, k, v = leaves(q, k, v)
    out, A = attn(q, k, v), attn.weights(q, k)
    out.backward(torch.ones_like(out))
    assert_finite(out, A, q.grad, k.grad, v.grad)
    assert_near(A.sum(-1), torch.ones_like(A[..., 0]), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_dtypes(case, dtype):
    attn = build_attention(small_config(case))
    q, k, v = leaves(*draw(5, 300, d=8, size=1, dtype=dtype))
    out, A = attn(q, k, v), attn.weights(q, k)
    assert out.dtype == dtype
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = attn.weights(q.double(), k.double())
    assert_near(A.double(), exact, rtol=1e-2, atol=1e-4)  # n past 256 counts in every dtype
    out.backward(torch.ones_like(out))
    assert_finite(out, q.grad, k.grad, v.grad)


@pytest.mark.parametrize("case", CASES)
def test_autocast_changes_nothing_inside(case):
    attn = build(case)
    q, k, v = draw(5, 9, dtype=torch.float32)
    half = [x.bfloat16() for x in (q, k, v)]
    plain = attn(q, k, v), attn.weights(q, k), attn(*half), attn.weights(*half[:2])
    with torch.autocast("cpu", torch.bfloat16):
        inside = attn(q, k, v), attn.weights(q, k), attn(*half), attn.weights(*half[:2])
    for ours, theirs in zip(inside, plain, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert inside[3].dtype == torch.float32


# ---- properties ----

few = settings(max_examples=4, deadline=None, derandomize=True)
seeds, lengths = st.integers(0, 2**16), st.integers(1, 40)


@pytest.mark.parametrize("case", CASES)
@few
@given(seeds, lengths)
def test_permuted_keys_have_permuted_weights(case, seed, L):
    """Of two queries, the keys that both see: a variant uses their number, not their order."""
    attn = build(case)
    q, k, v = draw(2, L + 1, seed)
    order = torch.randperm(L, generator=torch.Generator().manual_seed(seed))
    order = torch.cat((order, torch.tensor([L])))
    assert attn.ordered >= among(case, BY_DISTANCE)
    if among(case, BY_DISTANCE):
        return
    assert_near(attn.weights(q, k[:, :, order]), attn.weights(q, k)[..., order])
    assert_near(attn(q, k[:, :, order], v[:, :, order]), attn(q, k, v))


# ---- a user's own variant ----


def use_variant(monkeypatch, row):
    monkeypatch.setitem(VARIANTS, "own", row)


@pytest.mark.parametrize("p", [None, 3])
def test_a_new_phi_works_everywhere(p, monkeypatch):
    def elu1(z):
        return F.elu(z) + 1

    use_variant(monkeypatch, Variant(Phi(elu1)))
    extra = ["--attention=own"] + ([] if p is None else [f"--p={p}"])
    attn = build("softmax.py", *extra)
    q, k, v = leaves(*draw(7, 9))
    monkeypatch.setitem(textbook.FORMULAS, "own", lambda t: t.l1(elu1, t.z()))
    expected = textbook.weights(attn, q, k)
    assert_near(attn.weights(q, k), expected)
    assert_near(attn(q, k, v), expected @ v)
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 3)
    monkeypatch.setattr(blocked, "BLOCK_SCORES_CPU", 1)  # one head at a time
    assert_near(attn(q, k, v), expected @ v)
    assert gradcheck(attn, leaves(*draw(3, 5, B=1, d=8)))


def root_of_softplus(z):
    return F.softplus(z).sqrt()


def silu_of_seen(z, rows):
    w = torch.where(z == -math.inf, 0, F.silu(z))
    return w / w.abs().sum(-1, keepdim=True)


GRADIENTS_AT_HIDDEN_KEYS = {
    "finite zero": Variant(Phi(root_of_softplus, zero=-1000.0)),
    "row weights": Variant(attention.EXP, row_weights=silu_of_seen),
    "reweight": Variant(
        attention.SIGMOID, norm=lambda rows: rows.n, reweight=lambda A, rows, p: A.sqrt()
    ),
    "in place": Variant(Phi(lambda z: z.exp_())),
}


@pytest.mark.parametrize("variant", GRADIENTS_AT_HIDDEN_KEYS.values(), ids=GRADIENTS_AT_HIDDEN_KEYS)
def test_formulas_whose_gradient_at_hidden_keys_is_nan_are_accepted(variant):
    check_variant(variant)


SEES_TOO_MUCH = [
    (Variant(Phi(lambda z: z.clamp(-3, 3).exp())), r"own: phi\(-inf\) = 0.0498.*no weight"),
    (Variant(Phi(torch.tanh)), r"own: phi\(-inf\) = -1.*zero="),
    (Variant(Phi(torch.tanh, zero=0.0)), r"own: phi\(-30\) = -1 is negative.*signed=True"),
    (Variant(Phi(torch.log1p, zero=0.0)), r"own: phi\(-30\) is not finite"),
    (Variant(Phi(root_of_softplus)), r"own: phi's gradient at -inf.* is nan: .*to a finite z"),
    (
        Variant(attention.EXP, scale=lambda rows: math.log(rows.n)),
        r"own: its formulas fail.*rows\.n\.log\(\), not math\.log",
    ),
    (
        Variant(attention.EXP, bias=lambda rows: rows.keys - rows.last),
        r"own: its bias differs between keys: declare Variant\(..., keyed=True\)",
    ),
    (
        Variant(attention.EXP, reweight=lambda A, rows, p: A - 1 / rows.n),
        "own: row 1 depends on keys after it.*reweight",
    ),
    (
        Variant(attention.EXP, reweight=lambda A, rows, p: A / A.amax(-2, keepdim=True)),
        "own: row 2 depends on keys after it",
    ),
]


@pytest.mark.parametrize(("row", "message"), SEES_TOO_MUCH)
def test_a_variant_that_sees_the_future_is_refused(row, message, monkeypatch):
    use_variant(monkeypatch, row)
    with pytest.raises(UserError, match=message):
        check_attention(small_config("softmax.py --attention=own"))


def test_a_bias_of_ones_own_may_differ_between_heads_and_keys(small_blocks, monkeypatch):
    """ALiBi as a row, in blocks of a head and 4 queries, against the setting."""
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)[:, None, None]

    def bias(rows):
        return -slopes[rows.head[:, 0, 0]] * (rows.last - rows.keys)

    use_variant(monkeypatch, Variant(attention.EXP, bias=bias, keyed=True))
    for window in (None, 3):
        own, alibi = (
            build("softmax.py", f"--window={window}", *more).double()
            for more in (["--attention=own"], ["--positions=alibi"])
        )
        assert own.ordered and own.path(draw(1, 1)[0], 1) == "blocked"
        for Lq, Lk in ((9, 9), (1, 9), (3, 7)):
            q, k, v = draw(Lq, Lk)
            assert_near(own(q, k, v), alibi(q, k, v))
            assert_near(own.weights(q, k), alibi.weights(q, k))


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    st.sampled_from(["softmax.py", "lssar_p3.py", "sigmoid_l1.py", "ssmax.py --p=2"]),
    st.sampled_from(["none", "alibi"]),
    st.sampled_from(["none", "one", "learned"]),
    st.sampled_from([None, 2]),
    st.sampled_from([None, 4]),
    st.sampled_from([1, 2]),
    seeds,
)
def test_settings_compose(case, positions, sink, softcap, window, kv_heads, seed):
    """Every path against the formula, for values, gradients and a single query."""
    more = [f"--positions={positions}", f"--sink={sink}", f"--softcap={softcap}"]
    more += [f"--window={window}", "--n_head=2"]
    q, k, v = draw(5, 8, seed)
    log_forget = -torch.rand(2, 2, 8, dtype=torch.float64, generator=torch.Generator())
    inputs = leaves(q, k[:, :kv_heads], v[:, :kv_heads], log_forget)
    context = Context(log_forget=inputs[3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK_QUERIES", 2)
        patch.setattr(blocked, "BLOCK_SCORES_CPU", 1)
        for path in PATHS:
            attn = build(case, *more, f"--attention_impl={path}").double()
            both = attn(*inputs[:3], context), textbook.attention(attn, *inputs[:3], context)
            assert_near(*both)
            gradients = (
                torch.autograd.grad(out.sin().sum(), (*inputs, *attn.parameters())) for out in both
            )
            for ours, formula in zip(*gradients, strict=True):
                assert_near(ours, formula)
            with torch.no_grad():
                assert_near(attn(q[:, :, -1:], *inputs[1:3], context), both[1][:, :, -1:])


PEAK = """
import resource
import sys

import torch

from tests.fused import build

torch.set_num_threads(1)
H = int(sys.argv[3])
attn = build(sys.argv[1], 64, f"--n_head={H}", f"--n_embd={64 * H}")
q, k, v = (torch.randn(1, H, 4096, 64, requires_grad=sys.argv[2] == "train") for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = attn(q, k, v)
if out.requires_grad:
    out.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is in KiB on Linux")
@pytest.mark.parametrize(
    "case, phase, H",
    [("lssar_p15.py", "train", 6), ("ablations/softmax_recentred_l1.py", "eval", 2)],
)
def test_long_rows_take_the_memory_of_blocks(case, phase, H):
    """In a separate process: less than half of one matrix of all scores, of which the formula makes
    ten. Six heads make that 201 MB: a backward pass takes about 80 MB at any size."""
    command = [sys.executable, "-c", PEAK, case, phase, str(H)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert 1024 * int(done.stdout) < 4 * H * 4096**2 / 2
