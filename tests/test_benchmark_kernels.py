"""What a CPU can check: the alternatives compute what they are compared with, and refusals."""

import json
import re

import pytest
import torch

from config import load_config
from scripts import benchmark_kernels


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(benchmark_kernels, "HEADS", 2)
    monkeypatch.setattr(benchmark_kernels, "HEAD_SIZE", 16)


def test_two_flex_attention_calls_are_lssar(small):
    q, k, v, _ = benchmark_kernels.inputs(2, 128, 128, "cpu", torch.float32)
    ours = benchmark_kernels.layer("lssar_p15")(q, k, v)
    error = (benchmark_kernels.flex_lssar(15, 128, "cpu")(q, k, v) - ours).norm() / ours.norm()
    assert error < 1e-5


def test_softmax_peers_are_softmax(small):
    q, k, v, _ = benchmark_kernels.inputs(2, 64, 64, "cpu", torch.float32)
    ours = benchmark_kernels.layer("softmax")(q, k, v)
    torch.testing.assert_close(benchmark_kernels.flash(q, k, v), ours)
    torch.testing.assert_close(benchmark_kernels.softmax_flex(64, "cpu")(q, k, v), ours)


def test_every_figure_has_its_target(small):
    figures = list(benchmark_kernels.decoding("cpu", torch.float32, (64,)))
    assert [f["name"] for f in figures] == ["softmax, SDPA", "lssar_p15", "lssa"] * 2
    for figure in figures:
        assert figure["ms"] > 0 and figure["ratio"] > 0
        assert figure["spread"][0] <= figure["ms"] <= figure["spread"][1]
    assert figures[1]["target"] == 0.8
    failed = benchmark_kernels.row("lssar_p15", "training", (1, 2, 64, 16), "out of memory", [1.0])
    assert failed["failed"] == "out of memory" and "ms" not in failed


def test_generation_is_measured_with_recorded_steps_too(monkeypatch):
    recorded = []
    monkeypatch.setattr("model.record", lambda step, device: recorded.append(step) or step)
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--tokenizer=bytes"]
    monkeypatch.setattr(
        benchmark_kernels, "load_config", lambda files: load_config([*files, *tiny])
    )
    figures = list(benchmark_kernels.generation(torch.device("cpu"), torch.float32, 8))
    names = ["softmax", "softmax, recorded", "lssar_p15", "lssar_p15, recorded"]
    assert [f["name"] for f in figures] == names and len(recorded) == 2
    assert figures[0]["ratio"] == 1 and all(f["ms"] > 0 for f in figures)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
@pytest.mark.parametrize("options", [(), ("--part", "decoding")])
def test_without_a_gpu_it_is_refused(call, capsys, tmp_path, options):
    with pytest.raises(SystemExit) as stop:
        call(benchmark_kernels, *options, "--out", tmp_path / "gpu.json")
    assert stop.value.code == 2 and "NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


def test_a_figure_measured_again_takes_the_place_of_the_earlier_one():
    result: dict = {}
    for length, ms in ((64, 3.0), (128, 5.0), (64, 2.0)):
        figure = benchmark_kernels.row("lssa", "training", (1, 2, length, 16), [ms], [1.0])
        benchmark_kernels.add(result, "attention", figure)
    figures = result["attention"]["figures"]
    assert [(f["shape"][2], f["ms"]) for f in figures] == [(128, 5.0), (64, 2.0)]


def test_the_model_prints_every_kernel_beside_its_target(call, capsys):
    """From the committed counts, for each release of Triton."""
    call(benchmark_kernels, "--model")
    printed = capsys.readouterr().out
    table = json.loads(benchmark_kernels.TABLE.read_text())
    for release in table:
        assert f"Triton {release}" in printed
    ratios = re.findall(
        r"(lssar_p15|lssa) +(training|forward) +([0-9.]+)(?:  target ([0-9.]+))?", printed
    )
    assert len(ratios) == 4 * len(table)
    for name, what, ratio, target in ratios:
        assert 0.5 < float(ratio) < 3
        if (name, what) in benchmark_kernels.TARGETS:
            assert float(target) == benchmark_kernels.TARGETS[name, what][0]


def test_a_shape_is_measured_for_one_kernel_alone(monkeypatch):
    pytest.importorskip("triton")
    import kernels
    from scripts import tune_kernels

    used = []
    usual = kernels.block_shape

    def block_shape(*arguments):
        used.append(arguments[0])
        return usual(*arguments)

    monkeypatch.setattr(kernels, "block_shape", block_shape)
    monkeypatch.setattr(tune_kernels, "HEADS", 1)
    name, ms = tune_kernels.time_shape("relu_li", 16, kernels.KEYS, (16, 16, 4, 1), "cpu", 1, 20)
    assert name == "sm_0, backward, keys, float32, d 16, relu" and ms > 0
    assert set(used) == {kernels.ONE_STAGE} and kernels.block_shape is block_shape
