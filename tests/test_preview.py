"""What a run says before its first step, and what it then refuses."""

import pytest
import torch

from config import load_config
from model import GPT
from optim import build_optimizers
from runtime import preview
from tests.helpers import small_config
from tests.runs import metrics, refused


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(train, capsys, tmp_path):
    out = train("run", "--dry_run", "--max_iters=7", "--warmup_iters=9", "--val_tokens=10000")
    printed = capsys.readouterr().out
    assert not out.exists()
    for part in (
        "softmax: 33,696 parameters, 3,999 training tokens",
        "warm-up and cooldown take 9 steps, but max_iters = 7",
        "val_tokens = 10,000, but", "has only 592 in whole windows of 16",
        "896 tokens to train on: about ", " a step, ", " a validation and ", " MB of memory",
    ):  # fmt: skip
        assert part in printed
    refused(capsys, lambda: train("run", "--dry_run", f"--data_dir={tmp_path}"), "no *_train_*.bin")
    (tmp_path / "file").touch()
    refused(capsys, lambda: train("file/run", "--dry_run"), "Not a directory")
    run = train("run", "--max_iters=2")
    before = {path: path.read_bytes() for path in run.iterdir()}
    refused(capsys, lambda: train("run", "--dry_run"), "holds a run")
    train("run", "--dry_run", "--resume", "--max_iters=4")
    assert "from step 2 of 4" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_schedule_that_has_ended_is_not_continued_in_silence(train, capsys):
    train("cosine", "--schedule=cosine", "--warmup_iters=1")
    more = ("--schedule=cosine", "--warmup_iters=1", "--resume", "--max_iters=12")
    says = ("12 instead of 6 makes the learning rate at step 6 7.1e-03 instead of 9.5e-04",)
    refused(capsys, lambda: train("cosine", *more), *says, "--init_from=", "=trapezoidal")
    preview.check_schedule(load_config(["--max_iters=900"]), 750, {"max_iters": 1000}, quiet=False)
    assert "at step 750 5.2e-04 instead of 5.6e-04\n" in capsys.readouterr().out
    run = train("steady", "--schedule=trapezoidal")
    steady = ("--schedule=trapezoidal", "--resume", "--max_iters=9")
    train("steady", *steady, "--cooldown_iters=3")
    assert list(metrics(run, "lr").values())[5:] == pytest.approx([1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])
    says = ("1.0e-02 instead of 3.3e-03",)
    refused(capsys, lambda: train("steady", *steady, "--max_iters=20"), *says)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_estimate_leaves_no_trace_and_counts_the_memory(optimizer):
    """Weights, gradients, the optimizer's averages, and what a micro-batch keeps."""
    config = small_config("lssar_p15.py", f"--optimizer={optimizer}", "--n_embd=64", "--n_layer=4")
    model = GPT(config)
    matrices = sum(p.numel() for p in model.trunk.parameters() if p.dim() == 2)
    before, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    cpu, optimizers = torch.device("cpu"), build_optimizers(model, config)
    said = preview.estimate(model, optimizers, config, cpu, torch.float32, 1, 0, 256)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    x = torch.zeros(1, config.block_size, dtype=torch.long)
    _, kept = preview.time_pass(model, x, torch.float32)
    _, four = preview.time_pass(model, x.expand(4, -1).contiguous(), torch.float32)
    assert 3.5 * kept < four < 4.5 * kept  # activations alone, no weights
    parameters = sum(p.numel() for p in model.parameters())
    held = 4 * (4 * parameters - (matrices if optimizer == "muon" else 0))
    assert f"at least {(held + kept) / 1e6:,.0f} MB" in said
    # a block of the trunk keeps at least its inputs and the MLP's hidden layer
    assert kept > 4 * config.n_layer * 16 * (64 + 256) * 4


@pytest.mark.parametrize("seconds, text", [(0.0304, "30 ms"), (12.3, "12 s"), (3900, "1:05:00")])
def test_durations(seconds, text):
    assert preview.duration(seconds) == text
