"""The probes of a model of orbits: its labels, the fine-tuning, the laws, and what is refused."""

import json

import numpy as np
import pytest
import torch

from data.orbits import PAIRS, G, draw_pair, positions
from layers.build import build_model
from runtime import run_folder
from runtime.config_files import load_config
from scripts import eval_length, physics
from scripts.common.runs import load_run
from scripts.physics import Equation, Physics, best_score, law, magnitude_task, vector_task
from tests.helpers import SMALL, not_blank, read_table, saved_run, write_scale

ORBITS = [
    "--task=orbits",
    "--tie_embeddings=False",
    "--positions=learned",
    "--planets=1",
    "--systems=200",
    "--bins=100",
    "--block_size=32",
    "--total_batch_size=256",
    "--batch_size=4",
]
FEW = ["--steps=3", "--pairs=20", "--batch=8"]


@pytest.fixture
def searched(monkeypatch):
    """A search that knows the law, instead of pyoperon's, which takes 4 s a draw."""

    def search(x, y, seed):
        assert x.shape == (len(y), 3)
        return [
            Equation(1, 1.0, "0.5"),
            Equation(9, 1e-6, "39.5*m1*m2/r**2"),
            Equation(20, 9e-7, "39.5*m1*m2/r**2 + 0.1*sin(r)"),
        ]

    monkeypatch.setattr(physics, "search", search)


@pytest.fixture(scope="module")
def config():
    return load_config([*SMALL, *ORBITS])


@pytest.fixture(scope="module")
def orbit_run(config, tmp_path_factory):
    """A saved model of orbits, not trained: fine-tuning is what these tests are about."""
    torch.manual_seed(0)
    return saved_run(tmp_path_factory.mktemp("runs") / "orbits", build_model(config))


def test_vectors_point_to_the_sun_and_ten_of_each_planet_are_labelled(config):
    task = vector_task(config)
    assert task.tokens.shape == (8, 32, 2)
    assert (task.tokens[:4, 0] == config.bins).all()  # steps of a week
    assert (task.tokens[4:, 0] == config.bins + 1).all()  # steps of half a year
    assert task.forces.shape == (8, 16, 2)
    assert (task.labelled.sum(1) == 10).all()
    largest = np.abs(task.targets).max((0, 1))
    assert largest.tolist() == [1, 1]
    places = task.states[..., :2]
    masses = task.states[..., 2:]
    distance = np.linalg.norm(places, axis=-1)
    expected = G * masses.prod(-1) / distance**2
    assert np.allclose(np.linalg.norm(task.forces, axis=-1), expected)
    along = (task.forces * places).sum(-1)
    assert np.allclose(along, -expected * distance)
    perihelia = [
        0.387 * 0.795,
        0.723 * 0.993,
        0.983,
        1.524 * 0.907,
        5.203 * 0.952,
        9.537 * 0.946,
        19.189 * 0.953,
        30.069 * 0.991,
    ]
    assert distance[:, 0] == pytest.approx(perihelia)


def test_magnitudes_follow_newton_and_one_of_ten_has_two_labels(config):
    task = magnitude_task(config, 30)
    assert task.labelled[:27].all()
    assert (task.labelled[27:].sum(1) == 2).all()
    distance, planet, star = np.moveaxis(task.states, -1, 0)
    expected = G * planet * star / distance**2
    assert np.allclose(task.forces[..., 0], expected)
    targets = task.targets[task.labelled]
    assert (targets**2).mean() == pytest.approx(1)
    systems = [draw_pair(PAIRS, index) for index in range(30)]
    masses = [system.masses for system in systems]
    assert (task.states[:, 0, 1:] == masses).all()
    for system, distances in zip(systems, distance, strict=True):
        at = positions(system, 16)
        vectors = at[:, 0] - at[:, 1]
        assert np.allclose(np.linalg.norm(vectors, axis=-1), distances)


def test_scores_of_the_vectors(orbit_run, monkeypatch):
    monkeypatch.setattr(Physics, "predict", lambda self, run, probe, task: -3 * task.forces)
    evaluation = Physics()
    measured = evaluation.probe_vectors(load_run(orbit_run, evaluation))
    assert measured["cosine"] == pytest.approx(-1)
    assert measured["relative_error"] == pytest.approx(4)


def test_a_run_is_probed_once_and_its_files_say_all(orbit_run, call, searched, pictures, capsys):
    results = orbit_run / "physics.json"
    call(physics, orbit_run, *FEW)
    (measured,) = json.loads(results.read_text())
    vectors, magnitudes = measured["parts"].values()
    assert list(vectors["planets"]) == list(physics.SOLAR_SYSTEM)
    earth = vectors["planets"]["Earth"]
    for arrows in (earth["at"], earth["true"], earth["predicted"]):
        assert len(arrows) == 6
    assert -1 <= vectors["cosine"] <= 1
    assert vectors["relative_error"] > 0
    assert magnitudes["positions"] == 2 * 14
    assert list(magnitudes["exponents"]) == ["r", "m1", "m2"]
    assert magnitudes["engine"].startswith("pyoperon ")
    assert len(magnitudes["laws"]) == 5
    for equation in magnitudes["laws"]:
        assert equation["powers"] == [-2, 1, 1]
    assert ": F = 39.5*m1*m2/r^2" in capsys.readouterr().out
    before = results.read_text()
    call(physics, orbit_run, *FEW)
    assert results.read_text() == before
    call(physics, orbit_run, *FEW, "--oracle")
    saved = json.loads(results.read_text())
    assert len(saved) == 2
    assert saved[1]["oracle"]
    assert [path.name for path in pictures] == ["forces.png", "forces.png", "oracle.png"]


