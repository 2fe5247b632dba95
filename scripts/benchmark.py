"""The cost of a training step, an evaluation step or a generated token, as ratios to softmax.

python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py
python -m scripts.benchmark configs/lssar_p15.py --impls auto,unfused --lengths 1024,4096
python -m scripts.benchmark configs/softmax.py --nanogpt PATH_TO_A_CHECKOUT --set batch_size=1
python -m scripts.benchmark configs/softmax.py configs/t6.py --phases decode --lengths 1024,16384

The columns are those of the LSSAR paper's Table A7, whose figures are printed below each row. The
paper uses standard PyTorch functions and no fused kernels, as does `--impls unfused`: the path
`reference` without torch.compile, and all logits at once, in training and in evaluation. Every row
runs in its own process, to measure its own peak memory; the rows take turns, round by round, so
that drift in the machine's speed affects all equally. Times are the median over rounds. The phase
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
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, load_config
from errors import UserError, command
from model import GPT, KVCache, RecordedStep, compile_model
from optim import build_optimizers
from runtime.device import autocast, environment, memory_mb, pick_compile, pick_device, pick_dtype
from runtime.files import check_writable, write_json
from scripts.common.arguments import AtLeast
from scripts.common.papers import LSSAR
from scripts.common.tables import print_table

PAPER = LSSAR["table_a7"]
PHASES = ("train", "eval", "decode")
DECODING = ("decode_ms", "decode_mb")
UNFUSED = ["--attention_impl=reference", "--compile=False"]


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("configs", nargs="*", metavar="CONFIG.py", help="the first is the baseline")
    parser.add_argument(
        "--scale", metavar="CONFIG.py", help="a scale for all rows, e.g. configs/scales/45m.py"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all rows"
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
    parser.add_argument("--rounds", action=AtLeast, at_least=1, default=5)
    parser.add_argument("--out", help="write the figures to this JSON file")
    arguments = parser.parse_args()
    for pair in arguments.set:
        if "=" not in pair:
            raise UserError(f"--set {pair!r} must be KEY=VALUE, such as batch_size=16")
    check_paths(arguments.out, arguments.nanogpt)
    phases = tuple(arguments.phases.split(","))
    if not set(phases) <= set(PHASES):
        raise UserError(f"--phases {arguments.phases}: each must be one of {', '.join(PHASES)}")
    if "decode" in phases and arguments.nanogpt:
        raise UserError("--phases decode: nanoGPT has no cache to decode with")
    if not arguments.configs:
        raise UserError("no configs given; for example: configs/softmax.py configs/lssar_p15.py")
    rows, baselines = parse_rows(arguments)
    figures = measure(rows, arguments.rounds, arguments.nanogpt, phases)
    config = next(iter(rows.values()))
    device = pick_device(config.device)
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    made = environment()
    shape = f"{config.batch_size} x {arguments.lengths or config.block_size}"
    print(
        f"\n{config.n_layer} layers, {config.n_embd} wide, {shape} tokens, {dtype}, "
        f"{'compiled' if pick_compile(config.compile, device) else 'eager'}, on {made['machine']}, "
        f"{torch.get_num_threads()} threads; median of {arguments.rounds} rounds"
    )
    print_figures(figures, baselines, rows)
    if arguments.out:
        settings = config.as_dict() | {"shape": shape, "dtype": dtype, "rounds": arguments.rounds}
        result = {"environment": made, "settings": settings}
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, result | {"baselines": baselines, "rows": figures})
        print(f"written: {arguments.out}")


def check_paths(out: str | None, nanogpt: str | None) -> None:
    """Raise UserError where `out` cannot be written, or `nanogpt` is not a checkout of nanoGPT."""
    if nanogpt and not (Path(nanogpt) / "model.py").is_file():
        raise UserError(f"--nanogpt {nanogpt}: no model.py there")
    if out:
        if Path(out).is_dir():
            raise UserError(f"--out {out} is a folder; name a file in it")
        check_writable(Path(out).parent)


def parse_rows(arguments: argparse.Namespace) -> tuple[dict[str, Config], dict[str, str]]:
    """The Config of every row, and the baseline of each: the first row of the same length."""
    impls = arguments.impls.split(",")
    lengths = (arguments.lengths or "").split(",")
    common = [arguments.scale] if arguments.scale else []
    common += ["--batch_size=4"] + [f"--{pair}" for pair in arguments.set]
    rows: dict[str, Config] = {}
    baselines: dict[str, str] = {}
    labels = [load_config([path, *common]).variant_name for path in arguments.configs]
    if len(set(labels)) < len(labels):
        labels = [Path(path).stem for path in arguments.configs]
    for length in lengths:
        size = [f"--block_size={length}"] if length else []
        names: list[str] = []
        for path, label in zip(arguments.configs, labels, strict=True):
            for impl in impls:
                chosen = UNFUSED if impl == "unfused" else [f"--attention_impl={impl}"]
                config = load_config([path, *common, *size, *chosen])
                if size:  # a step is one micro-batch
                    tokens = config.batch_size * config.block_size
                    config = config.replace(total_batch_size=tokens)
                name = " ".join(
                    [label]
                    + ([impl] if len(impls) > 1 else [])
                    + ([f"at {length}"] if len(lengths) > 1 else [])
                )
                names.append(name)
                rows[name], baselines[name] = config, names[0]
        if arguments.nanogpt:
            name = "nanoGPT" + (f" at {length}" if len(lengths) > 1 else "")
            rows[name], baselines[name] = rows[names[0]], names[0]
    return rows, baselines


def measure(
    rows: dict[str, Config],
    rounds: int,
    nanogpt: str | None = None,
    phases: tuple[str, ...] = ("train", "eval"),
) -> dict[str, dict]:
    """Milliseconds and MB of a training and an evaluation step of every row.

    Each row and phase has its own process; they take turns, round by round.
    """
    workers = {
        (name, phase): Worker(row, phase, nanogpt if name.startswith("nanoGPT") else None)
        for name, row in rows.items()
        for phase in phases
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in workers}
    # the first round is warm-up: it allocates, compiles and fills caches
    if torch.cuda.is_available():  # let all of them compile at once, while the GPU is idle anyway
        for worker in workers.values():
            worker.send("step")
        for worker in workers.values():
            worker.answer()
    for _ in tqdm(range(rounds + 1), desc="rounds"):
        for key, worker in workers.items():
            times[key].append(worker.step())
    figures: dict[str, dict] = {}
    for name in rows:
        figures[name] = {}
        for phase in phases:
            measured = times[name, phase][1:]
            figures[name][f"{phase}_ms"] = statistics.median(measured)
            figures[name][f"{phase}_ms_spread"] = [min(measured), max(measured)]
            figures[name][f"{phase}_mb"] = workers[name, phase].stop()
    return figures


class Worker:
    """A process that takes one step on each request."""

    def __init__(self, config: Config, phase: str, nanogpt: str | None):
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        work = (config, phase, nanogpt, torch.get_num_threads(), child_pipe)
        self.process = context.Process(target=serve, args=work, daemon=True)
        self.process.start()

    def send(self, what: str) -> None:
        self.pipe.send(what)

    def answer(self) -> float:
        try:
            return self.pipe.recv()
        except EOFError:
            raise UserError("a measured process died; its message is above") from None

    def step(self) -> float:
        """Milliseconds of one step."""
        self.send("step")
        return self.answer()

    def stop(self) -> float:
        """End the process; returns its peak memory in MB."""
        self.send("stop")
        memory = self.answer()
        self.process.join()
        return memory


@command
def serve(config: Config, phase: str, nanogpt: str | None, threads: int, pipe: Connection) -> None:
    """What a Worker's process runs: a step, timed, for every "step" received."""
    torch.set_num_threads(threads)
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose work is waited for, and whose memory is counted
    step = build_step(config, phase, nanogpt, device)
    warm = False
    # as in generation, tokens share the weights that autocast has cast
    around: contextlib.AbstractContextManager = contextlib.nullcontext()
    if phase == "decode":
        around = autocast(device, pick_dtype(config.dtype, device))
    # the parent process has ended
    with around, contextlib.suppress(EOFError, BrokenPipeError):
        while pipe.recv() == "step":
            if warm and device.type == "cuda":  # not the first step, which autotunes and compiles
                torch.cuda.reset_peak_memory_stats()
            warm = True
            synchronise(device)
            started = time.perf_counter()
            step()
            synchronise(device)
            pipe.send(1000 * (time.perf_counter() - started))
        pipe.send(memory_mb(device))


