"""The cost of a training step, an evaluation step or a generated token, as ratios to softmax.

python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py
python -m scripts.benchmark configs/lssar_p15.py --impls auto,unfused --lengths 1024,4096
python -m scripts.benchmark configs/softmax.py --nanogpt PATH_TO_A_CHECKOUT --set batch_size=1
python -m scripts.benchmark configs/softmax.py configs/t6.py --phases decode --lengths 1024,16384

The columns are those of the LSSAR paper's Table A7, whose figures are printed below each variant.
The paper uses standard PyTorch functions and no fused kernels, as does `--impls unfused`: the path
`reference` without torch.compile, and all logits at once. Each model is measured in a process of
its own, so that its peak memory is known; the models take turns, round by round, so that a change
in the machine's speed affects all of them equally. Times are medians over the rounds. The phase
`decode` is one more token in each of batch_size sequences of which block_size - 1 are cached.
"""

import argparse
import contextlib
import importlib.util
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
from model import GPT, compile_model
from optim import build_optimizers
from runtime.device import autocast, environment, memory_mb, pick_compile, pick_device, pick_dtype
from runtime.files import check_writable, write_json
from scripts.common.papers import LSSAR
from scripts.common.tables import print_table

PAPER = LSSAR["table_a7"]
PHASES = ("train", "eval", "decode")
COLUMNS = (*PAPER["columns"], "decode_ms", "decode_mb")
UNFUSED = ["--attention_impl=reference", "--compile=False"]


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("configs", nargs="+", metavar="CONFIG.py", help="the first is the baseline")
    parser.add_argument(
        "--scale", metavar="CONFIG.py", help="a scale for all models, e.g. configs/scales/45m.py"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all models"
    )
    parser.add_argument(
        "--impls",
        default="auto",
        help="attention paths: auto,triton,blocked,reference, or unfused, which is the paper's",
    )
    parser.add_argument(
        "--phases", default="train,eval", help="what to measure, of train,eval,decode (%(default)s)"
    )
    parser.add_argument("--lengths", help="in tokens, such as 1024,4096 (default: block_size)")
    parser.add_argument("--nanogpt", metavar="DIR", help="a checkout of nanoGPT to measure too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", metavar="FILE", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    check(arguments)
    models, baselines = parse_models(arguments)
    phases = tuple(arguments.phases.split(","))
    figures = measure(models, arguments.rounds, arguments.nanogpt, phases)
    config = next(iter(models.values()))
    device = pick_device(config.device)
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    made = environment()
    shape = f"{config.batch_size} x {arguments.lengths or config.block_size}"
    print(
        f"\n{config.n_layer} layers, {config.n_embd} wide, {shape} tokens, {dtype}, "
        f"{'compiled' if pick_compile(config.compile, device) else 'eager'}, on {made['machine']}, "
        f"{torch.get_num_threads()} threads; median of {arguments.rounds} rounds"
    )
    print_figures(figures, baselines, models)
    if arguments.out:
        settings = config.as_dict() | {"shape": shape, "dtype": dtype, "rounds": arguments.rounds}
        result = {"environment": made, "settings": settings}
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, result | {"baselines": baselines, "rows": figures})
        print(f"written: {arguments.out}")


def check(arguments: argparse.Namespace) -> None:
    """Raise UserError, before any work, for options that cannot be used."""
    for pair in arguments.set:
        if "=" not in pair:
            raise UserError(f"--set {pair!r} must be KEY=VALUE, such as batch_size=16")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds} must be at least 1")
    phases = arguments.phases.split(",")
    if not set(phases) <= set(PHASES):
        raise UserError(f"--phases {arguments.phases}: each must be one of {', '.join(PHASES)}")
    if arguments.nanogpt and "decode" in phases:
        raise UserError("--phases decode: nanoGPT has no cache to decode with")
    if arguments.nanogpt and not (Path(arguments.nanogpt) / "model.py").is_file():
        raise UserError(f"--nanogpt {arguments.nanogpt}: no model.py there")
    if arguments.out:
        check_writable(Path(arguments.out).parent)


