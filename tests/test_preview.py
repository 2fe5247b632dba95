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
        "896 tokens to train on, 1.8e+08 FLOP; 1 MB for weights, gradients and optimizer",
        "dry run: all checks passed; nothing was written",
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
def test_the_memory_of_weights_gradients_and_optimizer(optimizer):
    """Against the tensors that a step leaves."""
    config = small_config("lssar_p15.py", f"--optimizer={optimizer}")
    model = GPT(config)
    optimizers = build_optimizers(model, config)
    model(*torch.zeros(2, 1, 16, dtype=torch.long)).backward()
    held = 2 * sum(p.nbytes for p in model.parameters())
    for one in optimizers:
        one.step()
        held += sum(
            value.nbytes for state in one.state.values() for value in state.values() if value.dim()
        )
    assert preview.state_bytes(config, model) == held
