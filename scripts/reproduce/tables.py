"""The papers' tables and figures: their rows, what is measured of them, and how it is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config import Config
from data.tokenizer import get_tokenizer
from errors import UserError
from model import Rope
from scripts import needle, passkey
from scripts.attention_maps import DRAWN, MapsRequest, mean_over_heads
from scripts.common.papers import LSSAR, SSMAX, TRAINED_LENGTH
from scripts.downstream import TaskRequest
from scripts.eval_length import LossRequest, gain_from_context, smoothed
from scripts.needle import NeedleRequest
from scripts.passkey import PasskeyRequest
from scripts.physics import ARROWS, SOLAR_SYSTEM, PhysicsRequest
from scripts.reproduce import figures, report
from scripts.reproduce.figures import Formula, RunFiles
from scripts.reproduce.measure import (
    Benchmark,
    Evaluation,
    WithDecoding,
    WithSteps,
    at,
    options,
    stretched,
)
from scripts.reproduce.report import SLIDING
from scripts.sparsity import SparsityRequest, mean_shares


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its rows (see training.find_row), how they are measured and shown."""

    title: str
    unit: str
    rows: tuple[str, ...]
    evaluation: Evaluation | Benchmark | Formula | RunFiles
    draw: Callable[[dict], dict]  # a table in the format of report.py -> pictures by name
    paper: dict | None = None  # the section of papers.json with values for these rows
    paper_scale: str = "124m"  # where the section does not name scales
    notes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # scales whose tables are drawn side by side with this one
    task: str = "language"  # of its runs
    remarks: Callable[[dict], Sequence[str]] = lambda table: ()  # sentences on its rows


GAIN = "gain from context"


def loss(
    *multiples: float,
    views: Mapping[str, dict] | None = None,
    per_position: bool = False,
    measured_as: type[Evaluation] = Evaluation,
    **more: Any,
) -> Evaluation:
    """Loss by length, over the same tokens at every length, and what the longest is worth.

    `measured_as` may add costs, with fields of its own in `more`.
    """

    def lengths(config: Config) -> tuple[int, ...]:
        return tuple(at(multiple, config) for multiple in multiples)

    def request(config: Config) -> LossRequest:
        return LossRequest(lengths=lengths(config), per_position=per_position, **options(config))

    def values(measured: dict, config: Config) -> list[float]:
        losses = report.losses_at(measured, lengths(config))
        if "control" not in measured:
            return losses
        alone, *_, window = report.losses_at(measured["control"], lengths(config))
        return [*losses, window, gain_from_context(alone, window, losses[-1])]

    controlled = (f"{multiples[-1]:g}x, {SLIDING}", GAIN) if multiples[-1] > 1 else ()
    better = ("lower",) * len(multiples) + ("lower", "higher")[: len(controlled)]
    return measured_as(
        (*multiples, *controlled),
        request,
        values,
        better=better + (None,) * len(getattr(measured_as, "costs", ())),
        control=LossRequest.control,
        views=views or {},
        **more,
    )


def loss_by_position(
    multiple: float,
    *shown: float,
    rope: str,
    theta: float | None = None,
    samples: int | None = None,
) -> Evaluation:
    """Loss at every position of windows of one length; columns are the loss around some of them.

    With `samples` the windows are random ones, so many or as many as there are.
    """

    def request(config: Config) -> LossRequest:
        return LossRequest(
            lengths=(at(multiple, config),),
            samples=samples,
            sample_seed=TRIAL_SEED,
            per_position=True,
            **options(config, rope, theta),
        )

    def values(measured: dict, config: Config) -> list[float]:
        (losses,) = measured["loss_by_position"].values()
        curve = smoothed(losses)
        return [curve[at(position, config) - 1] for position in shown]

    return Evaluation(shown, request, values, control=LossRequest.control)


TRIALS = 100  # passkeys of each length
TRIAL_SEED = 1337  # of passkeys, needles and haystacks, and of SSMax Fig. 5's sequences


def passkeys(*multiples: float) -> Evaluation:
    """LSSAR Figs. 2 and A3: passkeys found, in percent."""

    def prompt(config: Config) -> int:
        return passkey.shortest(get_tokenizer(config.tokenizer))

    def request(config: Config) -> PasskeyRequest:
        lengths = tuple(at(one, config) for one in stretched(multiples, prompt(config), config))
        return PasskeyRequest(lengths=lengths, trials=TRIALS, seed=TRIAL_SEED, **options(config))

    def values(measured: dict, config: Config) -> list[float]:
        return [100 * part["accuracy"] for part in measured["parts"].values()]

    return Evaluation(multiples, request, values, better="higher", digits=1, prompt=prompt)


