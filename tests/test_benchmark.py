"""The benchmarks: their models, what a step is, their tables, what they refuse."""

import argparse
import multiprocessing

import pytest
import torch
import torch.nn.functional as F

from config import load_config
from model import GPT, Trunk
from runtime.files import read_json
from scripts import benchmark, benchmark_kernels

TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes", "--device=cpu"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--out", "{}/file/new/b.json"), "Not a directory"),
        (("--set", "device"), "'device' must be KEY=VALUE"),
        (("--phases", "decoding"), "--phases decoding"),
        (("--phases", "decode", "--nanogpt", "."), "no cache"),
        (("--nanogpt", "{}"), "no model.py there"),
        (("--rounds", "0"), "--rounds 0 must be at least 1"),
    ],
)
def test_refuses_before_it_measures(call, capsys, tmp_path, monkeypatch, options, message):
    (tmp_path / "file").touch()
    monkeypatch.setattr(benchmark, "measure", None)
    with pytest.raises(SystemExit) as stop:
        call(benchmark, "configs/softmax.py", *(option.format(tmp_path) for option in options))
    assert stop.value.code == 2 and message in capsys.readouterr().err


def stubbed(monkeypatch, columns):
    """Figures of 1 for every model, not measured."""
    monkeypatch.setattr(
        benchmark,
        "measure",
        lambda models, *_: {name: dict.fromkeys(columns, 1.0) for name in models},
    )


def test_the_papers_figures_stand_beside_every_path(call, capsys, monkeypatch, tmp_path):
    stubbed(monkeypatch, benchmark.PAPER["columns"])
    (tmp_path / "model.py").touch()
    paths = ("--impls", "auto,reference", "--nanogpt", tmp_path)
    call(benchmark, "configs/softmax.py", "configs/lssar_p15.py", "configs/relu_li.py", *paths)
    lines = capsys.readouterr().out.splitlines()
    after = [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith("lssar_p15")]
    assert all(line.startswith("paper, A100") and "250.3 (2.08)" in line for line in after)
    assert sum("paper, A100" in line for line in lines) == 4 and lines[-1].startswith("nanoGPT")


def test_configs_of_a_single_variant_are_named_after_their_files(call, capsys, monkeypatch):
    stubbed(monkeypatch, ["decode_ms", "decode_mb"])
    call(benchmark, "configs/softmax.py", "configs/t6.py", "--phases", "decode")
    printed = capsys.readouterr().out
    assert "softmax" in printed and "\nt6 " in printed and "1.0 (1.00)" in printed
    assert "decode_ms" in printed and "paper" not in printed


def test_models_take_the_baseline_of_their_length():
    arguments = argparse.Namespace(
        configs=["configs/softmax.py", "configs/lssar_p3.py"], scale=None, set=["batch_size=2"],
        impls="auto,unfused", lengths="16,32", nanogpt="folder",
    )  # fmt: skip
    models, baselines = benchmark.parse_models(arguments)
    assert len(models) == 10 and baselines["lssar_p3 unfused at 32"] == "softmax auto at 32"
    assert baselines["nanoGPT at 16"] == "softmax auto at 16"
    config = models["lssar_p3 unfused at 32"]
    assert (config.block_size, config.batch_size, config.total_batch_size) == (32, 2, 64)
    assert config.attention_impl == "reference" and config.compile is False
    assert models["nanoGPT at 32"] == models["softmax auto at 32"]


