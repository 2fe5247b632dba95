"""Measure the cost of a training step, an evaluation step, a generated token or attention only.

python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py
python -m scripts.benchmark plain configs/softmax.py configs/lssar_p15.py --phases train
python -m scripts.benchmark configs/lssar_p15.py --impls auto,unfused
python -m scripts.benchmark configs/softmax.py configs/t6.py --phases decode --block_size=16384
python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py \
    --phases attention,attention_eval --block_size=16384

The columns are as in Table A7 of the LSSAR paper, whose numbers are printed below its variants. The
paper uses standard PyTorch functions and no fused kernels, as does `--impls unfused`: the path
`reference` without torch.compile, and all logits at once. `plain` instead of a config is a GPT-2
built from torch.nn's Transformer modules, as a baseline without this repository. Each phase of each
model has its own process, so that its peak memory is known; the processes take turns, round by
round, so that a change in the machine's speed affects all of them equally. Times are medians over
the rounds. On a GPU a round is a step that is not timed and four that are, between which the host
does not wait, as in training. Without a scale the model is GPT-2 124M at 1,024 tokens; --batch_size
is 4 by default. The phase `decode` generates one more token for each of batch_size sequences, of
which block_size - 1 are cached; `attention` is ten calls of one layer's attention, forward and
backward, and `attention_eval` is ten calls without gradients.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from attention_paths.reference import NO_CONTEXT, Context
from config import Config
from errors import Parser, UserError, check_choice, command
from generation import next_logits
from layers.build import build_model
from layers.cache import KVCache
from layers.documents import positions_in_documents
from layers.heads import check_attention
from layers.selfcheck import check_kernels
from model import GPT, compile_model
from optim import build_optimizers, build_scaler
from runtime.checkpoint import Training
from runtime.config_files import SCALES, load_config
from runtime.device import (
    autocast,
    environment,
    keep_freed_memory,
    memory_mb,
    open_device,
    pick_compile,
    pick_dtype,
)
from runtime.files import check_writable, write_json
from scripts.common.papers import LSSAR
from scripts.common.tables import print_table
from train import StepBatch, train_step

PAPER = LSSAR["table_a7"]
PAPER_BATCH = 4  # sequences of a step in Table A7
PHASES = ("train", "eval", "decode", "attention", "attention_eval")
# Calls of attention in a step: the host prepares one while the GPU computes another.
CALLS = 10
# Steps of a round on a GPU: the host waits after the last one alone.
STEPS = 4
# The average length of a document in tokens, with document_mask.
DOCUMENT_LENGTH = 512
UNFUSED = ("--attention_impl=reference", "--compile=False")
PLAIN = "plain"  # stands where a config file does: PlainGPT

Say = Callable[[str], None]
Step = Callable[[], object]


@command
def main() -> None:
    arguments, settings = parse_arguments()
    models = parse_models(arguments.configs, arguments.impls.split(","), settings)
    check_models(models, arguments.phases)
    figures = measure(models, arguments.rounds, arguments.phases)
    config = next(iter(models.values()))
    device = open_device(config.device)
    facts = environment(device)
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    print(
        f"\n{config.n_layer} layers, {config.n_embd} wide, "
        f"{config.batch_size} x {config.block_size} tokens, {dtype}, on {facts['machine']}; "
        f"median of {arguments.rounds} rounds; in parentheses: ratio to the first model"
    )
    print_figures(figures, models)
    if arguments.out:
        settings_used = config.as_dict() | {"dtype": dtype, "rounds": arguments.rounds}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            arguments.out,
            {"environment": facts, "settings": settings_used, "rows": figures},
        )
        print(f"written: {arguments.out}")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; returns its arguments, and the settings of all models.

    Raises UserError for invalid arguments.
    """
    parser = Parser(
        description=__doc__.split("\n\n")[0],
        epilog="--setting=value sets a setting of all models",
        allow_abbrev=False,
    )
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG.py",
        help="config files, or plain; the first is the baseline",
    )
    parser.add_argument(
        "--impls",
        default="",
        help="attention paths, from auto,triton,blocked,reference; unfused is the paper's setting "
        "(default: --attention_impl)",
    )
    parser.add_argument(
        "--phases",
        help=f"what to measure, from {','.join(PHASES)} (train,eval; with plain: train)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds per model: of one step, on a GPU of four (%(default)s)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the figures to this JSON file"
    )
    arguments, settings = parser.parse_known_args()
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds} must be at least 1")
    allowed = ["train"] if PLAIN in arguments.configs else PHASES
    if arguments.phases is None:
        arguments.phases = allowed[:2]
    else:
        arguments.phases = arguments.phases.split(",")
    for phase in arguments.phases:
        check_choice("--phases", phase, allowed)
    if arguments.out:
        if arguments.out.is_dir():
            raise UserError(f"--out {arguments.out} is a folder: give a file to write")
        check_writable(arguments.out.parent)
    return arguments, settings


