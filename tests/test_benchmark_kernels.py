"""What a CPU can check: the alternatives compute what they are compared with, and refusals."""

import pytest
import torch

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
    torch.testing.assert_close(benchmark_kernels.default_sdpa(q, k, v), ours)
    torch.testing.assert_close(benchmark_kernels.flash(q, k, v), ours)


def test_every_figure_has_its_target(small):
    figures = list(benchmark_kernels.decoding("cpu", torch.float32, (64,)))
    assert [f["name"] for f in figures] == ["softmax, SDPA", "lssar_p15", "lssa"] * 2
    for figure in figures:
        assert figure["ms"] > 0 and figure["ratio"] > 0
        assert figure["spread"][0] <= figure["ms"] <= figure["spread"][1]
    assert figures[1]["target"] == 0.8
    failed = benchmark_kernels.row("lssar_p15", "training", (1, 2, 64, 16), "out of memory", [1.0])
    assert failed["failed"] == "out of memory" and "ms" not in failed


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
@pytest.mark.parametrize("options", [(), ("--part", "decoding")])
def test_without_a_gpu_it_is_refused(call, capsys, tmp_path, options):
    with pytest.raises(SystemExit) as stop:
        call(benchmark_kernels, *options, "--out", tmp_path / "gpu.json")
    assert stop.value.code == 2 and "NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
