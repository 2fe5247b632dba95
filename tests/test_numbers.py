"""Rounding: in float32 and bfloat16, every row is about as exact as its formula as printed.

tests/textbook.py evaluates the formula twice on the same inputs: in the dtype under test, with
every number rounded to it, and in float64, which is the truth. The error of Attention, in value and
in every gradient, is at most twice the formula's error in the dtype under test, plus a floor.
"""

import functools
import zlib

import pytest
import torch

from tests import textbook
from tests.helpers import ATTENTIONS
from tests.kernel_cases import build_layer, draw, draw_off_kinks, evaluate, exact_evaluation

FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16

# ---- rounding ----

# Their slopes jump where a key enters the support, or are infinite there.
SPARSE = {"sparsemax.py", "entmax15.py", "asentmax.py"}
ROWS = [row for row in ATTENTIONS if row not in SPARSE]
# (length, window)
SIZES = [
    (1, None),
    (2, None),
    (5, None),
    (65, None),
    (65, 4),
    (1000, None),
    (1000, 300),
]
LEARNABLE = ("ds", "db", "dp_n")


def floor(name, keys, dtype):
    """The relative error allowed beyond twice the textbook's.

    With few keys the ratio of the two errors means little: up to 5 keys the textbook's can be 0. A
    learnable parameter's gradient is one sum of terms that cancel, and torch's fused attention
    recomputes them from the logsumexp: in float32 it is 2 to 5 times less exact than the textbook.
    """
    eps = torch.finfo(dtype).eps
    if dtype is BFLOAT16:
        if name in LEARNABLE:
            return 2 * eps
        return eps / 2  # the result itself is rounded
    if name in LEARNABLE:
        return 48 * eps
    if keys <= 5:
        return 16 * eps
    return 4 * eps


drawn = functools.cache(draw_off_kinks)  # once for all rows


class Evaluations:
    """Results of several draws, by name: of ours, of the formula in the same dtype, and exact."""

    def __init__(self, case, head_size, window):
        self.layer = build_layer(case, head_size, f"--window={window}")
        self.exact_layer = build_layer(case, head_size, f"--window={window}").double()
        self.ours = []
        self.printed = []
        self.exact = []
        self.squares = 0.0  # sum of the incoming gradient's

    def add(self, tensors):
        doubles = [x.double() for x in tensors]
        self.ours.append(evaluate(self.layer, tensors))
        self.printed.append(evaluate(self.layer, tensors, textbook.attention))
        self.exact.append(evaluate(self.exact_layer, doubles, textbook.attention))
        self.squares += doubles[-1].square().sum()

    def errors(self, name, keys):
        """The relative errors of ours, and of the formula in the same dtype."""
        exact = torch.cat([result[name] for result in self.exact])
        ours = torch.cat([result[name] for result in self.ours])
        printed = torch.cat([result[name] for result in self.printed])
        scale = self.squares**0.5
        if keys > 1:  # with one key most gradients are 0
            scale = max(exact.norm(), 1e-9 * scale)
        error = (ours - exact).norm() / scale
        error_of_printed = (printed - exact).norm() / scale
        return error, error_of_printed


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("case", ROWS)
def test_at_most_twice_the_error_of_the_formula_in_the_same_dtype(case, dtype):
    for i, (L, window) in enumerate(SIZES):
        # each length meets each head size in about a third of the rows; a new row changes no other
        hash_of_row = zlib.crc32(case.encode())
        head_size = (16, 64, 128)[(i + hash_of_row) % 3]
        evaluations = Evaluations(case, head_size, window)
        keys = min(L, window or L)
        draws = 1
        B = max(1, 64 // L)
        if keys <= 5:  # the ratio of two small errors: one draw says little
            draws = 8
        if list(evaluations.layer.parameters()):  # few gradients: as many as 8 draws have
            draws = 8
            B = 1
        rows = min(L, 32)  # the last positions
        seeds = range(0, 100 * draws, 100)
        inputs = [drawn(rows, L, head_size, dtype, B, seed, window) for seed in seeds]
        if not list(evaluations.layer.parameters()):  # as one batch
            inputs = [[torch.cat(tensors) for tensors in zip(*inputs, strict=True)]]
        for tensors in inputs:
            evaluations.add(tensors)
        for name in evaluations.exact[0]:
            error, bar = evaluations.errors(name, keys)
            assert bar.isfinite()
            limit = 2 * bar + floor(name, keys, dtype)
            assert error <= limit, (L, window, head_size, name, error, bar)


@pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
@pytest.mark.parametrize(
    "case, score",
    [
        ("relu_li.py", 1e-22),
        ("ablations/linear_l1.py", -1e-22),
        ("ablations/phi_relu2.py", 1e-11),
        ("ablations/phi_gelu.py", -9.5),
        ("ablations/phi_mish.py", -50),
    ],
)
def test_rows_of_tiny_weights(case, score, impl):
    """Their sums are below 5e-20, whose inverse square overflows; F.gelu would be 0."""
    if impl == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    q, k, v, gradient = draw(9, 9, 16, FLOAT32)
    q = q.abs()
    q = q * score / (q.sum(-1, keepdim=True) / 4)
    k = 0.9 + 0.1 * k.abs()
    inputs = (q, k, v, gradient)
    layer = build_layer(case, 16, f"--attention_impl={impl}")
    results = evaluate(layer, inputs)
    for name, exact in exact_evaluation(case, inputs).items():
        tolerance = 1e-4
        if (case, impl, name) == ("ablations/phi_gelu.py", "triton", "dq"):
            # its terms cancel: on some CPUs the kernels' gelu, exact to 1.2e-7, leaves 2.3e-4 of it
            tolerance = 1e-3
        error = (results[name] - exact).norm()
        assert error < tolerance * exact.norm(), name


# ---- 16,384 keys ----


@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py", "sigmoid_logn_l1_p15.py"])
def test_p_of_100_at_16384_keys_in_bfloat16(case):
    """The queries are the last four positions; one of them has a score far above the others."""
    q, k, v, gradient = draw(4, 16384, 64, BFLOAT16)
    q[:, :, 2] = 2 * k[:, :, 100]
    attn = build_layer(case, 64, "--p=100")
    results = evaluate(attn, (q, k, v, gradient))
    for result in results.values():
        assert result.isfinite().all()
    A = attn.weights(q, k)
    sums = A.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=0)
    assert (A[:, :, 2, 100] > 0.99).all()
    double = build_layer(case, 64, "--p=100").double()
    exact = textbook.attention(double, q.double(), k.double(), v.double())
    error = (results["out"] - exact.flatten()).norm()
    assert error < 0.01 * exact.norm()
