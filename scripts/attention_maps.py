"""What a layer's heads attend to: attention maps (Figure A1 of LSSAR), and the attention sink.

python -m scripts.attention_maps RUN [RUN ...] --layer -1
python -m scripts.attention_maps RUN [RUN ...] --text "Some other text." --lengths 1024,16384

Draws RUN/attention_maps.png, the weights of all heads of the layer on a text; prints a table with a
row for every run, for the text and for the same validation tokens at each length; and draws a
curve for every run over the length of the rows, at the greatest length (with --tokens 0, of the
text): attention_by_row.png in the run's folder, or for several runs attention_by_row_RUN_RUN.png in
the folder that contains them (or --out). The text is given to the model as it is, without
end-of-text before it.

A row is one query's weights over the n keys that it sees: all up to its own or, in a head with a
window, the last of them. The first query has no choice and is left out. Reported are means over
rows of

    first_token         share of the first token in sum |A|: the sink; if all weights are equal 1/n,
                        or 0 where a window hides it
    entropy             of the shares |A| / sum |A|, in nats
    entropy_share       entropy / log n: 1 if all weights are equal, as a single one is; 0 if one of
                        several keys gets all
    zeros               share of the n weights that are exactly 0 in float32, underflow included
    sum                 sum |A|: 1 for a distribution

A row that is not a distribution is thus normalised as |A| / sum |A|. A row of zeros cannot be: it
is dead, excluded from the means, and counted.

RUN/attention_maps.json is a list of measurements. Those of validation tokens are not repeated; a
text is always measured again, since its maps are drawn.

    variant, seed, checkpoint, step, sha256, trained_length, rope, rope_factor, rope_theta, dtype
    layer               from 0
    head_windows        the most keys that a row of each head sees; null: all up to its own
    text, data_dir      one of them is null
    picture             file name, only of the text drawn last: each text overwrites the picture
    length, tokens      of a window, and of all windows together
    keys, rows          groups of rows with up to 2, 4, 8, ... keys up to their own, those that a
                        window hides included; rows in each, per head
    groups              {"dead": [heads][groups] rows, "first_token": [heads][groups], ...}
    heads               {"dead": [heads] share of rows, "first_token": [heads], ...}, over all rows
    environment
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import DEAD
from config import Config
from data.loader import validation_batches
from data.tokenizer import get_tokenizer
from errors import UserError, command
from evaluation import attention_weights, head_windows
from runtime import checkpoint
from runtime.device import autocast
from scripts.common import runner
from scripts.common.plots import add_legend, length_axis, save_picture, show_equal_curves
from scripts.common.runner import Evaluation, Run, Store, measured, option, without_nan
from scripts.common.tables import print_table
from scripts.common.validation import counted, shared_tokens, validation_id

# LSSAR, Figure A1
TEXT = (
    "Working from home can be great most days. I enjoy the flexibility and not having to commute "
    "in traffic. But sometimes I miss the office interactions with my coworkers and team meetings."
)
CLAMP = 0.5
# A head with more than this on the first token is a sink (Gu et al. 2024, "When Attention Sink
# Emerges in Language Models").
SINK = 0.3
# Validation tokens at each length.
TOKENS = 32768
# The longest text that is drawn, and the longest whose ticks are its tokens, in tokens.
MAP_TOKENS, WORDS = 2048, 48
PICTURE = "attention_maps.png"
NUMBERS = ("first_token", "entropy", "entropy_share", "zeros", "sum")
DRAWN = {
    "first_token": "share of the first token",
    "entropy_share": "entropy / log n",
    "zeros": "share of weights that are exactly 0",
}


@dataclass(frozen=True, kw_only=True)
class AttentionMaps(Evaluation):
    """What a layer's heads attend to: maps of a text, and the attention sink.

    `at(length)` is the evaluation of validation tokens in windows of one length.
    """

    name = "attention_maps"

    layer: int = option(-1, "0 is the first, -1 the last")
    text: str = option(TEXT, "to map (default: the text of LSSAR's Figure A1)")
    file: str | None = option(None, "a UTF-8 file with the text to map")
    lengths: tuple[int, ...] | None = option(
        None, "in tokens, such as 1024,8192 (default: 1x and 8x the training length)"
    )
    tokens: int = option(TOKENS, "validation tokens at each length; 0: only the text", at_least=0)
    data_dir: str | None = option(None, "shards to use instead of the run's own")
    length: int | None = option(None, "")  # None: the text

    def at(self, length: int) -> "AttentionMaps":
        return replace(self, length=length)

    def ids(self, config: Config) -> list[int]:
        text = self.text if self.file is None else read_text(self.file)
        ids = get_tokenizer(config.tokenizer).encode(text)
        if not 2 <= len(ids) <= MAP_TOKENS:
            raise UserError(
                f"the text has {len(ids)} tokens; a map needs at least 2 and at most {MAP_TOKENS}"
            )
        return ids

    def lengths_of(self, config: Config) -> list[int]:
        if self.tokens == 0:
            return []
        lengths = sorted(self.lengths or (config.block_size, 8 * config.block_size))
        if lengths[0] < 2:
            raise UserError("--lengths must be at least 2: a single key leaves no choice")
        return lengths

    def facts(self, config: Config) -> dict:
        if not -config.n_layer <= self.layer < config.n_layer:
            raise UserError(
                f"--layer {self.layer}: a model of n_layer = {config.n_layer} has layers 0 to "
                f"{config.n_layer - 1}, and -1 to {-config.n_layer} from the last"
            )
        lengths = tuple(self.lengths_of(config))
        facts = {"layer": self.layer % config.n_layer, "head_windows": head_windows(config)}
        if self.length is None:
            ids, text = self.ids(config), self.text
            if self.file is not None:
                text = read_text(self.file)
            facts |= {"text": text, "data_dir": None, "length": len(ids), "tokens": len(ids)}
            return facts
        data_dir = self.data_dir or config.data_dir
        tokens = shared_tokens(data_dir, lengths, self.tokens, config)
        facts |= {"text": None, "data_dir": data_dir, "length": self.length, "tokens": tokens}
        return facts | {"val_sha256": validation_id(data_dir)}

    def select(self, measurement: dict, config: Config) -> dict | None:
        # the maps of another text may have overwritten this one's picture
        drawn = self.length is not None or measurement.get("picture") == PICTURE
        return measurement if drawn else None

    def amount(self, config: Config) -> int:
        return self.facts(config)["tokens"]

    def measure(self, run: Run, store: Store) -> None:
        layer, length = store.facts["layer"], store.facts["length"]
        seen = keys_seen(run.config, length)
        if self.length is None:
            ids = self.ids(run.config)
            A = weights(run, layer, torch.tensor([ids], device=run.device), lambda A: A)
            store.discard("picture")  # if interrupted here, no other measurement claims it
            save_picture(plot_maps(run, layer, ids, A), run.path / PICTURE)
            sums = group_sums(row_numbers(A[None])[0].double(), seen)
            store.save(picture=PICTURE, **summary(sums, length))
            return
        sums, tokens, data_dir = torch.zeros(()), store.facts["tokens"], store.facts["data_dir"]
        with tqdm(total=tokens, unit="tok", desc=f"{run.path} {length}") as bar:
            batches = validation_batches(data_dir, length, tokens, 1, device=run.device)
            for x, _ in counted(batches, bar):
                sums = sums + group_sums(weights(run, layer, x, row_numbers).double(), seen)
        store.save(**summary(sums, length))


@command
def main() -> None:
    evaluation, given = runner.parse(AttentionMaps)
    runner.refuse_early(given.runs, evaluation)
    configs = [evaluation.applied(checkpoint.read_config(path)) for path in given.runs]
    parts = [[evaluation, *map(evaluation.at, evaluation.lengths_of(config))] for config in configs]
    for config, several in zip(configs, parts, strict=True):
        for part in several:
            part.facts(config)  # raises now for too few tokens
    results = [
        [measured(part, path) for part in several]
        for path, several in zip(given.runs, parts, strict=True)
    ]
    names = runner.run_names(given.runs)
    for of_runs in zip(*results, strict=True):
        print_numbers(names, of_runs)
    longest = [of_run[-1] for of_run in results]
    pictures = {"attention_by_row": plot_rows(names, longest)}
    runner.save_pictures(pictures, given.runs, given.out)


def read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {file}: cannot be read as text: {error}") from error


def weights(run: Run, layer: int, idx: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` of the layer's weights [H, L, L] for idx [1, L]."""
    with autocast(run.device, run.dtype):
        (A,) = attention_weights(run.model, idx, slice(None), reduce, slice(layer, layer + 1))
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
    """`row_numbers` [H, L, 4] of rows that see `seen` keys [H, L], summed: [H, groups, 2 + 5].

    These are the number of rows, of dead rows, and NUMBERS summed over the others.
    """
    H, L, _ = numbers.shape
    n = seen[:, 1:].to(numbers.dtype)
    first, entropy, nonzero, total = numbers[:, 1:].unbind(-1)
    alive = (total > DEAD).to(numbers.dtype)
    share = torch.where(n > 1, entropy / n.log(), 1)
    means = torch.stack((first, entropy, share, 1 - nonzero / n, total), dim=-1)
    values = torch.stack((torch.ones_like(alive), 1 - alive), dim=-1)
    values = torch.cat((values, means * alive[..., None]), dim=-1)
    group = torch.tensor([(keys - 1).bit_length() - 1 for keys in range(2, L + 1)])
    return values.new_zeros(H, int(group[-1]) + 1, values.shape[-1]).index_add(1, group, values)


