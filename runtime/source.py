"""A hash of the source that decides a number, so that numbers of other source are recognised.

It is a hash of syntax trees: of some definitions, and of all definitions that they reach by name,
in this repository and in modules of a user's own. Comments, docstrings, annotations, the format and
the order of definitions do not count. Every process and every version of Python finds the same.
"""

import ast
import dataclasses
import functools
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

# The first word of a hash. Hashes of another kind, as they once were, are not compared.
KIND = "source"
# Fields of a syntax tree that compute nothing, or that only some versions of Python have.
SILENT = ("annotation", "returns", "ctx", "kind", "type_comment", "type_ignores", "type_params")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """What a module defines at its top: a name, a name inside a class ("Rows.sees"), or all.

    With a key it is what the dict of this name has under the key.
    """

    module: str
    name: str | None = None
    key: str | None = None


def differs(before: str | None, now: str) -> bool:
    """Whether two hashes are of other source, as far as they can be compared."""
    return before is not None and before.split()[0] == now.split()[0] and before != now


@functools.cache
def source_hash(
    roots: tuple[Definition, ...], closed: tuple[str, ...] = (), words: tuple[str, ...] = ()
) -> str:
    """A hash of these definitions, of all that they reach, and of `words`.

    Modules and packages named `closed` are not entered from other modules. Of an installed package
    only the names that are imported count. Raises LookupError where a name is not defined.
    """
    texts: dict[Definition, str] = {}
    remaining = list(roots)
    while remaining:
        definition = remaining.pop()
        if definition in texts:
            continue
        if tree_of(definition.module) is None:
            texts[definition] = " ".join(filter(None, definition))
            continue
        nodes = nodes_of(definition)
        if not nodes and definition in roots and definition.key is None:
            raise LookupError(f"{definition.module} does not define {definition.name}")
        imports = ast.Import | ast.ImportFrom
        texts[definition] = " ".join(ast.dump(x) for x in nodes if not isinstance(x, imports))
        for reached in reached_by(nodes, definition):
            package = reached.module.partition(".")[0]
            entered = reached.module not in closed and package not in closed
            if entered or reached.module == definition.module:
                remaining.append(reached)
    digest = hashlib.sha256("\n".join([*words, *sorted({*texts.values()})]).encode())
    return f"{KIND} {digest.hexdigest()[:16]}"


def definition_of(value: Any) -> Definition:
    """Where a function or a class is defined: a name at the top of a module, or for a lambda all
    of it."""
    if isinstance(value, functools.partial):
        return definition_of(value.func)
    name = getattr(value, "__qualname__", "").partition(".")[0]
    return Definition(value.__module__, name if name.isidentifier() else None)


def contents(value: Any) -> Iterator[Definition | str]:
    """The modules of a user's own that define the functions inside an object, and plain values.

    Inside dataclasses, tuples and partial functions too.
    """
    if isinstance(value, functools.partial):
        value = (value.func, *value.args, *value.keywords.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        value = (type(value), *fields)
    if isinstance(value, tuple):
        for item in value:
            yield from contents(item)
    elif callable(value):
        module = value.__module__
        if module is not None and tree_of(module) is not None:
            yield Definition(module)
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value)


# ---- modules ----


@functools.cache  # a process runs the source as it is at its beginning
def tree_of(module: str) -> ast.Module | None:
    """The syntax tree of a module, without what computes nothing.

    None for a module of Python or of an installed package, and where there is no source, as for
    what is typed into an interpreter.
    """
    standard = module.partition(".")[0] in sys.stdlib_module_names
    file = None if standard else file_of(module)
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return None
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        fields = vars(node)
        if isinstance(fields.get("body"), list):
            fields["body"] = [statement for statement in fields["body"] if not is_text(statement)]
        for name in [*fields]:
            if name in SILENT or fields[name] is None or fields[name] == []:
                del fields[name]
    return tree


