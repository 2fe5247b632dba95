"""metrics.jsonl, printed lines and wandb, with wandb's own client."""

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import Config
from errors import UserError
from runtime.log import Log, read_metrics, say, start_wandb, wandb_settings
from tests.faults import arguments, run_command
from tests.runs import metrics


@pytest.fixture(autouse=True)
def no_wandb_variables(monkeypatch):
    """Whoever runs the tests may have exported some."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def test_wandb_offline_says_how_to_sync(shards, tmp_path):
    # in a process of its own: wandb leaves its service behind in the process that uses it
    folder = tmp_path / "run"
    output = tmp_path / "output"
    command = arguments(shards, folder, "--wandb_mode=offline")
    assert run_command(command, output=output) == 0
    identity = json.loads((folder / "wandb.json").read_text())["id"]
    (path,) = re.findall("wandb sync (.*)", output.read_text())
    assert Path(path) in folder.glob(f"wandb/offline-run-*-{identity}")


@pytest.mark.parametrize(
    "settings, environment, expected",
    [
        (
            {},
            {"WANDB_MODE": "offline"},
            {
                "mode": "offline",
                "project": "sharp-attention",
                "run_name": "out/run",
                "resume": "allow",
            },
        ),
        (
            {},
            {"WANDB_PROJECT": "p", "WANDB_ENTITY": "team", "WANDB_NAME": "n", "WANDB_DIR": "d"},
            {"project": "p", "entity": "team", "run_name": "n", "root_dir": "d"},
        ),
        (
            {"wandb_project": "mine", "wandb_entity": "us", "wandb_mode": "online"},
            {"WANDB_PROJECT": "p", "WANDB_ENTITY": "team", "WANDB_MODE": "offline"},
            {"project": "mine", "entity": "us", "mode": "online"},
        ),
        ({"wandb_mode": "offline"}, {"WANDB_DISABLED": "true"}, {"mode": "offline"}),
        ({}, {"WANDB_DISABLED": "true"}, None),
        ({}, {"WANDB_DISABLED": "T"}, None),
        ({}, {"WANDB_DISABLED": "no", "WANDB_MODE": "offline"}, {"mode": "offline"}),
        ({}, {"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandbs_environment_counts_where_no_setting_does(
    monkeypatch, settings, environment, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = wandb_settings(Config(out_dir="out/run", **settings))
    if expected is None:
        assert result is None
        return
    for name, value in expected.items():
        assert getattr(result, name) == value


def test_training_needs_no_wandb(monkeypatch, tmp_path, capsys):
    for module in ("wandb", "pydantic"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it raises ImportError
    assert wandb_settings(Config()) is None
    assert start_wandb(Config(out_dir=str(tmp_path)), resumed=False) is None
    assert capsys.readouterr().out == "wandb is off: it is not installed\n"
    with pytest.raises(UserError, match="wandb_mode = 'offline', but wandb is not installed: pip"):
        wandb_settings(Config(wandb_mode="offline"))
    monkeypatch.setenv("WANDB_MODE", "")
    assert wandb_settings(Config()) is None
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert start_wandb(Config(out_dir=str(tmp_path)), resumed=False) is None
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "setting, says",
    [
        ("--wandb_project=team/name", ("project name 'team/name'", "--wandb_entity=TEAM names")),
        ("--wandb_entity=team/name", "the entity 'team/name' must be"),
        ("WANDB_PROJECT=a:b", "Invalid project name 'a:b'"),
        ("WANDB_MODE=on", "error: wandb: mode = 'on': Input should be 'online', 'offline'"),
        ("WANDB_RUN_ID=a/b", "Run ID cannot contain"),
    ],
)
def test_wandbs_names_are_checked_before_there_is_a_folder(
    train, tmp_path, monkeypatch, refused, setting, says
):
    arguments = ["--wandb_mode=auto"]
    if setting.startswith("--"):
        arguments.append(setting)
    else:
        monkeypatch.setenv(*setting.split("="))
    refused(train, "run", *arguments, "--dry_run", says=says)
    refused(train, "run", *arguments, says=says)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_under_the_output_does_not_end_a_run(shards, tmp_path):
    """Nor does a closed pipe: see test_a_closed_terminal_does_not_stop_a_run_under_nohup."""
    assert run_command(arguments(shards, tmp_path / "run"), output_lost="disk") == 0
    assert max(metrics(tmp_path / "run")) == 6


def test_output_whose_encoding_lacks_a_character_is_escaped(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="")
    monkeypatch.setattr(sys, "stdout", output)
    say("modèle")
    assert output.buffer.getvalue() == b"mod\\xe8le\n"


def test_a_full_disk_ends_the_run_with_a_sentence(train, monkeypatch, refused):
    real = Log.step

    def full(log, step, **values):
        if step == 3:
            log.file = open("/dev/full", "w")
        real(log, step, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", full)
        refused(train, "run", says="No space left on device")
    train("run", "--resume")


def test_a_resumed_run_sends_wandb_every_step_once(tmp_path, monkeypatch):
    """Steps that a killed process had not sent come from metrics.jsonl."""
    config = Config(out_dir=str(tmp_path), wandb_mode="online")
    sent = []

    def send(values, step):
        sent.append((step, *values))

    def init(**settings):
        at = 3 if settings["id"] else 0  # it has steps 0 to 2
        return SimpleNamespace(id="x1", starting_step=at, offline=False, log=send)

    monkeypatch.setattr("wandb.init", init)
    log = Log(config, None, quiet=False)
    for step in range(6):
        log.write({"step": step, "loss": 1.0})
    sent.clear()
    log = Log(config, 4, quiet=False)
    log.write({"step": 5, "loss": 1.0})
    log.validation(5, 2.0)
    assert sent == [
        (3, "step", "loss"),
        (4, "step", "loss"),
        (5, "step", "loss"),
        (5, "step", "val_loss"),
    ]
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": "x1"}
    assert metrics(tmp_path) == dict.fromkeys(range(6), 1.0)


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    """Half a line of a killed process, and JSON too deep to be parsed."""
    line = {"step": 1, "loss": 2.0}
    lines = [json.dumps(line), '{"step": 2, "lo', "[" * 100_000, "3"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path) == [line]


def test_a_run_goes_on_where_wandbs_process_has_died(tmp_path, monkeypatch, capsys):
    """As a signal to all processes of a job ends it."""
    config = Config(out_dir=str(tmp_path), wandb_mode="online")

    def dead(*arguments, **named):
        raise ConnectionResetError("Connection lost")

    started = SimpleNamespace(id="x1", starting_step=0, offline=False, log=dead, finish=dead)
    monkeypatch.setattr("wandb.init", lambda **settings: started)
    log = Log(config, None, quiet=False)
    for step in range(3):
        log.write({"step": step, "loss": 1.0})
    log.finish()
    assert capsys.readouterr().out == (
        "wandb has stopped (Connection lost): metrics.jsonl has every step\n"
    )
    assert metrics(tmp_path) == dict.fromkeys(range(3), 1.0)
    log = Log(config, None, quiet=False)
    log.finish()
    assert "wandb has stopped" in capsys.readouterr().out


def test_wandb_without_a_login_is_off(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wandb.login", lambda **options: False)
    assert start_wandb(Config(out_dir=str(tmp_path)), resumed=False) is None
    assert "wandb is off: `wandb login` or" in capsys.readouterr().out


def test_wandb_that_does_not_answer_logs_offline(tmp_path, monkeypatch, capsys):
    import wandb

    def init(mode=None, **settings):
        if mode is None:
            raise wandb.errors.CommError("timed out")
        return SimpleNamespace(id="x1", offline=True, sync_dir="here")

    monkeypatch.setattr("wandb.init", init)
    start_wandb(Config(out_dir=str(tmp_path), wandb_mode="online"), resumed=False)
    assert "does not answer (timed out): this run is logged offline" in capsys.readouterr().out


def test_an_api_key_of_another_form_turns_wandb_off(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert start_wandb(Config(out_dir=str(tmp_path)), resumed=False) is None
    assert re.search("wandb is off: .*API key", capsys.readouterr().out)