def test_steps_are_measured_in_processes_of_their_own(call, capsys, monkeypatch, tmp_path):
    # fork the processes from one that has imported torch already
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    settings = [x for pair in TINY for x in ("--set", pair[2:])]
    call(
        benchmark, "configs/lssar_p3.py", *settings, "--rounds", 3, "--lengths", 16,
        "--out", tmp_path / "new/b.json",
    )  # fmt: skip
    saved = read_json(tmp_path / "new/b.json")
    figures = saved["rows"]["lssar_p3"]
    assert saved["baselines"] == {"lssar_p3": "lssar_p3"} and saved["settings"]["rounds"] == 3
    for phase in ("train", "eval"):
        low, high = figures[f"{phase}_ms_spread"]
        assert 0 < low <= figures[f"{phase}_ms"] <= high and figures[f"{phase}_mb"] > 50
    assert "lssar_p3" in capsys.readouterr().out


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_unfused_holds_all_logits(monkeypatch, phase):
    """The paper's setting; evaluation otherwise never holds all logits."""
    seen = []
    logits, chunked = GPT.logits, F.linear_cross_entropy

    def counted(self, x):
        seen.append(x.shape[:-1].numel())
        return logits(self, x)

    def counted_chunks(x, *rest, options, **more):
        seen.extend([options.batch_chunk_size] * (len(x) // options.batch_chunk_size))
        return chunked(x, *rest, options=options, **more)

    monkeypatch.setattr(GPT, "logits", counted)
    monkeypatch.setattr(F, "linear_cross_entropy", counted_chunks)
    small = [*TINY, "--block_size=512", "--batch_size=2", "--total_batch_size=1024"]
    for options, expected in (
        (benchmark.UNFUSED, [1024]), ([], [] if phase == "eval" else [1024]),
    ):  # fmt: skip
        config = load_config(["configs/lssar_p15.py", *small, *options])
        benchmark.build_step(config, phase, None, torch.device("cpu"))()
        assert seen == expected
        seen.clear()


def test_a_training_step_changes_the_weights_and_clears_the_gradients(monkeypatch):
    models = []
    monkeypatch.setattr(benchmark, "GPT", lambda config: models.append(GPT(config)) or models[-1])
    small = [*TINY, "--block_size=8", "--batch_size=2", "--total_batch_size=16"]
    config = load_config(["configs/softmax.py", *small])
    step = benchmark.build_step(config, "train", None, torch.device("cpu"))
    before = models[0].wte.weight.detach().clone()
    step()
    assert not torch.equal(models[0].wte.weight, before) and models[0].wte.weight.grad is None


def test_a_generated_token_is_that_after_a_full_cache(monkeypatch):
    seen, forward = [], Trunk.forward

    def noted(self, x, cache):
        seen.append((x.shape[:2], cache.length, cache.size))
        return forward(self, x, cache)

    monkeypatch.setattr(Trunk, "forward", noted)
    small = [*TINY, "--block_size=8", "--batch_size=2", "--projections=tpa"]
    config = load_config(["configs/lssar_p3.py", *small])
    step = benchmark.build_step(config, "decode", None, torch.device("cpu"))
    step()
    step()
    assert seen == [((2, 1), 0, 8), ((2, 1), 7, 8), ((2, 1), 7, 8)]


# ---- the kernels ----


@pytest.fixture
def timed(monkeypatch):
    """Small tensors, and functions that are called but not timed, which takes a GPU."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(benchmark_kernels, "HEADS", 2)
    monkeypatch.setattr(benchmark_kernels, "HEAD_SIZE", 16)
    monkeypatch.setattr(testing, "do_bench", lambda call, return_mode: [call() or 2.0, 1.0, 4.0])


def test_kernels_are_compared_with_softmax(timed):
    figures = list(benchmark_kernels.decoding("cpu", torch.float32, (64,)))
    assert [f["name"] for f in figures] == ["softmax, SDPA", "lssar_p15", "lssa"] * 2
    for figure in figures:
        assert (figure["ms"], figure["spread"], figure["ratio"]) == (2, [1, 4], 1)
    assert [f["shape"] for f in figures[::3]] == [[1, 2, 64, 16], [8, 2, 64, 16]]


def test_a_training_call_is_forward_and_backward(timed):
    seen = []

    def function(q, k, v):
        seen.append(torch.is_grad_enabled())
        return q * k * v

    def fails(q, k, v):
        raise RuntimeError("no kernel")

    q, k, v, gradient = benchmark_kernels.inputs(1, 8, 8, "cpu", torch.float32)
    functions = {"one": function, "two": fails}
    for given in (gradient, None):
        one, two = benchmark_kernels.compare("training", functions, (q, k, v), given)
        assert one["ratio"] == 1 and two["failed"] == "RuntimeError: no kernel" and "ms" not in two
    assert seen == [True, False]
    assert q.shape == gradient.shape and q.grad is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_is_refused(call, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        call(benchmark_kernels, "--out", tmp_path / "gpu.json")
    assert stop.value.code == 2 and "NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_a_figure_measured_again_takes_the_place_of_the_earlier_one():
    result: dict = {}
    for length, ms in ((64, 3.0), (128, 5.0), (64, 2.0)):
        figure = {"name": "lssa", "what": "training", "shape": [1, 2, length, 16], "ms": ms}
        benchmark_kernels.add(result, "attention", figure)
    figures = result["attention"]["figures"]
    assert [(f["shape"][2], f["ms"]) for f in figures] == [(128, 5.0), (64, 2.0)]
