"""How the papers' tables are measured, which measurements are taken, and the pictures."""

import functools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from config import Config
from errors import UserError
from layers.build import build_model
from runtime.run_folder import read_config
from scripts import downstream
from scripts.common.papers import SSMAX
from scripts.reproduce import (
    formulas,
    headroom,
    kinds,
    metrics,
    pictures,
    rebuild,
    report,
    tables,
)
from scripts.reproduce.entries import config_entry
from scripts.reproduce.planned import PlannedRun
from tests.helpers import measured_losses, not_blank, read_table, saved_run, small_config
from tests.runs import ROOT
from tests.runs import metrics as metrics_of


@pytest.fixture
def undrawn(monkeypatch):
    """No picture is drawn: it takes a second."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)


def folder_of(tmp_path, name="softmax"):
    return tmp_path / f"out/small/{name}/seed1337"


def test_a_run_evaluated_in_several_ways(reproduced, commands, tmp_path, undrawn):
    table = read_table(reproduced("p_at_evaluation", "--only=lssa,lssa:p15"))
    assert list(table["rows"]) == ["lssa", "lssa:p15"]
    assert len(commands) == 1
    folder = folder_of(tmp_path, "lssa")
    trained, trained_control, p15, p15_control = measured_losses(folder)
    for measured, control, p, name in (
        (trained, trained_control, None, "lssa"),
        (p15, p15_control, 15, "lssa:p15"),
    ):
        assert measured["p"] == p
        assert control["p"] == p
        assert measured["window"] is None
        assert control["window"] == 16
        last = measured["loss"][-1]
        alone = control["loss"][0]
        window = control["loss"][-1]
        gain = min(alone, window) - last
        mean = table["rows"][name]["mean"]
        assert mean[4:] == [last, window, gain]
    # the run is shared, and so are its measurements
    measurements = folder / "eval_length.json"
    before = measurements.read_bytes()
    other = read_table(reproduced("components", "--only=lssa"))
    assert "lssa" in other["rows"]
    assert len(commands) == 1
    assert measurements.read_bytes() == before


def test_headroom(reproduced, scale, commands, tmp_path, undrawn):
    """Softmax trained at 4 T and 16 T on as many tokens a step, against softmax's own window."""
    shorter = scale.read_text().replace("block_size = 16", "block_size = 8")
    scale.write_text(shorter)
    table = read_table(reproduced("headroom"))
    for name, block_size, batch_size in (
        ("softmax", 8, 8),
        ("softmax_4t", 32, 2),
        ("softmax_16t", 128, 1),
    ):
        config = read_config(folder_of(tmp_path, name))
        assert config.block_size == block_size
        assert config.batch_size == batch_size
        assert config.total_batch_size == 128
    four, _ = measured_losses(folder_of(tmp_path, "softmax_4t"))
    (sixteen,) = measured_losses(folder_of(tmp_path, "softmax_16t"))
    row = table["rows"]["softmax_16t"]
    assert row["mean"] == sixteen["loss"]
    at_4 = four["loss"][0] - four["loss"][2]
    at_16 = sixteen["loss"][0] - sixteen["loss"][4]
    assert f"Available at 4x, by seed: {at_4:+.4f}." in table["caption"]
    assert f"Available at 16x, by seed: {at_16:+.4f}." in table["caption"]
    # and other tables say so beside the gain
    other = read_table(reproduced("loss_by_length", "--only=softmax"))
    assert other["columns"][-1] == f"gain from context (available: {at_16:+.4f})"
    end = f"headroom`), by seed {at_16:+.4f}."
    assert any(text.endswith(end) for text in other["caption"])
    assert len(commands) == 3
    assert headroom.available({"softmax_16t": row["runs"]}, length=24) == []


def test_when_it_is_undecidable_whether_a_model_gains(reproduced, undrawn, monkeypatch):
    """0.1 is available; the gains of the seeds differ by `spread`."""
    monkeypatch.setattr(report, "available", lambda runs, length: [0.1])

    def last_sentence(gain, spread):
        monkeypatch.setattr(kinds, "gain", lambda measured: gain)
        monkeypatch.setattr(report, "spread", lambda row, column: spread)
        table = read_table(reproduced("loss_by_length", "--only=softmax"))
        return table["caption"][-1]

    undecidable = "Undecidable here,"
    assert last_sentence(gain=0, spread=0.2).startswith(undecidable)
    assert not last_sentence(gain=0, spread=0.05).startswith(undecidable)
    assert not last_sentence(gain=-0.3, spread=0.2).startswith(undecidable)


