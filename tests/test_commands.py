"""What several commands on finished runs refuse in the same way."""

import errno
import shutil
import tempfile

import pytest

from scripts import attention_maps, eval_length, needle, passkey, sample


@pytest.mark.parametrize("module", [eval_length, attention_maps, passkey, needle])
def test_what_cannot_be_written_is_not_measured(train, call, module, monkeypatch, capsys):
    run = train("run", "--max_iters=1")
    before = sorted(run.iterdir())

    def denied(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(module, "measure", None)
    lengths = {passkey: "300", needle: "300"}.get(module, "16")
    score = ("--score_length", "300") if module is needle else ()
    with pytest.raises(SystemExit) as stop:
        call(module, run, "--lengths", lengths, *score)
    assert stop.value.code == 2
    error = f"{run}: no file can be written there: Permission denied"
    assert error in capsys.readouterr().err and sorted(run.iterdir()) == before


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
