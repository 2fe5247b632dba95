"""The fused kernels on an NVIDIA GPU: pytest -m cuda, and -m stress for the long ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train as training
from attention import VARIANTS
from attention_paths.fused import launch, variant_obstacle
from data.shards import write_meta, write_shard
from tests.fused import (
    REFERENCE,
    TRITON,
    attended,
    build,
    call,
    draw,
    draw_off_kinks,
    evaluate,
)
from tests.helpers import ATTENTIONS, set_meta, small_config

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("poisoned_buffers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FUSED = [
    case for case in ATTENTIONS
    if not variant_obstacle(VARIANTS[small_config(case).attention], 64)
]  # fmt: skip
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 127, 129, 1000, 1024, 4096]
# phi, or |phi| in a signed l1, has a kink at 0, near which a rounded score decides the slope: up to
# so many keys some draw has no score that near
KINKED, FREE = {"relu", "relu6", "identity", "gelu", "mish"}, 129


def with_settings(tensors, config):
    """With as many heads of keys and values as the settings say, and with forget gates if any."""
    q, k, v, gradient = tensors
    k, v = (x[:, : config.kv_heads].contiguous() for x in (k, v))
    g = torch.Generator().manual_seed(0)
    gates = F.logsigmoid(2 + torch.randn(*q.shape[:2], k.shape[2], generator=g))
    return [x.cuda() for x in (q, k, v, *([gates] if config.forget else []), gradient)]


def compare(case, Lq, Lk, d, dtype, *settings, roundings_of=None):
    """Asserts that the kernels' error is at most twice that of the formula in the same dtype, plus
    roundings, which p multiplies."""
    fused, exactly = (build(case, d, *settings, impl).cuda() for impl in (TRITON, REFERENCE))
    keys, draws = min(Lk, fused.window or Lk), draw_off_kinks if Lk <= FREE else draw
    tensors = with_settings(draws(Lq, Lk, d, dtype), small_config(case, *settings))
    truth = evaluate(exactly.double(), [x.double() for x in tensors])
    ours = evaluate(fused, tensors)
    with torch.device("cuda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "attend", attended)
        bar = evaluate(fused, tensors)
        if not all(x.isfinite().all() for x in bar.values()):  # float16 overflows
            bar = evaluate(fused, [x.bfloat16() for x in tensors])
            less = torch.finfo(FLOAT16).eps / torch.finfo(BFLOAT16).eps
            bar = {name: exact + less * (bar[name] - exact) for name, exact in truth.items()}
    eps = torch.finfo(roundings_of or dtype).eps
    roundings = (32 + 4 * (fused.p or 0) if dtype is FLOAT32 else 1) * eps
    size = tensors[-1].double().norm() * (1 if keys <= 5 else 1e-3)
    for name, exact in truth.items():
        scale = max(exact.norm(), size) * (1 if name in ("out", "dq", "dk", "dv") else 10)
        error, allowed = (ours[name] - exact).norm(), 2 * (bar[name] - exact).norm()
        assert error <= allowed + roundings * scale, (Lk, d, name, error / scale, allowed / scale)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("case", FUSED)
def test_every_variant(case, dtype):
    index = FUSED.index(case)
    for step in (0, 5):
        L, d = LENGTHS[(index + step) % len(LENGTHS)], (64, 128, 16)[(index + step) % 3]
        if VARIANTS[small_config(case).attention].phi.kernel in KINKED:
            L = min(L, FREE)
        compare(case, L, L, d, dtype)


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py"])
def test_every_length(case, L):
    compare(case, L, L, 64, BFLOAT16)


# ---- every block shape, in a process of its own: one that faults would take the others along ----

SHAPES = [(kind, d) for kind in ("hopper", "ampere", "small", "tf32", "ieee") for d in (64, 128)]
MEMORY = {"hopper": 227 * 1024, "ampere": 163 * 1024}
CHECK = """
import torch
from attention_paths.launch import SHAPES
from tests.test_kernels_cuda import compare

SHAPES.update(dict.fromkeys(SHAPES, SHAPES["{kind}"]))
torch.backends.cuda.matmul.allow_tf32 = {tf32}
for deterministic in (False, True):  # True: dq has a kernel of its own
    torch.use_deterministic_algorithms(deterministic)
    for case in ("lssar_p15.py", "lssa.py", "sigmoid.py", "softmax_p3.py"):
        for settings in ([], ["--window=200"]):
            compare(case, 300, 300, {d}, torch.{dtype}, *settings, roundings_of={roundings})
