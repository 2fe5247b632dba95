"""The fused kernels at lengths and in modes that need a GPU; -m stress for the long tests.

On a GPU the tests of tests/test_kernels.py run there too.
"""

import numpy as np
import pytest
import torch

from attention import VARIANTS
from attention_paths.fused import launch
from attention_paths.reference import NO_CONTEXT, Context
from attention_paths.varlen import varlen_parameters
from tests import textbook
from tests.helpers import small_config
from tests.kernel_cases import (
    FUSED,
    REFERENCE,
    SETTINGS,
    build_layer,
    compare,
    decode,
    document_positions,
    draw,
    draw_off_kinks,
    evaluate,
    exact_evaluation,
    in_float64,
    inputs_of,
    kernels,
    layer_output,
)
from tests.runs import metrics

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BFLOAT16 = torch.bfloat16
FLOAT32 = torch.float32
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 127, 129, 1000, 1024, 4096]
# Kernels whose phi, or |phi| in a signed l1, has a kink at 0: rounding a score near 0 changes its
# slope. Up to FREE keys draw_off_kinks finds a draw without such a score.
KINKED = {"relu", "relu6", "identity", "gelu", "mish"}
FREE = 129


def kinked(case):
    return VARIANTS[small_config(case).attention].phi.kernel in KINKED


def check(case, Lq, Lk, d, dtype, coarser=None):
    """tests.kernel_cases.compare with the formula as printed in the same dtype."""
    draws = draw_off_kinks if Lk <= FREE else draw
    compare(case, inputs_of(case, draws(Lq, Lk, d, dtype)), textbook.attention, coarser)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("case", FUSED)
def test_every_variant(case, dtype):
    index = FUSED.index(case)
    for choice in (index, index + 5):
        L = LENGTHS[choice % len(LENGTHS)]
        d = (64, 128, 16)[choice % 3]
        if kinked(case):
            L = min(L, FREE)
        check(case, L, L, d, dtype)
    for window in (1, 40, 64, 100):
        check(f"{case} --window={window}", 129, 129, 64, dtype)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case, dtype):
    check(case, 129, 129, 64, dtype)
    check(case, 70, 129 if kinked(case) else 300, 64, dtype)


@pytest.mark.stress
@pytest.mark.parametrize("L", [16384, 32768])
@pytest.mark.parametrize(
    "case", ["lssar_p15.py", "lssa.py", "relu_li.py", "sigmoid_logn_l1_p15.py"]
)
def test_long(case, L):
    """The last 256 queries against all keys."""
    check(case, 256, L, 64, BFLOAT16)


@pytest.mark.stress
@pytest.mark.parametrize("deterministic", [False, True])  # True: dq has a kernel of its own
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", ["hopper", "ampere", "tf32", "ieee"])
def test_every_block_shape(kind, d, deterministic, monkeypatch):
    """On every GPU whose shared memory is enough; worth running under compute-sanitizer."""
    memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if memory < {"hopper": 227 * 1024}.get(kind, 0):
        pytest.skip("this GPU has too little shared memory")
    monkeypatch.setattr(launch, "SHAPES", dict.fromkeys(launch.SHAPES, launch.SHAPES[kind]))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", kind == "tf32")
    dtype = FLOAT32 if kind in ("tf32", "ieee") else BFLOAT16
    coarser = BFLOAT16 if kind == "tf32" else None
    for case in ("lssar_p15.py", "lssa.py", "sigmoid.py", "softmax_p3.py"):
        for window in ("", " --window=200"):
            check(case + window, 300, 300, d, dtype, coarser)


@pytest.mark.parametrize("window", ["", " --window=900"])
@pytest.mark.parametrize("L", [1, 17, 1000, 16384])
@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "relu_li.py", "softmax_p3.py"])
def test_decoding(case, L, window):
    *inputs, _ = inputs_of(case, draw(1, L, 64, BFLOAT16, B=2))
    out = decode(kernels(case + window, 64), *inputs).double()
    exact = layer_output(in_float64(case + window, 64), *[x.double() for x in inputs])
    assert (out - exact).norm() < 2 * torch.finfo(BFLOAT16).eps * exact.norm()


def test_softmax_takes_the_kernels_where_varlen_attn_cannot_run():
    q = torch.zeros(1, 2, 300, 64, device="cuda", dtype=BFLOAT16)
    layer = build_layer("softmax.py", 64, "--window=100")
    assert layer.path(q, 100) == "sdpa"
    assert layer.path(q, 300) == ("varlen" if "window_size" in varlen_parameters() else "triton")
    assert layer.path(q.float(), 300) == "triton"
    documents = Context(document_positions=document_positions(1, 300, 300))
    assert layer.path(q.float(), 100, documents) == "triton"
    assert layer.path(q.double(), 300) == "sdpa"


@pytest.mark.skipif("window_size" not in varlen_parameters(), reason="no varlen_attn with windows")
@pytest.mark.parametrize(
    "case",
    [
        "softmax.py --window=100",
        "ssmax.py --document_mask",
        "ablations/softmax_cosine.py --document_mask --window=24",
        "softmax.py --n_kv_head=1 --window=40",
    ],
)
def test_varlen_attn(case):
    """Its error is at most twice the error of the reference path in bfloat16, plus a rounding."""
    inputs = inputs_of(case, draw(300, 300, 64, BFLOAT16, B=2))
    layer = build_layer(case, 64)
    context = NO_CONTEXT
    if layer.document_mask:
        context = Context(document_positions=document_positions(2, 300, 300))
    assert layer.path(inputs[0].cuda(), 300, context) == "varlen"
    ours = evaluate(layer, inputs)
    formula = evaluate(build_layer(case, 64, REFERENCE), inputs)
    for name, exact in exact_evaluation(case, inputs).items():
        error = (ours[name] - exact).norm()
        rounding = torch.finfo(BFLOAT16).eps * exact.norm()
        assert error <= 2 * (formula[name] - exact).norm() + rounding, name


def test_200_steps_follow_those_of_the_reference(train):
    def losses(impl):
        out = train(
            impl,
            "configs/lssar_p15.py",
            "--device=cuda",
            "--dtype=bfloat16",
            "--compile=False",
            "--n_embd=128",
            "--block_size=256",
            "--total_batch_size=2048",
            "--max_iters=200",
            "--warmup_iters=50",
            "--learning_rate=1e-3",
            "--eval_interval=1000",
            f"--attention_impl={impl}",
        )
        return np.array([*metrics(out).values()])

    ours = losses("triton")
    reference = losses("reference")
    assert len(ours) > 0
    assert ours[-1] < 0.7 * ours[0]
    assert np.abs(ours - reference).max() < 0.02
