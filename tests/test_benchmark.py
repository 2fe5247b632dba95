"""The benchmark: its models, what a step is, its tables."""

import multiprocessing

import pytest
import torch

from config import load_config
from model import GPT, Trunk
from runtime.files import read_json
from scripts import benchmark

TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes", "--device=cpu"]
SHORT = [*TINY, "--block_size=8", "--batch_size=2", "--total_batch_size=16"]


def step(name, phase, *settings, plain=False):
    """One step of a phase with the model of a config file."""
    config = load_config([f"configs/{name}.py", *settings])
    return benchmark.build_step(config, phase, torch.device("cpu"), plain, print)


@pytest.fixture
def table(call, capsys, monkeypatch):
    """Run the command with figures of 1 for the first model, 2 for the second and so on.

    Returns the models, by name, and the lines printed.
    """
    asked = {}

    def measure(models, rounds, phases):
        asked.update(models)
        columns = [f"{phase}_{unit}" for phase in phases for unit in ("ms", "ms_spread", "mb")]
        return {name: dict.fromkeys(columns, n) for n, name in enumerate(models, 1)}

    monkeypatch.setattr(benchmark, "measure", measure)

    def run(*arguments):
        asked.clear()
        call(benchmark, *arguments)
        return asked, capsys.readouterr().out.splitlines()

    return run


def test_the_papers_figures_stand_beside_every_path(table):
    configs = [f"configs/{name}.py" for name in ("softmax", "lssar_p15", "relu_li")]
    _, lines = table(*configs, "--impls=auto,reference")
    after = [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith("lssar_p15")]
    assert all(line.startswith("paper, A100") and "250.3 (2.08)" in line for line in after)
    assert sum("paper, A100" in line for line in lines) == 4
    # the paper has no figures of other phases, nor of T6
    models, lines = table("configs/softmax.py", "configs/t6.py", "--phases=decode", "--p=3")
    assert lines[-1].startswith("t6 ") and "2.0 (2.00)" in lines[-1]
    assert models["t6"].p == 3  # no option of the command, though --phases begins with it


def test_a_model_of_every_path_and_one_plain_model(table):
    more = ("--impls=auto,unfused", "--block_size=32", "--batch_size=2", "--phases=train")
    models, _ = table("plain", "configs/lssar_p3.py", *more)
    assert [*models] == ["plain", "lssar_p3 auto", "lssar_p3 unfused"]
    config = models["lssar_p3 unfused"]
    assert (config.block_size, config.batch_size, config.compile) == (32, 2, False)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["configs/softmax.py", "configs/scales/../softmax.py"], "two models are called softmax"),
        (["plain", "--optimizer=muon"], "plain is trained with adamw, not with muon"),
        (["configs/softmax.py", "--dry_run"], "neither task = orbits nor --dry_run"),
        (["plain", "--rounds=0"], "--rounds 0 must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, refused, arguments, says):
    refused(call, benchmark, *arguments, *SHORT, says=says)


def test_steps_are_measured_in_processes_of_their_own(call, monkeypatch, tmp_path):
    # fork the processes from one that has imported torch already
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    out = tmp_path / "new/b.json"
    more = ("--rounds=3", "--block_size=16", "--phases=eval,attention", "--out", out)
    call(benchmark, "configs/lssar_p3.py", *TINY, *more)
    saved = read_json(out)
    figures = saved["rows"]["lssar_p3"]
    assert saved["settings"]["rounds"] == 3 and "blocked" in figures["attention_path"]
    for phase in ("eval", "attention"):
        low, high = figures[f"{phase}_ms_spread"]
        assert 0 < low <= figures[f"{phase}_ms"] <= high and figures[f"{phase}_mb"] > 50


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_unfused_holds_all_logits(monkeypatch, phase):
    """The paper's setting; otherwise the losses are computed in chunks."""
    seen, logits = [], GPT.logits
    monkeypatch.setattr(
        GPT, "logits", lambda self, x: seen.append(x.shape[:-1].numel()) or logits(self, x)
    )
    small = [*TINY, "--block_size=512", "--batch_size=2", "--total_batch_size=1024"]
    for options, expected in ((benchmark.UNFUSED, [1024]), ([], [])):
        step("lssar_p15", phase, *small, *options)()
        assert seen == expected
        seen.clear()


@pytest.mark.parametrize("plain", [False, True])
def test_a_training_step_changes_the_weights(monkeypatch, plain):
    models, build = [], benchmark.build_optimizers
    monkeypatch.setattr(
        benchmark, "build_optimizers", lambda model, c: models.append(model) or build(model, c)
    )
    train = step("softmax", "train", *SHORT, "--positions=learned", plain=plain)
    weight, blocks = models[0].wte.weight, models[0].blocks if plain else models[0].trunk
    before = weight.detach().clone()
    train()
    assert not torch.equal(weight, before) and weight.grad is None
    parameters = sum(p.numel() for p in blocks.parameters())
    assert parameters == 3280 + 32 + (0 if plain else 8 * 16)  # one block, LayerNorm, positions


def test_the_plain_model_is_causal():
    model = benchmark.PlainGPT(load_config([*SHORT, "--block_size=4"]))
    x, y = torch.arange(4)[None], torch.tensor([[5, -100, -100, -100]])
    changed = torch.tensor([[0, 7, 8, 9]])
    torch.testing.assert_close(model(x, y), model(changed, y))
    assert not torch.isclose(model(x, y.flip(1)), model(changed, y.flip(1)))


def test_a_generated_token_is_that_after_a_full_cache(monkeypatch):
    seen, forward = [], Trunk.forward

    def noted(self, x, cache):
        seen.append((x.shape[:2], cache.length, cache.size))
        return forward(self, x, cache)

    monkeypatch.setattr(Trunk, "forward", noted)
    decode = step("lssar_p3", "decode", *SHORT, "--projections=tpa")
    decode()
    decode()
    assert seen == [((2, 1), 0, 8), ((2, 1), 7, 8), ((2, 1), 7, 8)]
