"""The speed of the fused kernels on an NVIDIA GPU, beside what one would use instead.

python -m scripts.benchmark_kernels --part attention --lengths 1024,4096
python -m scripts.benchmark_kernels --part attention --lengths 16384
python -m scripts.benchmark_kernels --part decoding

Each of these takes less than ten minutes. `attention` is attention alone, forward and backward and
forward without gradients, beside FlashAttention, cuDNN and the compiled formula on the same
tensors; `decoding` is one query against a cache. Each figure is written to the JSON file as soon as
it is measured, in place of an earlier figure of the same thing.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from attention_paths.module import Attention
from config import load_config
from errors import UserError, command, first_line
from layers.heads import build_attention
from runtime.device import environment
from runtime.files import check_writable, read_json, write_json
from scripts.common.runner import lengths_of

HEADS, HEAD_SIZE = 12, 64
TOKENS = 32768  # of a batch, at every length
LENGTHS = "1024,4096,16384"
CACHES = (16384, 65536)
VARIANTS = ("lssar_p15", "lssa", "sigmoid", "relu_li")
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", choices=("attention", "decoding", "all"), default="all")
    parser.add_argument(
        "--lengths", type=lengths_of, default=LENGTHS, help="of attention alone (%(default)s)"
    )
    default = "results/benchmark_gpu.json"
    parser.add_argument("--out", metavar="FILE", default=default, help="default: %(default)s")
    arguments = parser.parse_args()
    check_writable(Path(arguments.out).parent)
    if not torch.cuda.is_available():
        raise UserError("this needs an NVIDIA GPU, and this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    parts: dict[str, Iterable[dict]] = {
        "attention": attention_alone(device, torch.bfloat16, arguments.lengths),
        "decoding": decoding(device, torch.bfloat16, CACHES),
    }
    result = read_json(arguments.out) or {}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    for name in parts if arguments.part == "all" else [arguments.part]:
        for figure in parts[name]:
            add(result, name, figure)
            write_json(arguments.out, result)
    print(f"written: {arguments.out}")


def add(result: dict, part: str, figure: dict) -> None:
    """Put a figure into its part of the result, in place of an earlier figure of the same thing."""

    def identity(figure: dict) -> list:
        return [figure[key] for key in ("name", "what", "shape")]

    figures = result.setdefault(part, {}).get("figures", [])
    others = [other for other in figures if identity(other) != identity(figure)]
    result[part] = {"environment": environment(), "figures": [*others, figure]}


# ---- what is compared ----


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
    return [q, k, v, torch.randn(q.shape, device=device, dtype=dtype, generator=generator)]


def sdpa(backend: SDPBackend) -> Function:
    """Softmax through FlashAttention or cuDNN."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


# ---- measuring ----


def attention_alone(
    device: torch.device, dtype: torch.dtype, lengths: Sequence[int]
) -> Iterator[dict]:
    """Forward and backward, and forward without gradients, at every length."""
    for L in tqdm(lengths, desc="attention"):
        q, k, v, gradient = inputs(max(1, TOKENS // L), L, L, device, dtype)
        formula = layer("lssar_p15", "--attention_impl=reference")
        functions: dict[str, Function] = {
            "softmax, FlashAttention": sdpa(SDPBackend.FLASH_ATTENTION),
            "softmax, cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
            "lssar_p15, compiled formula": torch.compile(formula, dynamic=False),
            **{name: layer(name) for name in VARIANTS},
        }
        yield from compare("training", functions, (q, k, v), gradient)
        yield from compare("forward", functions, (q, k, v), None)
        torch._dynamo.reset()  # the next length is compiled again
        gc.collect()
        torch.cuda.empty_cache()


def decoding(
    device: torch.device | str, dtype: torch.dtype, caches: Sequence[int]
) -> Iterator[dict]:
    """One query against a cache of every length."""
    functions: dict[str, Function] = {
        "softmax, SDPA": F.scaled_dot_product_attention,
        "lssar_p15": layer("lssar_p15"),
        "lssa": layer("lssa"),
    }
    for L in tqdm(caches, desc="decoding"):
        for B in (1, 8):
            q, k, v, _ = inputs(B, 1, L, device, dtype)
            k, v = k.contiguous(), v.contiguous()  # as a cache holds them
            yield from compare("decoding", functions, (q, k, v), None)


def compare(
    what: str, functions: dict[str, Function], qkv: Sequence[Tensor], gradient: Tensor | None
) -> Iterator[dict]:
    """The median time and spread of each function, and its ratio to the first; or why it failed."""
    shape, base = list(qkv[1].shape), None
    for name, function in functions.items():
        figure: dict = {"name": name, "what": what, "shape": shape}
        try:
            ms = time_calls(function, qkv, gradient)
        except torch.cuda.OutOfMemoryError:
            figure["failed"] = "out of memory"
        except Exception as error:  # an alternative's failure is a result too
            figure["failed"] = f"{type(error).__name__}: {first_line(error)}"[:200]
        else:
            median = statistics.median(ms)
            base = base or median
            figure |= {"ms": median, "spread": [min(ms), max(ms)], "ratio": median / base}
        found = figure.get("failed") or f"{figure['ms']:9.3f} ms {figure['ratio']:5.2f}x"
        tqdm.write(f"{what:10} {' x '.join(map(str, shape)):20} {name:36} {found}")
        yield figure


def time_calls(function: Function, qkv: Sequence[Tensor], gradient: Tensor | None) -> list[float]:
    """Milliseconds of each call; with a gradient of the output, a call is forward and backward."""
    from triton.testing import do_bench

    qkv = [x.detach().requires_grad_(gradient is not None) for x in qkv]

    def call() -> None:
        with torch.set_grad_enabled(gradient is not None):
            out = function(*qkv)
        if gradient is not None:
            torch.autograd.grad(out, qkv, gradient)

    return do_bench(call, return_mode="all")


if __name__ == "__main__":
    main()
