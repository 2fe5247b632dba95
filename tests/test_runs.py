"""Runs, requests and results, as the commands on finished runs share them."""

import sys
from dataclasses import fields

import pytest

from config import Config
from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from scripts import attention_maps, downstream, eval_length, needle, passkey
from scripts.common.runs import open_run, picture_path, refuse_early
from tests import faults
from tests.runs import wait_for

# Every option of every evaluation, at another value than its default.
OPENED = {
    "rope": "yarn", "rope_factor": 2.5, "rope_theta": 500000.0, "checkpoint": "best",
    "attention": "lssa", "window": 7, "p": 2.0, "attention_impl": "reference", "device": "cpu",
    "dtype": "bfloat16",
}  # fmt: skip
REQUESTS = [
    eval_length.LossRequest(
        lengths=(16, 32), tokens=64, samples=5, sample_seed=3, data_dir="here",
        per_position=True, restart=True, **OPENED,
    ),
    attention_maps.MapsRequest(
        layer=0, text="A text.", lengths=(8,), tokens=0, data_dir="here", **OPENED
    ),
    passkey.PasskeyRequest(lengths=(300,), trials=7, seed=1, **OPENED),
    needle.NeedleRequest(
        lengths=(200, 300), samples=3, score_length=200, score_trials=2, data_dir="here", seed=1,
        **OPENED,
    ),
    downstream.TaskRequest(
        tasks=("a", "b"), include_path="here", max_length=40, limit=5, **OPENED
    ),
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.script)
def test_the_command_line_of_a_request_is_parsed_into_it(request_, monkeypatch, tmp_path):
    """As scripts.reproduce relies on it, which looks for the measurement by the same request."""
    module, parsed = sys.modules[type(request_).__module__], []
    parse, default = type(request_).parse, type(request_)()
    for field in fields(request_):
        assert getattr(request_, field.name) != getattr(default, field.name), field.name

    def stop(arguments):
        parsed.append(parse(arguments))
        raise SystemExit

    monkeypatch.setattr(type(request_), "parse", stop)
    for one in (request_, default):
        monkeypatch.setattr(sys, "argv", [module.__name__, *one.arguments(), str(tmp_path)])
        with pytest.raises(SystemExit):
            module.main()
    assert parsed == [request_, default] and default.arguments() == []
    assert request_.file(tmp_path).name == f"{module.__name__.removeprefix('scripts.')}.json"


def test_another_row_re_weights_only_where_it_is_asked_to():
    trained = Config(attention="lssar", p=15.0, p_law="log_n")

    def opened(**options):
        config = eval_length.LossRequest(**options).applied(trained)
        return config.attention, config.p, config.p_law

    assert opened() == ("lssar", 15.0, "log_n")
    assert opened(p=3.0) == ("lssar", 3.0, "log_n")
    assert opened(attention="lssa") == ("lssa", None, "constant")
    assert opened(attention="softmax", p=2.0) == ("softmax", 2.0, "log_n")
    assert opened(attention="lssar") == ("lssar", 15.0, "log_n")


def test_pictures_of_other_runs_have_other_names(tmp_path):
    (one,) = {picture_path([tmp_path / "a"], "loss")}
    assert one == tmp_path / "a/loss.png"
    runs = [tmp_path / "x/softmax", tmp_path / "y/lssa"]
    assert picture_path(runs, "loss") == tmp_path / "loss_x-softmax_y-lssa.png"
    assert picture_path(runs[:1] * 2, "loss") == tmp_path / "x/loss_softmax_softmax.png"
    many = [tmp_path / "softmax" / f"seed{i}" for i in range(50)]
    names = {picture_path(runs, "loss").name for runs in (many, many[:-1], many[:-2])}
    assert len(names) == 3 and all(len(name) < 120 for name in names)


def test_a_run_in_training_can_always_be_opened(shards, tmp_path):
    """Each checkpoint is deleted a step after it was saved."""
    out = tmp_path / "run"
    often = ["--checkpoint_interval=1", "--eval_interval=1", "--keep_last=1", "--val_tokens=16"]
    arguments = faults.arguments(shards, out, *often, "--max_iters=1000000", "--log_interval=1000")
    process = faults.start(arguments, output=tmp_path / "output")
    wait_for(lambda: (checkpoint.step(out) or 0) > 0)
    seen = {"latest": set(), "best": set()}
    for i in range(150):
        which = "best" if i % 5 == 0 else "latest"
        options = eval_length.LossRequest(lengths=(16,), tokens=16, checkpoint=which, device="cpu")
        refuse_early([out], options)
        seen[which].add(open_run(out, options).facts["sha256"])
    assert process.is_alive() and len(seen["latest"]) > 10 and seen["best"]
    process.terminate()
    assert faults.finish(process) == EXIT_STOPPED
