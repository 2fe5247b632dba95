"""The cost of a training step, an evaluation step, a token or attention alone, over softmax's.

python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py
python -m scripts.benchmark configs/lssar_p15.py --impls auto,unfused --lengths 1024,4096
python -m scripts.benchmark configs/softmax.py --nanogpt PATH_TO_A_CHECKOUT --batch_size=1
python -m scripts.benchmark configs/softmax.py configs/t6.py --phases decode --lengths 1024,16384
python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py \
    --phases attention,attention_eval --lengths 1024,4096,16384

The columns are those of the LSSAR paper's Table A7, whose figures are printed below each variant.
The paper uses standard PyTorch functions and no fused kernels, as does `--impls unfused`: the path
`reference` without torch.compile, and all logits at once. Each model is measured in a process of
its own, so that its peak memory is known; the models take turns, round by round, so that a change
in the machine's speed affects all of them equally. Times are medians over the rounds. The phase
`decode` is one more token in each of batch_size sequences of which block_size - 1 are cached;
`attention` is ten calls of one layer's attention, forward and backward, and `attention_eval` ten
without gradients.
"""

import argparse
import contextlib
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, load_config
from errors import UserError, command
from generation import next_logits
from layers.cache import KVCache
from layers.heads import build_attention
from model import GPT, compile_model
from optim import build_optimizers
from runtime.device import autocast, environment, memory_mb, pick_compile, pick_device, pick_dtype
from runtime.files import check_writable, write_json
from scripts.common.papers import LSSAR
from scripts.common.runner import Parser, lengths_of
from scripts.common.tables import print_table

PAPER = LSSAR["table_a7"]
PHASES = ("train", "eval", "decode", "attention", "attention_eval")
# Calls of attention in a step: the host prepares one while the GPU computes another.
CALLS = 10
UNFUSED = ["--attention_impl=reference", "--compile=False"]