def summary(sums: Tensor, length: int) -> dict:
    """The values of a measurement, from the sums [H, groups, 2 + 5] over its windows."""
    all_rows = sums.sum(1)
    by_group = mean_rows(sums) | {"dead": sums[..., 1].int().tolist()}
    by_head = mean_rows(all_rows) | {"dead": (all_rows[:, 1] / all_rows[:, 0]).tolist()}
    return {
        "keys": [min(length, 2 ** (i + 1)) for i in range(sums.shape[1])],
        "rows": sums[0, :, 0].int().tolist(),
        "groups": by_group,
        "heads": by_head,
    }


def mean_rows(sums: Tensor) -> dict:
    """Each of NUMBERS as lists of means over the rows that are not dead; None if all are."""
    means = sums[..., 2:] / (sums[..., :1] - sums[..., 1:2])
    return {name: without_nan(means[..., i].tolist()) for i, name in enumerate(NUMBERS)}


def mean_over_heads(result: dict, name: str) -> float:
    """Mean over the heads that have a value."""
    values = [v for v in result["heads"][name] if v is not None]
    return sum(values) / len(values) if values else math.nan


def subject(results: Sequence[dict]) -> str:
    """The title of measurements of several runs: their layer and text."""
    layers = ", ".join(str(n) for n in sorted({result["layer"] for result in results}))
    text = results[0]["text"]
    what = "validation tokens" if text is None else ascii(text[:40])
    return f"layer {layers}, {what}"


