"""Loss at lengths beyond the training length, over the same tokens at every length.

python -m scripts.eval_length RUN [RUN ...] --lengths 1024,2048,4096,8192 --rope dynamic_ntk

Prints a table, writes RUN/eval_length.json, and one picture for all runs: eval_length.png in the
run's folder, or for several runs loss_by_length.png in the folder that holds them. What has been
measured before, from the same weights in the same way, is not measured again.
"""

import argparse
import math
import os
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

import checkpoint
from config import Config
from data.loader import validation_batches, validation_tokens
from errors import UserError, command
from evaluate import mean_loss
from files import read_json, replacing, write_json
from scripts.runs import add_options, open_run

# Tokens of a batch, unless one window is longer.
BATCH_TOKENS = 16384


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py made")
    parser.add_argument("--lengths", help="in tokens, such as 1024,2048 (default: 1x to 16x)")
    parser.add_argument("--tokens", type=int, help="how many to predict (default: val_tokens)")
    parser.add_argument("--data_dir", help="other shards than the run's own")
    add_options(parser)
    arguments = parser.parse_args()
    results = [measure(Path(run), arguments) for run in arguments.runs]
    print_table(results)
    runs = [Path(run).resolve() for run in arguments.runs]
    if len(runs) == 1:
        picture = runs[0] / "eval_length.png"
    else:
        picture = Path(os.path.commonpath([run.parent for run in runs])) / "loss_by_length.png"
    plot(results, picture)
    print(f"picture: {os.path.relpath(picture)}")


def measure(path: Path, arguments) -> dict:
    """One run's losses, as they are saved in its eval_length.json."""
    run = open_run(path, arguments)
    lengths = parse_lengths(arguments.lengths, run.config)
    data_dir = arguments.data_dir or run.config.data_dir
    tokens = shared_tokens(data_dir, lengths, arguments.tokens or run.config.val_tokens)
    result = run.facts | {"lengths": lengths, "tokens": tokens, "data_dir": data_dir}
    file = path / "eval_length.json"
    before = read_json(file) or {}
    if all(before.get(key) == value for key, value in result.items()) and "loss" in before:
        return before
    result["loss"] = []
    with tqdm(total=tokens * len(lengths), unit="tok", unit_scale=True, desc=str(path)) as bar:
        for length in lengths:
            bar.set_postfix(length=length)
            size = max(1, BATCH_TOKENS // length)
            batches = validation_batches(data_dir, length, tokens, size, device=run.device)
            loss, count = mean_loss(run.model, counted(batches, bar), run.device, run.dtype)
            assert count == tokens
            result["loss"].append(loss)
    write_json(file, result | {"environment": checkpoint.environment()})
    return result


def counted(batches, bar):
    for x, y in batches:
        yield x, y
        bar.update(x.numel())


def parse_lengths(text: str | None, config: Config) -> list[int]:
    if text is None:
        return [config.block_size * 2**i for i in range(5)]
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--lengths {text!r} must be whole numbers, such as 1024,2048") from None
    if min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise UserError(f"--lengths {text!r} must be positive and different")
    return lengths


def shared_tokens(data_dir: str, lengths: list[int], wanted: int) -> int:
    """The most tokens, up to `wanted`, that fill whole windows of every length."""
    unit = math.lcm(*lengths)
    there = len(validation_tokens(data_dir, wanted)) - 1
    tokens = there // unit * unit
    if tokens < 1:
        raise UserError(
            f"{data_dir}: {there} validation tokens to use, but lengths {lengths} need a multiple "
            f"of {unit} to predict the same tokens in whole windows"
        )
    return tokens


def print_table(results: list[dict]) -> None:
    lengths = sorted({length for result in results for length in result["lengths"]})
    print(f"\nvalidation loss (nats a token), RoPE scaling {results[0]['rope']}")
    width = max(len(result["variant"]) for result in results) + 2
    times = [f"{length / results[0]['trained_length']:g}x" for length in lengths]
    print(" " * width + "".join(f"{t:>9}" for t in times) + "   of the training length")
    print(" " * width + "".join(f"{length:>9}" for length in lengths) + "   tokens")
    for result in results:
        losses = dict(zip(result["lengths"], result["loss"], strict=True))
        cells = [f"{losses[n]:9.4f}" if n in losses else " " * 9 for n in lengths]
        print(f"{result['variant']:<{width}}" + "".join(cells))


def plot(results: list[dict], path: Path) -> None:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for result in results:
        axes.plot(result["lengths"], result["loss"], marker="o", label=result["variant"])
    lengths = sorted({length for result in results for length in result["lengths"]})
    for trained in {result["trained_length"] for result in results}:
        axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length in tokens (dotted: training length)")
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(f"RoPE scaling: {results[0]['rope']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=150)


if __name__ == "__main__":
    main()
