"""Where the weights of attention are positive: by distance from the diagonal, and what is dead.

python -m scripts.sparsity RUN [RUN ...]

LSSAR's Sect. 2.2.1 says of ReLU attention that positive scores are concentrated around the
diagonal, and that a score below 0 gets no gradient, which isolates its token. Measured are all
layers and heads on validation tokens, in windows of one length, by default the training length:

    positive        share of the weights above 0, by distance i - j of query i from key j: 0, 1,
                    then up to 3, 7, 15, ...; of those on keys that a query sees: null at distances
                    that a head's attention window (--window, local_window) hides
    dead_rows       share of the queries whose weights are all 0: their output is 0
    dead_keys       share of the keys in a window's first half with weight 0 for every later query

A negative weight is neither positive nor 0. Prints a row for every run, with means over layers,
heads and pairs of query and key, and draws a curve for each: in sparsity.png in the run's folder,
or for several runs in sparsity_RUN_RUN.png in the folder that contains them. RUN/sparsity.json is a
list of measurements, none of which is made twice; its lists are by layer, by head and, of
`positive`, by distance.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.loader import validation_batches
from errors import UserError
from evaluation import attention_weights, head_windows
from runtime.device import autocast
from scripts.common.plots import add_legend, length_axis, one_panel, row_style, show_equal_curves
from scripts.common.runner import Evaluation, Run, Store, as_command, option, without_nan
from scripts.common.tables import print_table
from scripts.common.validation import counted, shared_tokens, validation_id

# A distance is near below this share of the length, and far from half of it.
NEAR = 1 / 16


@dataclass(frozen=True, kw_only=True)
class Sparsity(Evaluation):
    """Where the weights of attention are positive: by distance from the diagonal, and dead rows."""

    name = "sparsity"

    length: int | None = option(None, "of a window (default: the training length)", at_least=1)
    tokens: int = option(32768, "validation tokens of all windows", at_least=1)
    data_dir: str | None = option(None, "shards to use instead of the run's own")

    def length_of(self, config: Config) -> int:
        return self.length or config.block_size

    def facts(self, config: Config) -> dict:
        data_dir, length = self.data_dir or config.data_dir, self.length_of(config)
        if length < 2:
            raise UserError(f"--length {self.length} must be at least 2: a key before the query")
        return {
            "head_windows": head_windows(config),
            "data_dir": data_dir,
            "length": length,
            "tokens": shared_tokens(data_dir, (length,), self.tokens, config),
            "val_sha256": validation_id(data_dir),
        }

    def amount(self, config: Config) -> int:
        return self.facts(config)["tokens"]

    def measure(self, run: Run, store: Store) -> None:
        length, tokens, data_dir = (store.facts[key] for key in ("length", "tokens", "data_dir"))
        pairs = visible_pairs(length, store.facts["head_windows"])
        sums = torch.zeros(())
        with tqdm(total=tokens, unit="tok", desc=f"{run.path}") as bar:
            batches = validation_batches(data_dir, length, tokens, 1, device=run.device)
            for x, _ in counted(batches, bar):
                with autocast(run.device, run.dtype):
                    layers = attention_weights(run.model, x, slice(None), signs)
                sums = sums + torch.stack([counts(layer[0], pairs) for layer in layers])
        shares = sums / (tokens // length)
        store.save(
            distances=distances(length),
            positive=without_nan(shares[..., :-2].tolist()),
            dead_rows=shares[..., -2].tolist(),
            dead_keys=shares[..., -1].tolist(),
        )


def show(evaluation: Sparsity, runs: list[tuple[str, dict]]) -> dict[str, Figure]:
    names, results = [name for name, _ in runs], [result for _, result in runs]
    print_shares(names, results)
    return {"sparsity": plot_positive(names, results)}


def distances(length: int) -> list[int]:
    """The greatest distance of each group: 0, 1, 3, 7, ..., length - 1."""
    return [min(length, 2**i) - 1 for i in range((length - 1).bit_length() + 1)]


def visible_pairs(length: int, windows: Sequence[int | None]) -> Tensor:
    """How many pairs of query and key each head sees in each group of distances, [H, distances]."""
    groups = list(pairwise([-1, *distances(length)]))

    def pairs(low: int, high: int, window: int) -> int:  # length - d at each distance d
        return sum(length - d for d in range(low + 1, min(high + 1, window)))

    rows = [[pairs(*group, window or length) for group in groups] for window in windows]
    return torch.tensor(rows, dtype=torch.float64)


def signs(A: Tensor) -> Tensor:
    """The signs of weights, in a byte each."""
    return A.sign().to(torch.int8)


def counts(sign: Tensor, pairs: Tensor) -> Tensor:
    """The shares of one window, [H, distances + 2], from the signs of its weights [H, L, L].

    `pairs` are its `visible_pairs`; where there are none, the share is NaN.
    """
    length = sign.shape[-1]
    position = torch.arange(length, device=sign.device)
    distance = position[:, None] - position
    positive = [
        (sign[:, (low < distance) & (distance <= high)] > 0).sum(-1)
        for low, high in pairwise([-1, *distances(length)])
    ]
    shares = torch.stack(positive, dim=-1).cpu() / pairs
    used = sign != 0
    dead_rows = (~used.any(-1)).double().mean(-1)
    later = used & (distance > 0)
    dead_keys = (~later.any(-2))[:, : length // 2].double().mean(-1)
    return torch.cat((shares, torch.stack((dead_rows, dead_keys), dim=-1).cpu()), dim=-1)


def positive_shares(result: dict) -> Tensor:
    """`positive` as [layers, H, distances], NaN where it is null."""
    return torch.from_numpy(np.array(result["positive"], dtype=np.float64))


def mean_shares(result: dict) -> dict[str, float]:
    """Means over layers and heads; those of distances over all pairs of a query and a key it sees.

    NaN where there is no such pair.
    """
    length, ends = result["length"], [-1, *result["distances"]]
    pairs = visible_pairs(length, result["head_windows"])
    positive = positive_shares(result).mean(0).nan_to_num() * pairs
    low, high = torch.tensor(ends[:-1]) + 1, torch.tensor(ends[1:])
    near, far = high < max(1, NEAR * length), low >= length / 2

    def share(chosen: Tensor) -> float:
        return (positive[:, chosen].sum() / pairs[:, chosen].sum()).item()

    return {
        "near": share(near),
        "far": share(far),
        "all": share(near | True),
        "dead rows": torch.tensor(result["dead_rows"]).mean().item(),
        "dead keys": torch.tensor(result["dead_keys"]).mean().item(),
    }


def print_shares(names: list[str], results: Sequence[dict]) -> None:
    length = results[0]["length"]
    print(
        f"\nshare of positive weights, validation tokens in windows of {length}; near: closer than "
        f"{max(1, round(NEAR * length))} keys, far: at least half the window"
    )
    shares = [mean_shares(result) for result in results]
    table = [["", *shares[0]]]
    for name, row in zip(names, shares, strict=True):
        cells = ("no pairs" if math.isnan(share) else f"{share:.4f}" for share in row.values())
        table.append([name, *cells])
    print_table(table, width=11)


def plot_positive(names: Sequence[str], results: Sequence[dict]) -> Figure:
    """The share of positive weights over the distance, a curve for each run."""
    figure, axes = one_panel()
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        positive = positive_shares(result).mean(0).nanmean(0).tolist()  # over the heads that see
        keys = [distance + 1 for distance in result["distances"]]
        axes.plot(keys, positive, label=name, **row_style(i))
    trained = {result["trained_length"] for result in results}
    length_axis(axes, "distance from the diagonal + 1, up to", trained)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("share of weights above 0")
    axes.set_title("mean over layers and heads", fontsize="medium")
    show_equal_curves(axes)
    add_legend(figure)
    return figure


main = as_command(Sparsity, show)

if __name__ == "__main__":
    main()