def print_numbers(names: list[str], results: Sequence[dict]) -> None:
    """A row for every run, of the same text or validation tokens, and one for equal weights."""
    print(f"\n{subject(results)}; means over heads and rows;")
    print(f"top: the head with most on the first token; sinks: heads with more than {SINK}")
    table = [["", "length", "first token", "top", "sinks", *NUMBERS[1:4], "dead", "sum"]]
    for name, result in zip(names, results, strict=True):
        first = [value or 0.0 for value in result["heads"]["first_token"]]
        share, *rest = (f"{mean_over_heads(result, n):.4f}" for n in (*NUMBERS[:4], "dead", "sum"))
        sinks = f"{sum(value > SINK for value in first)} of {len(first)}"
        table.append([name, f"{result['length']}", share, f"{max(first):.4f}", sinks, *rest])
    for length in sorted({result["length"] for result in results}):
        n = torch.arange(2, length + 1, dtype=torch.float64)
        first_token, log = (1 / n).mean().item(), n.log().mean().item()
        share, *rest = (f"{value:.4f}" for value in (first_token, log, 1, 0, 0, 1))
        table.append(["equal weights, no window", f"{length}", share, share, "", *rest])
    print_table(table)


def plot_maps(run: Run, layer: int, ids: list[int], A: Tensor) -> Figure:
    """All heads' weights A [H, L, L] on token ids [L], one panel each, clamped as in Figure A1."""
    H, L, _ = A.shape
    tokenizer = get_tokenizer(run.config.tokenizer)
    columns = max(1, math.isqrt(H))  # 12 heads are the paper's 4 x 3
    lines = -(-H // columns)
    low, colours = (-CLAMP, "RdBu_r") if A.min() < 0 else (0.0, "viridis")
    distance = torch.arange(L)[:, None] - torch.arange(L)
    unseen = (distance < 0) | (distance >= keys_seen(run.config, L)[..., None])
    figure = Figure(figsize=(2.6 * columns + 0.8, 2.6 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for head, axes in enumerate(panels.flat):
        if head >= H:
            axes.axis("off")
            continue
        image = axes.imshow(
            A[head].masked_fill(unseen[head], math.nan).numpy(), vmin=low, vmax=CLAMP, cmap=colours,
            interpolation="nearest" if L <= 256 else "antialiased",
        )  # fmt: skip
        axes.set_title(f"head {head}", fontsize="small")
        axes.tick_params(labelsize="x-small")
        if L <= WORDS:
            words = [ascii(tokenizer.decode([i]))[1:-1].replace("$", r"\$") for i in ids]
            axes.set_xticks(range(L), words, rotation=90, fontsize=4)
            axes.set_yticks(range(L), words, fontsize=4)
        axes.label_outer()
    figure.suptitle(
        f"{run.config.variant_name}, layer {layer}: weights clamped to "
        f"[{low:g}, {CLAMP:g}]; rows are queries",
        fontsize="medium",
    )
    figure.colorbar(image, ax=panels, shrink=0.5)
    return figure


def plot_rows(names: list[str], results: list[dict]) -> Figure:
    """Sink, entropy and zeros over a row's position: mean, minimum and maximum of heads."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = dict(zip(DRAWN, figure.subplots(1, len(DRAWN)), strict=True))
    for name, axes in panels.items():
        for i, (run, result) in enumerate(zip(names, results, strict=True)):
            groups = torch.tensor(  # [H, groups]
                [[math.nan if v is None else v for v in row] for row in result["groups"][name]]
            )
            keys, colour = result["keys"], f"C{i % 10}"
            axes.plot(keys, groups.nanmean(0).numpy(), marker="o", label=run, color=colour)
            least = groups.nan_to_num(math.inf).amin(0).numpy()
            most = groups.nan_to_num(-math.inf).amax(0).numpy()
            axes.fill_between(keys, least, most, alpha=0.12, linewidth=0, color=colour)
        length_axis(axes, "keys up to the row's own", {r["trained_length"] for r in results})
        axes.tick_params(labelsize="small")
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(DRAWN[name], fontsize="medium")
        show_equal_curves(axes)
    # a sink stays of order 1 while equal weights decrease as 1 / n
    longest = max(results, key=lambda result: result["length"])
    shares = 1 / torch.arange(1, longest["length"] + 1)
    ends = [1, *longest["keys"]]
    equal = [shares[i:j].mean().item() for i, j in zip(ends, ends[1:], strict=False)]
    axes = panels["first_token"]
    axes.plot(ends[1:], equal, color="0.3", linestyle="--", label="equal weights, no window")
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(equal[-1] / 10, 1.3)
    add_legend(figure)
    lengths = " and ".join(f"{n:,}" for n in sorted({result["length"] for result in results}))
    figure.suptitle(
        f"{subject(results)} in windows of {lengths}; mean over heads, shaded from the least head "
        "to the greatest".replace("$", r"\$"),
        fontsize="medium",
    )
    return figure


if __name__ == "__main__":
    main()