def parse_models(paths: list[str], impls: list[str], settings: list[str]) -> dict[str, Config]:
    """Return the Config of every model, by its name in the table.

    Raises UserError for settings that cannot be measured, and for two models of one name.
    """
    models: dict[str, Config] = {}
    for path in paths:
        for impl in impls:
            if path == PLAIN and path in models:  # it has one path, and is compiled as the first
                continue
            if Path(path).resolve().is_relative_to(SCALES):
                raise UserError(
                    f"{path} would be measured as a model of its own; give the sizes of all models "
                    "as settings: --n_layer=4 --n_embd=128"
                )
            name = Path(path).stem
            if path != PLAIN:
                if len(impls) > 1:
                    name += f" {impl}"
                if name in models or name == PLAIN:
                    raise UserError(f"two models are called {name}: rename {path}")
            models[name] = parse_model(path, impl, settings)
    return models


def parse_model(path: str, impl: str, settings: list[str]) -> Config:
    files = [] if path == PLAIN else [path]
    impl_settings: Sequence[str] = ()  # without --impls, --attention_impl counts
    if impl == "unfused":
        impl_settings = UNFUSED
    elif impl:
        impl_settings = [f"--attention_impl={impl}"]
    config = load_config([*files, f"--batch_size={PAPER_BATCH}", *settings, *impl_settings])
    if path == PLAIN and config.optimizer != "adamw":
        raise UserError(f"plain is trained with adamw, not with {config.optimizer}")
    if config.batch_size == 0:
        raise UserError("batch_size = 0 fits a training run; benchmark takes the size to measure")
    if path == PLAIN and config.document_mask:
        raise UserError("plain takes no --document_mask: its attention joins documents")
    if config.task == "orbits":
        raise UserError("benchmark measures models of one token a position, not task = orbits")
    return config.replace(name=Path(path).stem)  # without the settings, which are of all models


def check_models(models: dict[str, Config], phases: Sequence[str]) -> None:
    """Raise UserError, before the first is built, for a model that cannot take these phases."""
    attention_alone = not {"attention", "attention_eval"}.isdisjoint(phases)
    for name, config in models.items():
        if name == PLAIN:
            continue
        try:
            check_attention(config)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        if attention_alone and (config.forget or config.local_window or config.n_kv_head):
            raise UserError(
                f"{name}: --phases attention knows no gates, local heads or n_kv_head: take train"
            )


# ---- measuring ----


def measure(models: dict[str, Config], rounds: int, phases: Sequence[str]) -> dict[str, dict]:
    """Measure milliseconds and MB of a step of every model and phase, in turns, round by round."""
    figures: dict[str, dict] = {name: {"attention_path": None} for name in models}
    context = multiprocessing.get_context("spawn")
    workers: dict[tuple[str, str], ProcessPoolExecutor] = {}
    measured = defaultdict(list)
    with contextlib.ExitStack() as stack:
        for name, config in models.items():
            for phase in phases:
                worker = stack.enter_context(ProcessPoolExecutor(1, context))
                stack.push(kill_workers_on_error)  # called before the executors wait for them
                # one after the other: Inductor chooses its kernels by their time on the device
                line = worker.submit(prepare, config, phase, name == PLAIN).result()
                if line is not None:
                    print(f"{name}, {phase}: {line}", flush=True)
                    figures[name]["attention_path"] = line.removeprefix("attention path: ")
                workers[name, phase] = worker
        for _ in tqdm(range(rounds), desc="rounds"):
            for key, worker in workers.items():
                measured[key].append(worker.submit(timed_step).result())
        for name, phase in workers:
            ms, peak_mb = zip(*measured[name, phase], strict=True)
            figures[name] |= {
                f"{phase}_ms": statistics.median(ms),
                f"{phase}_ms_spread": [min(ms), max(ms)],
                f"{phase}_mb": max(peak_mb),
            }
    return figures


