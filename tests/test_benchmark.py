"""The GPU suite's parts that a CPU can check: its peers compute what they are compared with."""

import pytest
import torch

from runtime.files import read_json
from scripts import benchmark, benchmark_kernels


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


def test_every_figure_names_what_it_is_held_to(small):
    figures = list(benchmark_kernels.decoding("cpu", torch.float32, (64,)))
    assert [f["name"] for f in figures] == ["softmax, SDPA", "lssar_p15", "lssa"] * 2
    for figure in figures:
        assert figure["ms"] > 0 and figure["ratio"] > 0
        assert figure["spread"][0] <= figure["ms"] <= figure["spread"][1]
    assert figures[1]["target"] == 0.8
    failed = benchmark_kernels.row("lssar_p15", "training", (1, 2, 64, 16), "out of memory", [1.0])
    assert failed["failed"] == "out of memory" and "ms" not in failed


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the suite")
def test_the_suite_is_refused_without_a_gpu(call, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        call(benchmark, "--suite", "gpu", "--out", tmp_path / "gpu.json")
    assert stop.value.code == 2 and "NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    "out, message", [("file/new/b.json", "Not a directory"), ("folder", "is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    call, capsys, tmp_path, monkeypatch, out, message
):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(benchmark, "measure", None)
    with pytest.raises(SystemExit) as stop:
        call(benchmark, "configs/softmax.py", "--out", tmp_path / out)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and str((tmp_path / out).parent) in error and message in error


def test_a_setting_without_a_value_is_refused(call, capsys):
    with pytest.raises(SystemExit) as stop:
        call(benchmark, "configs/softmax.py", "--set", "device", "--set", "dtype=float32")
    assert stop.value.code == 2 and "'device' must be KEY=VALUE" in capsys.readouterr().err


def test_the_papers_figures_stand_beside_every_path(call, capsys, monkeypatch, tmp_path):
    columns = benchmark.PAPER["columns"]
    monkeypatch.setattr(
        benchmark, "measure", lambda rows, *_: {name: dict.fromkeys(columns, 1.0) for name in rows}
    )
    (tmp_path / "model.py").touch()
    paths = ("--impls", "auto,reference", "--nanogpt", tmp_path)
    call(benchmark, "configs/softmax.py", "configs/lssar_p15.py", "configs/relu_li.py", *paths)
    lines = capsys.readouterr().out.splitlines()
    after = [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith("lssar_p15")]
    assert all(line.startswith("paper, A100") and "250.3 (2.08)" in line for line in after)
    assert sum("paper, A100" in line for line in lines) == 4 and lines[-1].startswith("nanoGPT")


def test_paths_and_lengths_side_by_side(call, capsys, tmp_path):
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes"]
    settings = [x for pair in tiny for x in ("--set", pair[2:])]
    call(
        benchmark, "configs/softmax.py", "configs/lssar_p3.py", *settings, "--rounds", 1,
        "--impls", "auto,reference", "--lengths", "16,32", "--out", tmp_path / "new/b.json",
    )  # fmt: skip
    printed = capsys.readouterr().out
    saved = read_json(tmp_path / "new/b.json")
    assert len(saved["rows"]) == 8
    for name, figures in saved["rows"].items():
        length = name.split(" at ")[1]
        assert saved["baselines"][name] == f"softmax auto at {length}"
        assert figures["train_ms"] > 0 and figures["train_mb"] > 50 and name in printed
