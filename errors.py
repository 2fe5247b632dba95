"""How every command reports a user's mistake: one sentence, no traceback, and exit code 2."""

import difflib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, ParamSpec, TypeVar

EXIT_MISTAKE = 2

P = ParamSpec("P")
R = TypeVar("R")


class UserError(ValueError):
    """A mistake in the user's input; the message names it, its value and what would be valid."""


def check_choice(key: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise UserError, with the nearest right value, where a value is not among these."""
    if value not in allowed:
        texts = [str(one) for one in allowed]
        hint = did_you_mean(str(value), texts)
        raise UserError(f"{key} = {value!r}; {hint}it is one of {', '.join(texts)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest known name, and a space; "" where none is near."""
    words = list(known)
    initials = [word for word in words if name == "".join(part[:1] for part in word.split("_"))]
    near = initials or difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def command(main: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command's `main`: print a UserError as one sentence and exit with code 2.

    Running out of memory is reported the same way; Ctrl-C exits with 130, output that nobody reads
    any more, as in `| head`, with 1.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(EXIT_MISTAKE)
        except (MemoryError, RuntimeError) as error:
            text = str(error) or "more than this machine has"
            # how torch words a failed allocation, on a CPU and on a GPU
            if isinstance(error, RuntimeError) and "to allocate" not in text:
                raise
            print(f"error: not enough memory: {text.splitlines()[0]}", file=sys.stderr, flush=True)
            sys.exit(EXIT_MISTAKE)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            sys.exit(1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run
