"""How every command reports a user's mistake: one sentence, no traceback, and exit code 2."""

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

EXIT_MISTAKE = 2


class UserError(ValueError):
    """A mistake in the user's input; the message names it, its value and what would be valid."""


def check_choice(key: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise UserError, with the nearest allowed value, if `value` is not allowed."""
    if value not in allowed:
        names = list(map(str, allowed))
        hint = did_you_mean(str(value), names)
        raise UserError(f"{key} = {value!r}; {hint}it must be one of {', '.join(names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name nearest to `name`, and a space; "" if none is near."""
    candidate = nearest(name, known)
    return "" if candidate is None else f"did you mean {candidate}? "


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name with the initials `name` (lr: learning_rate), or else the most similar.

    None if no similarity in difflib's measure, from 0 to 1, is at least `cutoff`.
    """
    names = list(known)
    for candidate in names:
        initials = "".join(word[:1] for word in candidate.split("_"))
        if name == initials and len(initials) > 1:
            return candidate
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence, an unknown option with the nearest known one.

    Expands the ~ of --option=~/path, as train.py does: a shell leaves it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        expanded = []
        for argument in sys.argv[1:] if args is None else args:
            option, equals, value = argument.partition("=")
            if option.startswith("--") and value.startswith("~/"):
                value = os.path.expanduser(value)
            expanded.append(option + equals + value)
        return super().parse_known_args(expanded, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --(\w+)", message)
        if unknown:
            known = re.findall(r"--(\w+)", self.format_usage())
            message += f"; {did_you_mean(unknown[1], known)}--help lists the options"
        raise UserError(re.sub(r"^argument (\S+):", r"\1", message))


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has no message."""
    message = str(error) or type(error).__name__
    return message.splitlines()[0]


@contextmanager
def reported() -> Iterator[None]:
    """Print a UserError of the block as one sentence and exit with code 2.

    A full disk, and a path that is too long or may not be opened, are reported in the same way, and
    running out of memory with exit code 1. Ctrl-C exits with 130, and a closed output pipe, as in
    `| head`, exits with 1.
    """
    try:
        yield
    except UserError as error:
        exit_with(str(error))
    except MemoryError as error:
        reason = str(error) or "more than this machine has"
        exit_with(f"not enough memory: {reason.splitlines()[0]}", code=1)
    except RuntimeError as error:
        # how torch words a failed allocation, on a CPU and on a GPU; CUDA and Triton; cuBLAS
        if not re.search("to allocate|out of memory|_ALLOC_FAILED", str(error)):
            raise
        exit_with(f"not enough memory: {first_line(error)}", code=1)
    except BrokenPipeError:
        discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENAMETOOLONG) and error.filename:
            exit_with(f"{os.fsdecode(error.filename)}: {error.strerror}")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        discard_output()
        exit_with("no space left on the disk under the output")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


# Decorates the `main` of every command.
command = reported()


def discard_output() -> None:
    """Discard all further output, including the flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with(message: str, code: int = EXIT_MISTAKE) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
