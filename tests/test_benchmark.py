"""The benchmark: its rows, its table, what it refuses."""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F

from config import load_config
from model import GPT, Trunk
from runtime.files import read_json
from scripts import benchmark


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


def test_paths_and_lengths_side_by_side(call, capsys, monkeypatch, tmp_path):
    # eight processes: fork them from one that has imported torch already
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes"]
    settings = [x for pair in tiny for x in ("--set", pair[2:])]
    call(
        benchmark, "configs/lssar_p3.py", *settings, "--rounds", 1,
        "--impls", "auto,unfused", "--lengths", "16,32", "--out", tmp_path / "new/b.json",
    )  # fmt: skip
    printed = capsys.readouterr().out
    saved = read_json(tmp_path / "new/b.json")
    assert len(saved["rows"]) == 4
    for name, figures in saved["rows"].items():
        length = name.split(" at ")[1]
        assert saved["baselines"][name] == f"lssar_p3 auto at {length}"
        assert figures["train_ms"] > 0 and figures["train_mb"] > 50 and name in printed


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_unfused_holds_all_logits(monkeypatch, phase):
    """The paper's setting; the others never hold them all in an evaluation."""
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
    small = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=512", "--batch_size=2"]
    small += ["--tokenizer=bytes"]
    common = ["configs/lssar_p15.py", *small, "--total_batch_size=1024", "--device=cpu"]
    for options, rows in (
        (benchmark.UNFUSED, [1024]), ([], [] if phase == "eval" else [1024]),
    ):  # fmt: skip
        config = load_config([*common, *options])
        benchmark.build_step(config, phase, None, torch.device("cpu"))()
        assert seen == rows
        seen.clear()


def test_a_generated_token_is_that_after_a_full_cache(monkeypatch):
    seen, forward = [], Trunk.forward

    def noted(self, x, cache):
        seen.append((x.shape[:2], cache.length, cache.size))
        return forward(self, x, cache)

    monkeypatch.setattr(Trunk, "forward", noted)
    small = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=2"]
    config = load_config(["configs/lssar_p3.py", *small, "--projections=tpa", "--tokenizer=bytes"])
    step = benchmark.build_step(config, "decode", None, torch.device("cpu"))
    step()
    step()
    assert seen == [((2, 1), 0, 8), ((2, 1), 7, 8), ((2, 1), 7, 8)]


def test_rows_of_one_variant_are_named_after_their_configs(call, capsys, monkeypatch):
    figures = {"decode_ms": 2.0, "decode_mb": 3.0}
    monkeypatch.setattr(
        benchmark, "measure", lambda rows, *_: {name: dict(figures) for name in rows}
    )
    call(benchmark, "configs/softmax.py", "configs/t6.py", "--phases", "decode")
    printed = capsys.readouterr().out
    assert "softmax" in printed and "\nt6 " in printed and "decode_ms" in printed
    assert "2.0 (1.00)" in printed and "paper" not in printed
    for arguments in (["--phases", "decoding"], ["--phases", "decode", "--nanogpt", "."]):
        with pytest.raises(SystemExit):
            call(benchmark, "configs/softmax.py", *arguments)
        assert "--phases decod" in capsys.readouterr().err