def kill_workers_on_error(kind: type[BaseException] | None, *_: object) -> None:
    """Kill the workers if the measurement fails: after Ctrl-C their executors may wait forever."""
    if kind is not None:
        for process in multiprocessing.active_children():
            process.kill()


# The step that a process measures, and its device.
_step: Step
_device: torch.device


def prepare(config: Config, phase: str, plain: bool) -> str | None:
    """Build the step of a process, and take it twice: it allocates, compiles, fills caches.

    Returns a line on the path of attention; None for PlainGPT.
    """
    global _step, _device
    _device = open_device(config.device)
    if _device.type == "cpu" and not plain:
        keep_freed_memory()  # as train.py does; a plain training loop does not
    if phase == "decode":  # as in generation, all tokens share the weights that autocast has cast
        autocast(_device, pick_dtype(config.dtype, _device)).__enter__()
    lines: list[str] = []
    _step = build_step(config, phase, _device, plain, lines.append)
    timed_step()
    if _device.type == "cuda":  # the first step's autotuning and compilation take memory too
        torch.cuda.reset_peak_memory_stats()
    timed_step()
    return lines[0] if lines else None


def timed_step() -> tuple[float, float]:
    """Take a round's steps; return the milliseconds of one, and the peak memory so far in MB."""
    steps = 1
    if _device.type == "cuda":
        steps = STEPS
        _step()  # allocates again what the last round has freed
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        _step()
    synchronize()
    ms = 1000 * (time.perf_counter() - started) / steps
    if _device.type == "cuda":  # the next model's process needs what this step no longer uses
        torch.cuda.empty_cache()
    return ms, memory_mb(_device)


def synchronize() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()


# ---- the steps ----