def build_step(
    config: Config, phase: str, nanogpt: str | None, device: torch.device
) -> Callable[[], None]:
    """A function that takes one step of a phase with the config's model, or nanoGPT's."""
    torch.manual_seed(config.seed)
    dtype = pick_dtype(config.dtype, device)
    shape = (config.batch_size, config.block_size + 1)
    tokens = torch.randint(config.n_vocab, shape, device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if nanogpt:
        spec = importlib.util.spec_from_file_location("nanogpt", Path(nanogpt) / "model.py")
        assert spec is not None and spec.loader is not None
        sys.modules["nanogpt"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # with its padded vocabulary, and no dropout, as here
        sizes = dict(
            n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, dropout=0.0,
            block_size=config.block_size, bias=config.bias,
            vocab_size=-(-config.n_vocab // 64) * 64,
        )  # fmt: skip
        model = module.GPT(module.GPTConfig(**sizes)).to(device)
        optimizers = [
            model.configure_optimizers(
                config.weight_decay, config.learning_rate, (config.beta1, config.beta2), device.type
            )
        ]
    else:
        model = GPT(config).to(device)
        optimizers = build_optimizers(model, config)
    called = model
    if pick_compile(config.compile, device):
        called = torch.compile(model) if nanogpt else compile_model(model)
    unfused = config.attention_impl == "reference" and config.compile is False

    def loss_of_all_logits() -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def train() -> None:
        with autocast(device, dtype):
            out = loss_of_all_logits() if unfused else called(x, y)
        loss = out[1] if nanogpt else out
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate() -> None:
        with autocast(device, dtype):
            if unfused:
                loss_of_all_logits()
            else:
                model(x, y) if nanogpt else model.token_losses(x, y)

    cache = KVCache(config.block_size)
    recorded: RecordedStep | None = None

    @torch.no_grad()
    def decode() -> None:
        nonlocal recorded
        if not cache.layers:
            model.next_logits(x[:, :1], cache)
            for kept in sum(cache.layers.values(), []):
                kept.normal_()
        cache.length = config.block_size - 1
        if device.type == "cuda":
            recorded = recorded or RecordedStep(model, cache, x[:, :1])
            recorded(x[:, :1])
        else:
            model.next_logits(x[:, :1], cache)

    model.train(phase == "train")
    return {"train": train, "eval": evaluate, "decode": decode}[phase]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def print_figures(
    figures: dict[str, dict], baselines: dict[str, str], rows: dict[str, Config]
) -> None:
    """Print the figures of `measure`, and below each row the paper's for the same variant."""
    paper = {
        name: PAPER["rows"].get(config.variant_name)
        for name, config in rows.items()
        if not name.startswith("nanoGPT") and config.projections == "linear"
    }
    measured = next(iter(figures.values()))
    columns = [column for column in (*PAPER["columns"], *DECODING) if column in measured]
    table = [["", *columns]]
    for name, row in figures.items():
        base = baselines[name]
        cells = [f"{row[c]:.1f} ({row[c] / figures[base][c]:.2f})" for c in columns]
        table.append([name, *cells])
        if paper.get(name) and paper[base] and columns[0] in PAPER["columns"]:
            theirs, their_base = (
                dict(zip(PAPER["columns"], paper[n], strict=True)) for n in (name, base)
            )
            cells = [
                f"{theirs[c]:.1f} ({theirs[c] / their_base[c]:.2f})" if c in theirs else ""
                for c in columns
            ]
            table.append(["  paper, A100", *cells])
    print_table(table, width=18, remarks=["(ratio to the first row of that length)"])


if __name__ == "__main__":
    main()