@command
def main() -> None:
    parser = Parser(
        description=__doc__.split("\n\n")[0],
        epilog="--setting=value sets a setting of all models",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG.py", help="the first is the baseline")
    add("--scale", metavar="CONFIG.py", help="of all models, such as configs/scales/45m.py")
    add("--impls", default="auto", help="auto,triton,blocked,reference, or unfused: the paper's")
    add("--phases", default="train,eval", help=f"of {','.join(PHASES)} (%(default)s)")
    add("--lengths", type=lengths_of, help="in tokens, such as 1024,4096 (default: block_size)")
    add("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to measure too")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--out", metavar="FILE", help="write the figures to this JSON file")
    given, settings = parser.parse_known_args()
    phases = tuple(given.phases.split(","))
    allowed = PHASES[:2] if given.nanogpt else PHASES  # nanoGPT has no cache, and no one layer
    if not set(phases) <= set(allowed):
        raise UserError(f"--phases {given.phases}: each must be one of {', '.join(allowed)}")
    if given.nanogpt and not (Path(given.nanogpt) / "model.py").is_file():
        raise UserError(f"--nanogpt {given.nanogpt}: no model.py there")
    if given.out:
        check_writable(Path(given.out).parent)
    models, baselines = parse_models(given, settings)
    figures = measure(models, given.rounds, given.nanogpt, phases)
    config = next(iter(models.values()))
    device = pick_device(config.device)
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    lengths = ",".join(map(str, given.lengths or [config.block_size]))
    made, shape = environment(), f"{config.batch_size} x {lengths}"
    print(
        f"\n{config.n_layer} layers, {config.n_embd} wide, {shape} tokens, {dtype}, "
        f"{'compiled' if pick_compile(config.compile, device) else 'eager'}, on {made['machine']}, "
        f"{torch.get_num_threads()} threads; median of {given.rounds} rounds"
    )
    print_figures(figures, baselines, models)
    if given.out:
        used = config.as_dict() | {"shape": shape, "dtype": dtype, "rounds": given.rounds}
        Path(given.out).parent.mkdir(parents=True, exist_ok=True)
        results = {"environment": made, "settings": used, "baselines": baselines, "rows": figures}
        write_json(given.out, results)
        print(f"written: {given.out}")


def parse_models(
    given: argparse.Namespace, settings: list[str]
) -> tuple[dict[str, Config], dict[str, str]]:
    """The Config of every model, and the baseline of each: the first model of the same length."""
    impls = given.impls.split(",")
    lengths = given.lengths or (0,)
    common = [*([given.scale] if given.scale else []), "--batch_size=4", *settings]
    labels = [load_config([path, *common]).variant_name for path in given.configs]
    if len(set(labels)) < len(labels):
        labels = [Path(path).stem for path in given.configs]
    models: dict[str, Config] = {}
    baselines: dict[str, str] = {}
    for length in lengths:
        end, found = f" at {length}" if len(lengths) > 1 else "", {}
        for (path, label), impl in itertools.product(
            zip(given.configs, labels, strict=True), impls
        ):
            chosen = UNFUSED if impl == "unfused" else [f"--attention_impl={impl}"]
            size = [f"--block_size={length}"] if length else []
            config = load_config([path, *common, *size, *chosen])
            if length:  # a step is one micro-batch
                config = config.replace(total_batch_size=config.batch_size * length)
            found[label + (f" {impl}" if len(impls) > 1 else "") + end] = config
        first = next(iter(found))
        if given.nanogpt:
            found[f"nanoGPT{end}"] = found[first]
        models |= found
        baselines |= dict.fromkeys(found, first)
    return models, baselines


# ---- measuring ----


def measure(
    models: dict[str, Config],
    rounds: int,
    nanogpt: str | None = None,
    phases: tuple[str, ...] = ("train", "eval"),
) -> dict[str, dict]:
    """Milliseconds and MB of a step of every model and phase; they take turns, round by round."""
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        workers = {
            key: stack.enter_context(ProcessPoolExecutor(1, context))
            for key in itertools.product(models, phases)
        }
        ready = []
        for (name, phase), worker in workers.items():
            folder = nanogpt if name.startswith("nanoGPT") else None
            ready.append(worker.submit(prepare, models[name], phase, threads, folder))
        try:
            for warm in ready:
                warm.result()
            taken: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in workers}
            for _ in tqdm(range(rounds), desc="rounds"):
                for key, worker in workers.items():
                    taken[key].append(worker.submit(timed_step).result())
        except BrokenProcessPool:
            raise UserError("a measured process died; its message is above") from None
    figures: dict[str, dict] = {name: {} for name in models}
    for (name, phase), steps in taken.items():
        ms, peaks = zip(*steps, strict=True)
        figures[name][f"{phase}_ms"] = statistics.median(ms)
        figures[name][f"{phase}_ms_spread"] = [min(ms), max(ms)]
        figures[name][f"{phase}_mb"] = max(peaks)
    return figures


# The step that the process of a model and phase takes, and its device.
_step: Callable[[], None]
_device: torch.device


def prepare(config: Config, phase: str, threads: int, nanogpt: str | None) -> None:
    """Build the step of a process, and take it twice: it allocates, compiles, fills caches."""
    global _step, _device
    torch.set_num_threads(threads)
    _device = pick_device(config.device)
    if _device.type == "cuda":
        torch.cuda.set_device(_device)  # whose work is waited for, and whose memory is counted
    if phase == "decode":  # as in generation, all tokens share the weights that autocast has cast
        autocast(_device, pick_dtype(config.dtype, _device)).__enter__()
    _step = build_step(config, phase, nanogpt, _device)
    timed_step()
    if _device.type == "cuda":  # the first step's autotuning and compilation take memory too
        torch.cuda.reset_peak_memory_stats()
    timed_step()


def timed_step() -> tuple[float, float]:
    """Milliseconds of a step, and the peak memory so far in MB."""
    wait = torch.cuda.synchronize if _device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    _step()
    wait()
    return 1000 * (time.perf_counter() - started), memory_mb(_device)