def downstream(number: str) -> Evaluation:
    """LSSAR Tables 2, A1 and A2: tasks of lm-evaluation-harness; accuracies in percent."""
    columns = tuple(LSSAR[f"table{number}"]["columns"])
    pairs = [column.split() for column in columns]
    tasks = tuple(dict.fromkeys(task for task, _ in pairs))

    def values(measured: dict, config: Config) -> list[float]:
        found = [
            measured["parts"][task]["scores"][task]["metrics"][metric]["value"]
            for task, metric in pairs
        ]
        return [
            100 * value if metric.startswith("acc") else value
            for value, (_, metric) in zip(found, pairs, strict=True)
        ]

    def refuse(config: Config) -> None:
        edu = "fineweb_edu" in config.data_dir
        if number == "_a1" and "fineweb" in config.data_dir and not edu:
            raise UserError(
                f"Table A1 is of training on FineWeb-Edu, not on {config.data_dir}: "
                "--scale 45m, 124m_edu or 355m"
            )

    return Evaluation(
        columns,
        lambda config: TaskRequest(tasks=tasks, **options(config)),
        values,
        better=tuple("lower" if metric == "perplexity" else "higher" for _, metric in pairs),
        digits=2,
        refuse=refuse,
    )


NEEDLE_LENGTHS = (1, 2, 4, 8, 10)
SCORE_LENGTH = SSMAX["figure8"]["length"] / TRAINED_LENGTH


def needles(
    keys: tuple, columns: Callable[[dict, list[dict]], list[float]], digits: int
) -> Evaluation:
    """SSMax Figs. 6 to 8, three views of one measurement.

    `columns` computes a row from the needle scores and from the accuracies at (length, depth).
    """

    def prompt(config: Config) -> int:
        return needle.shortest(get_tokenizer(config.tokenizer))

    def request(config: Config) -> NeedleRequest:
        multiples = stretched((*NEEDLE_LENGTHS, SCORE_LENGTH), prompt(config), config)
        *lengths, score_length = (at(multiple, config) for multiple in multiples)
        return NeedleRequest(
            lengths=tuple(lengths),
            samples=SSMAX["figure6"]["samples"],
            score_length=score_length,
            score_trials=SSMAX["figure8"]["trials"],
            seed=TRIAL_SEED,
            **options(config, "none", SSMAX["figure6"]["rope_theta"]),
        )

    def values(measured: dict, config: Config) -> list[float]:
        *cells, scores = measured["parts"].values()
        return columns(scores, cells)

    return Evaluation(
        keys, request, values, better="higher", digits=digits, finetuned=True, prompt=prompt
    )


def found(scores: dict, cells: list[dict]) -> list[float]:
    """Needles found in percent at each length, averaged over depths."""
    lengths = dict.fromkeys(cell["length"] for cell in cells)
    shares = [[cell["correct"] for cell in cells if cell["length"] == n] for n in lengths]
    return [100 * sum(one) / len(one) for one in shares]


def one_needle(scores: dict, cells: list[dict]) -> list[float]:
    heads = [head["score"] for head in scores["one needle"]["heads"]]
    return [heads[0], sum(heads) / len(heads)]


def many_needles(scores: dict, cells: list[dict]) -> list[float]:
    trials = scores["trials"]
    graded = [
        sum(trial["grade"] == grade for trial in trials) / len(trials)
        for grade in ("correct", "first digit")
    ]
    return [sum(trial["top_score"] for trial in trials) / len(trials), *graded]


def maps() -> Evaluation:
    """LSSAR Figs. A1, A4, A5, A6: the last layer's weights on the paper's text, as numbers."""
    return Evaluation(
        tuple(DRAWN.values()),
        lambda config: MapsRequest(**options(config)),
        lambda measured, config: [mean_over_heads(measured, name) for name in DRAWN],
        better=None,
    )


class RowsRequest(MapsRequest):
    """The same measurement's part on validation tokens, in windows of the greatest length."""

    def facts(self, config: Config) -> dict:
        return self.facts_at(self.lengths_of(config)[-1], config)

    def select(self, measurement: dict, config: Config) -> dict | None:
        return measurement


