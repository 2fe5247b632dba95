"""Values that need no evaluation: they are read from runs' weights and metrics.jsonl."""

import math
import statistics
from collections.abc import Callable

from runtime import checkpoint
from runtime.log import read_metrics
from scripts.reproduce.measure import Values
from scripts.reproduce.planned import PlannedRun

MOST_POINTS = 100  # of a curve


def learned_p(run: PlannedRun) -> Values:
    """SSMax Fig. 2: read p_n after training, and fit a_1 log n + a_2 by least squares.

    n = 1 is left out: a single key has weight 1 whatever p_1 is, so p_1 is not trained.
    """
    weights = checkpoint.load(checkpoint.find(run.folder).path).model
    layers = [weight for name, weight in weights.items() if name.endswith(".p_n")]
    p_n = layers[0][1:].tolist()
    sizes = [float(n) for n in range(2, len(p_n) + 2)]
    logs = [math.log(n) for n in sizes]
    a_1, a_2 = statistics.linear_regression(logs, p_n)
    r_squared = statistics.correlation(logs, p_n) ** 2
    return [a_1, a_2, r_squared], {"": (sizes, p_n)}


def metric(run: PlannedRun, key: str) -> dict[int, float]:
    """Return the values of a key of metrics.jsonl, by step."""
    return {line["step"]: line[key] for line in read_metrics(run.folder) if key in line}


def last_validation(run: PlannedRun) -> Values:
    """Return the validation loss of the last step; None if it was not finite."""
    return [metric(run, "val_loss").get(run.config.max_iters)], {}


def binned(values: dict[int, float], summary: Callable = statistics.mean) -> tuple[list, list]:
    """Return at most MOST_POINTS points: each bin's last step, and a summary of its values."""
    steps = sorted(values)
    size = math.ceil(len(steps) / MOST_POINTS)
    x = []
    y = []
    for start in range(0, len(steps), size):
        bin_steps = steps[start : start + size]
        x.append(float(bin_steps[-1]))
        y.append(summary([values[step] for step in bin_steps]))
    return x, y


def learning_curve(run: PlannedRun, softmax: PlannedRun) -> Values:
    """SSMax Fig. 4: read the training loss, and its difference from softmax on the same batches."""
    losses = metric(run, "loss")
    baseline = metric(softmax, "loss")
    steps = sorted(losses.keys() & baseline.keys())
    differences = {step: losses[step] - baseline[step] for step in steps}
    last_tenth = steps[-max(1, len(steps) // 10) :]
    final_loss = statistics.mean(losses[step] for step in last_tenth)
    final_difference = statistics.mean(differences[step] for step in last_tenth)
    curves = {"loss": binned(losses), "loss minus softmax's": binned(differences)}
    return [final_loss, final_difference], curves


def gradient_norms(run: PlannedRun) -> Values:
    """LSSAR Appendix B.1.4: read the gradient norm after the warm-up, before it is clipped."""
    norms = metric(run, "grad_norm")
    after = [norm for step, norm in norms.items() if step > run.config.warmup_iters]
    if not after:
        after = list(norms.values())
    clipped = sum(norm > run.config.grad_clip > 0 for norm in after) / len(after)
    curves = {"median": binned(norms, statistics.median), "highest": binned(norms, max)}
    return [statistics.median(after), max(after), clipped], curves
