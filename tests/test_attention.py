"""The attention family against the formulas of tests/textbook.py, in float64."""

import copy
import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention import VARIANTS, Phi, Variant
from attention_paths import blocked, power, sdpa
from attention_paths.check import check_computation, check_variant
from attention_paths.module import Attention
from attention_paths.reference import NO_CONTEXT, Context, ReferenceAttention
from errors import UserError
from layers.heads import build_attentions
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
    "relu_li.py --p=3",
    "ablations/phi_relu6.py --p=1",
    "ablations/phi_softplus.py --p=2.5",
    "ssmax.py --p=3",
    "ablations/softmax_cosine.py --p=3",
    "ablations/softplus_logn.py --p=3",
    "ablations/ssmax_probe.py --p=3",
]


def is_reweighted(case):
    """Whether weights are raised to a power, without a sink that takes weight from tied rows."""
    config = small_config(case)
    return config.p is not None and config.sink == "none"


P_CASES = [case for case in CASES if is_reweighted(case)]
RELU_CASES = [case for case in CASES if "relu" in case]
# Cases that torch's scaled_dot_product_attention can compute.
SDPA_CASES = [
    "softmax.py",
    "ssmax.py",
    "ssmax_fixed.py",
    "ssmax_bias.py",
    "softmax_logn.py",
    "ablations/ssmax_probe.py",
    "ablations/softmax_cosine.py",
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def build(case, *more):
    """An attention layer whose parameters are not at their initial values."""
    attn = build_attentions(small_config(case, *more), layer=0)[0]
    values = {
        "s": torch.tensor([1.3, 0.4]),
        "b": torch.tensor([-0.5, 0.7]),
        "p_n": torch.linspace(0.5, 2, 16),
        "sink": torch.tensor([-0.3, 1.1]),
    }
    for name, parameter in attn.named_parameters():
        value = values[name]
        parameter.data = value.repeat(len(parameter) // len(value))
    return attn


def draw(Lq, Lk, seed=0, B=2, H=2, d=8, size=1.5, dtype=torch.float64):
    """q [B, H, Lq, d], k and v [B, H, Lk, d]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for L in (Lq, Lk, Lk):
        x = torch.randn(B, H, L, d, generator=generator, dtype=torch.float64)
        tensors.append((size * x).to(dtype))
    return tensors


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def assert_near(actual, expected, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_finite(*tensors):
    for tensor in tensors:
        assert tensor.isfinite().all()


# ---- the formulas ----


@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula(case):
    attn = build(case).double()
    shapes = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (33, 33)]
    shapes += [(1, 4), (2, 5), (3, 5), (1, 33), (5, 20)]
    calls = [(*shape, NO_CONTEXT) for shape in shapes]
    calls.append((4, 6, Context(score_scale=1.7)))
    positions = torch.tensor([[1, 2, 0, 0, 1], [2, 3, 4, 5, 6]])
    calls.append((5, 7, Context(document_positions=positions)))
    for Lq, Lk, context in calls:
        q, k, v = draw(Lq, Lk, seed=Lk)
        expected = textbook.weights(attn, q, k, context)
        assert_near(attn.weights(q, k, context), expected)
        assert_near(attn(q, k, v, context), expected @ v)


def test_learnables_start_at_their_settings():
    config = small_config("ablations/ssmax_probe.py", "--s_init=0.2")
    attn = build_attentions(config, layer=0)[0]
    assert attn.s.tolist() == pytest.approx([0.2, 0.2])
    assert attn.b.tolist() == [0, 0]
    assert attn.p_n.tolist() == [1] * 16
    with_sink = build_attentions(small_config("softmax_sink.py"), layer=0)[0]
    assert with_sink.sink.tolist() == [0, 0]
    rows_with_parameters = []
    for row in ROWS:
        if list(build(row).parameters()):
            rows_with_parameters.append(row)
    assert sorted(rows_with_parameters) == [
        "ablations/ssmax_probe.py",
        "softmax_sink.py",
        "ssmax.py",
        "ssmax_bias.py",
        "ssmax_qk_norm.py",
    ]


def test_a_training_length_of_1_is_finite():
    """There log T is 0."""
    config = small_config("softmax_logn.py", "--block_size=1")
    attn = build_attentions(config, layer=0)[0].double()
    q, k, _ = draw(3, 5)
    assert_finite(attn.weights(q, k))


@pytest.mark.parametrize("case", ["sigmoid_l1.py", "ablations/phi_softplus.py"])
def test_rows_far_below_zero_keep_their_shares(case):
    """There sigmoid and softplus are exp, which itself is 0 in float64 from -745."""
    attn = build(case)
    q, k, _ = draw(6, 6)
    q[..., 0] = 50
    k[..., 0] = -50  # about -880 on every scaled score
    expected = build("softmax.py").weights(q, k)
    assert_near(attn.weights(q, k), expected)
    one_head = leaves(q[:1, :1], k[:1, :1])
    assert gradcheck(attn.weights, one_head)


@pytest.mark.parametrize("case", ["lssa.py", "lssar_p3.py", "ablations/lssa_threshold.py"])
def test_a_factor_on_bounded_scores_leaves_no_row_without_weights(case):
    """YaRN's, or log_base's: the bound of the cosine, log d log n, holds without a factor."""
    attn = build(case)
    q, k, _ = draw(40, 40)
    q[..., 0] = 9
    k[..., 0] = -9  # about -80 on the score of 40 keys
    for factor in (12.0, torch.full((1, 1, 40, 1), 12.0)):
        context = Context(score_scale=factor)
        expected = textbook.weights(attn, q, k, context)
        actual = attn.weights(q.float(), k.float(), context)
        assert_near(actual.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("size", [0.1, 5, 300])
@pytest.mark.parametrize("case", ["ablations/phi_softplus.py", "sparsemax.py", "entmax15.py"])
def test_small_and_large_scores(case, size):
    """softplus is not linear above 20 either; where entmax has one key it is 1."""
    attn = build(case)
    q, k, _ = draw(20, 20, size=size)
    expected = textbook.weights(attn, q, k)
    assert_near(attn.weights(q, k), expected, rtol=1e-8)


@pytest.mark.parametrize("keys", [1, 2, 4096])
@pytest.mark.parametrize("power", [1, 2])
def test_entmax_is_the_threshold_at_which_a_row_sums_to_1(power, keys):
    """In rows of many keys: of scores close to each other, far apart, and with heavy tails."""
    noise, other = torch.randn(2, 8, keys, dtype=torch.float64)
    scores = [
        0.01 * noise,
        0.3 * noise,
        30 * noise,
        noise / other,
        -(noise.abs() ** 5),
        0 * noise,
        -(-noise.abs()).exp(),
    ]
    z = torch.cat(scores) / power
    A = attention.entmax(z * power, power)
    ones = torch.ones(len(z), dtype=z.dtype)
    assert_near(A.sum(-1), ones)
    tau = z - A ** (1 / power)  # where A is 0, this is the score
    has_weight = A > 0
    threshold = tau.where(has_weight, -math.inf).amax(-1, keepdim=True)
    assert_near(tau.where(has_weight, threshold), threshold.expand_as(z))
    assert (tau <= threshold + 1e-12).all()


# ---- blocks ----


@pytest.mark.parametrize("keep_scores, times", [(10**9, 1), (0, 2)])
@pytest.mark.parametrize(
    "Lq, block_queries, block_scores, rows_of_blocks",
    [
        (10, 3, 2 * 3 * 10, 3 * [2, 6, 6, 6]),  # at most 3 queries
        (10, 256, 2 * 5 * 10, 3 * [10, 10]),  # 5 queries, as many as fit
        (10, 256, 1, 3 * 5 * [4]),  # at least 2 queries
        (4, 256, 4 * 10 * 4, [16, 8]),  # all 4 queries of 2 sequences
    ],
)
def test_blocks_are_small_and_recomputed_where_scores_are_many(
    Lq, block_queries, block_scores, rows_of_blocks, keep_scores, times, monkeypatch
):
    rows = []
    output = ReferenceAttention.output

    def counting_output(self, q, *rest):
        rows.append(q.shape[:3].numel())
        return output(self, q, *rest)

    monkeypatch.setattr(ReferenceAttention, "output", counting_output)
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", block_queries)
    monkeypatch.setattr(blocked, "FEWEST_QUERIES", 2)
    monkeypatch.setattr(blocked, "BLOCK_SCORES_CPU", block_scores)
    monkeypatch.setattr(blocked, "KEEP_SCORES", keep_scores)
    attn = build("lssar_p3.py").double()
    q, k, v = leaves(*draw(Lq, 10, B=3))
    out = attn(q, k, v)
    expected = textbook.attention(attn, q, k, v)
    assert_near(out, expected)
    assert rows == rows_of_blocks
    out.sum().backward()
    assert len(rows) == times * len(rows_of_blocks)


def test_recomputed_blocks_draw_the_same_random_numbers(monkeypatch):
    """In the forward pass and the backward pass, for a variant such as one with dropout."""
    monkeypatch.setattr(blocked, "KEEP_SCORES", 0)
    dropout = Variant(attention.EXP, reweight=lambda A, rows: F.dropout(A, 0.5))
    monkeypatch.setitem(VARIANTS, "dropout", dropout)
    attn = build_attentions(small_config("softmax.py", "--attention=dropout"), layer=0)[0].double()
    q, k, _ = draw(8, 8)
    v = torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8).clone().requires_grad_()
    weights = attn(q, k, v)
    gradient = torch.linspace(-1, 2, 256, dtype=torch.float64).view(2, 2, 8, 8)
    weights.backward(gradient)
    assert_near(v.grad, weights.detach().mT @ gradient)


# ---- windows and paths ----


def with_gradients(function, attn, inputs, context=NO_CONTEXT):
    """The output of function(q, k, v, context), and its gradients by inputs and parameters.

    The inputs begin with q, k and v.
    """
    q, k, v, *_ = inputs
    out = function(q, k, v, context)
    gradient = torch.linspace(-1, 2, out.numel(), dtype=out.dtype)
    by = [*inputs, *attn.parameters()]
    gradients = torch.autograd.grad(out, by, gradient.view_as(out))
    return [out, *gradients]


@pytest.mark.parametrize("case", CASES)
def test_every_path_equals_the_formula(case, small_blocks, monkeypatch):
    """With a window and without; more than the 16 keys of the training length, too."""
    monkeypatch.setattr(blocked, "KEEP_SCORES", 100)  # of the first alone
    paths = ["reference", "auto"]
    if case in SDPA_CASES:  # elsewhere "auto" is "blocked"
        paths.append("blocked")
    for Lq, Lk, window in (
        (11, 11, 1),
        (11, 11, 3),
        (10, 12, 5),
        (1, 9, 6),
        (3, 30, 20),
        (10, 10, None),
    ):
        B = 1 if window else 2
        inputs = leaves(*draw(Lq, Lk, seed=Lk, B=B))
        with_window = f"--window={window}"
        reference = build(case, with_window, "--attention_impl=reference").double()
        q, k, _ = inputs
        expected_weights = textbook.weights(reference, q, k)
        assert_near(reference.weights(q, k), expected_weights)
        formula = functools.partial(textbook.attention, reference)
        expected = with_gradients(formula, reference, inputs)
        for path in paths:
            attn = build(case, with_window, f"--attention_impl={path}").double()
            actual = with_gradients(attn, attn, inputs)
            assert_near(actual, expected)


class MinimumsAreOfFloats(TorchDispatchMode):
    """Sees each operation that a graph of the call would have."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if re.search("clamp|minimum", function.__name__):
            assert out.is_floating_point(), function
        return out


@pytest.mark.parametrize("case", CASES)
def test_clamps_are_of_floats(case):
    """Inductor for CUDA folds a minimum of integers with an index, and fails in some backwards."""
    attn = build(case, "--window=5")
    attn.impl = "blocked"
    q, k, v = torch.randn(3, 1, 2, 16, attn.head_size)
    with MinimumsAreOfFloats():
        attn(q, k, v)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive(scale):
    """torch's scaled_dot_product_attention returns nan for it."""
    variant = Variant(attention.EXP, scale=lambda rows: scale)
    qkv = torch.randn(3, 1, 2, 8, 16)
    expected = Attention(variant, 2, 16, impl="reference")(*qkv)
    torch.testing.assert_close(Attention(variant, 2, 16)(*qkv), expected)


@pytest.mark.parametrize("case, path", [("ssmax.py", "sdpa"), ("lssar_p3.py", "blocked")])
def test_a_deep_copy_takes_the_same_path(case, path):
    attn = build(case)
    q, _, _ = draw(4, 4)
    for layer in (attn, copy.deepcopy(attn)):
        assert layer.path(q, 4) == path


@pytest.mark.parametrize("case", ["softmax.py", "lssar_p3.py"])
def test_a_block_reads_the_keys_of_its_window_alone(case, small_blocks, monkeypatch):
    lengths = []
    output = ReferenceAttention.output
    sdpa_output = F.scaled_dot_product_attention

    def noting_output(self, q, keys, *rest):
        lengths.append((q.shape[2], keys.k.shape[2]))
        return output(self, q, keys, *rest)

    def noting_sdpa(q, k, *rest, **options):
        lengths.append((q.shape[2], k.shape[2]))
        return sdpa_output(q, k, *rest, **options)

    monkeypatch.setattr(ReferenceAttention, "output", noting_output)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting_sdpa)
    attn = build(case, "--window=6")
    q, k, v = draw(20, 50, B=1)
    attn(q, k, v)
    assert lengths == [(4, 9)] * 5


@pytest.mark.parametrize("window", [None, 3])
def test_grouped_keys_are_repeated_where_sdpa_would_hold_all_scores(window, monkeypatch):
    def noting_sdpa(q, k, *rest, **options):
        heads = q.shape[1]
        heads_of_keys = k.shape[1]
        groups.append((heads, heads_of_keys, options["enable_gqa"]))
        return real(q, k, *rest, **options)

    groups = []
    real = F.scaled_dot_product_attention
    grouped = ("--n_head=4", "--n_kv_head=2")
    attn = build("softmax.py", *grouped, f"--window={window}").double()
    q, k, v = draw(11, 11, B=2, H=4)
    inputs = leaves(q, k[:, :2], v[:, :2])
    expected = with_gradients(attn, attn, inputs)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting_sdpa)
    monkeypatch.setattr(sdpa, "takes_groups", lambda q, is_masked: False)
    actual = with_gradients(attn, attn, inputs)
    assert_near(actual, expected)
    assert set(groups) == {(4, 4, False)}