def entropy() -> Evaluation:
    """LSSAR Sect. 2.1.2: entropy of the last layer's rows by their number of keys, and its slope.

    A row of n keys counts for the smallest power of 2 that is at least n.
    """
    multiples = (0.25, 1.0, 4.0, 16.0)

    def request(config: Config) -> RowsRequest:
        return RowsRequest(lengths=(at(multiples[-1], config),), **options(config))

    def values(measured: dict, config: Config) -> list[float]:
        keys, means = figures.entropies(measured)
        shown = [means[(at(m, config) - 1).bit_length() - 1] for m in multiples]
        beyond = [i for i, n in enumerate(keys) if n >= config.block_size]
        slope = figures.log_slope([keys[i] for i in beyond], [means[i] for i in beyond])
        return [*shown, slope]

    return Evaluation((*multiples, "slope"), request, values, better=None)


def sparsity() -> Evaluation:
    """LSSAR Sect. 2.2.1: positive weights near the diagonal and far from it, and what is dead."""
    names = ("near", "far", "all", "dead rows", "dead keys")
    return Evaluation(
        names,
        lambda config: SparsityRequest(**options(config, "none")),
        lambda measured, config: [mean_shares(measured)[name] for name in names],
        better=None,
    )


TABLE1 = LSSAR["table1"]
# What users pick instead of LSSAR, by kind: a panel of the league's picture each.
LEAGUE = {
    "LSSAR's paper": tuple(TABLE1["rows"]),
    "scales and norms": (
        "softmax", "softmax_logn", "ssmax", "ssmax_fixed", "qk_norm", "softcap",
    ),
    "positions": (
        "softmax", "softmax_alibi", "softmax_nope", "swa", "swa:plain_rope", "hybrid",
        "hybrid:plain_rope", "hybrid_ssmax", "hybrid_ssmax:plain_rope", "hybrid_lssar_p5",
        "hybrid_lssar_p5:plain_rope",
    ),
    "sinks and gates": (
        "softmax", "softmax_off_by_one", "softmax_sink", "softpick", "gated", "fox",
    ),
    "whole rows": (
        "softmax", "softmax:adaptive_temperature", "sparsemax", "entmax15", "asentmax",
        "stick_breaking",
    ),
}  # fmt: skip
LEAGUE_ROWS = tuple(dict.fromkeys(row for rows in LEAGUE.values() for row in rows))
TWO = ("softmax", "lssar_p15")
# 50 and 100 are in the LSSAR paper's earlier version
POWERS = (1, 2, 3, 5, 10, 15, 20, 30, 50, 100)
P_SWEEP = (
    "lssa", *(f"lssar_p{p}" for p in POWERS), "softmax", *(f"softmax_p{p}" for p in POWERS)
)  # fmt: skip
# {exp, softplus} x {1 / sqrt d, log n / sqrt d, log d log n cos} x {no stage 2, p = 3, p = 15}
COMPONENTS = (
    "softmax", "softmax_p3", "softmax_p15", "ssmax_fixed", "ssmax_fixed_p3", "ssmax_fixed_p15",
    "softmax_cosine", "softmax_cosine_p3", "softmax_cosine_p15",
    "phi_softplus", "phi_softplus_p3", "phi_softplus_p15",
    "softplus_logn", "softplus_logn_p3", "softplus_logn_p15", "lssa", "lssar_p3", "lssar_p15",
    "lssa_threshold",
)  # fmt: skip
# NTK-aware scaling with s = length / trained length is dynamic NTK, so here s is fixed
ROPES: dict[str, dict[str, Any]] = {name: {"rope": name} for name in Rope.SCALINGS if name != "ntk"}
ROPES["ntk16"] = {"rope": "ntk", "rope_factor": 16.0}
EVALUATED_P = {f"p{p}": {"p": float(p)} for p in POWERS}
LOSS = "validation loss (nats per token)"
FIGURE_A2 = {
    "lengths": TABLE1["lengths"],
    "scales": {"124m": {row: TABLE1["rows"][row] for row in TWO}}
    | {scale: {} for scale in LSSAR["figure_a2"]["scales"]},
}
RELUS = ("relu_wortsman", "relu_li", "relu_shen", "phi_relu2", "phi_relu6")
HIGHEST_SLOPE = "d ln g / d ln x at log d log n"
FROM_TABLE1 = "The paper's values are those of its Table 1: it has curves only here"
SSMAX_ROWS = tuple(SSMAX["rows"])
SWAP_NOTES = (
    "(e) is softmax's last weights with SSMax; (f) trains an eighth of the steps with SSMax from "
    "softmax trained for the rest, goes on in its data order and starts AdamW's moments anew, as "
    "the paper says nothing of them. Each part has a schedule of its own; the paper's is constant, "
    "and where ours is too, (f) begins with a checkpoint of `softmax` itself.",
)
SEQUENCES = (
    f"The paper takes {SSMAX['figure5']['sequences']:,} random sequences of "
    f"{SSMAX['figure5']['length']:,} tokens of SlimPajama's test set. These (`samples`) are random "
    f"too, with seed {TRIAL_SEED}: as many as lie side by side in the validation text, at most the "
    "paper's number."
)
TUNED_NOTES = (
    *SWAP_NOTES,
    "Each run was fine-tuned on SQuAD first (scripts.finetune_squad, its defaults).",
)
RETRIEVED = "The answers at this needle are in the legend; the paper's: " + "; ".join(
    f"`{row}` {answer}" for row, answer in SSMAX["figure7"]["retrieved"].items()
) + "."  # fmt: skip


