"""Rounding: in float32 and bfloat16, every row is about as exact as its formula as printed.

tests/textbook.py evaluates the formula twice on the same inputs: in the dtype under test, with
every number rounded to it, and in float64, which is the truth. The error of Attention, in value and
in every gradient, is at most twice that of the first, up to the floors below.
"""

import pytest
import torch

from tests import textbook
from tests.fused import build, draw, draw_off_kinks, evaluate, exact_evaluation
from tests.helpers import ATTENTIONS

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

# ---- rounding ----

# whose slopes jump where a key enters the support, or are infinite there
SPARSE = {"sparsemax.py", "entmax15.py", "asentmax.py"}
ROWS = [row for row in ATTENTIONS if row not in SPARSE]
# (length, window)
SIZES = [(1, None), (2, None), (5, None), (65, None), (65, 4), (1000, None), (1000, 300)]
LEARNABLE = ("ds", "db", "dp_n")


def floor(name, keys, dtype):
    """The relative error allowed beyond twice the textbook's.

    With few keys the ratio of the two errors means little: up to 5 keys the textbook's can be 0. A
    learnable parameter's gradient is one sum of terms that cancel, and torch's fused attention
    recomputes them from the logsumexp: in float32 it is 2 to 5 times less exact than the textbook.
    """
    eps = torch.finfo(dtype).eps
    if name in LEARNABLE:
        return (48 if dtype is FLOAT32 else 2) * eps
    if dtype is FLOAT32:
        return (16 if keys <= 5 else 4) * eps
    return eps / 2  # the result itself is rounded


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("case", ROWS)
def test_at_most_twice_the_error_of_the_formula_in_the_same_dtype(case, dtype):
    for i, (L, window) in enumerate(SIZES):
        d = (16, 64, 128)[(i + ROWS.index(case)) % 3]  # each pair of L and d in a third of the rows
        attn, exactly = (build(case, d, f"--window={window}") for _ in range(2))
        exactly.double()
        keys = min(L, window or L)
        # the last 32 positions; parameters have few gradients, so those of 8 draws
        draws, B = (8, 1) if list(attn.parameters()) else (1, max(1, 64 // L))
        ours, printed, exact, size = [], [], [], 0.0
        for seed in range(draws):
            tensors = draw_off_kinks(min(L, 32), L, d, dtype, B, 100 * seed, window)
            ours.append(evaluate(attn, tensors))
            printed.append(evaluate(attn, tensors, textbook.attention))
            exact.append(evaluate(exactly, [x.double() for x in tensors], textbook.attention))
            size += tensors[-1].double().square().sum()
        for name in exact[0]:
            truth, mine, theirs = (
                torch.cat([result[name] for result in results])
                for results in (exact, ours, printed)
            )
            # with one key most gradients are 0: errors are relative to the incoming gradient
            scale = max(truth.norm(), 1e-9 * size**0.5) if keys > 1 else size**0.5
            error, bar = (mine - truth).norm() / scale, (theirs - truth).norm() / scale
            assert bar.isfinite()
            assert error <= 2 * bar + floor(name, keys, dtype), (L, window, d, name, error, bar)


@pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
@pytest.mark.parametrize(
    "case, score",
    [("relu_li.py", 1e-22), ("ablations/linear_l1.py", -1e-22), ("ablations/phi_relu2.py", 1e-11),
     ("ablations/phi_gelu.py", -9.5), ("ablations/phi_mish.py", -50)],
)  # fmt: skip
def test_rows_of_tiny_weights(case, score, impl):
    """Their sums are below 5e-20, whose inverse square overflows; F.gelu would be 0.

    The terms of dq cancel: on some CPUs the kernels' gelu, exact to 1.2e-7, leaves 2.3e-4 of dq.
    """
    q, k, v, gradient = draw(9, 9, 16, FLOAT32)
    q = q.abs() * score / (q.abs().sum(-1, keepdim=True) / 4)
    k = 0.9 + 0.1 * k.abs()
    found = evaluate(build(case, 16, f"--attention_impl={impl}"), (q, k, v, gradient))
    for name, exact in exact_evaluation(case, (q, k, v, gradient)).items():
        cancels = (case, impl, name) == ("ablations/phi_gelu.py", "triton", "dq")
        assert (found[name] - exact).norm() < (1e-3 if cancels else 1e-4) * exact.norm(), name


# ---- 16,384 keys ----


@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py", "sigmoid_logn_l1_p15.py"])
def test_p_of_100_at_16384_keys_in_bfloat16(case):
    """The queries are the last four positions; one of them has a score far above the others."""
    q, k, v, gradient = draw(4, 16384, 64, BFLOAT16)
    q[:, :, 2] = 2 * k[:, :, 100]
    attn = build(case, 64, "--p=100")
    ours = evaluate(attn, (q, k, v, gradient))
    assert all(x.isfinite().all() for x in ours.values())
    A = attn.weights(q, k)
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]), rtol=1e-5, atol=0)
    assert (A[:, :, 2, 100] > 0.99).all()
    double = build(case, 64, "--p=100").double()
    exact = textbook.attention(double, *(x.double() for x in (q, k, v)))
    assert (ours["out"] - exact.flatten()).norm() < 0.01 * exact.norm()
