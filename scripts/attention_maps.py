"""What heads attend to: attention maps (Figure A1 of LSSAR), the attention sink, sparsity.

python -m scripts.attention_maps RUN [RUN ...] --layer -1
python -m scripts.attention_maps RUN [RUN ...] --text "Some other text." --lengths 1024,16384
python -m scripts.attention_maps RUN [RUN ...] --distances

Draws RUN/attention_maps.png, the weights of all heads of the layer on a text. Prints a table for
the text and for the same validation tokens at each length, with a line for every run. Draws a curve
for every run over the number of keys of a row, at the greatest length (with --tokens 0: of the
text), as attention_by_row.png in the run's folder, or for several runs attention_by_row_RUN_RUN.png
in the folder that contains them (or --out). The model reads the text without end-of-text before it.

A row is one query's weights over the n keys that it sees: all up to its own or, in a head with a
window, the last of them. The first query has no choice and is left out. Reported are means over
rows of

    first_token         share of the first token in sum |A|: the sink; 1/n if all weights are equal,
                        or 0 where a window hides it
    entropy             of the shares |A| / sum |A|, in nats
    entropy_share       entropy / log n: 1 if all weights are equal, also for n = 1; 0 if one of
                        several keys gets all
    zeros               share of the n weights that are exactly 0 in float32, underflow included
    sum                 sum |A|: 1 for a distribution

So a row that is not a distribution is normalised as |A| / sum |A|. A row of zeros is dead: it is
counted, and excluded from the means.

LSSAR's Sect. 2.2.1 says of ReLU attention that positive scores are concentrated around the
diagonal, and that a score below 0 gets no gradient, which isolates its token. --distances measures
all layers and heads on the validation tokens, in windows of the training length:

    positive            share of the weights above 0, by distance i - j of query i from key j: 0, 1,
                        then up to 3, 7, 15, ...; of the keys that a query sees: null at distances
                        that a head's attention window (--window, local_window) hides
    dead_rows           share of the queries whose weights are all 0: their output is 0
    dead_keys           share of the keys in a window's first half with weight 0 for every later
                        query

A negative weight is neither positive nor 0. The table has means over layers, heads and pairs of
query and key: near, at distances below 1/16 of the length; far, from half of it; and all. The
picture is weights_by_distance.png, with RUN_RUN for several runs.

RUN/attention_maps.json is a list of measurements. What it has is not measured again.

    variant, seed, checkpoint, step, sha256, trained_length, rope, rope_factor, rope_theta, dtype
    layer               from 0
    head_windows        the most keys that a row of each head sees; null: all up to its own
    data_dir, tokens    of the validation tokens; null and 0 for a text alone
    parts               {"1024 tokens": {...}, "text: Some other text.": {...}}, each with
        length          of a window
        keys            groups of rows with up to 2, 4, 8, ... keys up to their own, including keys
                        that a window hides
        groups          {"dead": [heads][groups] share of rows, "first_token": [heads][groups], ...}
        heads           {"dead": [heads], "first_token": [heads], ...}, over all rows
                        and "by distance": {...} with
        length          of a window
        distances       the greatest distance of each group
        positive        [layers][heads][groups]
        dead_rows, dead_keys    [layers][heads]
    environment
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import DEAD
from config import Config
from data.tokenizer import get_tokenizer
from errors import UserError
from evaluation import attention_weights, head_windows
from runtime.device import autocast
from scripts.common.plots import Curve, draw_curves, panels
from scripts.common.runner import Run, as_command, load_run, option
from scripts.common.tables import print_table
from scripts.common.validation import AtLengths, data_facts, stretches, windows

# LSSAR, Figure A1
TEXT = (
    "Working from home can be great most days. I enjoy the flexibility and not having to commute "
    "in traffic. But sometimes I miss the office interactions with my coworkers and team meetings."
)
CLAMP = 0.5
# The longest text that is drawn, and the longest whose ticks are its tokens, in tokens.
MAP_TOKENS, WORDS = 2048, 48
# The name of the part of --distances.
BY_DISTANCE = "by distance"
# A distance is near below this share of the length, and far from half of it.
NEAR = 1 / 16
NUMBERS = ("first_token", "entropy", "entropy_share", "zeros", "sum")
DRAWN = {
    "first_token": "share of the first token",
    "entropy_share": "entropy / log n",
    "zeros": "share of weights that are exactly 0",
}


@dataclass(frozen=True, kw_only=True)
class AttentionMaps(AtLengths):
    """What heads attend to: maps of a text, the attention sink, and the weights by distance."""

    name, multiples = "attention_maps", (1, 8)

    layer: int = option(-1, "0 is the first, -1 the last")
    text: str = option(TEXT, "to map; empty: none (default: the text of LSSAR's Figure A1)")
    tokens: int = option(32768, "validation tokens at each length; 0: only the text", at_least=0)
    distances: bool = option(False, "also positive weights by distance, dead rows, in all layers")
    data_dir: str | None = option(None, "shards to use instead of the run's own")

    def ids(self, config: Config) -> list[int]:
        """The tokens of the text."""
        ids = get_tokenizer(config.tokenizer).encode(self.text)
        if self.text and not 2 <= len(ids) <= MAP_TOKENS:
            raise UserError(f"--text has {len(ids)} tokens; a map takes 2 to {MAP_TOKENS}")
        return ids

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return super().lengths_of(config) if self.tokens else ()

    def facts(self, config: Config) -> dict:
        layers = range(config.n_layer)
        if self.layer not in (*layers, *range(-config.n_layer, 0)):
            raise UserError(f"--layer {self.layer}: this model has layers 0 to {layers[-1]}")
        self.ids(config)
        facts = {"layer": layers[self.layer], "head_windows": head_windows(config)}
        if not (self.tokens or self.distances):
            return facts | {"data_dir": None, "val_sha256": None, "tokens": 0}
        if min(self.lengths_of(config), default=2) < 2:
            raise UserError("--lengths must be at least 2: a single key leaves no choice")
        return facts | data_facts(self.data_dir or config.data_dir, self.stretches(config))

    def stretches(self, config: Config) -> NDArray:
        lengths = (*self.lengths_of(config), *([config.block_size] if self.distances else []))
        return stretches(self.data_dir or config.data_dir, lengths, self.tokens, config)

    def parts(self, config: Config) -> dict[str, int]:
        text = {f"text: {self.text}": len(self.ids(config))} if self.text else {}
        names = [f"{length} tokens" for length in self.lengths_of(config)]
        names += [BY_DISTANCE] if self.distances else []
        return text | dict.fromkeys(names, self.facts(config)["tokens"])

    def measure_part(self, run: Run, facts: dict, name: str, bar: tqdm) -> dict:
        if name.startswith("text: "):
            return row_statistics(run, facts["layer"], [torch.tensor([self.ids(run.config)])])
        length = run.config.block_size if name == BY_DISTANCE else int(name.split()[0])
        one_by_one = (x for x, _ in windows(self.stretches(run.config), length, 1, run.device, bar))
        if name == BY_DISTANCE:
            return distance_statistics(run, length, one_by_one)
        return row_statistics(run, facts["layer"], one_by_one)

    def picture(self, path: str | Path, measurement: dict) -> Figure | None:
        if not self.text:
            return None
        run, layer = load_run(path, self), measurement["layer"]
        ids = self.ids(run.config)
        return plot_maps(run, layer, ids, weights(run, layer, torch.tensor([ids])))


# ---- groups of positions or distances ----


def distances(length: int) -> list[int]:
    """The greatest distance of each group: 0, 1, 3, 7, ..., length - 1."""
    return [min(length, 2**i) - 1 for i in range((length - 1).bit_length() + 1)]


def grouped(values: Tensor) -> Tensor:
    """Sums over each group of `distances`, [..., groups], of values at each distance, [..., L]."""
    sizes = np.diff(distances(values.shape[-1]), prepend=-1).tolist()
    return torch.stack([group.sum(-1) for group in values.split(sizes, -1)], dim=-1)


# ---- rows, by the number of keys ----


def row_statistics(run: Run, layer: int, windows: Iterable[Tensor]) -> dict:
    """The values of a part, over windows [1, L] of one length."""
    sums = torch.zeros(())
    for idx in windows:
        numbers = weights(run, layer, idx, row_numbers).double()
        sums = sums + group_sums(numbers, keys_seen(run.config, idx.shape[1]))
    return summary(sums, idx.shape[1])


def weights(
    run: Run, layer: int, idx: Tensor, reduce: Callable[[Tensor], Tensor] = lambda A: A
) -> Tensor:
    """`reduce` of the layer's weights [H, L, L] for idx [1, L]."""
    with autocast(run.device, run.dtype):
        one = slice(layer, layer + 1)
        (A,) = attention_weights(run.model, idx.to(run.device), slice(None), reduce, one)
    return A[0].cpu()


