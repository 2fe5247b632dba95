"""What the fused kernels are held to, on an NVIDIA GPU: python -m scripts.benchmark --suite gpu

Runs the GPU tests, then measures attention alone, decoding, and training steps of GPT-2 124M, each
beside what a user would take instead, in the same run and on the same tensors. Every figure is
written to the JSON file as soon as it is there; --suite attention, decoding, steps or tests takes
one part, and leaves the others in the file as they are.

The time of attention alone is the GPU's: the queue is kept full, and its L2 cache cold.

Floors are counted, not measured: the share of FlashAttention's work that a row cannot do without,
in matrix products of [L, d] x [d, L]. Softmax has 2 forward and 5 backward; two stages have 4 (3
without gradients) and 5, or 7 without atomics. Special functions of a score: softmax takes one exp
forward and one backward; softplus an exp in each pass, and its slope one more. Instructions of a
score, which may weigh more than either, are counted by python -m tests.compile_kernels.
"""

import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from tqdm import tqdm

from attention import Attention
from config import load_config
from errors import UserError
from model import build_attention
from runtime import checkpoint
from runtime.device import environment
from runtime.files import read_json, write_json

HEADS, HEAD_SIZE = 12, 64
TOKENS = 32768  # of a batch, at every length
LENGTHS = (1024, 4096, 16384)
CACHES = (16384, 65536)
PARTS = ("attention", "decoding", "steps", "tests")
# Before each timed call: bytes to clear, more than any L2 cache, and cycles of the GPU to wait,
# about a millisecond, in which the CPU gets ahead of it.
FLUSH, AHEAD = 256 * 2**20, 2_000_000
# what -> largest ratio to FlashAttention that it should reach, and its floor in matrix products
TARGETS = {
    ("lssar_p15", "training"): (1.5, 9 / 7),
    ("lssar_p15", "forward"): (1.6, 3 / 2),
    ("lssa", "training"): (1.0, 1.0),
    ("sigmoid", "training"): (1.0, 1.0),
    ("relu_li", "training"): (1.0, 1.0),
    ("lssar_p15", "decoding"): (0.8, None),
}


def run_suite(asked: str, path: str, nanogpt: str | None) -> None:
    """All parts ("gpu"), or one, into the JSON file `path`.

    Raises UserError where there is no NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("--suite measures on an NVIDIA GPU, and there is none on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    parts = {
        "attention": lambda: attention_alone(device, torch.bfloat16, LENGTHS, TOKENS),
        "decoding": lambda: decoding(device, torch.bfloat16, CACHES),
        "steps": lambda: training_steps(nanogpt),
        "tests": gpu_tests,
    }
    result = read_json(path) or {}
    for name in PARTS if asked == "gpu" else [asked]:
        result[name] = {"environment": environment(), "figures": []}
        for figure in parts[name]():
            result[name]["figures"].append(figure)
            write_json(path, result)
    print(f"written: {path}")


# ---- attention alone ----


def layer(name: str, *settings: str) -> Attention:
    sizes = [f"--n_head={HEADS}", f"--n_embd={HEADS * HEAD_SIZE}"]
    return build_attention(load_config([f"configs/{name}.py", *sizes, *settings]))


def inputs(B: int, Lq: int, Lk: int, device, dtype) -> list[torch.Tensor]:
    """q, k, v as the model has them, slices of one projection, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(
        B, Lk, 3, HEADS, HEAD_SIZE, device=device, dtype=dtype, generator=generator
    )
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    q = q[:, :, -Lq:]
    gradient = torch.randn(q.shape, device=device, dtype=dtype, generator=generator)
    return [q, k, v, gradient]


