"""One way to refuse: a sentence for the user, no traceback, exit code 2."""

import functools
import sys


class UserError(ValueError):
    """Something the user gave is wrong; the message names it, its value and what would be right."""


def command(main):
    """Decorate a command's `main`: a UserError is printed as one sentence and exits with 2."""

    @functools.wraps(main)
    def run(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
        except (MemoryError, RuntimeError) as error:
            text = str(error) or "more than this machine has"
            # what both torch on a CPU and torch on a GPU say
            if isinstance(error, RuntimeError) and "to allocate" not in text:
                raise
            print(f"error: not enough memory: {text.splitlines()[0]}", file=sys.stderr, flush=True)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return run
