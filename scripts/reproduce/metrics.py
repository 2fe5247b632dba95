"""Numbers that take no evaluation: from the weights and the metrics.jsonl of runs."""

import math
import statistics
from collections.abc import Callable

from runtime import checkpoint
from runtime.log import read_metrics
from scripts.common.planned import PlannedRun
from scripts.reproduce.measure import Values


def learned_p(run: PlannedRun) -> Values:
    """SSMax Fig. 2: p_n after training, and a_1 log n + a_2 by least squares.

    n = 1 is left out: a single key has weight 1 whatever p_1 is, so that p_1 is not trained.
    """
    model = checkpoint.load(checkpoint.find(run.folder).path).model
    p_n = next(value for name, value in model.items() if name.endswith(".p_n"))[1:].tolist()
    sizes = [float(n) for n in range(2, len(p_n) + 2)]
    logs = [math.log(n) for n in sizes]
    a_1, a_2 = statistics.linear_regression(logs, p_n)
    return [a_1, a_2, statistics.correlation(logs, p_n) ** 2], {"": (sizes, p_n)}


def metric(run: PlannedRun, key: str) -> dict[int, float]:
    """The values of a key of metrics.jsonl, by step."""
    return {line["step"]: line[key] for line in read_metrics(run.folder) if key in line}


def last_validation(run: PlannedRun) -> Values:
    return [*metric(run, "val_loss").values()][-1:], {}


BINS = 100  # points of a curve


def binned(values: dict[int, float], summary: Callable = statistics.mean) -> tuple[list, list]:
    """At most BINS points: in each bin of steps, the last step and a summary of the values."""
    steps = sorted(values)
    size = -(-len(steps) // BINS)
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [float(part[-1]) for part in bins], [summary([values[s] for s in part]) for part in bins]


def learning_curve(run: PlannedRun, softmax: PlannedRun) -> Values:
    """SSMax Fig. 4: the training loss, and its difference from softmax on the same batches."""
    losses, baseline = (metric(one, "loss") for one in (run, softmax))
    differences = {step: losses[step] - baseline[step] for step in losses.keys() & baseline.keys()}
    steps = sorted(differences)
    last = steps[-max(1, len(steps) // 10) :]  # the end of a curve: a mean over a tenth
    values = [statistics.mean(source[step] for step in last) for source in (losses, differences)]
    return values, {"loss": binned(losses), "loss minus softmax's": binned(differences)}


def gradient_norms(run: PlannedRun) -> Values:
    """LSSAR Appendix B.1.4: the gradient norm after the warm-up, before it is clipped."""
    norms = metric(run, "grad_norm")
    after = [norm for step, norm in norms.items() if step > run.config.warmup_iters]
    after = after or list(norms.values())
    clipped = sum(norm > run.config.grad_clip > 0 for norm in after) / len(after)
    values = [statistics.median(after), max(after), clipped]
    return values, {"median": binned(norms, statistics.median), "highest": binned(norms, max)}
