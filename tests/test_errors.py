"""How a command ends: one sentence for a mistake, and nothing hidden of what is a bug."""

import os
import subprocess
import sys

import pytest

from config import ROOT
from errors import EXIT_MISTAKE, UserError, command


def ends(error, capsys):
    """Exit code and standard error of a command that raises this."""

    @command
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().err


def test_a_mistake_is_one_sentence(capsys):
    assert ends(UserError("p = 0 must be at least 1"), capsys) == (
        EXIT_MISTAKE,
        "error: p = 0 must be at least 1\n",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] you tried to allocate 4 bytes\nmore"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_is_not_there_is_one_sentence(capsys, error):
    code, printed = ends(error, capsys)
    assert code == 2 and printed.startswith("error: not enough memory: ")
    assert printed.count("\n") == 1


def test_control_c_has_the_shells_code(capsys):
    assert ends(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


def test_output_that_nobody_reads_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), SystemExit(75)])
def test_the_rest_is_not_hidden(error):
    @command
    def main():
        raise error

    with pytest.raises(type(error)) as raised:
        main()
    assert raised.value is error
