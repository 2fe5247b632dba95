"""The benchmark: its models, what a step is, its tables."""

import argparse
import multiprocessing

import pytest
import torch

from attention_paths.module import Attention
from config import load_config
from model import GPT, Trunk
from runtime.files import read_json
from scripts import benchmark

TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes", "--device=cpu"]
SHORT = [*TINY, "--block_size=8", "--batch_size=2", "--total_batch_size=16"]


def step(name, phase, *settings):
    """One step of a phase with the model of a config file."""
    config = load_config([f"configs/{name}.py", *settings])
    return benchmark.build_step(config, phase, torch.device("cpu"))


def test_the_papers_figures_stand_beside_every_path(call, capsys, monkeypatch):
    asked = {}

    def measure(models, rounds, phases):  # figures of 1 for the first model, 2 for the second
        asked.update(models)
        columns = [f"{phase}_{unit}" for phase in phases for unit in ("ms", "ms_spread", "mb")]
        return {name: dict.fromkeys(columns, n) for n, name in enumerate(models, 1)}

    monkeypatch.setattr(benchmark, "measure", measure)
    paths = ("--impls", "auto,reference")
    call(benchmark, "configs/softmax.py", "configs/lssar_p15.py", "configs/relu_li.py", *paths)
    lines = capsys.readouterr().out.splitlines()
    after = [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith("lssar_p15")]
    assert all(line.startswith("paper, A100") and "250.3 (2.08)" in line for line in after)
    assert sum("paper, A100" in line for line in lines) == 4
    # the paper has no figures of other phases, nor of T6
    call(benchmark, "configs/softmax.py", "configs/t6.py", "--phases", "decode", "--p=3")
    printed = capsys.readouterr().out
    assert "\nt6 " in printed and "2.0 (2.00)" in printed and "paper" not in printed
    assert asked["t6"].p == 3  # no option of the command, though --phases begins with it


def test_models_take_the_baseline_of_their_length():
    arguments = argparse.Namespace(
        configs=["configs/softmax.py", "configs/lssar_p3.py"], scale=None, impls="auto,unfused",
        lengths=(16, 32),
    )  # fmt: skip
    models = benchmark.parse_models(arguments, ["--batch_size=2"])
    baselines = benchmark.baselines_of(models)
    assert len(models) == 8 and baselines["lssar_p3 unfused at 32"] == "softmax auto at 32"
    config = models["lssar_p3 unfused at 32"]
    assert (config.block_size, config.total_batch_size, config.compile) == (32, 64, False)


def test_steps_are_measured_in_processes_of_their_own(call, monkeypatch, tmp_path):
    # fork the processes from one that has imported torch already
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    out = tmp_path / "new/b.json"
    more = ("--rounds=3", "--lengths=16", "--phases=eval", "--out", out)
    call(benchmark, "configs/lssar_p3.py", *TINY, *more)
    saved = read_json(out)
    figures = saved["rows"]["lssar_p3"]
    assert saved["baselines"] == {"lssar_p3": "lssar_p3"} and saved["settings"]["rounds"] == 3
    low, high = figures["eval_ms_spread"]
    assert 0 < low <= figures["eval_ms"] <= high and figures["eval_mb"] > 50


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


def test_a_training_step_changes_the_weights(monkeypatch):
    models, build = [], benchmark.build_optimizers
    monkeypatch.setattr(
        benchmark, "build_optimizers", lambda model, c: models.append(model) or build(model, c)
    )
    train = step("softmax", "train", *SHORT)
    weight = models[0].wte.weight
    before = weight.detach().clone()
    train()
    assert not torch.equal(weight, before) and weight.grad is None


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


@pytest.mark.parametrize("phase, backward", [("attention", 1), ("attention_eval", 0)])
def test_attention_alone_is_a_layers(monkeypatch, phase, backward):
    seen, calls, forward, grad = [], [], Attention.forward, torch.autograd.grad

    def noted(self, q, k, v):
        seen.append((self.p, q.shape, q.requires_grad))
        return forward(self, q, k, v)

    monkeypatch.setattr(Attention, "forward", noted)
    monkeypatch.setattr(torch.autograd, "grad", lambda *a: calls.append(a) or grad(*a))
    step("lssar_p3", phase, *SHORT)()
    assert seen == [(3, (2, 2, 8, 8), bool(backward))] * benchmark.CALLS
    assert len(calls) == backward * benchmark.CALLS