"""


@pytest.mark.stress
@pytest.mark.parametrize("kind, d", SHAPES)
def test_every_block_shape(kind, d, tmp_path):
    """Under compute-sanitizer, where it is installed."""
    memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    if memory < MEMORY.get(kind, 0):
        pytest.skip("this GPU has too little shared memory")
    dtype = "float32" if kind in ("tf32", "ieee") else "bfloat16"
    script = tmp_path / "check.py"
    script.write_text(CHECK.format(
        kind=kind, d=d, tf32=kind == "tf32", dtype=dtype,
        roundings="torch.bfloat16" if kind == "tf32" else None,
    ))  # fmt: skip
    sanitizer = shutil.which("compute-sanitizer")
    prefix = [sanitizer, "--error-exitcode=1"] if sanitizer else []
    more = {
        "PYTHONPATH": str(Path(__file__).parent.parent), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }  # fmt: skip
    done = subprocess.run(
        [*prefix, sys.executable, script], env=os.environ | more, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "relu_li.py", "softmax_p3.py"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_nan_in_q_or_k_comes_out_as_nan(case, row):
    attn = build(case, 64, TRITON).cuda()
    tensors = [x.cuda() for x in draw(300, 300, 64, BFLOAT16)]
    tensors[row][0, 0, 200, 3] = torch.nan
    with torch.no_grad():
        out, last = attn(*tensors[:3]), attn(tensors[0][:, :, -1:], *tensors[1:3])
    seen = slice(200, 201) if row == 0 else slice(200, None)
    assert out[0, 0, seen].isnan().all() and out[0, 0, :200].isfinite().all()
    assert out[0, 1].isfinite().all() and last[0, 0].isnan().all() == (row == 1)


@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py"])
def test_under_cuda_graphs(case):
    """torch.compile's reduce-overhead records a training step and replays it."""
    attn = build(case, 64, TRITON).cuda()
    graphed = torch.compile(attn, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        tensors = [x.cuda() for x in draw(200, 200, 64, BFLOAT16, B=2, seed=seed)]
        torch.compiler.cudagraph_mark_step_begin()
        eager, found = evaluate(attn, tensors), evaluate(graphed, tensors)
        for name in eager:
            assert (eager[name] - found[name]).norm() < 0.01 * eager[name].norm()


@pytest.mark.parametrize("window", [1, 5, 63, 64, 100, 128, 200, 299])
@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "softmax_p3.py", "ssmax_bias.py"])
def test_every_window(case, window):
    compare(case, 300, 300, 64, BFLOAT16, f"--window={window}")
    compare(case, 70, 300, 64, FLOAT32, f"--window={window}")


@pytest.mark.parametrize("case", FUSED)
def test_every_row_with_a_window(case):
    compare(case, 129, 129, 64, FLOAT32, "--window=40")


@pytest.mark.parametrize("p", [1, 2, 3, 2.5, 100])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_powers(p, dtype):
    compare("lssa.py", 300, 300, 64, dtype, f"--p={p}")


@pytest.mark.stress
@pytest.mark.parametrize("L", [16384, 32768])
@pytest.mark.parametrize(
    "case", ["lssar_p15.py", "lssa.py", "relu_li.py", "sigmoid_logn_l1_p15.py"]
)
def test_long(case, L):
    """The last 256 queries against all keys."""
    compare(case, 256, L, 64, BFLOAT16)


def test_softmax_takes_the_kernels_with_a_window_alone():
    q = torch.zeros(1, 2, 300, 64, device="cuda", dtype=BFLOAT16)
    attn = build("softmax.py", 64, "--window=100")
    assert attn.path(q, 100) == "sdpa" and attn.path(q, 300) == "triton"
    assert attn.path(q.double(), 300) == "sdpa"


def check_decoding(case, L, dtype, *settings):
    *inputs, _ = with_settings(draw(1, L, 64, dtype, B=2), small_config(case, *settings))
    fused, exactly = (build(case, 64, *settings, impl).cuda() for impl in (TRITON, REFERENCE))
    with torch.no_grad():
        out, exact = call(fused, *inputs), call(exactly.double(), *(x.double() for x in inputs))
    roundings = 32 + 4 * (fused.p or 0) if dtype is FLOAT32 else 2
    assert (out.double() - exact).norm() < roundings * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("window", [[], ["--window=900"]])
