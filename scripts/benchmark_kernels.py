"""The speed of the fused kernels on an NVIDIA GPU, beside alternatives and targets.

python -m scripts.benchmark_kernels --model             # modelled ratios; needs no GPU
python -m scripts.benchmark_kernels --part tests        # each part is meant for 10 minutes
python -m scripts.benchmark_kernels --part stress       # every block shape, 16K and 32K keys
python -m scripts.benchmark_kernels --part attention --lengths 1024,4096
python -m scripts.benchmark_kernels --part attention --lengths 16384
python -m scripts.benchmark_kernels --part decoding     # and generation with GPT-2 124M
python -m scripts.benchmark_kernels --part steps --nanogpt PATH_TO_A_CHECKOUT

Measures attention alone, decoding, and generation and training steps of GPT-2 124M, each beside
what a user would use instead, in the same run and on the same tensors, and runs the GPU tests.
Every figure is written to the JSON file as soon as it is measured, in place of an earlier one of
the same thing; others in the file stay.

Attention alone is timed on the GPU itself, its queue kept full and its L2 cache cold.

Floors are counted, not measured: the least work as a ratio to FlashAttention's, in matrix products
of [L, d] x [d, L]. Softmax needs 2 forward and 5 backward; two-stage attention needs 4 forward (3
without gradients) and 5 backward, or 7 without atomics.
"""

import argparse
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import Attention
from config import Config, load_config
from errors import UserError, command, first_line
from model import GPT, KVCache, RecordedStep, build_attention
from runtime.device import autocast, environment
from runtime.files import read_json, write_json
from scripts.benchmark import check_paths, measure, print_figures, synchronise