def parse_models(arguments: argparse.Namespace) -> tuple[dict[str, Config], dict[str, str]]:
    """The Config of every model, and the baseline of each: the first model of the same length."""
    impls, lengths = arguments.impls.split(","), (arguments.lengths or "").split(",")
    common = [arguments.scale] if arguments.scale else []
    common += ["--batch_size=4", *(f"--{pair}" for pair in arguments.set)]
    labels = [load_config([path, *common]).variant_name for path in arguments.configs]
    if len(set(labels)) < len(labels):
        labels = [Path(path).stem for path in arguments.configs]
    models: dict[str, Config] = {}
    baselines: dict[str, str] = {}
    for length in lengths:
        end = f" at {length}" if len(lengths) > 1 else ""
        first = ""
        for path, label in zip(arguments.configs, labels, strict=True):
            for impl in impls:
                chosen = UNFUSED if impl == "unfused" else [f"--attention_impl={impl}"]
                size = [f"--block_size={length}"] if length else []
                config = load_config([path, *common, *size, *chosen])
                if length:  # a step is one micro-batch
                    tokens = config.batch_size * config.block_size
                    config = config.replace(total_batch_size=tokens)
                name = label + (f" {impl}" if len(impls) > 1 else "") + end
                first = first or name
                models[name], baselines[name] = config, first
        if arguments.nanogpt:
            models[f"nanoGPT{end}"], baselines[f"nanoGPT{end}"] = models[first], first
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
    keys = [(name, phase) for name in models for phase in phases]
    with contextlib.ExitStack() as stack:
        workers = {key: stack.enter_context(ProcessPoolExecutor(1, context)) for key in keys}
        ready = []
        for (name, phase), worker in workers.items():
            folder = nanogpt if name.startswith("nanoGPT") else None
            ready.append(worker.submit(prepare, models[name], phase, threads, folder))
        try:
            for warm in ready:
                warm.result()
            times: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
            for _ in tqdm(range(rounds), desc="rounds"):
                for key, worker in workers.items():
                    times[key].append(worker.submit(timed_step).result())
            memory = {key: worker.submit(peak_memory).result() for key, worker in workers.items()}
        except BrokenProcessPool:
            raise UserError("a measured process died; its message is above") from None
    figures: dict[str, dict] = {name: {} for name in models}
    for (name, phase), ms in times.items():
        figures[name][f"{phase}_ms"] = statistics.median(ms)
        figures[name][f"{phase}_ms_spread"] = [min(ms), max(ms)]
        figures[name][f"{phase}_mb"] = memory[name, phase]
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


def timed_step() -> float:
    """Milliseconds of a step."""
    synchronise(_device)
    started = time.perf_counter()
    _step()
    synchronise(_device)
    return 1000 * (time.perf_counter() - started)


def peak_memory() -> float:
    return memory_mb(_device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def build_step(
    config: Config, phase: str, nanogpt: str | None, device: torch.device
) -> Callable[[], None]:
    """A function that takes one step of a phase with the config's model, or nanoGPT's."""
    torch.manual_seed(config.seed)
    dtype = pick_dtype(config.dtype, device)
    shape = (config.batch_size, config.block_size + 1)
    tokens = torch.randint(config.n_vocab, shape, device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model: Any = (build_nanogpt(config, nanogpt) if nanogpt else GPT(config)).to(device)
    model.train(phase == "train")
    compiled = model
    if pick_compile(config.compile, device):
        compiled = torch.compile(model) if nanogpt else compile_model(model)
    unfused = config.attention_impl == "reference" and config.compile is False
    if nanogpt:
        rates = config.weight_decay, config.learning_rate, (config.beta1, config.beta2)
        optimizers = [model.configure_optimizers(*rates, device.type)]
    else:
        optimizers = build_optimizers(model, config)
    cache = KVCache(config.block_size)

    def loss() -> torch.Tensor:
        with autocast(device, dtype):
            if unfused:
                return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            return compiled(x, y)[1] if nanogpt else compiled(x, y)

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


def build_nanogpt(config: Config, folder: str) -> torch.nn.Module:
    """nanoGPT's model of these sizes, with its padded vocabulary, and without dropout."""
    spec = importlib.util.spec_from_file_location("nanogpt", Path(folder) / "model.py")
    assert spec is not None and spec.loader is not None
    sys.modules["nanogpt"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    sizes["vocab_size"] = -(-config.n_vocab // 64) * 64
    return module.GPT(module.GPTConfig(dropout=0.0, bias=config.bias, **sizes))


# ---- the table ----


def print_figures(
    figures: dict[str, dict], baselines: dict[str, str], models: dict[str, Config]
) -> None:
    """Print the figures of `measure`, and below each model the paper's for the same variant."""
    paper = {
        name: dict(zip(PAPER["columns"], PAPER["rows"][config.variant_name], strict=True))
        for name, config in models.items()
        if config.variant_name in PAPER["rows"] and config.projections == "linear"
        if not name.startswith("nanoGPT")
    }
    columns = [column for column in COLUMNS if column in next(iter(figures.values()))]
    papers_columns = set(columns) & set(PAPER["columns"])

    def cells(values: dict, base: dict) -> list[str]:
        return [
            f"{values[c]:.1f} ({values[c] / base[c]:.2f})" if c in base else "" for c in columns
        ]

    table = [["", *columns]]
    for name, values in figures.items():
        base = baselines[name]
        table.append([name, *cells(values, figures[base])])
        if name in paper and base in paper and papers_columns:
            table.append(["  paper, A100", *cells(paper[name], paper[base])])
    print_table(table, width=18, remarks=["(ratio to the first model of that length)"])


if __name__ == "__main__":
    main()
