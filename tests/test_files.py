"""Files that are whole or not there, and the lock of a folder."""

import errno
import os
import stat
import subprocess
import sys

import pytest

from errors import UserError
from runtime import files
from tests.runs import ROOT


def test_a_run_is_trained_by_one_process_at_a_time(train, refused):
    folder = train("run")
    before = (folder / "metrics.jsonl").read_bytes()
    assert not files.is_locked(folder)
    with files.lock_folder(folder, "training this run"):
        assert files.is_locked(folder)
        refused(train, "run", "--resume", says="another process is training this run")
    assert (folder / "metrics.jsonl").read_bytes() == before
    train("run", "--resume")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_used_with_a_warning(number, tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        with files.lock_folder(tmp_path / "run", "training this run"):
            files.write_json(tmp_path / "run/config.json", 1)
            assert not files.is_locked(tmp_path / "run")
        assert "its file system has no locks" in capsys.readouterr().err
    assert files.read_json(tmp_path / "run/config.json") == 1


def test_a_folder_locked_for_nothing_is_gone_again(tmp_path):
    folder = tmp_path / "sweep/runs/run"
    with pytest.raises(ZeroDivisionError), files.lock_folder(folder, "training this run"):
        assert folder.is_dir()
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
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
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "before"
    with pytest.raises(UserError, match="cannot be written"):
        files.write_json(tmp_path / "no" / "folder.json", 1)
    with pytest.raises(UserError, match="no file can be written there"):
        files.check_writable(path / "below a file")
    too_long = tmp_path / ("x" * 300)
    assert files.is_writable(too_long / "run")
    says = "no file can be written there: File name too long"
    with pytest.raises(UserError, match=says), files.lock_folder(too_long, "testing"):
        pass


def test_a_file_is_synced_before_its_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    """No kill shows that a sync is missing, a power cut would."""
    operations = []
    replace = os.replace

    def fsync(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            operations.append("sync the folder")
        else:
            operations.append(f"sync {status.st_size} bytes")

    def rename(source, target):
        operations.append("rename")
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", rename)
    with files.atomic_write(tmp_path / "file") as file:
        file.write(b"content")
    assert operations == ["sync 7 bytes", "rename", "sync the folder"]


def test_a_network_share_that_cannot_sync_folders(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    files.write_json(tmp_path / "file.json", 1)
    assert files.read_json(tmp_path / "file.json") == 1


def test_nothing_is_written_through_a_link(tmp_path, monkeypatch):
    """Not by a temporary file, not even where its name was guessed, nor by the lock or target."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".config.json.0a1b2c3d.tmp", "config.json", ".lock"):
        (folder / name).symlink_to(precious)
    with monkeypatch.context() as patch:
        patch.setattr(files.secrets, "token_hex", lambda size: "0a1b2c3d")
        with pytest.raises(UserError, match="config.json: cannot be written: File exists"):
            files.write_json(folder / "config.json", {})
    files.write_json(folder / "config.json", {})
    assert not (folder / "config.json").is_symlink()
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        with files.lock_folder(folder, "training this run"):
            pass
    assert precious.read_text() == "mine"


def test_text_is_utf8_in_any_locale(tmp_path):
    path = tmp_path / "table.md"
    code = (
        "from runtime.files import atomic_write\n"
        f"with atomic_write({str(path)!r}, 'w') as file:\n"
        "    file.write('2.5 \\xb1 0.1')"
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | locale)
    assert path.read_bytes() == "2.5 ± 0.1".encode()


def test_the_temporary_file_of_a_killed_process_is_deleted_when_the_folder_is_used(tmp_path):
    path = tmp_path / "file.json"
    abandoned = tmp_path / ".file.json.0a1b2c3d.tmp"
    abandoned.touch()
    with files.atomic_write(path, "w") as first:
        with files.lock_folder(tmp_path, "training this run"):
            assert not abandoned.exists()
        files.write_json(path, "second")  # at the same time
        first.write('"first"')
    assert files.read_json(path) == "first"
    assert not list(tmp_path.glob(".*.tmp"))
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode
