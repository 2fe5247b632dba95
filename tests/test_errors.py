"""How a command ends: one sentence for a mistake, and nothing hidden of what is a bug."""

import os
import subprocess
import sys
from errno import EACCES, ENAMETOOLONG

import pytest
from torch import AcceleratorError

from config import ROOT
from errors import UserError, command

TOO_LARGE = "you tried to allocate 4 bytes"
FULL_GPU = "CUDA error: out of memory"


@pytest.mark.parametrize(
    "error, code, sentence",
    [
        (UserError("p = 0 must be at least 1"), 2, "error: p = 0 must be at least 1"),
        (MemoryError(), 1, "error: not enough memory: more than this machine has"),
        (RuntimeError(f"{TOO_LARGE}\nmore"), 1, f"error: not enough memory: {TOO_LARGE}"),
        (AcceleratorError(f"{FULL_GPU}\nmore"), 1, f"error: not enough memory: {FULL_GPU}"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(EACCES, "Permission denied", "a/b"), 2, "error: a/b: Permission denied"),
        (OSError(ENAMETOOLONG, "File name too long", "a"), 2, "error: a: File name too long"),
    ],
)
def test_a_mistake_is_one_sentence(error, code, sentence, capsys):
    @command
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    assert capsys.readouterr().err == sentence + "\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), SystemExit(75)])
def test_the_rest_is_not_hidden(error):
    @command
    def main():
        raise error

    with pytest.raises(type(error)) as raised:
        main()
    assert raised.value is error


def test_output_that_cannot_be_written_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert process.returncode == 1
    assert process.stderr == b""
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert process.returncode == 2
    assert process.stderr == b"error: no space left on the disk under the output\n"
