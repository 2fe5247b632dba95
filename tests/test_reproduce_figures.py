"""Figures from formulas and from runs' files: their numbers, against closed forms."""

import json
import math

import numpy as np
import pytest
import torch

from errors import UserError
from model import GPT
from runtime.checkpoint import write_header
from scripts.common.papers import SSMAX
from scripts.common.planned import PlannedRun
from scripts.reproduce import figures, tables, training
from tests.helpers import not_blank, read_table, saved_run, small_config


def run_in(folder, name="softmax"):
    """A planned run whose folder is this one."""
    config = small_config("softmax.py", f"--out_dir={folder}")
    return PlannedRun(name, config, arguments=[])


def test_fading_and_focus_are_the_papers_formulas():
    """SSMax Eqs. 1 and 2, on the vectors of Figs. 1 and 3."""
    for row, power in (("softmax", lambda n: math.e), ("ssmax", lambda n: n**0.43)):
        values, curves = figures.attention_fading(row)
        for n, value in [*zip(figures.SIZES, values, strict=True), *zip(*curves[""], strict=True)]:
            assert value == pytest.approx(1 / (1 + (n - 1) * power(n) ** (-2 - 3)))
    for row, (variant, s) in figures.FOCUS.items():
        values, _ = figures.attention_focus(row)
        for n, value in zip(figures.SIZES, values, strict=True):
            scale = s * math.log(n) if variant == "ssmax" else 1
            others = np.exp(scale * np.arange(n - 1) / (n - 2)).sum()
            assert value == pytest.approx(math.log(others) / scale, abs=1e-3)
    # as the paper writes its vector, up to the slip: n values, in steps of 1 / (n - 2)
    first, second, third, _, _, last, top = SSMAX["figure3"]["vector"]
    assert [eval(value, {"n": 16}) for value in (first, second, third)] == [0, 1 / 14, 2 / 14]
    assert (last, top) == ("1", "z_max")


def test_gradient_slopes():
    """e^-x against x^-2, and what the paper's limit does not say of the scores that LSSA has."""
    slopes = {row: figures.gradient_slopes(row)[0] for row in ("softmax", "lssa", "lssar_p15")}
    assert slopes["softmax"][0] == pytest.approx(-1, abs=1e-3)
    assert slopes["lssa"][:2] == pytest.approx([0, -2], abs=1e-3)
    x, K = figures.HIGHEST, 1023 * math.log(2)
    exact = -2 * x / (x + K)  # of K / (x + K)^2, which is (A9)
    assert slopes["lssa"][2] == pytest.approx(exact, abs=1e-3)
    a = x / (x + K)
    growth = 14 * 1024 * a * (1 - a) / (1024 * a - 1)  # of r^14
    assert slopes["lssar_p15"][2] == pytest.approx(exact + growth, abs=1e-2)


def test_entropy_of_random_rows(monkeypatch):
    monkeypatch.setattr(figures, "LENGTHS", (16, 64))
    generator = torch.Generator().manual_seed(1337)
    q, k = (torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (64, 64))
    expected = []
    for n in (16, 64):
        shares = (q @ k[:n].T / 8).softmax(-1)
        expected.append(-(shares * shares.log()).sum(-1).mean().item())
    values, _ = figures.random_entropy("softmax")
    slope = (expected[1] - expected[0]) / math.log(4)
    assert values == pytest.approx([*expected, slope])


def test_learnt_p_is_fitted_without_p_1(tmp_path):
    model = GPT(small_config("ablations/ssmax_probe.py"))
    n = torch.arange(1.0, 17)
    with torch.no_grad():
        p_n = next(value for name, value in model.named_parameters() if name.endswith("p_n"))
        p_n.copy_(2 * n.log() + 3)
        p_n[0] = 100
    run = run_in(saved_run(tmp_path / "run", model))
    values, curves = figures.learned_p(run, run)
    assert values == pytest.approx([2, 3, 1], abs=1e-5) and curves["fit"][0][0] == 2


def write_metrics(folder, **values):
    folder.mkdir()
    lines = [{"run_id": "a"}, {"step": 0, "val_loss": 5.0}]
    lines += [
        {"step": step, **{key: value[step - 1] for key, value in values.items()}}
        for step in range(1, 1 + len(next(iter(values.values()))))
    ]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    write_header(folder, small_config("softmax.py"), job=None)
    (folder / "metrics.jsonl").write_text(text + '7\n{"step": 9')  # a last line cut off
    return run_in(folder)