def test_passkeys_of_prompts_beyond_the_training_length(reproduced, tmp_path, monkeypatch, undrawn):
    """264 bytes take 17 times the 16 of training, so all lengths are 17 times the paper's."""
    few = functools.partial(kinds.PasskeyRetrieval, trials=2)
    monkeypatch.setattr(kinds, "PasskeyRetrieval", few)
    table = read_table(reproduced("passkey", "--only=softmax"))
    text = (folder_of(tmp_path) / "passkey.json").read_text()
    (measured,) = json.loads(text)
    assert list(measured["parts"]) == ["272", "408", "544", "1088", "2176"]
    assert table["columns"][:2] == ["17x, 272", "25.5x, 408"]
    assert table["multiples"][-1] == 136
    assert table["rows"]["softmax"]["paper"] is None
    multiples = tables.EXPERIMENTS["passkey"].multiples_at(Config())
    assert multiples == (1, 1.5, 2, 4, 8)


def test_what_cannot_be_measured_is_refused(reproduced, commands, scale, monkeypatch, refused):
    def offline(names):
        raise UserError(f"{names}: their data are not on this machine")

    monkeypatch.setattr(downstream, "load_tasks", offline)
    refused(reproduced, "table_a2", says="('lambada_openai',): their data")
    reproduced("table_a2", "--plan")  # a plan needs no tasks
    scale.write_text(scale.read_text() + 'positions = "learned"\n')
    refused(reproduced, "table1", "--only=softmax", says="learned positions, which end")
    assert not commands


def test_figures_end_to_end(reproduced, commands, tmp_path):
    """Drawn from runs that the figures share; nothing is made twice."""
    for name, only, trained in (
        ("ssmax_figure4", "ssmax", 2),  # and softmax, which the loss is compared with
        ("ssmax_figure2", "ssmax_probe", 1),
        ("gradient_norm", "softmax", 0),
        ("entropy", "softmax", 0),
        ("gradient_slopes", "softmax", 0),
        ("sparsity", "relu_li", 1),
        ("attention_maps", "softmax", 0),
    ):
        commands.clear()
        folder = reproduced(name, f"--only={only}")
        assert len(commands) == trained, (name, commands)
        picture = "softmax.png" if name == "attention_maps" else f"{name}.png"
        assert only in read_table(folder)["rows"]
        assert not_blank(folder / picture)
    of_two_seeds = read_table(reproduced("attention_maps", "--only=softmax", "--seeds=2"))
    assert "The picture is of the first seed of each entry." in of_two_seeds["caption"]
    table = read_table(tmp_path / "results/small/ssmax_figure4")
    row = table["rows"]["ssmax"]
    assert row["paper"] == [None, -0.008]
    last_step = 6
    ssmax = metrics_of(folder_of(tmp_path, "ssmax"))[last_step]
    softmax = metrics_of(folder_of(tmp_path, "softmax"))[last_step]
    assert row["mean"] == [ssmax, pytest.approx(ssmax - softmax)]


# ---- numbers from formulas and files ----


def test_fading_and_focus_are_the_papers_formulas():
    """SSMax Eqs. 1 and 2, on the vectors of Figs. 1 and 3."""
    for name in ("softmax", "ssmax"):
        values, curves = formulas.attention_fading(config_entry(name))
        curve_sizes, curve_values = curves[""]
        sizes = [*formulas.SIZES, *curve_sizes]
        all_values = [*values, *curve_values]
        for n, value in zip(sizes, all_values, strict=True):
            base = math.e if name == "softmax" else n**0.43
            others = (n - 1) * base ** (-2 - 3)
            assert value == pytest.approx(1 / (1 + others))
    expected = {
        "softmax": None,
        "ssmax (s = 0.43)": 0.43,
        "ssmax (s = 1)": 1,
    }
    for entry, (name, s) in zip(formulas.FOCUS, expected.items(), strict=True):
        assert entry.name == name
        values, _ = formulas.attention_focus(entry)
        for n, value in zip(formulas.SIZES, values, strict=True):
            scale = 1 if s is None else s * math.log(n)
            scores = np.linspace(0, 1, n - 1)
            others = np.exp(scale * scores).sum()
            assert value == pytest.approx(math.log(others) / scale, abs=1e-3)


def test_gradient_slopes():
    """e^-x against x^-2, and the slope at the highest score of LSSA."""
    slopes = {}
    for name in ("softmax", "lssa", "lssar_p15"):
        slopes[name], _ = formulas.gradient_slopes(config_entry(name))
    assert slopes["softmax"][0] == pytest.approx(-1, abs=1e-3)
    assert slopes["lssa"][:2] == pytest.approx([0, -2], abs=1e-3)
    n = 1024
    x = formulas.HIGHEST
    K = (n - 1) * math.log(2)
    exact = -2 * x / (x + K)  # of K / (x + K)^2, which is (A9)
    assert slopes["lssa"][2] == pytest.approx(exact, abs=1e-3)
    a = x / (x + K)
    r = n * a - 1
    growth = 14 * n * a * (1 - a) / r  # of r^14
    assert slopes["lssar_p15"][2] == pytest.approx(exact + growth, abs=1e-2)