def keys_seen(config: Config, length: int) -> Tensor:
    """How many keys the rows of each head see, [H, length]."""
    most = [length if window is None else window for window in head_windows(config)]
    return torch.arange(1, length + 1).minimum(torch.tensor(most)[:, None])


def row_numbers(A: Tensor) -> Tensor:
    """For rows of A [..., rows, keys]: first token's share, entropy, nonzero weights, sum |A|."""
    size = A.abs()
    total = size.sum(-1)
    share = size / total.clamp_min(DEAD)[..., None]
    entropy = torch.special.entr(share).sum(-1)
    return torch.stack((share[..., 0], entropy, (A != 0).sum(-1).to(A.dtype), total), dim=-1)


def group_sums(numbers: Tensor, seen: Tensor) -> Tensor:
    """`row_numbers` [H, L, 4] of rows that see `seen` keys [H, L], summed: [H, 2 + 5, groups].

    These are the number of rows, of dead rows, and NUMBERS summed over the others.
    """
    n = seen.to(numbers.dtype)
    first, entropy, nonzero, total = numbers.unbind(-1)
    alive = (total > DEAD).to(numbers.dtype)
    share = torch.where(n > 1, entropy / n.log(), 1)
    means = torch.stack((first, entropy, share, 1 - nonzero / n, total), dim=1)
    counts = torch.stack((torch.ones_like(alive), 1 - alive), dim=1)
    sums = grouped(torch.cat((counts, means * alive[:, None]), dim=1))
    return sums[..., 1:]  # without the first query