def loss_table(number: int, what: str) -> Experiment:
    """A table of losses at the training length."""
    paper = LSSAR[f"table_a{number}"]
    rows = tuple(paper["rows"])
    return Experiment(f"LSSAR Table A{number}, {what}", LOSS, rows, loss(1), report.dots, paper)


def probes(vectors_only: bool = False) -> Evaluation:
    """LSSAR Table 3, or its Figs. 1 and A7: the forces that a model of orbits predicts."""
    planets = tuple(SOLAR_SYSTEM)

    def request(config: Config) -> PhysicsRequest:
        return PhysicsRequest(
            # the published numbers, or less for fewer systems
            steps=min(10_000, -(-config.systems // 40)),
            pairs=min(10_000, -(-config.systems // 10)),
            batch=min(64, config.total_batch_size // config.block_size),
            vectors_only=vectors_only, device=config.device, dtype=config.dtype,
        )  # fmt: skip

    def values(measured: dict, config: Config) -> list[float]:
        parts = measured["parts"]
        vectors = parts["vectors"]
        if vectors_only:
            return [vectors["planets"][planet]["cosine"] for planet in planets]
        magnitudes, draws = parts["magnitudes"], parts["laws"]["draws"]
        return [
            vectors["cosine"], vectors["relative_error"], magnitudes["rank_correlation"],
            magnitudes["median_relative_error"], magnitudes["positive"],
            *magnitudes["exponents"].values(),
            *(sum(draw["powers"] == powers for draw in draws) for powers in figures.LAWS.values()),
        ]  # fmt: skip

    return Evaluation(
        planets if vectors_only else tuple(figures.PHYSICS),
        request,
        values,
        better="higher" if vectors_only else tuple(b for b, _ in figures.PHYSICS.values()),
        digits=2,
        views={"oracle": {"oracle": True}},
    )


EXPERIMENTS = {
    "table1": Experiment(
        "LSSAR Table 1, loss by length", LOSS, tuple(TABLE1["rows"]), loss(1, 2, 4, 8),
        report.curves, TABLE1,
    ),
    "table2": Experiment(
        "LSSAR Table 2, downstream tasks", "zero-shot scores", TWO, downstream("2"), report.dots,
        LSSAR["table2"],
    ),
    "table_a1": Experiment(
        "LSSAR Table A1, downstream tasks after FineWeb-Edu", "zero-shot scores", TWO,
        downstream("_a1"), report.dots, LSSAR["table_a1"], paper_scale="124m_edu",
    ),
    "table_a2": Experiment(
        "LSSAR Table A2, LAMBADA", "zero-shot scores", TWO, downstream("_a2"), report.dots,
        LSSAR["table_a2"],
    ),
    "table_a4": loss_table(4, "modified scores"),
    "table_a5": loss_table(5, "softmax without its parts"),
    "table_a6": loss_table(6, "activation functions"),
    "table_a7": Experiment(
        "LSSAR Table A7, cost of a step", "milliseconds and MB", tuple(LSSAR["table_a7"]["rows"]),
        Benchmark(), report.dots, LSSAR["table_a7"],
    ),
    "loss_by_length": Experiment(
        "LSSAR Fig. A2, loss to 16 times the training length", LOSS, TWO, loss(1, 2, 4, 8, 16),
        report.curves, FIGURE_A2, notes=(
            "Fig. A2 has curves without numbers, of 45M, 124M and 355M models trained on "
            "FineWeb-Edu. Where the paper's values are shown, they are those of its Table 1, of "
            "124M trained on FineWeb-10B.",
        ), beside=tuple(LSSAR["figure_a2"]["scales"]),
    ),
    "p_sweep": Experiment(
        "LSSAR Appendix B.1.4, loss by p", LOSS, P_SWEEP, loss(1, 2, 4, 8, 16), report.loss_over_p,
        TABLE1, notes=(f"{FROM_TABLE1}.",),
    ),
    "p_at_evaluation": Experiment(
        "Is it the training or the sharpening: other p than in training", LOSS,
        ("lssa", "lssa:p3", "lssa:p15", "lssar_p3", *(f"lssar_p3:p{p}" for p in (1, 5, 15)),
         "lssar_p15", *(f"lssar_p15:p{p}" for p in (1, 3, 5, 10, 20, 30))),
        loss(1, 2, 4, 8, 16, views=EVALUATED_P), report.views, TABLE1,
        notes=("`lssa:p15` are the weights of `lssa`, evaluated with p = 15.",),
    ),
    "components": Experiment(
        "LSSAR taken apart: phi, scale and re-weighting", LOSS, COMPONENTS, loss(1, 2, 4, 8, 16),
        report.components, TABLE1, notes=(
            "phi is exp (`softmax`, `ssmax_fixed`, `softmax_cosine`) or softplus (`phi_softplus`, "
            "`softplus_logn`, `lssa`), each l1-normalised; the scale of the scores is 1/√d, "
            "log n/√d or, with unit q and k, log d log n. `lssa_threshold` drops what `lssar` "
            "drops, without the power.",
        ),
    ),
    "rope": Experiment(
        "RoPE scalings and variants", LOSS,
        tuple(f"{row}:{rope}" for row in ("softmax", "ssmax", "lssar_p15") for rope in ROPES),
        loss(1, 2, 4, 8, 16, views=ROPES), report.views,
        notes=(
            "`softmax:yarn` are the weights of `softmax`, evaluated with YaRN. Linear scaling and "
            "YaRN take s = length / training length, `ntk16` s = 16 at every length.",
        ),
    ),
    "league": Experiment(
        "What users pick instead", LOSS, LEAGUE_ROWS,
        loss(
            1, 2, 4, 8, 16, per_position=True, measured_as=WithSteps,
            views={
                "adaptive_temperature": {"attention": "adaptive_temperature"},
                "plain_rope": {"rope": "none"},  # as models with local windows have it
            },
        ),
        lambda table: report.league(table, LEAGUE), TABLE1, notes=(
            "`softmax:adaptive_temperature` are the weights of `softmax`, as its paper has it. "
            "Rows without RoPE are not scaled, `:plain_rope` are the same weights without scaling. "
            "`swa` has its own, shorter window in the control too.",
        ),
    ),
    "league_passkey": Experiment(
        "What users pick instead, passkey retrieval", "passkeys found (%)",
        tuple(row for row in LEAGUE_ROWS if ":" not in row), passkeys(1, 1.5, 2, 4, 8),
        report.dots, LSSAR["passkey"], notes=(
            "Of 100 trials: a value near 50 has a standard error of 5, whatever the seeds.",
        ),
    ),
    "t6": Experiment(
        "T6: queries, keys and values from factors, with softmax and with LSSAR", LOSS,
        ("softmax", "lssar_p15", "softmax_swiglu", "lssar_p15_swiglu", "t6", "t6_lssar_p15"),
        loss(1, 2, 4, 8, 16, measured_as=WithDecoding, cached=16.0), report.blocks, notes=(
            "`t6` is T6 (Zhang et al. 2025), of as many parameters as GPT-2 to 0.6%, and the rows "
            "`_swiglu` are T6 with linear projections and GPT-2's first weights instead. The "
            "earlier version of the LSSAR paper recommends T6 with LSSAR, without any numbers.",
        ),
    ),
    "loss_by_position": Experiment(
        "Loss at each position, to 16 times the training length",
        "validation loss around a position (nats)", TWO,
        loss_by_position(16, 0.5, 1, 2, 4, 8, 16, rope="dynamic_ntk"), report.positions,
    ),
    "passkey": Experiment(
        "LSSAR Figs. 2 and A3, passkey retrieval", "passkeys found (%)", TWO,
        passkeys(1, 1.5, 2, 4, 8), report.curves, LSSAR["passkey"],
        notes=("Of 100 trials: a value near 50 has a standard error of 5, whatever the seeds.",),
    ),
    "attention_maps": Experiment(
        "LSSAR Figs. A1, A4, A5, A6, attention maps", "mean over heads and rows", TWO, maps(),
        report.maps,
    ),
    "table3": Experiment(
        "LSSAR Table 3, Newton's law from orbits", "forces at positions without a label",
        ("oracle", "softmax", "lssar_p15", "lssar_p3", "lssa", "softmax_window", "untrained"),
        probes(), figures.draw_physics, task="orbits", remarks=figures.what_was_found, notes=(
            "Cosine and error: of force vectors in the solar system, over eight planets. The other "
            "columns are of magnitudes in two-body systems: the rank correlation with m1 m2 / r^2, "
            "the median relative error, the share above 0, the exponents of a log-log regression "
            "over those predictions (Newton's: -2, 1 and 1), and how many of five draws give the "
            "law by symbolic regression.",
            "`oracle` averages the true forces of the nearest labelled states; `untrained` "
            "fine-tunes random weights; `softmax_window` sees two points of each body.",
            "No label that is judged is seen: the last step's weights are taken. The published "
            "code takes the checkpoint that is best on a validation set that is the "
            "unmasked test set.",
            "The paper leaves open p, the positions (learned here, as in Vafa et al.), the seeds, "
            "which of several equations it prints, and how its softmax row was obtained. In the "
            "two-body systems m2 is at most 0.0101 solar masses, so no constant c of a fitted "
            "c m1 / r^2 can be near the paper's, which suit a star of one solar mass.",
        ),
    ),
    "physics_figures": Experiment(
        "LSSAR Figs. 1 and A7, forces in the solar system", "mean cosine with the true force",
        ("oracle", "lssar_p15", "softmax", "untrained"), probes(vectors_only=True),
        figures.draw_forces, task="orbits", notes=(
            "Positions without a label. Arrows: true, then as each row's first seed predicts, at "
            f"up to {ARROWS} positions that are far from each other.",
        ),
    ),
    "gradient_norm": Experiment(
        "LSSAR Appendix B.1.4, gradient norm in training", "gradient norm before clipping",
        ("softmax", "softmax_p3", "softmax_p15", "lssar_p3", "lssar_p15"),
        RunFiles(("median", "highest", "share of steps clipped"), figures.gradient_norms),
        figures.draw_gradient_norms, notes=(
            "After the warm-up. The paper says that softmax suffers from severe gradient "
            "explosion at p = 15, and LSSAR does not; it shows no norms.",
        ),
    ),
    "gradient_slopes": Experiment(
        "LSSAR Appendix A.6, decay of the gradient", "slope of the gradient g in the score x",
        tuple(LSSAR["gradients"]["rows"]),
        Formula((*LSSAR["gradients"]["columns"], HIGHEST_SLOPE), figures.gradient_slopes),
        figures.draw_gradients, LSSAR["gradients"], notes=(
            f"Of one score x among {figures.KEYS:,} keys, the others 0, and head size "
            f"{figures.HEAD_SIZE}; with p, of (A6)'s y = r^p, before the last l1. The first two "
            "columns are far out (x = {exp:g} for exp, {softplus:g} for softplus), the last is at "
            "the highest score that LSSA can have.".format(**figures.FAR),
        ),
    ),
    "entropy": Experiment(
        "LSSAR Sect. 2.1.2, entropy by the number of keys", "entropy of a row's weights (nats)",
        ("softmax", "ssmax", "lssa", "lssar_p15"), entropy(), figures.draw_entropies, notes=(
            "Rows of the last layer in windows of 16 times the training length, means over heads; "
            "a column is of rows that see more than half as many keys, and at most as many. "
            "Slope: of entropy over log n, from the training length on. 0 is the invariance that "
            "the scale log d log n is to give; equal weights have 1. The paper has no numbers.",
        ),
    ),
    "entropy_random": Experiment(
        "LSSAR Sect. 2.1.2, entropy of random rows", "entropy of a row's weights (nats)",
        ("softmax", "ssmax_fixed", "lssa", "lssar_p3", "lssar_p15"),
        Formula((*(f"n = {n:,}" for n in figures.LENGTHS), "slope"), figures.random_entropy),
        figures.draw_random_entropy, notes=(
            f"q and k are normal, of head size {figures.HEAD_SIZE}; means over "
            f"{figures.QUERIES} queries. Slope: of entropy over log n. 0 is invariance, equal "
            "weights have 1. The paper has no numbers.",
        ),
    ),
    "sparsity": Experiment(
        "LSSAR Sect. 2.2.1, positive weights by distance", "share of weights above 0, of dead ones",
        (*RELUS, "lssar_p3", "lssar_p15"), sparsity(), figures.draw_sparsity, notes=(
            "Means over layers, heads and pairs of query and key. Near: closer than 1/16 of the "
            "training length; far: at least half of it. The weights of dead rows are all 0; dead "
            "keys get weight 0 from every later query of the window (of its first half). For ReLU "
            "a weight of 0 is a score without gradient; for LSSAR it is not, as l1 comes before.",
        ),
    ),
    "ssmax_figure1": Experiment(
        "SSMax Fig. 1, attention fading", "largest of n weights", ("softmax", "ssmax"),
        Formula(tuple(f"n = {n:,}" for n in figures.SIZES), figures.attention_fading),
        figures.draw_fading, notes=(
            "The scores are {others}, the last {last}; s = {s}. The paper has curves only: "
            "softmax's decreases, SSMax's stays close to 1.".format(**figures.FADING),
        ),
    ),
    "ssmax_figure2": Experiment(
        "SSMax Fig. 2, learnt p_n", "p_n as a_1 log n + a_2", ("ssmax_probe",),
        RunFiles(("a_1", "a_2", "R²"), figures.learned_p), figures.draw_p, notes=(
            "By least squares over n >= 2: a row of one key has weight 1 whatever p_1 is. The "
            "paper has a curve only, and says that p_n closely follows the logarithm.",
        ),
    ),
    "ssmax_figure3": Experiment(
        "SSMax Fig. 3, the score that attention focuses on", "z_max whose weight is 1/2",
        tuple(figures.FOCUS),
        Formula(tuple(f"n = {n:,}" for n in figures.SIZES), figures.attention_focus, digits=2),
        figures.draw_focus, figures.FOCUS_RULE, notes=(
            "The n - 1 other scores are spread evenly from 0 to 1. The paper has curves only, of "
            "sizes and s that it does not name; its values here are its rule, that z_max must "
            "exceed the others by approximately 1 / s, whatever n is.",
        ),
    ),
    "ssmax_figure4": Experiment(
        "SSMax Fig. 4, learning curves", "training loss (nats per token)", SSMAX_ROWS[:4],
        RunFiles(
            tuple(SSMAX["figure4"]["columns"]), figures.learning_curve, "lower",
            against_softmax=True,
        ),
        figures.draw_learning_curves, SSMAX["figure4"], paper_scale="ssmax_paper", notes=(
            "Means over the last tenth of the steps. Softmax and SSMax of one seed see the same "
            "batches.",
        ),
    ),
    "ssmax_figure5": Experiment(
        "SSMax Fig. 5, loss by position", "validation loss around a position (nats)", SSMAX_ROWS,
        loss_by_position(
            SSMAX["figure5"]["length"] / TRAINED_LENGTH, 0.5, 1, 2, 4, 8, 16, rope="none",
            theta=SSMAX["figure5"]["rope_theta"], samples=SSMAX["figure5"]["sequences"],
        ),
        report.positions, notes=(*SWAP_NOTES, SEQUENCES),
    ),
    "ssmax_figure6": Experiment(
        "SSMax Fig. 6, needles in a haystack", "needles found (%), over all depths", SSMAX_ROWS,
        needles(NEEDLE_LENGTHS, found, digits=1), report.haystacks, notes=TUNED_NOTES,
    ),
    "ssmax_figure7": Experiment(
        "SSMax Fig. 7, needle scores of the heads", "needle score", SSMAX_ROWS,
        needles(("highest", "mean of the 25 highest"), one_needle, digits=4), report.heads,
        notes=(*TUNED_NOTES, RETRIEVED),
    ),
    "ssmax_figure8": Experiment(
        "SSMax Fig. 8, highest needle score of each trial", "over 100 trials", SSMAX_ROWS,
        needles(("mean highest score", "found", "first digit only"), many_needles, digits=4),
        report.trials, notes=TUNED_NOTES,
    ),
}  # fmt: skip
