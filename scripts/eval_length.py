"""Loss at lengths beyond the training length, over the same tokens at every length.

python -m scripts.eval_length RUN [RUN ...] --lengths 1024,2048,4096 --rope none,ntk:4,dynamic_ntk
python -m scripts.eval_length RUN [RUN ...] --lengths 20000 --per_position --rope none \
    --rope_theta 500000

The first compares RoPE scalings, here NTK-aware with s = 4; the second is Figure 5 of SSMax.
Prints a table with a row for every run and scaling, and draws a curve for each: eval_length.png in
the run's folder, or for several runs loss_by_length.png in the folder that holds them; with
--per_position loss_by_position.png in their place.

RUN/eval_length.json is a list of measurements. One of them is the loss of the same weights over the
same tokens in the same way; what it holds is not measured again, further lengths are added to it:

    variant, seed, checkpoint, step, trained_length     of the run
    rope, rope_factor, rope_theta                       as asked; null: the scaling's, the run's own
    data_dir, tokens, dtype                             the first validation tokens of data_dir
    lengths, loss                                       two lists; mean loss in nats a token
    loss_by_position                                    {"20000": [the mean over tokens / 20000
                                                        windows, for each position of theirs]}
    environment                                         where the last of it was measured
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from config import Config
from data.loader import validation_batches, validation_tokens
from data.shards import read_meta
from errors import UserError, command
from model import Rope
from runtime.device import autocast, environment
from runtime.files import write_json
from scripts.common.runs import (
    MARKERS,
    Run,
    add_options,
    check_places,
    find_result,
    holding_folder,
    open_run,
    read_results,
    run_names,
    save_picture,
)

# Tokens of a batch, unless one window is longer.
BATCH_TOKENS = 16384
# The smooth curve at position i is the mean over positions i (1 - 1/16) to i (1 + 1/16).
SMOOTHING = 16
# The picture by position starts at this part of the training length: before, little can be known.
FIRST_DRAWN = 1 / 32
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="--rope takes several here: none,ntk:8,yarn"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py made")
    parser.add_argument("--lengths", help="in tokens, such as 1024,2048 (default: 1x to 16x)")
    parser.add_argument("--tokens", type=int, help="how many to predict (default: val_tokens)")
    parser.add_argument("--data_dir", help="other shards than the run's own")
    parser.add_argument(
        "--per_position",
        action="store_true",
        help="also the loss at every position of windows of the greatest length",
    )
    add_options(parser)
    arguments = parser.parse_args()
    asked = scalings(arguments)
    for path in arguments.runs:
        prepare(path, asked[0])  # refuses what is wrong before anything is measured
    check_places(arguments.runs)
    results = [[measure(Path(path), a) for a in asked] for path in arguments.runs]
    names = run_names(arguments.runs)
    print_table(names, results)
    folder = holding_folder(arguments.runs)
    if arguments.per_position:
        plot_positions(names, results, folder / "loss_by_position.png")
    else:
        picture = "loss_by_length.png" if len(results) > 1 else "eval_length.png"
        plot_lengths(names, results, folder / picture)


def scalings(arguments) -> list[argparse.Namespace]:
    """The arguments of each RoPE scaling of --rope, such as ntk:4 or dynamic_ntk."""
    asked = []
    for text in arguments.rope.split(","):
        rope, colon, number = text.partition(":")
        try:
            factor = float(number) if colon else arguments.rope_factor
        except ValueError:
            raise UserError(f"--rope {text!r}: {number!r} must be a number, as in ntk:4") from None
        theta = {} if arguments.rope_theta is None else {"theta": arguments.rope_theta}
        Rope(2, 1, scaling=rope, factor=factor, **theta)  # refuses what it cannot do
        one = {"rope": rope, "rope_factor": factor}
        asked.append(argparse.Namespace(**{**vars(arguments), **one}))
    if any(a in asked[:i] for i, a in enumerate(asked)):
        raise UserError(f"--rope {arguments.rope!r} must name different scalings")
    return asked


def prepare(path, arguments) -> tuple[Run, dict, list[int]]:
    """The run, what its measurement is known by, and the lengths."""
    run = open_run(path, arguments)
    lengths = parse_lengths(arguments.lengths, run.config)
    data_dir = arguments.data_dir or run.config.data_dir
    wanted = run.config.val_tokens if arguments.tokens is None else arguments.tokens
    tokens = shared_tokens(data_dir, lengths, wanted, run.config)
    read_results(run.path / "eval_length.json")
    return run, run.facts | {"tokens": tokens, "data_dir": data_dir}, lengths


def measure(path: Path, arguments) -> dict:
    """A run's measurement with one scaling, of the lengths that are asked for."""
    run, question, lengths = prepare(path, arguments)
    tokens, data_dir = question["tokens"], question["data_dir"]
    file = path / "eval_length.json"
    results = read_results(file)
    result = find_result(results, question)
    if result is None:
        result = question | {"lengths": [], "loss": [], "loss_by_position": {}}
        results.append(result)
    losses = dict(zip(result["lengths"], result["loss"], strict=True))
    by_position = result["loss_by_position"]
    wanted = {str(max(lengths))} if arguments.per_position else set()
    missing = [n for n in lengths if n not in losses or str(n) in wanted - by_position.keys()]
    with tqdm(total=tokens * len(missing), unit="tok", unit_scale=True, disable=not missing) as bar:
        for length in missing:
            bar.set_description(f"{path} {label(result)} {length}")
            size = max(1, BATCH_TOKENS // length)
            batches = validation_batches(data_dir, length, tokens, size, device=run.device)
            means = position_losses(run, counted(batches, bar))
            losses[length] = means.mean().item()
            if str(length) in wanted:
                by_position[str(length)] = means.tolist()
            result["lengths"] = sorted(losses)
            result["loss"] = [losses[n] for n in result["lengths"]]
            result["environment"] = environment()
            write_json(file, results)  # after each, so that a stopped run goes on from here
    return result | {"lengths": lengths, "loss": [losses[n] for n in lengths]}


@torch.no_grad()
def position_losses(run: Run, batches) -> Tensor:
    """Mean loss in nats at every position of the windows x, y [B, L]: float64 [L]."""
    total, windows = 0.0, 0
    for x, y in batches:
        with autocast(run.device, run.dtype):
            losses = run.model.token_losses(x, y)
        total = total + losses.cpu().double().sum(0)
        windows += len(losses)
    return total / windows


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


def shared_tokens(data_dir: str, lengths: list[int], wanted: int, config: Config) -> int:
    """The most tokens, up to `wanted`, that fill whole windows of every length."""
    if wanted < 1:
        raise UserError(f"--tokens {wanted} must be at least 1")
    meta = read_meta(data_dir) or {"tokenizer": config.tokenizer}  # published shards have none
    tokens = validation_tokens(data_dir, wanted)
    if meta["tokenizer"] != config.tokenizer or tokens.max() >= config.n_vocab:
        raise UserError(
            f"{data_dir}: its tokens are of another tokenizer than {config.tokenizer!r}, the run's"
        )
    unit, there = math.lcm(*lengths), len(tokens) - 1
    if there < unit:
        raise UserError(
            f"{data_dir}: {there} validation tokens to use, but lengths {lengths} need a multiple "
            f"of {unit} to predict the same tokens in whole windows"
        )
    return there // unit * unit


def label(result: dict) -> str:
    """A RoPE scaling, its factor and base where they were asked for."""
    factor, theta = result["rope_factor"], result["rope_theta"]
    text = result["rope"] + ("" if factor is None else f":{factor:g}")
    return text + ("" if theta is None else f", theta {theta:g}")


def rows(names: list[str], results: list[list[dict]]):
    """(run's number, scaling's number, name of the row, measurement), for every row or curve."""
    for i, (name, of_run) in enumerate(zip(names, results, strict=True)):
        for j, result in enumerate(of_run):
            yield i, j, name + (f"  {label(result)}" if len(of_run) > 1 else ""), result


def title(results: list[list[dict]]) -> str:
    return "" if len(results[0]) > 1 else f"RoPE scaling {label(results[0][0])}"


def print_table(names: list[str], results: list[list[dict]]) -> None:
    lengths = sorted({n for of_run in results for result in of_run for n in result["lengths"]})
    print("\nvalidation loss (nats a token)" + (title(results) and f", {title(results)}"))
    width = max(len(name) for *_, name, _ in rows(names, results)) + 2
    times = [f"{length / results[0][0]['trained_length']:g}x" for length in lengths]
    print(" " * width + "".join(f"{t:>9}" for t in times) + "   of the training length")
    print(" " * width + "".join(f"{length:>9}" for length in lengths) + "   tokens")
    for *_, name, result in rows(names, results):
        losses = dict(zip(result["lengths"], result["loss"], strict=True))
        cells = [f"{losses[n]:9.4f}" if n in losses else " " * 9 for n in lengths]
        print(f"{name:<{width}}" + "".join(cells))


def style(i: int, j: int, results: list[list[dict]]) -> dict:
    """A colour for each run and a line for each scaling; for one run, a colour for each scaling."""
    if len(results) == 1:
        return {"color": f"C{j}"}
    return {"color": f"C{i % 10}", "linestyle": LINES[j % len(LINES)]}


def plot_lengths(names: list[str], results: list[list[dict]], path: Path) -> None:
    figure, axes = empty_plot(results, "length in tokens")
    lengths = sorted({n for of_run in results for result in of_run for n in result["lengths"]})
    for i, j, name, result in rows(names, results):
        points = sorted(zip(result["lengths"], result["loss"], strict=True))
        marker = MARKERS[(j if len(results[i]) > 1 else i) % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name, **style(i, j, results))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    save_picture(figure, path)


def plot_positions(names: list[str], results: list[list[dict]], path: Path) -> None:
    """Loss at each position: raw means faint, their smooth curve over them."""
    figure, axes = empty_plot(results, "position in tokens")
    first = int(FIRST_DRAWN * min(of_run[0]["trained_length"] for of_run in results))
    low, high = math.inf, -math.inf
    for i, j, name, result in rows(names, results):
        length = max(result["lengths"])
        means = torch.tensor(result["loss_by_position"][str(length)], dtype=torch.float64)
        curve, position = smoothed(means)[first:], range(first + 1, length + 1)
        look = style(i, j, results)
        axes.plot(position, means[first:], color=look["color"], alpha=0.15, linewidth=0.5)
        windows = result["tokens"] // length
        axes.plot(position, curve, label=f"{name} ({windows:,} windows)", **look)
        low, high = min(low, curve.min().item()), max(high, curve.max().item())
    room = 0.1 * max(0.5, high - low)
    axes.set_ylim(low - room, high + room)  # raw means may leave the picture
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.legend(fontsize="small")
    save_picture(figure, path)


def smoothed(means: Tensor) -> Tensor:
    """The mean over a neighbourhood that grows with the position; the end cuts it off."""
    i = torch.arange(len(means))
    half = (i + 1) // SMOOTHING
    first, end = i - half, (i + half + 1).clamp_max(len(means))
    sums = torch.cat((means.new_zeros(1), means.cumsum(0)))
    return (sums[end] - sums[first]) / (end - first)


def empty_plot(results: list[list[dict]], what: str):
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for trained in {of_run[0]["trained_length"] for of_run in results}:
        axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"{what} (dotted: training length)")
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(title(results), fontsize="medium")
    axes.grid(alpha=0.3)
    return figure, axes


if __name__ == "__main__":
    main()
