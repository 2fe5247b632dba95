"""The cost of a training step, an evaluation step, a generated token or attention alone.

python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py
python -m scripts.benchmark plain configs/softmax.py configs/lssar_p15.py --phases train
python -m scripts.benchmark configs/lssar_p15.py --impls auto,unfused
python -m scripts.benchmark configs/softmax.py configs/t6.py --phases decode --block_size=16384
python -m scripts.benchmark configs/softmax.py configs/lssa.py configs/lssar_p15.py \
    --phases attention,attention_eval --block_size=16384

The columns are the columns of the LSSAR paper's Table A7, whose figures are printed below each
variant. The paper uses standard PyTorch functions and no fused kernels, as does `--impls unfused`:
the path `reference` without torch.compile, and all logits at once. `plain` in place of a config is
a GPT-2 of torch's own modules, as one would write it without this repository. Each model is
measured in its own process, so that its peak memory is known; the models take turns, round by
round, so that a change in the machine's speed affects all of them equally. Times are medians over
the rounds. The phase `decode` generates one more token for each of batch_size sequences, of
which block_size - 1 are cached; `attention` is ten calls of one layer's attention, forward and
backward, and `attention_eval` is ten calls without gradients.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, load_config
from errors import UserError, command
from generation import next_logits
from layers.cache import KVCache
from layers.selfcheck import check_kernels
from model import GPT, compile_model
from optim import build_optimizers
from runtime.device import autocast, environment, memory_mb, open_device, pick_compile, pick_dtype
from runtime.files import check_writable, write_json
from scripts.common.options import Parser
from scripts.common.papers import LSSAR
from scripts.common.tables import print_table

PAPER = LSSAR["table_a7"]
PHASES = ("train", "eval", "decode", "attention", "attention_eval")
# Calls of attention in a step: the host prepares one while the GPU computes another.
CALLS = 10
UNFUSED = ("--attention_impl=reference", "--compile=False")
PLAIN = "plain"  # in place of a config file: PlainGPT


@command
def main() -> None:
    epilog = "--setting=value sets a setting of all models"
    parser = Parser(description=__doc__.split("\n\n")[0], epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG.py", help="or plain; the first is the baseline")
    add("--impls", default="auto", help="auto,triton,blocked,reference, or unfused: the paper's")
    add("--phases", help=f"of {','.join(PHASES)} (train,eval; train beside plain)")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--out", metavar="FILE", type=Path, help="write the figures to this JSON file")
    arguments, settings = parser.parse_known_args()
    allowed = ("train",) if PLAIN in arguments.configs else PHASES
    phases = arguments.phases.split(",") if arguments.phases else [*allowed[:2]]
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds} must be at least 1")
    if not set(phases) <= set(allowed):
        raise UserError(f"--phases {arguments.phases}: each must be one of {', '.join(allowed)}")
    if arguments.out:
        check_writable(arguments.out.parent)
    models = parse_models(arguments, settings)
    figures = measure(models, arguments.rounds, phases)
    config = next(iter(models.values()))
    made = environment(config.device)
    dtype = str(pick_dtype(config.dtype, open_device(config.device))).removeprefix("torch.")
    shape = f"{config.n_layer} layers, {config.n_embd} wide, "
    shape += f"{config.batch_size} x {config.block_size} tokens, {dtype}, on {made['machine']}"
    print(f"\n{shape}; median of {arguments.rounds} rounds; in parentheses over the first model")
    print_figures(figures, models)
    if arguments.out:
        used = config.as_dict() | {"dtype": dtype, "rounds": arguments.rounds}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, {"environment": made, "settings": used, "rows": figures})
        print(f"written: {arguments.out}")


def parse_models(arguments: argparse.Namespace, settings: list[str]) -> dict[str, Config]:
    """The Config of every model, by its name in the table."""
    impls, models = arguments.impls.split(","), {}
    for path, impl in itertools.product(arguments.configs, impls):
        chosen = UNFUSED if impl == "unfused" else [f"--attention_impl={impl}"]
        files = [] if path == PLAIN else [path]
        name = Path(path).stem + (f" {impl}" if impls[1:] and path != PLAIN else "")
        config = load_config([*files, "--batch_size=4", *settings, *chosen])
        if files and (name in models or name == PLAIN):
            raise UserError(f"two models are called {name}: rename {path}")
        if path == PLAIN and config.optimizer != "adamw":
            raise UserError(f"plain is trained with adamw, not with {config.optimizer}")
        if config.task == "orbits" or config.dry_run:
            raise UserError("benchmark takes neither task = orbits nor --dry_run")
        models[name] = config
    return models


# ---- measuring ----


def measure(models: dict[str, Config], rounds: int, phases: Sequence[str]) -> dict[str, dict]:
    """Milliseconds and MB of a step of every model and phase; they take turns, round by round."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        workers = {
            key: stack.enter_context(ProcessPoolExecutor(1, context))
            for key in itertools.product(models, phases)
        }
        paths: dict[str, str] = {}  # of attention
        for (name, phase), worker in workers.items():
            for line in worker.submit(prepare, models[name], phase, name == PLAIN).result():
                print(f"{name}, {phase}: {line}", flush=True)
                paths[name] = line.removeprefix("attention path: ")
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in workers}
        for _ in tqdm(range(rounds), desc="rounds"):
            for key, worker in workers.items():
                taken[key].append(worker.submit(timed_step).result())
    figures: dict[str, dict] = {name: {"attention_path": paths.get(name)} for name in models}
    for (name, phase), steps in taken.items():
        ms, peaks = zip(*steps, strict=True)
        figures[name][f"{phase}_ms"] = statistics.median(ms)
        figures[name][f"{phase}_ms_spread"] = [min(ms), max(ms)]
        figures[name][f"{phase}_mb"] = max(peaks)
    return figures


