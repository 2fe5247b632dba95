"""A hash of a variant's formulas, which tells numbers that were made with other formulas."""

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from dis import get_instructions
from types import CodeType, FunctionType, ModuleType
from typing import Any


def fingerprint(*variants: Any) -> str:
    """A hash of the variants' functions, and of the functions and constants that these use.

    Comments and docstrings do not count. The version of Python comes first, because another version
    compiles the same formulas to other instructions.
    """
    digest = hashlib.sha256("\n".join(parts(variants, set(), {})).encode()).hexdigest()
    return f"{'.'.join(platform.python_version_tuple()[:2])} {digest[:16]}"


def differs(before: str | None, now: str) -> bool:
    """Whether two fingerprints are of other formulas, as far as is known: by one Python version."""
    return before is not None and before.split()[0] == now.split()[0] and before != now


def parts(value: Any, seen: set[Any], scope: dict[str, Any]) -> Iterator[str]:
    """A text for each part of a value: instructions, constants, names, what the names stand for."""
    value = getattr(value, "__func__", value)  # of a staticmethod
    if isinstance(value, FunctionType | type):
        yield value.__qualname__
        if value in seen or value.__module__.startswith("torch"):
            return
        seen.add(value)
    if isinstance(value, FunctionType):
        constants = tuple(None if x == value.__doc__ else x for x in value.__code__.co_consts)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inside = [value.__code__.replace(co_consts=constants), value.__defaults__, *cells]
        yield from parts(inside, seen, value.__globals__)
    elif isinstance(value, CodeType):
        loaded = [step.argval for step in get_instructions(value) if step.opname == "LOAD_GLOBAL"]
        used = [scope[name] for name in loaded if name in scope]
        yield value.co_code.hex()
        yield from parts([value.co_names, value.co_consts, used], seen, scope)
    elif isinstance(value, type):
        own = vars(value)
        yield from parts([own[key] for key in sorted(own) if key[:2] != "__"], seen, scope)
    elif is_dataclass(value):
        yield from parts([(f.name, getattr(value, f.name)) for f in fields(value)], seen, scope)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from parts(item, seen, scope)
    elif callable(value) or isinstance(value, ModuleType):  # built-in functions, modules
        yield value.__name__
    else:
        yield repr(value)
