"""How the papers' tables are measured, which measurements are taken, and the pictures."""

import functools
import json
import math

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
from scripts.common.planned import PlannedRun
from scripts.reproduce import formulas, headroom, kinds, metrics, report, tables
from scripts.reproduce.entries import config_entry
from tests.helpers import measured_losses, not_blank, read_table, saved_run, small_config
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
        assert measured["p"] == control["p"] == p
        assert measured["window"] is None
        assert control["window"] == 16
        last = measured["loss"][-1]
        alone = control["loss"][0]
        window = control["loss"][-1]
        gain = min(alone, window) - last
        assert table["rows"][name]["mean"][4:] == [last, window, gain]
    # the run is shared, and so are its measurements
    before = (folder / "eval_length.json").read_bytes()
    assert "lssa" in read_table(reproduced("components", "--only=lssa"))["rows"]
    assert len(commands) == 1
    assert (folder / "eval_length.json").read_bytes() == before


def test_headroom(reproduced, scale, commands, tmp_path, undrawn, monkeypatch):
    """Softmax trained at 4 T and 16 T on as many tokens a step, against softmax's own window."""
    scale.write_text(scale.read_text().replace("block_size = 16", "block_size = 8"))
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
    assert table["rows"]["softmax_16t"]["mean"] == sixteen["loss"]
    for column, measured in ((2, four), (4, sixteen)):
        worth = measured["loss"][0] - measured["loss"][column]
        assert f"Available at {2**column}x, by seed: {worth:+.4f}." in table["caption"]
    # and other tables say so beside the gain
    other = read_table(reproduced("loss_by_length", "--only=softmax"))
    assert other["columns"][-1] == f"gain from context (available: {worth:+.4f})"
    assert any(text.endswith(f"headroom`), by seed {worth:+.4f}.") for text in other["caption"])
    assert len(commands) == 3
    runs = table["rows"]["softmax_16t"]["runs"]
    assert headroom.available({"softmax_16t": runs}, length=24) == []


def test_when_it_is_undecidable_whether_a_model_gains(reproduced, undrawn, monkeypatch):
    """0.1 is available; the gains of the seeds differ by `spread`."""
    monkeypatch.setattr(report, "available", lambda runs, length: [0.1])

    def last_sentence(gain, spread):
        monkeypatch.setattr(kinds, "gain", lambda measured: gain)
        monkeypatch.setattr(report, "spread", lambda row, column: spread)
        return read_table(reproduced("loss_by_length", "--only=softmax"))["caption"][-1]

    assert last_sentence(gain=0, spread=0.2).startswith("Undecidable here,")
    assert not last_sentence(gain=0, spread=0.05).startswith("Undecidable here,")
    assert not last_sentence(gain=-0.3, spread=0.2).startswith("Undecidable here,")


def test_passkeys_of_prompts_beyond_the_training_length(reproduced, tmp_path, monkeypatch, undrawn):
    """264 bytes take 17 times the 16 of training, so all lengths are 17 times the paper's."""
    few = functools.partial(kinds.PasskeyOptions, trials=2)
    monkeypatch.setattr(kinds, "PasskeyOptions", few)
    table = read_table(reproduced("passkey", "--only=softmax"))
    (measured,) = json.loads((folder_of(tmp_path) / "passkey.json").read_text())
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
    row = read_table(tmp_path / "results/small/ssmax_figure4")["rows"]["ssmax"]
    assert row["paper"] == [None, -0.008]
    ssmax = metrics_of(folder_of(tmp_path, "ssmax"))[6]
    softmax = metrics_of(folder_of(tmp_path, "softmax"))[6]
    assert row["mean"] == [ssmax, pytest.approx(ssmax - softmax)]


# ---- numbers from formulas and files ----


