"""The share of attention weights above 0 by distance, and of rows and keys without any.

python -m scripts.weights_by_distance RUN [RUN ...]

LSSAR's Sect. 2.2.1 says of ReLU attention that positive scores are concentrated around the
diagonal, and that a score below 0 gets no gradient, which isolates its token. This command measures
all layers and heads on validation tokens, in windows of the training length:

    positive            share of the weights above 0, by distance i - j of query i from key j: 0, 1,
                        then up to 3, 7, 15, ...; of the keys that a query sees: null at distances
                        that a head's attention window (--window, local_window) hides
    dead_rows           share of the queries whose weights are all 0: their output is 0
    dead_keys           share of the keys in a window's first half with weight 0 for every later
                        query

A negative weight is neither positive nor 0. The table has means over layers, heads and pairs of
query and key: near, at distances below 1/16 of the length; far, from half of it; and all. Near and
far are whole groups of distances, so they are narrower if the length is not a power of 2. The
picture is weights_by_distance.png.

RUN/weights_by_distance.json is a list of measurements:

    variant, seed, step, sha256, trained_length, dtype
    attention, rope, rope_factor, rope_theta, log_base  as in eval_length.json
    head_windows        by layer, the most keys that a query of each head sees; null: all
    data_dir, tokens    of the validation tokens
    parts               {"128 tokens": {...}}, with
        length          of a window
        distances       the greatest distance of each group
        positive        [layers][heads][groups]
        dead_rows, dead_keys    [layers][heads]
    environment
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from config import Config, PositiveInt
from errors import UserError
from evaluation import head_windows, layer_attention_weights
from scripts.common.command_line import option
from scripts.common.groups import distances, sum_groups, with_nan, without_nan
from scripts.common.labels import title_of
from scripts.common.plots import Curve, draw_curves
from scripts.common.runner import Results, as_command
from scripts.common.runs import Run, model_on_meta
from scripts.common.tables import print_table
from scripts.common.validation import TextEvaluation, single_windows, stretches

# Near: distances below this share of the length. Far: distances from half of the length on.
NEAR = 1 / 16


@dataclass(frozen=True, kw_only=True)
class WeightsByDistance(TextEvaluation):
    """The share of positive weights by distance, and of rows and keys whose weights are all 0."""

    name = "weights_by_distance"

    tokens: PositiveInt = option(32768, "validation tokens, at least one window")

    def text(self, config: Config) -> NDArray[np.integer]:
        """The validation text that is cut into windows of the training length."""
        length = config.block_size
        return stretches((length,), max(self.tokens, length), config)

    def identify(self, config: Config) -> dict:
        if config.document_mask:
            raise UserError(
                f"{config.out_dir} has document_mask: weights_by_distance cannot measure it, "
                "because it counts all earlier tokens as keys"
            )
        windows_of = head_windows(model_on_meta(config, self.window))
        targets = self.text(config)[:, 1:]
        return {"head_windows": windows_of, "tokens": targets.size}

    def chunks(self, config: Config) -> dict[str, int]:
        """The length of a window."""
        return {f"{config.block_size} tokens": config.block_size}

    def measure(self, run: Run, length: int) -> dict:
        """The shares of each head, means over windows of `length` tokens."""
        pairs = visible_pairs(length, head_windows(run.model))  # [layers, H, groups]
        text = self.text(run.config)
        measured = defaultdict(list)  # by layer within each window
        for idx in single_windows(text, length, run.device):
            with run.autocast():
                signs = layer_attention_weights(
                    run.model,
                    idx,
                    rows=slice(None),
                    reduce=lambda A: A.sign().char(),  # a byte each
                )
            for layer_signs, layer_pairs in zip(signs, pairs, strict=True):
                for name, share in shares(layer_signs[0], layer_pairs).items():
                    measured[name].append(share)
        result: dict[str, Any] = {"length": length, "distances": distances(length)}
        for name, by_layer in measured.items():
            by_window = torch.stack(by_layer).unflatten(0, (-1, len(pairs)))
            result[name] = without_nan(by_window.mean(0))
        return result

    def show(self, results: Results) -> dict[str, Figure]:
        """Print a line and draw a curve for every run."""
        curves = []
        table: list[list[str]] = []
        for name, result in results.items():
            curves.append(Curve(name, *positive_curve(result)))
            mean_of = mean_shares(result)
            if not table:
                table.append(["", "length", *mean_of])
            cells = [f"{share:.4f}" for share in mean_of.values()]
            table.append([name, str(result["trained_length"]), *cells])
        title = title_of(results)
        print(f"\nshare of positive weights, validation tokens in windows of T, {title}")
        print_table(table, width=11)
        figure = draw_curves(
            {title: curves},
            "distance from the diagonal + 1, up to",
            "share of weights above 0",
            log="x",
        )
        return {"weights_by_distance": figure}


def visible_pairs(length: int, layers: list[list[int | None]]) -> Tensor:
    """The number of pairs of query and key that heads see, [layers, H, groups of distances]."""
    distance = torch.arange(length)
    limits = torch.tensor([[window or length for window in heads] for heads in layers])
    visible = distance < limits[..., None]
    pairs = (length - distance) * visible  # [layers, H, L]
    return sum_groups(pairs).double()


def shares(sign: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """The shares of a layer in one window, from the signs of its weights [H, L, L].

    These are positive weights by distance [H, groups], NaN where `visible_pairs` are 0, and dead
    rows and dead keys [H].
    """
    length = sign.shape[-1]
    positive = []
    for distance in range(length):
        diagonal = sign.diagonal(-distance, -2, -1)
        positive.append((diagonal > 0).sum(-1))
    counts = sum_groups(torch.stack(positive, dim=-1)).cpu()
    used = sign != 0
    used_rows = used.any(-1)
    used_keys = used.tril(-1).any(-2)  # by a later query
    used_keys = used_keys[:, : length // 2]
    return {
        "positive": counts / pairs,
        "dead_rows": (~used_rows).cpu().double().mean(-1),  # MPS has no float64
        "dead_keys": (~used_keys).cpu().double().mean(-1),
    }


def mean_shares(result: dict) -> dict[str, float]:
    """Means over layers and heads, and for distances over all visible pairs of query and key.

    NaN where there is no such pair.
    """
    (part,) = result["parts"].values()
    length = part["length"]
    pairs = visible_pairs(length, result["head_windows"])  # [layers, H, groups]
    positive = with_nan(part["positive"]).nan_to_num() * pairs  # pairs with a positive weight
    last = torch.tensor(part["distances"])  # of each group
    first = torch.cat((torch.tensor([0]), last[:-1] + 1))
    groups = {
        "near": last < max(1, NEAR * length),
        "far": first >= length / 2,
        "all": last >= 0,
    }
    mean_of = {}
    for name, group in groups.items():
        share = positive[..., group].sum() / pairs[..., group].sum()
        mean_of[name] = share.item()
    mean_of["dead rows"] = torch.tensor(part["dead_rows"]).mean().item()
    mean_of["dead keys"] = torch.tensor(part["dead_keys"]).mean().item()
    return mean_of


def positive_curve(result: dict) -> tuple[list[float], list[float]]:
    """The distances + 1, and the mean share of positive weights over the heads that see so far."""
    (part,) = result["parts"].values()
    by_head = with_nan(part["positive"]).flatten(0, 1)  # [layers * H, groups]
    return [last + 1 for last in part["distances"]], by_head.nanmean(0).tolist()


main = as_command(WeightsByDistance)

if __name__ == "__main__":
    main()