def finetuned(path, evaluation, task):
    return evaluation.finetune(load_run(path, evaluation), "vectors", task)


def test_no_label_that_is_judged_is_seen(orbit_run, config):
    evaluation = Physics(steps=2, batch=8)
    task = vector_task(config)
    predicted = finetuned(orbit_run, evaluation, task)
    task.forces[~task.labelled] = 1e6
    assert np.array_equal(finetuned(orbit_run, evaluation, task), predicted)


def test_forces_are_the_outputs_at_the_planets_positions(orbit_run, config):
    evaluation = Physics(steps=0)
    run = load_run(orbit_run, evaluation)
    task = vector_task(config)
    outputs = evaluation.finetune(run, "vectors", task)
    torch.manual_seed(config.seed)
    model = physics.with_new_head(run.model, outputs=2)
    tokens = torch.from_numpy(task.tokens).long()
    with torch.no_grad():
        expected = model(tokens)[:, 1::2]
    assert np.allclose(outputs, expected, atol=1e-6)


def test_labels_are_learned(orbit_run, config):
    task = vector_task(config)
    task.forces[:] = [0.5, -0.25] * task.scale
    learned = finetuned(orbit_run, Physics(steps=60, batch=8), task)
    assert np.abs(learned - [0.5, -0.25]).mean() < 0.1


def test_the_oracle_recovers_the_law_by_plain_regression(orbit_run, searched):
    evaluation = Physics(pairs=400, oracle=True)
    measured = evaluation.probe_magnitudes(load_run(orbit_run, evaluation))
    assert measured["rank_correlation"] > 0.98
    assert measured["median_relative_error"] < 0.1
    assert measured["positive"] == 1
    exponents = list(measured["exponents"].values())
    assert exponents == pytest.approx([-2, 1, 1], abs=0.15)


def test_too_few_positive_forces_have_no_exponents(orbit_run, searched, monkeypatch):
    def predict(evaluation, run, probe, task):
        forces = np.full_like(task.forces, -1.0)
        sequences, points = np.nonzero(~task.labelled)
        forces[sequences[:3], points[:3]] = 1.0
        return forces

    monkeypatch.setattr(Physics, "predict", predict)
    evaluation = Physics(pairs=400)
    measured = evaluation.probe_magnitudes(load_run(orbit_run, evaluation))
    assert measured["exponents"] == {"r": None, "m1": None, "m2": None}


def test_the_best_score_is_the_largest_drop_of_log_loss_per_node():
    start = Equation(1, 1.0, "a")
    candidates = [
        start,
        Equation(3, 0.9, "b"),
        Equation(5, 1e-3, "c"),
        Equation(9, 0.8, "worse than c"),
        Equation(15, 1e-4, "d"),
    ]
    assert best_score(candidates).formula == "c"
    assert best_score([start, Equation(7, 0.0, "exact")]).formula == "exact"


def test_laws_are_products_of_powers():
    product = law("2.5*((-0.0001) + (3.0*((m1/(2.0*r))*(m2/(0.5*r)))))", deviation=1.0)
    assert product == {
        "powers": [-2, 1, 1],
        "factor": pytest.approx(7.5),
        "equation": "7.5*m1*m2/r^2",
    }
    assert law("27.02*m1/r**2", 1.0)["powers"] == [-2, 1, 0]
    for formula in ("m1*m2/r**2 + 0.5", "(sin(1/sin(r - 0.24)) + 1.45)/(1/r + m2)", "0.3"):
        assert law(formula, 1.0)["powers"] is None


def test_pyoperon_finds_newtons_law():
    rng = np.random.default_rng(0)
    r = rng.uniform(1, 20, 300)
    masses = rng.uniform(1e-4, 1e-2, (300, 2))
    force = G * masses.prod(1) / r**2
    equations = physics.search(np.column_stack([r, masses]), force, seed=1)
    newton = law(best_score(equations).formula, force.std())
    assert newton["powers"] == [-2, 1, 1]
    assert newton["factor"] == pytest.approx(G, rel=0.01)


def test_what_cannot_be_probed_is_refused(orbit_run, trained, call, monkeypatch, refused):
    refused(call, physics, trained, says="task = 'language', but this command")
    refused(call, eval_length, orbit_run, says="has task = 'orbits', but this command")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(call, physics, orbit_run, says='and pyoperon: pip install -e ".[physics]"')


def test_table3_from_nothing(reproduced, scale, searched, tmp_path):
    """The numbers, the equations and the picture of entries at the scale of the tests above."""
    write_scale(scale, *SMALL, *ORBITS)
    folder = reproduced("table3", "--only=oracle,softmax,softmax_window,untrained")
    text = (folder / "table.md").read_text()
    assert "`softmax`, seed 1337, by pyoperon" in text
    assert ": `39.5*m1*m2/r^2`; `39.5" in text
    rows = read_table(folder)["rows"]
    untrained = rows["untrained"]["runs"][0]
    assert untrained["step"] == 0
    assert rows["softmax"]["runs"][0]["step"] == 6
    assert rows["oracle"]["runs"][0]["run"] == untrained["run"]
    windowed = tmp_path / "out/orbits/small/softmax_window/seed1337"
    assert run_folder.read_config(windowed).window == 4
    assert not_blank(folder / "table3.png")