def file_of(module: str) -> Path | None:
    """The file of a module, which is not imported for that."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
    else:
        spec = spec_of(module)
        file = spec.origin if spec else None
    return Path(file) if file else None


def spec_of(module: str) -> ModuleSpec | None:
    package = module.rpartition(".")[0]
    if not package:
        return PathFinder.find_spec(module)
    parent = spec_of(package)
    folders = parent.submodule_search_locations if parent else None
    return PathFinder.find_spec(module, folders) if folders else None


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# ---- definitions ----


def nodes_of(definition: Definition) -> list[ast.AST]:
    """The syntax trees of a definition; none where its module has no such name."""
    module, name, key = definition
    if name is None:
        tree = tree_of(module)
        return [*getattr(tree, "body", [])]
    name, _, inner = name.partition(".")
    by_name = statements_by_name(module)
    statements = by_name.get(name) or by_name.get("*", [])
    if key is not None:
        return [node for statement in statements for node in under_key(statement, key)]
    if inner:
        members = [member for statement in statements for member in getattr(statement, "body", [])]
        return [member for member in members if getattr(member, "name", None) == inner]
    return [*statements]


@functools.cache
def statements_by_name(module: str) -> dict[str, list[ast.stmt]]:
    """The statements at the top of a module that decide what each name stands for."""
    statements = defaultdict(list)
    for statement in getattr(tree_of(module), "body", []):
        for name in names_set_by(statement):
            statements[name].append(statement)
    return statements


def names_set_by(statement: ast.stmt) -> set[str]:
    """The names that a statement may set or change: of a loop or a call all names in it."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    places: Iterable[ast.AST] = [statement]
    if isinstance(statement, ast.Assign):
        places = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        places = [statement.target]
    names = set()
    for node in (node for place in places for node in ast.walk(place)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(getattr(node, "asname", None) or node.name.partition(".")[0])
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
    return names


def under_key(statement: ast.stmt, key: str) -> Iterator[ast.AST]:
    """What a statement that sets or changes a dict may put under a key."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=other))], value=value):
            if other == key:
                yield value
        case ast.Assign(value=ast.Dict() as table) | ast.AnnAssign(value=ast.Dict() as table):
            for label, value in zip(table.keys, table.values, strict=True):
                if not isinstance(label, ast.Constant) or label.value == key:  # or **others
                    yield value
        case _:
            yield statement


# ---- what a definition reaches ----


def reached_by(nodes: Iterable[ast.AST], definition: Definition) -> Iterator[Definition]:
    """The definitions that the syntax trees of a definition name or import."""
    module = definition.module
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node, module, definition.name)
            continue
        of_members = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                yield from imported(inner, module)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                other = module_called(inner.value.id, module)
                if other is not None:
                    of_members.add(inner.value)
                    yield member(other, inner.attr)
            elif isinstance(inner, ast.Name) and inner not in of_members:
                yield Definition(module, inner.id)


def imported(
    statement: ast.Import | ast.ImportFrom, module: str, name: str | None = None
) -> Iterator[Definition]:
    """What an import in a module stands for: all of it, or what it calls `name`."""
    for alias in statement.names:
        bound = getattr(alias, "asname", None) or alias.name.partition(".")[0]
        if name is not None and bound not in (name, "*"):
            continue
        if isinstance(statement, ast.Import):
            yield Definition(alias.name)
        elif alias.name == "*":
            yield Definition(source_of(statement, module), name)
        else:
            yield member(source_of(statement, module), alias.name)


def source_of(statement: ast.ImportFrom, module: str) -> str:
    """The module that an import in another module imports from."""
    source = getattr(statement, "module", "")
    if not statement.level:
        return source
    package = getattr(sys.modules.get(module), "__package__", None) or module.rpartition(".")[0]
    parents = package.split(".")
    return ".".join([*parents[: len(parents) + 1 - statement.level], *filter(None, [source])])


@functools.cache
def member(module: str, name: str) -> Definition:
    """What a module or package has under a name: a definition, or a module."""
    submodule = f"{module}.{name}"
    if name not in statements_by_name(module) and tree_of(submodule) is not None:
        return Definition(submodule)
    return Definition(module, name)


@functools.cache
def module_called(name: str, module: str) -> str | None:
    """The module that a name stands for in a module; None where it stands for something else."""
    statements = statements_by_name(module).get(name, [])
    if len(statements) != 1 or not isinstance(statements[0], ast.Import | ast.ImportFrom):
        return None
    (target,) = imported(statements[0], module, name)
    # `import a.b` binds a, of which any module may be used
    of_package = target.module.startswith(f"{name}.")
    return None if target.name is not None or of_package else target.module