@pytest.mark.parametrize("L", [1, 17, 1000, 16384])
@pytest.mark.parametrize("case", ["lssar_p15.py", "lssa.py", "relu_li.py", "softmax_p3.py"])
def test_decoding(case, L, window):
    check_decoding(case, L, BFLOAT16, *window)


# Each setting alone, with one stage and with two, and some together. The second half of heads has
# ALiBi where nope_share is 0.5.
SETTINGS = [
    "softmax.py --softcap=2",
    "lssar_p15.py --softcap=5",
    "softmax.py --positions=alibi",
    "lssar_p3.py --positions=alibi",
    "lssar_p3.py --positions=alibi --nope_share=0.5",
    "softmax.py --forget=True",
    "lssar_p3.py --forget=True",
    "softmax.py --sink=one",
    "lssar_p3.py --sink=one",
    "softmax.py --sink=learned",
    "lssar_p3.py --sink=learned",
    "softmax.py --n_kv_head=1",
    "lssar_p15.py --n_kv_head=1",
    "softpick.py --positions=alibi --softcap=3",
    "softmax_p3.py --forget=True --sink=learned",
    "ssmax.py --positions=alibi --n_kv_head=1",
    "lssar_p15.py --sink=learned --forget=True",
    "lssar_p3.py --positions=alibi --n_kv_head=1 --window=100",
    "softmax.py --forget=True --softcap=5 --n_kv_head=1 --window=100",
]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_go_with_any_row(case, dtype):
    for Lq, Lk in ((300, 300), (129, 129), (70, 300)):
        compare(case, Lq, Lk, 64, dtype)
    check_decoding(case, 300, dtype)


def test_memory_grows_with_the_length_alone():
    attn = build("lssar_p15.py", 64, TRITON).cuda()

    def peak(L):
        q, k, v, gradient = (
            torch.randn(1, 2, L, 64, device="cuda", dtype=BFLOAT16) for _ in "qkvg"
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attn(*inputs), inputs, gradient)
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) < 4.5 * peak(4096)


def test_deterministic_gradients_are_bitwise_the_same():
    tensors = [x.cuda() for x in draw(500, 500, 64, BFLOAT16, B=2)]
    attn = build("lssar_p15.py", 64, TRITON).cuda()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = evaluate(attn, tensors), evaluate(attn, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_compiled_without_graph_breaks():
    tensors = [x.cuda() for x in draw(200, 200, 64, BFLOAT16, B=2)]
    attn = build("lssar_p15.py", 64, TRITON).cuda()
    eager, compiled = (
        evaluate(attn, tensors),
        evaluate(torch.compile(attn, fullgraph=True), tensors),
    )
    for name in eager:
        assert (eager[name] - compiled[name]).norm() < 0.01 * eager[name].norm()


@pytest.fixture
def words(tmp_path):
    """Shards of 2.2 million bytes with something to learn."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, size=2000)
    vocabulary = [rng.integers(97, 123, n, np.uint8).tobytes() + b" " for n in lengths]
    for name, n in (("text_val_000000", 40000), ("text_train_000001", 360000)):
        text = b"".join(vocabulary[i] for i in rng.integers(0, 2000, size=n))
        write_shard(tmp_path / f"{name}.bin", np.frombuffer(text, np.uint8).astype(np.uint16))
    write_meta(tmp_path, set_meta("bytes"))
    return tmp_path


def test_200_steps_of_the_45m_model_follow_those_of_the_reference(words, tmp_path, monkeypatch):
    def losses(impl):
        out = tmp_path / impl
        settings = [
            "configs/lssar_p15.py", "configs/scales/45m.py", "--tokenizer=bytes", "--compile=False",
            "--batch_size=8", "--total_batch_size=8192", "--max_iters=200", "--warmup_iters=50",
            "--wandb_mode=disabled", "--val_tokens=65536", "--eval_interval=1000",
            "--dtype=bfloat16", f"--data_dir={words}", f"--attention_impl={impl}",
            f"--out_dir={out}", "--log_interval=50",
        ]  # fmt: skip
        monkeypatch.setattr("sys.argv", ["train.py", *settings])
        training.main()
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return np.array([line["loss"] for line in lines if "loss" in line])

    ours, reference = losses("triton"), losses("reference")
    assert len(ours) == 200 and ours[-1] < 0.7 * ours[0]
    assert np.abs(ours - reference).max() < 0.02