def test_curves_of_metrics(tmp_path):
    losses = [5 - 0.001 * step for step in range(1000)]
    softmax = write_metrics(tmp_path / "a", loss=losses)
    ssmax = write_metrics(tmp_path / "b", loss=[loss - 0.01 for loss in losses])
    values, curves = figures.learning_curve(ssmax, softmax)
    assert values == pytest.approx([np.mean(losses[-100:]) - 0.01, -0.01])
    steps, means = curves["loss"]
    assert steps == list(range(10, 1001, 10))
    assert means[0] == pytest.approx(np.mean(losses[:10]) - 0.01)
    # after two steps of warm-up, clipped at 1
    run = write_metrics(tmp_path / "c", grad_norm=[90.0, 80.0, 0.5, 4.0, 0.2, 0.9])
    values, curves = figures.gradient_norms(run, run)
    assert values == [0.7, 4.0, 0.25] and curves["highest"][1][0] == 90
    with pytest.raises(UserError, match="metrics.jsonl has no loss"):
        figures.learning_curve(run, run)


def test_figures_end_to_end(reproduced, commands, tmp_path, capsys):
    """Drawn from runs that the figures share; what is there is not made again."""
    with pytest.raises(SystemExit) as stop:
        reproduced("ssmax_figure4", "--only=ssmax")
    assert stop.value.code == 2 and "add softmax" in capsys.readouterr().err
    for name, rows, trained in (
        ("ssmax_figure4", "softmax,ssmax", 2),
        ("ssmax_figure2", "ssmax_probe", 1),
        ("gradient_norm", "softmax", 0),
        ("entropy", "softmax", 1),
        ("sparsity", "relu_li", 2),
        ("gradient_slopes", "softmax", 0),
    ):
        commands.clear()
        folder = reproduced(name, f"--only={rows}")
        assert len(commands) == trained, (name, commands)
        assert set(rows.split(",")) <= set(read_table(folder)["rows"])
        assert not_blank(folder / f"{name}.png")
    table = read_table(tmp_path / "results/small/ssmax_figure4")
    assert (
        table["rows"]["ssmax"]["paper"] == [None, -0.008] and table["paper_scale"] == "ssmax_paper"
    )
    losses = [
        figures.read_metric(tmp_path / f"out/small/{row}/seed1337", "loss")[6]
        for row in ("ssmax", "softmax")
    ]
    assert table["rows"]["ssmax"]["mean"] == [losses[0], pytest.approx(losses[0] - losses[1])]
    assert table["rows"]["softmax"]["mean"][1] == 0
    text = (tmp_path / "results/small/gradient_slopes/table.md").read_text()
    assert "layers" not in text and "-1.0000 (-1.0000" in text and "are of 124m" not in text
    text = (tmp_path / "results/small/ssmax_figure2/table.md").read_text()
    assert "None" not in text and "2 layers" in text


def test_the_probe_is_trained_for_no_longer_than_the_papers():
    for scale, steps in (("ssmax_paper", SSMAX["figure2"]["steps"]), ("tiny", 800)):
        opened = training.open_scale(scale, "out", None, "disabled", [])
        config = opened.run("ssmax_probe", 1337).config
        assert config.max_iters == steps
        assert (config.s_init, config.b_init) == (SSMAX["figure2"]["s"], SSMAX["figure2"]["b"])
    state = GPT(small_config("ablations/ssmax_probe.py")).state_dict()
    p_n = next(value for name, value in state.items() if name.endswith("p_n"))
    assert set(p_n.tolist()) == {SSMAX["figure2"]["p_n"]}
    tokens = SSMAX["figure2"]["steps"] * SSMAX["pretraining"]["tokens_a_step"]
    assert SSMAX["figure2"]["tokens"] == f"approximately {tokens / 1e9:.0f}B"


def test_entropies_leave_out_rows_that_are_dead():
    measured = {"keys": [2, 4], "groups": {"entropy": [[0.5, None], [0.7, 1.0]]}}
    assert figures.entropies(measured) == ([2, 4], [pytest.approx(0.6), 1.0])
    assert "entropy" in tables.EXPERIMENTS
