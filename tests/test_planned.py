"""Planned runs: what is left to train, and who trains it."""

import contextlib

from errors import EXIT_MISTAKE
from runtime.files import lock_folder
from scripts.common import planned


def test_a_run_that_another_process_begins_first(tmp_path, monkeypatch, capsys):
    """It takes the folder after we have looked: train.py refuses, and we wait for its end."""
    folder, calls = tmp_path / "run", []
    other = contextlib.ExitStack()

    def call(command):
        calls.append(command)
        if len(calls) == 1:
            other.enter_context(lock_folder(folder, "training this run"))
            return EXIT_MISTAKE
        return 0

    monkeypatch.setattr(planned, "call", call)
    monkeypatch.setattr(planned.time, "sleep", lambda seconds: other.close())
    assert (
        planned.call_when_free(folder, lambda: ["train", "--resume"] if calls else ["train"]) == 0
    )
    assert calls == [["train"], ["train", "--resume"]]
    assert f"{folder}: another process is training" in capsys.readouterr().out
    # refused for another reason
    monkeypatch.setattr(planned, "call", lambda command: EXIT_MISTAKE)
    assert planned.call_when_free(folder, lambda: ["train"]) == EXIT_MISTAKE
    # finished by the other
    monkeypatch.setattr(planned, "call", None)
    assert planned.call_when_free(folder, lambda: None) == 0