def flash(q, k, v):
    """Softmax through FlashAttention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def default_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex_lssar(p: float, L: int, device) -> Callable:
    """LSSAR of L x L as two calls of FlexAttention: one for each row's sum, one for its weights.

    The first has log softplus(z) as its score, so that its log-sum-exp is the log of the row's sum;
    the second p log(n A - o). It has no rule for tied rows.
    """

    def causal(b, h, i, j):
        return i >= j

    mask = create_block_mask(causal, None, None, L, L, device=device)

    def log_softplus(score, b, h, i, j):
        z = score * torch.log(i + 1.0)
        return torch.log(F.softplus(z))

    def attend(q, k, v):
        q, k = (F.normalize(x.float(), dim=-1).to(v.dtype) for x in (q, k))
        log_d = math.log(q.shape[-1])
        _, rows = flex_attention(
            q, k, v, score_mod=log_softplus, block_mask=mask, scale=log_d,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip

        def reweighted(score, b, h, i, j):
            A = torch.exp(log_softplus(score, b, h, i, j) - rows.lse[b, h, i])
            x = (i + 1.0) * A - torch.where(i >= 3, 1.0, 0.0)
            return p * torch.log(torch.relu(x))

        return flex_attention(q, k, v, score_mod=reweighted, block_mask=mask, scale=log_d)

    return attend


def attention_alone(device, dtype, lengths, tokens) -> Iterator[dict]:
    """Forward and backward, and forward without gradients, at every length."""
    for L in tqdm(lengths, desc="attention"):
        q, k, v, gradient = inputs(max(1, tokens // L), L, L, device, dtype)
        rows = {name: layer(name) for name in ("lssar_p15", "lssa", "sigmoid", "relu_li")}
        reference = layer("lssar_p15", "--attention_impl=reference")
        peers = {
            "softmax, FlashAttention": flash,
            "softmax, SDPA's choice": default_sdpa,
            "lssar_p15, compiled reference": torch.compile(reference, dynamic=False),
            "lssar_p15, two FlexAttention calls": torch.compile(
                flex_lssar(15, L, device), dynamic=False
            ),
        }
        for what in ("training", "forward"):
            base = None
            for name, function in (peers | rows).items():
                ms = measure(function, (q, k, v), gradient if what == "training" else None)
                base = base or ms  # FlashAttention comes first
                figure = row(name, what, tuple(q.shape), ms, base)
                print_row(figure)
                yield figure
        # the next length compiles anew, and other processes need the memory
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def decoding(device, dtype, caches) -> Iterator[dict]:
    """One query against a cache."""
    for L in tqdm(caches, desc="decoding"):
        for B in (1, 8):
            q, k, v, _ = inputs(B, 1, L, device, dtype)
            k, v = k.contiguous(), v.contiguous()  # as a cache holds them
            base = None
            functions = {
                "softmax, SDPA": F.scaled_dot_product_attention,
                "lssar_p15": layer("lssar_p15"),
                "lssa": layer("lssa"),
            }
            for name, function in functions.items():
                ms = measure(function, (q, k, v), None)
                base = base or ms
                figure = row(name, "decoding", tuple(k.shape), ms, base)
                print_row(figure)
                yield figure


def measure(function, qkv, gradient) -> list[float] | str:
    """Milliseconds of 20 calls after warm-up, or why there are none."""
    qkv = [x.detach().requires_grad_(gradient is not None) for x in qkv]
    cuda = qkv[0].is_cuda
    flushed = torch.empty(FLUSH if cuda else 0, dtype=torch.uint8, device=qkv[0].device)

    def call():
        if gradient is None:
            with torch.no_grad():
                return function(*qkv)
        torch.autograd.grad(function(*qkv), qkv, gradient)

    def once() -> float:
        if not cuda:
            started = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - started)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda._sleep(AHEAD)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    try:
        for _ in range(3 if cuda else 1):
            once()
        return [once() for _ in range(20 if cuda else 2)]
    except torch.cuda.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # what a peer cannot do is a result too
        return f"{type(error).__name__}: {checkpoint.first_line(error)}"[:200]


def row(name: str, what: str, shape, ms, base) -> dict:
    """A figure as it is saved: median, spread, ratio to the first peer, target, floor."""
    target, floor = TARGETS.get((name, what), (None, None))
    figure = {"name": name, "what": what, "shape": list(shape), "target": target, "floor": floor}
    if isinstance(ms, str):
        return figure | {"failed": ms}
    figure |= {"ms": statistics.median(ms), "spread": [min(ms), max(ms)]}
    if not isinstance(base, str):
        figure["ratio"] = figure["ms"] / statistics.median(base)
    return figure


def print_row(figure: dict) -> None:
    shape = " x ".join(map(str, figure["shape"]))
    if "failed" in figure:
        tqdm.write(f"{figure['what']:10} {shape:20} {figure['name']:36} {figure['failed']}")
        return
    bounds = "".join(f"  {k} {figure[k]:.2f}" for k in ("target", "floor") if figure[k])
    ratio = f"{figure['ratio']:5.2f}x" if "ratio" in figure else ""
    tqdm.write(
        f"{figure['what']:10} {shape:20} {figure['name']:36} {figure['ms']:9.3f} ms {ratio}{bounds}"
    )


# ---- the model, and the tests ----


def training_steps(nanogpt: str | None) -> Iterator[dict]:
    """Steps of GPT-2 124M, compiled, at 4 x 1024 (LSSAR's Table A7) and 32 x 1024."""
    from scripts.benchmark import measure as measure_steps
    from scripts.benchmark import print_table

    def config(name: str, batch: int):
        return load_config([f"configs/{name}.py", f"--batch_size={batch}"])

    small = {name: config(name, 4) for name in ("softmax", "lssa", "lssar_p15")}
    small["lssar_p15 reference"] = small["lssar_p15"].replace(attention_impl="reference")
    large = {name: config(name, 32) for name in ("softmax", "lssar_p15")}
    tables = {"4 x 1024": small, "32 x 1024": large}
    if nanogpt:
        tables["32 x 1024, nanoGPT"] = {"softmax": large["softmax"], "nanoGPT": large["softmax"]}
    for shape, rows in tables.items():
        # of two rows of the large batch the memory is enough for their training steps
        phases = ("train", "eval") if rows is small else ("train",)
        measured = measure_steps(rows, 10, nanogpt, phases)
        print(f"\n{shape} tokens (time of LSSAR's training step: at most 1.10, memory 1.03)")
        print_table(measured, dict.fromkeys(rows, "softmax"), rows)
        yield {"shape": shape, "rows": measured}


def gpu_tests() -> Iterator[dict]:
    command = [sys.executable, "-m", "pytest", "-m", "cuda and not stress", "-q", "tests"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout[-3000:])
    yield {"exit": done.returncode, "printed": done.stdout[-3000:]}