# The step that a process measures, and its device.
_step: Callable[[], None]
_device: torch.device


def prepare(config: Config, phase: str, plain: bool) -> list[str]:
    """Build the step of a process, and take it twice: it allocates, compiles, fills caches.

    Returns what check_kernels says.
    """
    global _step, _device
    _device = open_device(config.device)
    if phase == "decode":  # as in generation, all tokens share the weights that autocast has cast
        autocast(_device, pick_dtype(config.dtype, _device)).__enter__()
    said: list[str] = []
    _step = build_step(config, phase, _device, plain, said.append)
    timed_step()
    if _device.type == "cuda":  # the first step's autotuning and compilation take memory too
        torch.cuda.reset_peak_memory_stats()
    timed_step()
    return said


def timed_step() -> tuple[float, float]:
    """Milliseconds of a step, and the peak memory so far in MB."""
    wait = torch.cuda.synchronize if _device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    _step()
    wait()
    return 1000 * (time.perf_counter() - started), memory_mb(_device)


class PlainGPT(nn.Module):
    """A GPT-2 of torch's own modules: SDPA, learned positions, tied embeddings."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.n_vocab, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        sizes = (c.n_embd, c.n_head, 4 * c.n_embd, 0.0, "gelu")
        block = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, c.n_layer, nn.LayerNorm(c.n_embd), False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(c.block_size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.wte(x) + self.wpe.weight, self.mask, is_causal=True)
        return F.cross_entropy((h @ self.wte.weight.T).flatten(0, 1), y.flatten())

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [*self.parameters()]}]


def build_step(
    config: Config, phase: str, device: torch.device, plain: bool, say: Callable[[str], None]
) -> Callable[[], None]:
    """A function that takes one step of a phase with the config's model, or with PlainGPT.

    `say` is given the path of the model's attention, whose kernels are checked first.
    """
    torch.manual_seed(config.seed)
    if phase.startswith("attention"):
        return attention_step(config, phase == "attention", device, say)
    x, y = torch.randint(config.n_vocab, (2, config.batch_size, config.block_size), device=device)
    model: Any = (PlainGPT if plain else GPT)(config).to(device).train(phase == "train")
    dtype = pick_dtype(config.dtype, device)
    if not plain:
        check_kernels(model, config, dtype, say=say)
    compiled = model
    if phase != "decode" and pick_compile(config.compile, device):  # generation is not compiled
        compiled = torch.compile(model) if plain else compile_model(model)
    unfused = not plain and config.attention_impl == "reference" and config.compile is False
    optimizers, cache = build_optimizers(model, config), KVCache(config.block_size)

    def loss_of_all_logits() -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def train() -> None:
        with autocast(device, dtype):
            loss = loss_of_all_logits() if unfused else compiled(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate() -> None:
        with autocast(device, dtype):
            loss_of_all_logits() if unfused else model.token_losses(x, y)

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
    config: Config, training: bool, device: torch.device, say: Callable[[str], None]
) -> Callable[[], None]:
    """The attention of one layer: forward and backward, or forward without gradients."""
    if config.forget or config.local_window or config.n_kv_head:
        raise UserError("--phases attention knows no gates, local heads or n_kv_head: take train")
    dtype = pick_dtype(config.dtype, device)
    model = GPT(config.replace(n_layer=1, tokenizer="bytes")).to(device)  # takes little memory
    check_kernels(model, config, dtype, say=say)
    attention: Any = model.attention_layers()[0].attention
    if pick_compile(config.compile, device):
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


# ---- the table ----


def print_figures(figures: dict[str, dict], models: dict[str, Config]) -> None:
    """Print the figures of `measure`, and below each model the paper's for the same variant."""
    columns = [c for c in next(iter(figures.values())) if c.endswith(("_ms", "_mb"))]
    ours = {name: [steps[c] for c in columns] for name, steps in figures.items()}
    papers = {
        name: PAPER["rows"].get(config.variant_name)
        for name, config in models.items()
        if columns == PAPER["columns"] and config.projections == "linear"
    }
    table, first = [["", *columns]], next(iter(models))
    for name in models:
        for label, values in ((name, ours), ("  paper, A100", papers)):
            if values.get(name) and values.get(first):
                pairs = zip(values[name], values[first], strict=True)
                table.append([label, *(f"{x:.1f} ({x / base:.2f})" for x, base in pairs)])
    print_table(table, width=18)


if __name__ == "__main__":
    main()