HEADS, HEAD_SIZE = 12, 64
TOKENS = 32768  # of a batch, at every length
LENGTHS = (1024, 4096, 16384)
CACHES = (16384, 65536)
PARTS = ("tests", "stress", "attention", "decoding", "steps")
TABLE = Path(__file__).parent.parent / "results/kernels.json"
# The model: a multiprocessor's clocks for a score are k (instructions / 128 + products / 32), for
# its 4 schedulers of 32 lanes and, at d = 64 in 16 bits, the H100's tensor cores. k, for what
# does not overlap or is below its peak, and FlashAttention-2's clocks are from its published speed
# (about 320 TFLOP/s forward and 285 backward, at 16K). All of it is good to about 20%, and to be
# corrected by the first measurement.
OVERHEAD = {"forward": 1.15, "backward": 1.3}
FLASH_CLOCKS = {"forward": 0.186, "backward": 0.521}
PRODUCTS = {1: (2, 2, 5), 2: (3, 4, 5)}  # by stages: forward without and with gradients, backward
# Bytes read or written for a cached key, d = 64 in 16 bits: k, its score twice in float32, and of v
# the share whose weight is not 0, about a third of random and of small trained models.
DECODED_SHARE = 0.35
# Before each timed call: bytes to clear, more than any L2 cache holds, and GPU cycles to wait,
# about 1 ms, in which the CPU fills the queue.
FLUSH, AHEAD = 256 * 2**20, 2_000_000
# (variant, pass) -> target, the largest ratio to FlashAttention's time, and floor, the smallest
TARGETS = {
    ("lssar_p15", "training"): (1.5, 9 / 7),
    ("lssar_p15", "forward"): (1.6, 3 / 2),
    ("lssa", "training"): (1.0, 1.0),
    ("sigmoid", "training"): (1.0, 1.0),
    ("relu_li", "training"): (1.0, 1.0),
    ("lssar_p15", "decoding"): (0.8, None),
}


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="default: all")
    parser.add_argument(
        "--model", action="store_true", help="print modelled ratios, and measure nothing"
    )
    parser.add_argument(
        "--lengths",
        default=",".join(map(str, LENGTHS)),
        help="of attention alone (default: %(default)s)",
    )
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to measure too")
    default = "results/benchmark_gpu.json"
    parser.add_argument("--out", metavar="FILE", default=default, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.model:
        model()
        return
    lengths = parse_lengths(arguments.lengths)
    check_paths(arguments.out, arguments.nanogpt)
    if not torch.cuda.is_available():
        raise UserError("this needs an NVIDIA GPU, and this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    parts: dict[str, Callable[[], Iterable[dict]]] = {
        "attention": lambda: attention_alone(device, torch.bfloat16, lengths, TOKENS),
        "decoding": lambda: chain(
            decoding(device, torch.bfloat16, CACHES), generation(device, torch.bfloat16, 1024)
        ),
        "steps": lambda: training_steps(arguments.nanogpt),
        "tests": lambda: gpu_tests("cuda and not stress"),
        "stress": lambda: gpu_tests("stress"),
    }
    result = read_json(arguments.out) or {}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    for name in PARTS if arguments.part == "all" else [arguments.part]:
        for figure in parts[name]():
            add(result, name, figure)
            write_json(arguments.out, result)
    print(f"written: {arguments.out}")


def parse_lengths(text: str) -> list[int]:
    if not all(length.isdigit() and int(length) > 0 for length in text.split(",")):
        raise UserError(f"--lengths {text!r} must be lengths in tokens, such as 1024,4096")
    return [int(length) for length in text.split(",")]


def add(result: dict, part: str, figure: dict) -> None:
    """Put a figure into its part of the result, in place of an earlier one of the same thing."""

    def identity(figure: dict) -> list:
        return [figure.get(key) for key in ("name", "what", "shape")]

    figures = result.setdefault(part, {}).get("figures", [])
    others = [other for other in figures if identity(other) != identity(figure)]
    result[part] = {"environment": environment(), "figures": [*others, figure]}


def model() -> None:
    """Print the modelled ratio of every variant and pass to FlashAttention-2, beside its target."""
    table = read_json(TABLE)
    if not table:
        raise UserError(f"{TABLE.name} is missing: python -m tests.compile_kernels --update")
    print("modelled on one H100 at d = 64 and 16K, over FlashAttention-2, which is to about 20%")
    for release, counts in table.items():
        print(f"\nTriton {release}")
        for name in ("lssar_p15", "lssa", "sigmoid", "relu_li"):
            for what, ratio in modelled(counts, name).items():
                target, _ = TARGETS.get((name, what), (None, None))
                print(
                    f"  {name:10} {what:9} {ratio:5.2f}" + (f"  target {target}" if target else "")
                )
    key, score, value = 2 * HEAD_SIZE, 2 * 4, 2 * HEAD_SIZE * DECODED_SHARE
    ratio = (key + score + value) / (2 * key)
    print(f"\n  lssar_p15  decoding  {ratio:5.2f}  target 0.8 (bytes moved; launches come on top)")


def modelled(table: dict[str, dict], name: str) -> dict[str, float]:
    """Ratios to FlashAttention-2, from the instructions of the kernels of a variant on sm_90."""
    two = f"sm_90, d 64, {name}, forward_two_stages" in table
    forward = f"sm_90, d 64, {name}, forward_{'two_stages' if two else 'one_stage'}"
    instructions = [
        # the loops without a mask: the first of each pass's pair
        sum(table[kernel]["instructions"][::2])
        for kernel in (
            f"{forward}, without gradients", forward, f"sm_90, d 64, {name}, backward_keys"
        )
    ]  # fmt: skip
    passes = ("forward", "forward", "backward")
    alone, saving, backward = (
        OVERHEAD[what] * (count / 128 + products / 32)
        for what, count, products in zip(
            passes, instructions, PRODUCTS[2 if two else 1], strict=True
        )
    )
    return {
        "training": (saving + backward) / sum(FLASH_CLOCKS.values()),
        "forward": alone / FLASH_CLOCKS["forward"],
    }


# ---- attention alone ----


def layer(name: str, *settings: str) -> Attention:
    sizes = [f"--n_head={HEADS}", f"--n_embd={HEADS * HEAD_SIZE}"]
    return build_attention(load_config([f"configs/{name}.py", *sizes, *settings]))


def inputs(
    B: int, Lq: int, Lk: int, device: torch.device | str, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v as in the model, slices of one projection, and a gradient of the output.

    Their shapes are [B, HEADS, Lq or Lk, HEAD_SIZE].
    """
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(
        B, Lk, 3, HEADS, HEAD_SIZE, device=device, dtype=dtype, generator=generator
    )
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    q = q[:, :, -Lq:]
    gradient = torch.randn(q.shape, device=device, dtype=dtype, generator=generator)
    return [q, k, v, gradient]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax through FlashAttention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax through cuDNN, which is faster than FlashAttention-2 on Hopper."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def softmax_flex(L: int, device: torch.device | str) -> Callable[..., Tensor]:
    """Softmax through FlexAttention."""
    mask = create_block_mask(causal, None, None, L, L, device=device)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def flex_lssar(p: float, L: int, device: torch.device | str) -> Callable[..., Tensor]:
    """LSSAR of L x L as two calls of FlexAttention: one for each row's sum, one for its weights.

    The first has log softplus(z) as its score, so that its log-sum-exp is the log of the row's sum;
    the second has p log(n A - o). Tied rows are not treated specially.
    """

    mask = create_block_mask(causal, None, None, L, L, device=device)

    def log_softplus(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        z = score * torch.log(i + 1.0)
        return torch.log(F.softplus(z))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (F.normalize(x.float(), dim=-1).to(v.dtype) for x in (q, k))
        log_d = math.log(q.shape[-1])
        _, aux = flex_attention(
            q, k, v, score_mod=log_softplus, block_mask=mask, scale=log_d,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        log_sums = aux.lse
        assert log_sums is not None

        def reweighted(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            A = torch.exp(log_softplus(score, b, h, i, j) - log_sums[b, h, i])
            x = (i + 1.0) * A - torch.where(i >= 3, 1.0, 0.0)
            return p * torch.log(torch.relu(x))

        return flex_attention(q, k, v, score_mod=reweighted, block_mask=mask, scale=log_d)

    return attend


def attention_alone(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int], tokens: int
) -> Iterator[dict]:
    """Forward and backward, and forward without gradients, at every length."""
    for L in tqdm(lengths, desc="attention"):
        q, k, v, gradient = inputs(max(1, tokens // L), L, L, device, dtype)
        rows: dict[str, Callable[..., Tensor]] = {
            name: layer(name) for name in ("lssar_p15", "lssa", "sigmoid", "relu_li")
        }
        reference = layer("lssar_p15", "--attention_impl=reference")
        peers: dict[str, Callable[..., Tensor]] = {
            "softmax, FlashAttention": flash,
            "softmax, cuDNN": cudnn,
            "softmax, FlexAttention": torch.compile(softmax_flex(L, device), dynamic=False),
            "lssar_p15, compiled reference": torch.compile(reference, dynamic=False),
            "lssar_p15, two FlexAttention calls": torch.compile(
                flex_lssar(15, L, device), dynamic=False
            ),
        }
        for what in ("training", "forward"):
            base: list[float] | str | None = None
            for name, function in (peers | rows).items():
                ms = time_calls(function, (q, k, v), gradient if what == "training" else None)
                base = base or ms  # FlashAttention comes first
                figure = row(name, what, tuple(q.shape), ms, base)
                print_row(figure)
                yield figure
        # the next length is compiled again, and the processes of other parts need the memory
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def decoding(
    device: torch.device | str, dtype: torch.dtype, caches: Sequence[int]
) -> Iterator[dict]:
    """One query against a cache of every length."""
    for L in tqdm(caches, desc="decoding"):
        for B in (1, 8):
            q, k, v, _ = inputs(B, 1, L, device, dtype)
            k, v = k.contiguous(), v.contiguous()  # as a cache holds them
            base: list[float] | str | None = None
            functions: dict[str, Callable[..., Tensor]] = {
                "softmax, SDPA": F.scaled_dot_product_attention,
                "lssar_p15": layer("lssar_p15"),
                "lssa": layer("lssa"),
            }
            for name, function in functions.items():
                ms = time_calls(function, (q, k, v), None)
                base = base or ms
                figure = row(name, "decoding", tuple(k.shape), ms, base)
                print_row(figure)
                yield figure


@torch.no_grad()
def generation(device: torch.device, dtype: torch.dtype, length: int) -> Iterator[dict]:
    """Tokens of GPT-2 124M after `length` others, each step launched kernel by kernel, and as one
    CUDA graph; the time of the host is counted."""
    base: list[float] | None = None
    new = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for name in ("softmax", "lssar_p15"):
        model = GPT(load_config([f"configs/{name}.py"])).to(device).eval()
        for recorded in (False, True):
            cache, ms = KVCache(length + 23), []
            with autocast(device, dtype):
                model.next_logits(new.expand(1, length), cache)
                step: Callable[[Tensor], Tensor] = partial(model.next_logits, cache=cache)
                if recorded:
                    step = RecordedStep(model, cache, new)
                for _ in range(23):
                    synchronise(device)
                    started = time.perf_counter()
                    step(new)
                    synchronise(device)
                    ms.append(1000 * (time.perf_counter() - started))
            base = base or ms[3:]
            label = f"{name}, recorded" if recorded else name
            figure = row(label, "generation", (1, length), ms[3:], base)
            print_row(figure)
            yield figure


def time_calls(
    function: Callable[..., Tensor], qkv: Sequence[Tensor], gradient: Tensor | None
) -> list[float] | str:
    """Milliseconds of each of 20 calls after warm-up (2 on a CPU), or why it failed.

    With a gradient of the output, a call is forward and backward.
    """
    qkv = [x.detach().requires_grad_(gradient is not None) for x in qkv]
    cuda = qkv[0].is_cuda
    flushed = torch.empty(FLUSH if cuda else 0, dtype=torch.uint8, device=qkv[0].device)

    def call() -> None:
        if gradient is None:
            with torch.no_grad():
                function(*qkv)
        else:
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
    except Exception as error:  # an alternative's failure is a result too
        return f"{type(error).__name__}: {first_line(error)}"[:200]


def row(
    name: str, what: str, shape: Sequence[int], ms: list[float] | str, base: list[float] | str
) -> dict:
    """A figure as it is saved: median, spread, ratio to `base`, target, floor; or why it failed."""
    target, floor = TARGETS.get((name, what), (None, None))
    figure: dict = {
        "name": name,
        "what": what,
        "shape": list(shape),
        "target": target,
        "floor": floor,
    }
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


# ---- training steps, and the tests ----


def training_steps(nanogpt: str | None) -> Iterator[dict]:
    """Steps of GPT-2 124M, compiled, at 4 x 1024 (LSSAR's Table A7) and 32 x 1024."""

    def config(name: str, batch: int) -> Config:
        return load_config([f"configs/{name}.py", f"--batch_size={batch}"])

    small = {name: config(name, 4) for name in ("softmax", "lssa", "lssar_p15")}
    small["lssar_p15 reference"] = small["lssar_p15"].replace(attention_impl="reference")
    # at the large batch, memory allows the training steps of two rows and no more
    large = {name: config(name, 32) for name in ("softmax", "lssar_p15")}
    other = {name: config(name, 32) for name in ("softmax", "lssa")}
    tables = {"4 x 1024": small, "32 x 1024": large, "32 x 1024, LSSA": other}
    if nanogpt:
        tables["32 x 1024, nanoGPT"] = {"softmax": large["softmax"], "nanoGPT": large["softmax"]}
    for shape, rows in tables.items():
        phases = ("train", "eval") if rows is small else ("train",)
        measured = measure(rows, 10, nanogpt, phases)
        print(f"\n{shape} tokens (time of LSSAR's training step: at most 1.10, memory 1.03)")
        print_figures(measured, dict.fromkeys(rows, "softmax"), rows)
        for name, config_ in rows.items():
            tokens = config_.batch_size * config_.block_size
            measured[name]["tokens_per_s"] = tokens / (measured[name]["train_ms"] / 1000)
            print(f"{name}: {measured[name]['tokens_per_s']:,.0f} tokens/s in training")
        yield {"shape": shape, "rows": measured}


def gpu_tests(marked: str) -> Iterator[dict]:
    command = [sys.executable, "-m", "pytest", "-m", marked, "tests/test_kernels_cuda.py"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout[-3000:])
    yield {"exit": done.returncode, "printed": done.stdout[-3000:]}


if __name__ == "__main__":
    main()