class PlainGPT(nn.Module):
    """A GPT-2 of torch's own modules: SDPA, learned positions, tied embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        n_embd = config.n_embd
        self.wte = nn.Embedding(config.n_vocab, n_embd)
        self.wpe = nn.Embedding(config.block_size, n_embd)
        block = nn.TransformerEncoderLayer(
            n_embd,
            config.n_head,
            dim_feedforward=4 * n_embd,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, config.n_layer, nn.LayerNorm(n_embd), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(config.block_size)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.wte(x) + self.wpe.weight, self.mask, is_causal=True)
        logits = h @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def build_step(config: Config, phase: str, device: torch.device, plain: bool, say: Say) -> Step:
    """Build a function that takes one step of a phase with the config's model, or with PlainGPT.

    `say` is called with the path of the model's attention, whose kernels are checked first.
    """
    torch.manual_seed(config.seed)
    if phase in ("attention", "attention_eval"):
        return attention_step(config, device, phase == "attention", say)
    shape = (2, config.batch_size, config.block_size)
    x, y = torch.randint(config.n_vocab, shape, device=device)
    if config.document_mask:
        x[draw_starts(config, device)] = config.end_of_text
    dtype = pick_dtype(config.dtype, device)
    model: Any = PlainGPT(config) if plain else build_model(config)
    model.to(device)
    if not plain:
        check_kernels(model, config, dtype, say=say)
    if phase == "decode":  # generation is not compiled
        model.document_start = None  # the cache is one document
        return decoding_step(model.eval(), config, x)
    if pick_compile(config.compile, device):
        if plain:
            model.compile()
        else:
            compile_model(model)
    loss_fn: Callable = model  # of inputs and targets
    if phase == "eval":
        loss_fn = model.eval().token_losses
    unfused = config.attention_impl == "reference" and config.compile is False
    if unfused and not plain:
        loss_fn = partial(loss_of_all_logits, model)

    if phase == "train":
        optimizers = build_optimizers(model, config)
        training = Training(model, dtype, optimizers, build_scaler(device, dtype))
        batch = StepBatch([(x, y)], divisor=1, tokens=x.numel())
        return partial(train_step, training, loss_fn, batch, config.grad_clip)

    @torch.no_grad()
    def evaluation_step() -> None:
        with autocast(device, dtype):
            loss_fn(x, y)

    return evaluation_step


def draw_starts(config: Config, device: torch.device) -> Tensor:
    """Draw with which tokens of a batch documents begin, bool [B, L]."""
    return torch.rand(config.batch_size, config.block_size, device=device) < 1 / DOCUMENT_LENGTH


def loss_of_all_logits(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def decoding_step(model: GPT, config: Config, x: Tensor) -> Step:
    """Build a step that generates the token after block_size - 1 cached ones."""
    cache = KVCache(config.block_size)
    token = x[:, :1]

    @torch.no_grad()
    def step() -> None:
        if not cache.stored:  # the first call allocates them
            next_logits(model, token, cache)
            for tensors in cache.stored.values():
                for tensor in tensors:
                    tensor.normal_()
        cache.length = config.block_size - 1
        next_logits(model, token, cache)

    return step


def attention_step(config: Config, device: torch.device, training: bool, say: Say) -> Step:
    """Build a step of one layer's attention: forward and, in training, backward."""
    dtype = pick_dtype(config.dtype, device)
    # takes little memory; of a window_pattern it is a layer with the window
    layer_config = config.replace(n_layer=1, nope_every=0, window_pattern="", tokenizer="bytes")
    model = build_model(layer_config).to(device)
    check_kernels(model, config, dtype, say=say)
    attention: Any = model.attention_layers()[0].attention
    if pick_compile(config.compile, device):
        attention = torch.compile(attention, dynamic=False)
    # q, k, v as in the model, slices of one projection, and a gradient of the output
    shape = (config.batch_size, config.block_size, 4, config.n_head, config.d_head)
    packed = torch.randn(shape, device=device, dtype=dtype).permute(2, 0, 3, 1, 4)
    qkv = [x.detach().requires_grad_(training) for x in packed[:3]]  # each [B, H, L, d]
    gradient = packed[3]
    context = NO_CONTEXT
    if config.document_mask:
        context = Context(document_positions=positions_in_documents(draw_starts(config, device)))

    def step() -> None:
        for _ in range(CALLS):
            with torch.set_grad_enabled(training):
                out = attention(*qkv, context)
            if training:
                torch.autograd.grad(out, qkv, gradient)

    return step


# ---- the table ----


def print_figures(figures: dict[str, dict], models: dict[str, Config]) -> None:
    """Print the figures of `measure`, and below each model the paper's for the same config."""
    baseline = next(iter(models))
    columns = [name for name in figures[baseline] if name.endswith(("_ms", "_mb"))]
    paper_rows = {}
    first = models[baseline]
    sizes = (first.n_layer, first.n_embd, first.block_size, first.batch_size)
    paper_sizes = (Config.n_layer, Config.n_embd, Config.block_size, PAPER_BATCH)
    if columns == PAPER["columns"] and sizes == paper_sizes:
        for name, config in models.items():
            # a setting, such as --p=3, makes another variant than the file's name says
            if config.name == config.variant_name:
                paper_rows[name] = PAPER["rows"].get(config.name)
    rows = {name: [figures[name][column] for column in columns] for name in models}
    lines = [["", *columns]]
    for name in models:
        lines.append([name, *with_ratios(rows[name], rows[baseline])])
        if paper_rows.get(name) and paper_rows.get(baseline):
            ratios = with_ratios(paper_rows[name], paper_rows[baseline])
            lines.append(["  paper, A100", *ratios])
    print_table(lines, width=18)


def with_ratios(values: list[float], baseline: list[float]) -> list[str]:
    """Format each value, with its ratio to the baseline's in parentheses."""
    return [f"{x:.1f} ({x / base:.2f})" for x, base in zip(values, baseline, strict=True)]


if __name__ == "__main__":
    main()