def test_only_flashattention_takes_grouped_keys_on_cuda(monkeypatch):
    assert sdpa.takes_groups(torch.empty(1), is_masked=True)
    for capability, dtype, takes in (
        ((7, 5), torch.float16, False),  # T4
        ((8, 0), torch.bfloat16, True),
        ((8, 0), torch.float32, False),
        ((12, 0), torch.float16, True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with FakeTensorMode():
            q = torch.empty(1, device="cuda", dtype=dtype)
        assert sdpa.takes_groups(q, is_masked=False) == takes
        assert not sdpa.takes_groups(q, is_masked=True)


# ---- edge cases ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", P_CASES)
def test_tied_rows_stay_uniform_with_bounded_gradients(case, dtype):
    attn = build(case)
    for n in (2, 4, 5, 7, 33, 1000):
        q, k, v = draw(1, n, seed=n, dtype=dtype)
        k = q.sign() + torch.zeros_like(k)  # equal keys, with a score above 0
        q, k, v = leaves(q, k, v)
        A = attn.weights(q, k)
        uniform = torch.full_like(A, 1 / n)
        assert_near(A, uniform, rtol=1e-5)
        out = attn(q, k, v)
        out.backward(torch.ones_like(out))
        for x in (q, k, v):
            assert x.grad.abs().max() < 1e3


@pytest.mark.parametrize("p", [1, 2, 3, 7, 15.0, 100, 999, 1000, 2.5])
def test_normalised_powers_and_their_gradients(p):
    """A CPU's faster powers against the formula, whose gradients are autograd's."""
    torch.manual_seed(0)
    exact = torch.randn(3, 50, dtype=torch.float64)
    exact[1] = -1.0  # a dead row
    g, h = torch.randn(2, 3, 50, dtype=torch.float64)

    def derivatives(dtype, normalised_power=power.fast_normalised_power):
        x = exact.to(dtype).requires_grad_()
        top = x.detach().amax(-1, keepdim=True).relu()
        A = normalised_power(x, top, p)
        (slope,) = torch.autograd.grad(A, x, g.to(dtype), create_graph=True)
        (curve,) = torch.autograd.grad(slope, x, h.to(dtype))
        return A, slope, curve

    expected = derivatives(torch.float64, attention.normalised_power)
    assert_near(derivatives(torch.float64), expected)
    # a relative error of an eps in x becomes p of them, and terms of both signs cancel
    tolerance = 16 * (p + 16) * EPS
    for rounded, formula in zip(derivatives(torch.float32), expected, strict=True):
        size = formula.abs().max().item()
        assert_near(rounded.double() / size, formula / size, atol=tolerance)


@pytest.mark.parametrize("p", [2.5, 15, 1e4])
def test_a_row_with_a_single_key_has_no_gradient(p):
    torch.manual_seed(0)
    top = torch.rand(200, 1)
    others = -torch.rand(200, 9)
    x = torch.cat((top, others), dim=1).requires_grad_()
    A = power.fast_normalised_power(x, top, p)
    A.backward(torch.randn(200, 10))
    assert (A[:, 0] == 1).all()
    assert not A[:, 1:].any()
    assert not x.grad.any()


@pytest.mark.parametrize("largest, winner", [(15.9 * EPS, 0.1), (16.1 * EPS, 1.0)])
def test_a_row_counts_as_tied_up_to_16_eps(largest, winner):
    A = torch.full((1, 1, 1, 10), 0.1 * (1 - largest / 9), dtype=torch.float64)
    A[..., 3] = 0.1 * (1 + largest)
    q_idx = torch.tensor([[9]])
    rows = attention.Rows(
        n=q_idx + 1.0,
        q_idx=q_idx,
        kv_idx=torch.arange(10),
        head=torch.zeros(1, 1, 1),
        window=None,
        d=8,
        T=10,
        p=3,
        power_then_l1=attention.normalised_power,
    )
    out = attention.relu_power(A, rows)
    assert out[0, 0, 0, 3] == pytest.approx(winner, rel=1e-4)
    assert out.sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", RELU_CASES)
def test_dead_relu_rows_are_zero_with_zero_gradient(case, dtype):
    attn = build(case)
    q, k, v = draw(6, 6, dtype=dtype)
    q = q[:, :, :1] + torch.zeros_like(q)  # every query points away from every key
    k = -q.sign()
    q, k, v = leaves(q, k, v)
    out = attn(q, k, v)
    assert not out.any()
    assert not attn.weights(q, k).any()
    out.backward(torch.ones_like(out))
    for x in (q, k, v):
        assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_zero_queries_are_finite(case, dtype):
    attn = build(case)
    if dtype == torch.float16 and attn.variant.l2_normalise:
        pytest.skip("the bound of a zero query's gradient, 1e6 times the scale, exceeds float16")
    q, k, v = draw(9, 9, dtype=dtype)
    k[:, :, 3] = 0
    assert_finite_with_gradients(attn, torch.zeros_like(q), k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", [case for case in CASES if case != "ablations/exp.py"])
def test_scores_of_ten_thousand_are_finite(case, dtype):
    _, k, v = draw(9, 9, dtype=dtype)
    signs = torch.tensor([-1, -1, -1, -1, -1, 1, -1, 1, 1], dtype=dtype)
    size = math.sqrt(1e4 / 8)
    large = size * signs[:, None] + torch.zeros_like(k)
    assert_finite_with_gradients(build(case), large.abs(), large, v)


def assert_finite_with_gradients(attn, q, k, v):
    q, k, v = leaves(q, k, v)
    out = attn(q, k, v)
    out.backward(torch.ones_like(out))
    gradients = [x.grad for x in (q, k, v, *attn.parameters())]
    assert_finite(out, attn.weights(q, k), *gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_dtypes(case, dtype):
    """Float32 at least inside, whatever autocast says."""
    attn = build_attentions(small_config(case), layer=0)[0]
    q, k, v = leaves(*draw(5, 300, d=8, size=1, dtype=dtype))
    out = attn(q, k, v)
    A = attn.weights(q, k)
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.dtype == dtype
    assert A.dtype == inside
    exact = attn.weights(q.double(), k.double())
    assert_near(A.double(), exact, rtol=1e-4, atol=1e-6)  # n past 256 counts in every dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attn(q, k, v), out)
        assert torch.equal(attn.weights(q, k), A)
    out.backward(torch.ones_like(out))
    assert_finite(out, q.grad, k.grad, v.grad)


# ---- a user's own variant ----


def root_of_softplus(z):
    """Its gradient at minus infinity, the score of masked keys, is NaN."""
    return F.softplus(z).sqrt()


@pytest.mark.parametrize("p", ["None", "3"])
def test_a_new_phi_works_everywhere(p, monkeypatch):
    monkeypatch.setitem(VARIANTS, "own", Variant(Phi(root_of_softplus)))
    attn = build("softmax.py", "--attention=own", f"--p={p}")
    q, k, v = leaves(*draw(7, 9))
    monkeypatch.setitem(textbook.FORMULAS, "own", lambda t: t.l1(root_of_softplus, t.z()))
    A = textbook.weights(attn, q, k)
    assert_near(attn.weights(q, k), A)
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 3)
    expected = A @ v
    assert_near(attn(q, k, v), expected)
    last = attn(q[:, :, -1:], k, v)
    assert_near(last, expected[:, :, -1:])
    few = leaves(*draw(3, 5, B=1, d=8))
    assert gradcheck(attn, few)


GRADIENTS_AT_MASKED_KEYS = {
    "finite zero": Variant(Phi(root_of_softplus, zero=-1000.0)),
    "reweight": Variant(
        attention.SIGMOID,
        norm=lambda rows: rows.n,
        reweight=lambda A, rows: A.sqrt(),
    ),
    "in place": Variant(Phi(lambda z: z.exp_())),
    "no query or key counts": Variant(
        attention.EXP,
        row_weights=lambda z, rows: torch.softmax(
            torch.where(z.isfinite(), -rows.s * rows.distance(), -torch.inf), dim=-1
        ),
        learnable=("s",),
    ),
    "bias with s": Variant(
        attention.EXP,
        bias=lambda rows: -rows.s * rows.distance().log1p(),
        bias_per_key=True,
        learnable=("s",),
    ),
}


@pytest.mark.parametrize("variant", GRADIENTS_AT_MASKED_KEYS.values(), ids=GRADIENTS_AT_MASKED_KEYS)
def test_formulas_whose_gradient_at_masked_keys_is_nan_are_accepted(variant):
    check_variant(variant, 2)


def test_a_layer_can_be_built_in_inference_mode():
    check_computation.cache_clear()
    with torch.inference_mode():
        Attention(VARIANTS["ssmax"], 2, 16)


@pytest.mark.parametrize(
    "name, settings, says",
    [
        ("sparsemax", {"p": 15.0}, "attention = 'sparsemax' cannot have p = 15.0"),
        ("sigmoid", {"p": 3.0}, "attention = 'sigmoid' cannot have p = 3.0"),
        ("sparsemax", {"sink": "one"}, "attention = 'sparsemax' cannot have a sink"),
        ("softmax", {"sink": "learnt"}, "sink = 'learnt'; did you mean learned"),
    ],
)
def test_settings_without_a_meaning_are_refused(name, settings, says):
    with pytest.raises(UserError, match=says):
        Attention(VARIANTS[name], 2, 16, **settings)


def test_queries_in_another_layout_are_refused():
    q = torch.zeros(2, 5, 4, 16)  # [B, L, H, d], as flash_attn takes them
    with pytest.raises(UserError, match=r"shape \(2, 5, 4, 16\) must be \[B, n_head = 4, L, d\]"):
        Attention(VARIANTS["lssa"], 4, 16)(q, q, q)


def test_messages_name_the_entry_itself_and_not_another_one_like_it(monkeypatch):
    monkeypatch.setitem(VARIANTS, "own", Variant(attention.EXP))
    with pytest.raises(UserError, match="attention = 'own' cannot have s_init = 2"):
        Attention(VARIANTS["own"], 2, 16, s=2.0)


TEMPERATURE = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
REFUSED = [
    (
        Variant(Phi(attention.softplus, shift=torch.neg)),
        "own: phi.shift changes the weights of a row whose scores are about -60",
    ),
    (
        Variant(Phi(torch.tanh)),
        r"own: phi\(-inf\) = -1.*no weight.*zero=",
    ),
    (
        Variant(Phi(lambda z: torch.where(z > 20, math.inf, z.exp()))),
        r"own: phi\(20.1\) is not finite",
    ),
    (
        Variant(Phi(torch.tanh, zero=0.0)),
        r"own: phi\(-30\) = -1 is negative.*signed=True",
    ),
    (
        Variant(Phi(lambda z: math.exp(z))),
        r"own: its phi returns a float; .*torch\.exp\(z\), not math\.exp\(z\)",
    ),
    (
        Variant(Phi(lambda z: z.exp(2))),
        "own: its phi fails: TypeError: .*; it must return a tensor",
    ),
    (
        Variant(Phi(lambda z: z.exp().sum())),
        r"own: its phi returns the shape \[\] for scores of the shape \[1\]",
    ),
    (
        Variant(Phi(torch.exp, kernel="elu")),
        "own: kernel = 'elu'; did you mean relu?",
    ),
    (
        Variant(attention.EXP, scale=lambda rows: math.log(rows.n)),
        r"own: its scale fails.*rows\.n\.log\(\), not math\.log",
    ),
    (
        Variant(Phi(lambda z: torch.exp(z * TEMPERATURE))),
        r"own: its formulas use a parameter of the shape \[1\], which no optimizer trains",
    ),
    (
        Variant(attention.EXP, scale=0.5),
        "own: its scale is a float, but must be a function",
    ),
    (
        Variant(attention.EXP, scale=attention.s_log_n, learnable=["s"]),
        r"own: learnable = \['s'\] must be a tuple",
    ),
    (
        Variant(attention.EXP, from_input=("u",)),
        "own: no formula uses u, which `from_input` names",
    ),
    (
        Variant(attention.EXP, row_weights=lambda z, rows: z.softmax(-1).mean(1, keepdim=True)),
        r"own: in a call of 2 heads, 6 rows and 6 keys its weights.* are \[1, 1, 6, 6\], not",
    ),
    (
        Variant(attention.EXP, row_weights=lambda z, rows: None),
        "own: .* its weights.* are NoneType, not",
    ),
    (
        Variant(attention.EXP, bias=lambda rows: rows.kv_idx - rows.q_idx),
        "own: its bias differs between keys, so it needs bias_per_key=True",
    ),
    (
        Variant(attention.EXP, reweight=lambda A, rows: A / A.amax(-2, keepdim=True)),
        "own: row 2 depends on keys after it",
    ),
    (
        Variant(
            attention.EXP,
            bias=lambda rows: -rows.s * (rows.q_idx - rows.kv_idx).log1p(),
            bias_per_key=True,
            learnable=("s",),
        ),
        r"own: the gradient of its weights with respect to s is not finite.*rows\.distance\(\)",
    ),
    (
        Variant(attention.EXP, scale=lambda rows: 1 / rows.n.log()),
        "own: the gradient of its weights with respect to q is not finite; in the first row n is 1",
    ),
    (
        Variant(
            attention.EXP,
            reweight=lambda A, rows: attention.l1_normalise((A - A.mean(-1, True)).relu()),
        ),
        "own: a row's weights depend on the number of rows or keys in the call",
    ),
    (
        Variant(
            attention.EXP, bias=lambda rows: (rows.q_idx + 1).log() * rows.kv_idx, bias_per_key=True
        ),
        "own: a row's weights depend on the number",
    ),
    (
        Variant(
            attention.EXP,
            scale=lambda rows: rows.s.flatten() * rows.d**-0.5,
            learnable=("s",),
        ),
        r"own: in a call of 2 heads, 6 rows and 6 keys its scale has the shape \[2\]",
    ),
    (attention.EXP, "own is a Phi, but must be a Variant"),
    (Variant(torch.exp), "own: its phi is a builtin_function_or_method, but must be a Phi"),
    (Variant(attention.EXP, from_input=("x",)), "own: from_input = 'x'; .*u, w"),
]


@pytest.mark.parametrize(("variant", "message"), REFUSED)
def test_a_variant_that_cannot_be_computed_or_trained_is_refused(variant, message, monkeypatch):
    monkeypatch.setitem(VARIANTS, "own", variant)
    with pytest.raises(UserError, match=message):
        build_attentions(small_config("softmax.py --attention=own"), layer=0)


def test_the_bias_of_a_users_variant_may_differ_between_heads_and_keys(small_blocks, monkeypatch):
    """ALiBi as a variant, in blocks of 4 queries, against the setting."""

    def bias(rows):
        slope = 2.0 ** (-8 * (rows.head + 1) / len(rows.head))
        return -slope * rows.distance()

    variant = Variant(attention.EXP, bias=bias, bias_per_key=True)
    monkeypatch.setitem(VARIANTS, "own", variant)
    for window in (None, 3):
        with_window = f"--window={window}"
        own = build("softmax.py", with_window, "--attention=own").double()
        alibi = build("softmax.py", with_window, "--positions=alibi").double()
        q, _, _ = draw(1, 1)
        assert own.path(q, 1) == "blocked"
        for Lq, Lk in ((9, 9), (1, 9), (3, 7)):
            q, k, v = draw(Lq, Lk)
            assert_near(own(q, k, v), alibi(q, k, v))
            assert_near(own.weights(q, k), alibi.weights(q, k))


def test_heads_without_alibi_have_none_beside_few_with_it():
    """The formula of a slope overflows, in float64 too, for heads far before those with ALiBi."""
    q, k, v = torch.randn(3, 1, 140, 9, 4, dtype=torch.float64)
    with_alibi = Attention(VARIANTS["softmax"], 140, 4, alibi_heads=1)
    without = Attention(VARIANTS["softmax"], 140, 4)
    for impl in ("reference", "blocked", "auto"):
        with_alibi.impl = impl
        out = with_alibi(q, k, v)
        assert_near(out[:, :139], without(q, k, v)[:, :139])
        distance = torch.arange(9.0)[:, None] - torch.arange(9)
        scores = (q[:, 139] @ k[:, 139].mT / 2 - 2.0**-8 * distance).masked_fill(distance < 0, -1e9)
        assert_near(out[:, 139], scores.softmax(-1) @ v[:, 139])


def test_an_unknown_path_is_refused():
    for impl in ("sdpa", "flash"):
        with pytest.raises(UserError, match=f"attention_impl = '{impl}'; .*must be one of auto"):
            Attention(VARIANTS["lssar"], 2, 8, p=3.0, impl=impl)


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    st.sampled_from(["softmax.py", "lssar_p3.py", "sigmoid_l1.py", "ssmax.py --p=2"]),
    st.sampled_from(["none", "alibi"]),
    st.sampled_from(["none", "one", "learned"]),
    st.sampled_from([None, 2]),
    st.sampled_from([None, 4]),
    st.sampled_from([1, 2]),
    st.integers(0, 2**16),
)
def test_settings_compose(case, positions, sink, softcap, window, kv_heads, seed):
    """Every path against the formula, for values, gradients and a single query."""
    layer_settings = [
        f"--positions={positions}",
        f"--sink={sink}",
        f"--softcap={softcap}",
        f"--window={window}",
        "--n_head=2",
    ]
    q, k, v = draw(5, 8, seed)
    generator = torch.Generator().manual_seed(seed)
    log_forget = -torch.rand(2, 2, 8, dtype=torch.float64, generator=generator)
    inputs = leaves(q, k[:, :kv_heads], v[:, :kv_heads], log_forget)
    q, k, v, log_forget = inputs
    context = Context(log_forget=log_forget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK_QUERIES", 2)
        patch.setattr(blocked, "BLOCK_SCORES_CPU", 1)
        for path in ("reference", "auto", "blocked"):
            attn = build(case, *layer_settings, f"--attention_impl={path}").double()
            formula = functools.partial(textbook.attention, attn)
            expected = with_gradients(formula, attn, inputs, context)
            actual = with_gradients(attn, attn, inputs, context)
            assert_near(actual, expected)
            with torch.no_grad():
                last = attn(q[:, :, -1:], k, v, context)
            expected_out = expected[0]
            assert_near(last, expected_out[:, :, -1:])