def test_entropy_of_random_rows(monkeypatch):
    monkeypatch.setattr(formulas, "LENGTHS", (16, 64))
    generator = torch.Generator().manual_seed(1337)
    q = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    k = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    expected = []
    for n in (16, 64):
        scores = q @ k[:n].T / 8
        A = scores.softmax(-1)
        entropies = -(A * A.log()).sum(-1)
        expected.append(entropies.mean().item())
    at_16, at_64 = expected
    slope = (at_64 - at_16) / math.log(64 / 16)
    values, _ = formulas.random_entropy(config_entry("softmax"))
    assert values == pytest.approx([*expected, slope])


def test_heads_whose_queries_are_all_dead_have_no_entropy():
    by_head = [[0.5, None], [0.7, 1.0]]
    measured = {"keys": [2, 4], "groups": {"entropy": by_head}}
    keys, means = tables.entropies({"parts": {"": measured}})
    assert keys == [2, 4]
    assert means == pytest.approx([0.6, 1.0])


def run_in(folder):
    config = small_config("softmax.py", f"--out_dir={folder}")
    return PlannedRun(config, arguments=[])


def test_learned_p_is_fitted_without_p_1(tmp_path):
    model = build_model(small_config("ablations/ssmax_probe.py"))
    of_layers = [value for name, value in model.named_parameters() if name.endswith("p_n")]
    p_n = of_layers[0]
    assert set(p_n.tolist()) == {SSMAX["figure2"]["p_n"]}
    n = torch.arange(1.0, 17)
    with torch.no_grad():
        p_n.copy_(2 * n.log() + 3)
        p_n[0] = 100
    run = run_in(saved_run(tmp_path / "run", model))
    values, curves = metrics.learned_p(run)
    assert values == pytest.approx([2, 3, 1], abs=1e-5)
    sizes, _ = curves[""]
    assert sizes[0] == 2


def test_curves_of_metrics(tmp_path):
    def write(name, key, values):
        folder = tmp_path / name
        folder.mkdir()
        entries = [{"step": 0, "val_loss": 5.0}]
        for step, value in enumerate(values, 1):
            entries.append({"step": step, key: value})
        with open(folder / "metrics.jsonl", "w") as file:
            for entry in entries:
                print(json.dumps(entry), file=file)
        return run_in(folder)

    losses = 5 - 0.001 * np.arange(1000)
    lower = losses - 0.01
    softmax = write("a", "loss", losses.tolist())
    ssmax = write("b", "loss", lower.tolist())
    values, curves = metrics.learning_curve(ssmax, softmax)
    last_tenth = lower[-100:].mean()
    assert values == pytest.approx([last_tenth, -0.01])
    steps, means = curves["loss"]
    of_ten_steps = lower.reshape(100, 10)
    assert steps == list(range(10, 1001, 10))
    assert means == pytest.approx(of_ten_steps.mean(1))
    # after two steps of warm-up, clipped at 1
    run = write("c", "grad_norm", [90.0, 80.0, 0.5, 4.0, 0.2, 0.9])
    values, curves = metrics.gradient_norms(run)
    assert values == [0.7, 4.0, 0.25]
    _, highest = curves["highest"]
    assert highest[0] == 90


@pytest.mark.parametrize(
    "name",
    [
        "small_cpu/compare_lssar_p15",  # of a single config beside a committed table
        "tiny/physics_figures",  # of an experiment that is no longer in EXPERIMENTS
        "tiny_documents/documents",
    ],
)
def test_a_committed_table_is_rebuilt_as_it_is(name, tmp_path, call, undrawn):
    committed = ROOT / "results" / name
    folder = shutil.copytree(committed, tmp_path / "copy")
    (folder / "table.md").unlink()
    call(rebuild, folder)
    assert (folder / "table.md").read_text() == (committed / "table.md").read_text()


def test_the_control_of_runs_with_both_losses_is_not_drawn():
    """It is measured only as the run was trained: across documents, or within them."""
    for name, drawn in (("tiny_documents/documents", False), ("tiny/league", True)):
        table = read_table(ROOT / "results" / name)
        for row in table["rows"].values():
            assert bool(pictures.control_losses(table, row["runs"])) == drawn