def build_step(
    config: Config, phase: str, nanogpt: str | None, device: torch.device
) -> Callable[[], None]:
    """A function that takes one step of a phase with the config's model, or nanoGPT's."""
    torch.manual_seed(config.seed)
    dtype = pick_dtype(config.dtype, device)
    if phase.startswith("attention"):
        return attention_step(config, phase == "attention", device, dtype)
    x, y = torch.randint(config.n_vocab, (2, config.batch_size, config.block_size), device=device)
    model: Any = (build_nanogpt(config, nanogpt) if nanogpt else GPT(config)).to(device)
    model.train(phase == "train")
    compiled = model
    if pick_compile(config.compile, device):
        compiled = torch.compile(model) if nanogpt else compile_model(model)
    unfused = config.attention_impl == "reference" and config.compile is False
    optimizers, cache = build_optimizers(model, config), KVCache(config.block_size)

    def loss() -> torch.Tensor:
        with autocast(device, dtype):
            if unfused:
                return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            return compiled(x, y)

    def train() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate() -> None:
        if unfused or nanogpt:
            loss()
        else:
            with autocast(device, dtype):
                model.token_losses(x, y)

    @torch.no_grad()
    def decode() -> None:
        if not cache.layers:
            next_logits(model, x[:, :1], cache)
            for stored in sum(cache.layers.values(), []):
                stored.normal_()
        cache.length = config.block_size - 1
        next_logits(model, x[:, :1], cache)

    return {"train": train, "eval": evaluate, "decode": decode}[phase]


def attention_step(
    config: Config, training: bool, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """The attention of one layer: forward and backward, or forward without gradients."""
    attention: Any = build_attention(config).to(device)
    if config.attention_impl == "reference" and pick_compile(config.compile, device):
        attention = torch.compile(attention, dynamic=False)
    shape = (config.batch_size, config.block_size, 4, config.n_head, config.d_head)
    # q, k, v as in the model, slices of one projection, and a gradient of the output
    packed = torch.randn(shape, device=device, dtype=dtype).permute(2, 0, 3, 1, 4)
    *qkv, gradient = (x.detach().requires_grad_(training) for x in packed)

    def step() -> None:
        for _ in range(CALLS):
            with torch.set_grad_enabled(training):
                out = attention(*qkv)
            if training:
                torch.autograd.grad(out, qkv, gradient)

    return step


def build_nanogpt(config: Config, folder: str) -> torch.nn.Module:
    """nanoGPT's model of these sizes, with its padded vocabulary, and without dropout."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    sys.modules["nanogpt"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Model(module.GPT):  # type: ignore[name-defined]
        parameter_groups = GPT.parameter_groups

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y)[1]

    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    sizes["vocab_size"] = -(-config.n_vocab // 64) * 64
    return Model(module.GPTConfig(dropout=0.0, bias=config.bias, **sizes))


# ---- the table ----


def print_figures(
    figures: dict[str, dict], baselines: dict[str, str], models: dict[str, Config]
) -> None:
    """Print the figures of `measure`, and below each model the paper's for the same variant."""
    columns = [c for c in next(iter(figures.values())) if not c.endswith("_spread")]
    table = [["", *columns]]

    def published(name: str) -> list[float] | None:
        config = models[name]
        papers = config.projections == "linear" and not name.startswith("nanoGPT")
        return PAPER["rows"].get(config.variant_name) if papers else None

    def add(name: str, values: list[float], base: list[float]) -> None:
        pairs = zip(values, base, strict=True)
        table.append([name, *(f"{value:.1f} ({value / b:.2f})" for value, b in pairs)])

    for name, baseline in baselines.items():
        add(name, *([figures[one][c] for c in columns] for one in (name, baseline)))
        paper, base = published(name), published(baseline)
        if paper and base and columns == PAPER["columns"]:
            add("  paper, A100", paper, base)
    print("in parentheses: the ratio to the first model of that length")
    print_table(table, width=18)


if __name__ == "__main__":
    main()
