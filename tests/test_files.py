"""Files that are whole or not there, and the lock of a folder."""

import pytest

from errors import UserError
from runtime import files
from tests.runs import refused


def test_a_run_is_trained_by_one_process_at_a_time(train, capsys):
    folder = train("run")
    before = (folder / "metrics.jsonl").read_bytes()
    with files.lock_folder(folder, "training this run"):
        refused(capsys, lambda: train("run", "--resume"), "another process is training this run")
    assert (folder / "metrics.jsonl").read_bytes() == before
    train("run", "--resume")


def test_a_folder_locked_for_nothing_is_gone_again(tmp_path):
    folder = tmp_path / "out" / "new" / "run"
    with pytest.raises(ZeroDivisionError), files.lock_folder(folder, "training this run"):
        assert folder.is_dir()
        1 / 0  # noqa: B018
    assert not (tmp_path / "out").exists()
    with files.lock_folder(folder, "training this run"):
        (folder.parent / "other").touch()
    assert not folder.exists() and (folder.parent / "other").exists()
    with files.lock_folder(folder, "training this run"):
        (folder / "config.json").touch()
    with files.lock_folder(folder, "training this run"):  # it was there before
        (folder / "config.json").unlink()
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), files.atomic_write(path, "w") as file:
        file.write("after")
        1 / 0  # noqa: B018
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "before"
    with pytest.raises(UserError, match="cannot be written"):
        files.write_json(tmp_path / "no" / "folder.json", 1)
    with pytest.raises(UserError, match="no file can be written there"):
        files.check_writable(path / "below a file")
    with pytest.raises(UserError, match="no file can be written there"):
        with files.lock_folder(path / "below a file", "training this run"):
            pass


def test_a_refused_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ZeroDivisionError), files.lock_folder(tmp_path, "training this run"):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with files.lock_folder(tmp_path, "training this run"):
        (tmp_path / "metrics.jsonl").touch()
    assert (tmp_path / ".lock").exists()
    with pytest.raises(ZeroDivisionError), files.lock_folder(tmp_path / "new", "training"):
        (tmp_path / "new" / ".lock").unlink()
        (tmp_path / "new").rmdir()
        1 / 0  # noqa: B018