def test_fading_and_focus_are_the_papers_formulas():
    """SSMax Eqs. 1 and 2, on the vectors of Figs. 1 and 3."""
    for name in ("softmax", "ssmax"):
        values, curves = formulas.attention_fading(config_entry(name))
        curve_sizes, curve_values = curves[""]
        sizes = [*formulas.SIZES, *curve_sizes]
        for n, value in zip(sizes, [*values, *curve_values], strict=True):
            base = math.e if name == "softmax" else n**0.43
            others = (n - 1) * base ** (-2 - 3)
            assert value == pytest.approx(1 / (1 + others))
    names = ["softmax", "ssmax (s = 0.43)", "ssmax (s = 1)"]
    assert [entry.name for entry in formulas.FOCUS] == names
    for entry, s in zip(formulas.FOCUS, (None, 0.43, 1), strict=True):
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
    x = formulas.HIGHEST
    K = 1023 * math.log(2)
    exact = -2 * x / (x + K)  # of K / (x + K)^2, which is (A9)
    assert slopes["lssa"][2] == pytest.approx(exact, abs=1e-3)
    a = x / (x + K)
    growth = 14 * 1024 * a * (1 - a) / (1024 * a - 1)  # of r^14
    assert slopes["lssar_p15"][2] == pytest.approx(exact + growth, abs=1e-2)


def test_entropy_of_random_rows(monkeypatch):
    monkeypatch.setattr(formulas, "LENGTHS", (16, 64))
    generator = torch.Generator().manual_seed(1337)
    q = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    k = torch.randn(64, 64, generator=generator, dtype=torch.float64)
    expected = []
    for n in (16, 64):
        weights = (q @ k[:n].T / 8).softmax(-1)
        entropies = -(weights * weights.log()).sum(-1)
        expected.append(entropies.mean().item())
    slope = (expected[1] - expected[0]) / math.log(64 / 16)
    values, _ = formulas.random_entropy(config_entry("softmax"))
    assert values == pytest.approx([*expected, slope])


def test_heads_whose_queries_are_all_dead_have_no_entropy():
    by_head = [[0.5, None], [0.7, 1.0]]
    measured = {"keys": [2, 4], "groups": {"entropy": by_head}}
    keys, means = tables.entropies({"parts": {"": measured}})
    assert keys == [2, 4]
    assert means == pytest.approx([0.6, 1.0])


def run_in(folder):
    return PlannedRun("softmax", small_config("softmax.py", f"--out_dir={folder}"), arguments=[])


def test_learnt_p_is_fitted_without_p_1(tmp_path):
    model = build_model(small_config("ablations/ssmax_probe.py"))
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        p_n = next(value for name, value in parameters.items() if name.endswith("p_n"))
        assert set(p_n.tolist()) == {SSMAX["figure2"]["p_n"]}
        p_n.copy_(2 * torch.arange(1.0, 17).log() + 3)
        p_n[0] = 100
    run = run_in(saved_run(tmp_path / "run", model))
    values, curves = metrics.learned_p(run)
    assert values == pytest.approx([2, 3, 1], abs=1e-5)
    sizes, _ = curves[""]
    assert sizes[0] == 2


def test_curves_of_metrics(tmp_path):
    def write(name, key, values):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "metrics.jsonl", "w") as file:
            print(json.dumps({"step": 0, "val_loss": 5.0}), file=file)
            for step, value in enumerate(values, 1):
                print(json.dumps({"step": step, key: value}), file=file)
        return run_in(tmp_path / name)

    losses = [5 - 0.001 * step for step in range(1000)]
    softmax = write("a", "loss", losses)
    ssmax = write("b", "loss", [loss - 0.01 for loss in losses])
    values, curves = metrics.learning_curve(ssmax, softmax)
    last_tenth = np.mean(losses[-100:]) - 0.01
    assert values == pytest.approx([last_tenth, -0.01])
    steps, means = curves["loss"]
    assert steps == list(range(10, 1001, 10))
    assert means == pytest.approx(np.reshape(losses, (100, 10)).mean(1) - 0.01)
    # after two steps of warm-up, clipped at 1
    run = write("c", "grad_norm", [90.0, 80.0, 0.5, 4.0, 0.2, 0.9])
    values, curves = metrics.gradient_norms(run)
    assert values == [0.7, 4.0, 0.25]
    _, highest = curves["highest"]
    assert highest[0] == 90