def summary(sums: Tensor, length: int) -> dict:
    """The values of a part, from the sums [H, 2 + 5, groups] over its windows."""
    return {
        "length": length,
        "keys": [distance + 1 for distance in distances(length)[1:]],
        "groups": mean_rows(sums),
        "heads": mean_rows(sums.sum(-1)),
    }


def mean_rows(sums: Tensor) -> dict:
    """The share of dead rows, and each of NUMBERS as a mean over the others; None if all are."""
    rows, dead, *others = sums.unbind(1)
    means = {name: total / (rows - dead) for name, total in zip(NUMBERS, others, strict=True)}
    return {k: without_nan(v.tolist()) for k, v in ({"dead": dead / rows} | means).items()}


def without_nan(value: Any) -> Any:
    """Nested lists with None in place of NaN, which JSON lacks."""
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if math.isnan(value) else value


def with_nan(values: list) -> Tensor:
    """Nested lists as a tensor, with NaN in place of None."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


def mean_over_heads(part: dict, name: str) -> float:
    """Mean over the heads that have a value."""
    return with_nan(part["heads"][name]).nanmean().item()


# ---- weights, by distance ----


def distance_statistics(run: Run, length: int, windows: Iterable[Tensor]) -> dict:
    """The values of the part of --distances, over windows [1, length]."""
    pairs = visible_pairs(length, head_windows(run.config))
    sums, number = torch.zeros(()), 0
    for idx in windows:
        with autocast(run.device, run.dtype):
            layers = attention_weights(run.model, idx, slice(None), signs)
        sums = sums + torch.stack([shares(layer[0], pairs) for layer in layers])
        number += 1
    means = sums / number
    return {
        "length": length,
        "distances": distances(length),
        "positive": without_nan(means[..., :-2].tolist()),
        "dead_rows": means[..., -2].tolist(),
        "dead_keys": means[..., -1].tolist(),
    }


def visible_pairs(length: int, windows: Sequence[int | None]) -> Tensor:
    """How many pairs of query and key each head sees in each group of distances, [H, groups]."""
    distance = torch.arange(length)
    pairs = [(length - distance) * (distance < (window or length)) for window in windows]
    return grouped(torch.stack(pairs)).double()


def signs(A: Tensor) -> Tensor:
    """The signs of weights, in a byte each."""
    return A.sign().to(torch.int8)


def shares(sign: Tensor, pairs: Tensor) -> Tensor:
    """The shares of one window, [H, groups + 2], from the signs of its weights [H, L, L].

    `pairs` are its `visible_pairs`; where there are none, the share is NaN.
    """
    length = sign.shape[-1]
    positive = [(sign.diagonal(-d, -2, -1) > 0).sum(-1) for d in range(length)]
    used = sign != 0
    dead_rows = ~used.any(-1)
    dead_keys = ~used.tril(-1).any(-2)[:, : length // 2]
    dead = torch.stack([x.double().mean(-1).cpu() for x in (dead_rows, dead_keys)], dim=-1)
    return torch.cat((grouped(torch.stack(positive, dim=-1)).cpu() / pairs, dead), dim=-1)


def mean_shares(result: dict) -> dict[str, float]:
    """Means over layers and heads, and for distances over all visible pairs of query and key.

    NaN where there is no such pair.
    """
    part = result["parts"][BY_DISTANCE]
    length, ends = part["length"], [-1, *part["distances"]]
    pairs = visible_pairs(length, result["head_windows"])
    positive = with_nan(part["positive"]).mean(0).nan_to_num() * pairs
    low, high = torch.tensor(ends[:-1]) + 1, torch.tensor(ends[1:])
    near, far = high < max(1, NEAR * length), low >= length / 2

    def share(chosen: Tensor) -> float:
        return (positive[:, chosen].sum() / pairs[:, chosen].sum()).item()

    return {
        "near": share(near),
        "far": share(far),
        "all": share(near | True),
        "dead rows": torch.tensor(part["dead_rows"]).mean().item(),
        "dead keys": torch.tensor(part["dead_keys"]).mean().item(),
    }


# ---- the tables and the pictures ----


def show(evaluation: AttentionMaps, runs: list[tuple[str, dict]]) -> dict[str, Figure]:
    """Print a table of every part; draw the last length and the distances."""
    names, pictures = [name for name, _ in runs], {}
    # the lengths of runs with other training lengths differ
    for of_runs in zip(*(result["parts"].items() for _, result in runs), strict=True):
        part, parts = of_runs[0][0], [part for _, part in of_runs]
        if part == BY_DISTANCE:
            pictures["weights_by_distance"] = show_distances(runs)
        else:
            print(f"\nlayer {evaluation.layer}, {ascii(part[:46])}; means over heads and rows")
            pictures["attention_by_row"] = show_rows(names, parts)
    return pictures


def show_rows(names: Sequence[str], parts: Sequence[dict]) -> Figure:
    """A line for every run, of the same text or validation tokens; a panel for each of DRAWN."""
    columns = (*NUMBERS[:4], "dead", "sum")
    table = [["", "length", *columns]]
    drawn: dict[str, list[Curve]] = {title: [] for title in DRAWN.values()}
    for name, part in zip(names, parts, strict=True):
        means = [f"{mean_over_heads(part, column):.4f}" for column in columns]
        table.append([name, str(part["length"]), *means])
        for number, title in DRAWN.items():  # means over heads; NaN where all rows are dead
            groups = with_nan(part["groups"][number]).nanmean(0)
            drawn[title].append(Curve(name, part["keys"], groups.tolist()))
    print_table(table)
    keys = max((part["keys"] for part in parts), key=max)
    return draw_curves(drawn, "keys up to the row's own", "", "x", keys, sharey=False)


def show_distances(runs: Sequence[tuple[str, dict]]) -> Figure:
    """A line and a curve for every run."""
    length = runs[0][1]["parts"][BY_DISTANCE]["length"]
    print(f"\nshare of positive weights, validation tokens in windows of {length}")
    means = {name: mean_shares(result) for name, result in runs}
    table = [[name, *(f"{mean:.4f}" for mean in of_run.values())] for name, of_run in means.items()]
    print_table([["", *means[runs[0][0]]], *table], width=11)
    curves = [Curve(name, *positive_curve(result)) for name, result in runs]
    x = "distance from the diagonal + 1, up to"
    ticks = positive_curve(runs[0][1])[0]
    return draw_curves({"": curves}, x, "share of weights above 0", "x", ticks)


def plot_maps(run: Run, layer: int, ids: list[int], A: Tensor) -> Figure:
    """All heads' weights A [H, L, L] on token ids [L], one panel each, clamped as in Figure A1."""
    H, L, _ = A.shape
    tokenizer = get_tokenizer(run.config.tokenizer)
    low, colours = (-CLAMP, "RdBu_r") if A.min() < 0 else (0.0, "viridis")
    distance = torch.arange(L)[:, None] - torch.arange(L)
    unseen = (distance < 0) | (distance >= keys_seen(run.config, L)[..., None])
    figure, all_axes = panels(H)
    for head, axes in enumerate(all_axes):
        image = axes.imshow(
            A[head].masked_fill(unseen[head], math.nan).numpy(), vmin=low, vmax=CLAMP, cmap=colours
        )
        axes.set_title(f"head {head}", fontsize="small")
        axes.tick_params(labelsize="x-small")
        if L <= WORDS:
            words = [ascii(tokenizer.decode([i]))[1:-1].replace("$", r"\$") for i in ids]
            axes.set_xticks(range(L), words, rotation=90, fontsize=5)
            axes.set_yticks(range(L), words, fontsize=5)
    figure.suptitle(
        f"{run.config.variant_name}, layer {layer}: weights clamped to "
        f"[{low:g}, {CLAMP:g}]; rows are queries",
        fontsize="medium",
    )
    figure.colorbar(image, ax=all_axes, shrink=0.5)
    return figure


def positive_curve(result: dict) -> tuple[list[float], list[float]]:
    """The distances + 1, and the share of positive weights: over the heads that see, and layers."""
    part = result["parts"][BY_DISTANCE]
    shares = with_nan(part["positive"]).mean(0).nanmean(0).tolist()
    return [distance + 1 for distance in part["distances"]], shares


main = as_command(AttentionMaps, show)

if __name__ == "__main__":
    main()
