"""What several commands on finished runs refuse in the same way."""

import errno
import json
import shutil
import subprocess
import sys
import tempfile

import pytest

from runtime import checkpoint
from scripts import attention_maps, eval_length, needle, passkey, sample
from tests.runs import ROOT


@pytest.mark.parametrize("module", [eval_length, passkey])
def test_what_cannot_be_written_is_not_measured(train, call, module, monkeypatch, capsys):
    run = train("run", "--max_iters=1")
    before = sorted(run.iterdir())

    def denied(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    monkeypatch.setattr("scripts.common.runner.load_run", None)
    lengths = "300" if module is passkey else "16"
    with pytest.raises(SystemExit) as stop:
        call(module, run, "--lengths", lengths)
    assert stop.value.code == 2
    error = f"{run}: no file can be written there: Permission denied"
    assert error in capsys.readouterr().err and sorted(run.iterdir()) == before


@pytest.mark.parametrize(
    "module, arguments",
    [
        (eval_length, ["--lengths=16,32", "--per_position"]),
        (attention_maps, ["--lengths=16", "--tokens=32", "--distances"]),
    ],
)
def test_a_measurement_of_other_weights_is_not_taken(train, call, tmp_path, module, arguments):
    """Another run's results, where the two differ in their learning rate only."""
    name = f"{module.__name__.removeprefix('scripts.')}.json"
    other, run = (train(f"run{rate}", f"--learning_rate={rate}") for rate in (0.01, 0.02))
    call(module, other, *arguments)
    copied = json.loads((other / name).read_text())
    shutil.copy(other / name, run)
    call(module, run, *arguments)
    measured = json.loads((run / name).read_text())
    own = checkpoint.find(run).sha256
    assert [one["sha256"] for one in measured[len(copied) :]] == [own] * len(copied)
    assert measured[: len(copied)] == copied  # the other's stay
    (run / name).unlink()
    call(module, run, *arguments)
    assert json.loads((run / name).read_text()) == measured[len(copied) :]
    assert module is not eval_length or measured[0]["parts"] != measured[2]["parts"]


def test_a_folder_that_is_no_run_is_refused(call, tmp_path, capsys):
    for module in (eval_length, sample):
        with pytest.raises(SystemExit) as stop:
            call(module, tmp_path)
        assert stop.value.code == 2 and "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("module", [passkey, needle])
def test_a_run_without_a_checkpoint_is_refused(trained, call, tmp_path, capsys, module):
    for message in ("no config.json", "checkpoint"):
        with pytest.raises(SystemExit) as stop:
            call(module, tmp_path)
        assert stop.value.code == 2 and message in capsys.readouterr().err
        shutil.copy(trained / "config.json", tmp_path)
    assert not (tmp_path / "out").exists()


# Libraries that take seconds to import, and that these commands do not need.
SLOW = ("torch._dynamo", "transformers", "lm_eval", "datasets", "pandas", "scipy", "sympy", "wandb")
AS_A_FILE = f"""
import runpy, sys
sys.path[0] = sys.argv[1].rpartition("/")[0]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print("slow:", [name for name in {SLOW} if name in sys.modules])
"""


def test_a_command_runs_as_a_file_from_any_folder(trained, tmp_path):
    """And starts quickly: it imports nothing that it does not need."""
    arguments = [ROOT / "scripts/sample.py", trained, "--max_new_tokens=2", "--device=cpu"]
    command = [sys.executable, "-c", AS_A_FILE, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "-" * 80 in done.stdout, done.stderr
    assert done.stdout.endswith("slow: []\n")


def test_every_command_finds_the_modules_beside_its_folder():
    for file in ROOT.glob("scripts/*.py"):
        text = file.read_text()
        if "__main__" in text:
            assert "if not __package__:" in text.partition("from errors import")[0], file
