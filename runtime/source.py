"""A hash of the source code that computes a result, to recognise results of other code.

The hash covers the syntax trees of some definitions, and of all definitions that they reach by
name, in this repository and in the user's modules. Comments, docstrings, annotations, formatting
and the order of definitions do not count. The hash is the same in every process and with every
version of Python.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The first word of a hash. Hashes of another kind, as they once were, are not compared.
KIND = "source"
# Fields of a syntax tree that compute nothing, or that only some versions of Python have.
SILENT = ("annotation", "returns", "ctx", "kind", "type_comment", "type_ignores", "type_params")
# Folders of packages that others have written.
PACKAGES = {"site-packages", "dist-packages"}


class Definition(NamedTuple):
    """A top-level name of a module, a name inside a class ("Rows.sees"), or the whole module.

    With a key it is only the value under this key, in the dict of this name.
    """

    module: str
    name: str | None = None
    key: str | None = None


def differs(before: str | None, now: str) -> bool:
    """Whether two hashes are of other source, as far as they can be compared."""
    return before is not None and before.split()[0] == now.split()[0] and before != now


@functools.cache
def source_hash(roots: tuple[Definition | str, ...], closed: tuple[str, ...] = ()) -> str:
    """A hash of `roots`, definitions or plain strings, and of all definitions that they reach.

    Modules and packages in `closed` are not followed from other modules. From installed packages
    only the names of imports count. Raises LookupError if a name is not defined.
    """
    texts: dict[Definition | str, str] = {}
    remaining = list(roots)
    while remaining:
        root = remaining.pop()
        if root in texts:
            continue
        if isinstance(root, str):
            texts[root] = root
            continue
        nodes = nodes_of(root)
        if tree_of(root.module) is None:
            texts[root] = f"{root.module} {root.name}"
        elif nodes or root not in roots or root.key is not None:
            texts[root] = " ".join(ast.dump(node) for node in nodes if not is_import(node))
        else:
            raise LookupError(f"{root.module} does not define {root.name}")
        for definition in reached_by(root, nodes):
            package = definition.module.partition(".")[0]
            is_closed = definition.module in closed or package in closed
            if definition.module == root.module or not is_closed:
                remaining.append(definition)
    lines = sorted(set(texts.values()))
    digest = hashlib.sha256("\n".join(lines).encode())
    return f"{KIND} {digest.hexdigest()[:16]}"


# ---- what defines an object ----


def definition_of(function: Any) -> Definition:
    """Where a function or a class is defined; for a lambda at the top of a module all of it."""
    if isinstance(function, functools.partial):
        return definition_of(function.func)
    name = getattr(function, "__qualname__", "").partition(".")[0]
    return Definition(function.__module__, name if name.isidentifier() else None)


def contents(value: Any) -> Iterator[Definition | str]:
    """The user's modules that define the functions inside an object, and its plain values.

    Inside dataclasses, tuples and partial functions too.
    """
    if isinstance(value, functools.partial):
        yield from contents(value.func)
        yield from contents((*value.args, *value.keywords.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from contents(type(value))
        for field in dataclasses.fields(value):
            yield from contents(getattr(value, field.name))
    elif isinstance(value, tuple):
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
    """The syntax tree of a module, without docstrings and annotations, which compute nothing.

    None for the standard library, for an installed package, and without a source file, as in an
    interactive session.
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None
    file = file_of(module)
    if file is None or PACKAGES & set(file.parts):
        return None
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        fields = vars(node)
        if isinstance(fields.get("body"), list):
            fields["body"] = [child for child in fields["body"] if not is_docstring(child)]
        for name in list(fields):
            if name in SILENT or fields[name] is None or fields[name] == []:
                del fields[name]
    return tree


def file_of(module: str) -> Path | None:
    """The source of a module, which is not imported for that."""
    if module in sys.modules:
        path = Path(getattr(sys.modules[module], "__file__", None) or "")
        return path if path.suffix == ".py" and path.is_file() else None
    for folder in sys.path:
        path = Path(folder, *module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def is_block(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


# ---- definitions ----


def nodes_of(definition: Definition) -> list[Any]:
    """The syntax trees of a definition; none where its module has no such name."""
    module, name, key = definition
    if name is None:
        return getattr(tree_of(module), "body", [])
    name, _, inner_name = name.partition(".")
    by_name = statements_by_name(module)
    statements = by_name.get(name) or by_name.get("*", [])
    if key is not None:
        nodes: list[ast.AST] = []
        for statement in statements:
            nodes += under_key(statement, key)
        return nodes
    if inner_name:
        (block,) = statements
        return [node for node in block.body if getattr(node, "name", None) == inner_name]
    return statements


@functools.cache
def statements_by_name(module: str) -> dict[str, list[Any]]:
    """The statements at the top of a module that decide what each name stands for."""
    statements = defaultdict(list)
    for statement in getattr(tree_of(module), "body", []):
        for name in names_set_by(statement):
            statements[name].append(statement)
    return statements


def names_set_by(statement: ast.stmt) -> set[str]:
    """The names that a statement may set or change: all names in a loop, a call or X += y."""
    if is_block(statement):
        return {statement.name}  # type: ignore[attr-defined]
    places: list[ast.AST] = [statement]
    if isinstance(statement, ast.Assign):
        places = [*statement.targets]
    elif isinstance(statement, ast.AnnAssign):
        places = [statement.target]
    names = set()
    for place in places:
        for node in ast.walk(place):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add(name_bound_by(node))
            elif is_block(node):
                names.add(node.name)  # type: ignore[attr-defined]
    return names


def name_bound_by(alias: ast.alias) -> str:
    """The name that an import binds: x for `import x.y`, z for `import x.y as z`."""
    return getattr(alias, "asname", None) or alias.name.partition(".")[0]


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


def reached_by(definition: Definition, nodes: list[Any]) -> Iterator[Definition]:
    """The definitions that the syntax trees of a definition name or import."""
    module = definition.module
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                yield Definition(module, inner.id)
            elif is_import(inner):
                # of an import at the top only the name that is reached
                name = definition.name if inner is node else None
                yield from imported_by(inner, module, name)


def package_of(module: str) -> str:
    """The package that a module's relative imports start from."""
    file = file_of(module)
    if module == "__main__" or file is None:
        return getattr(sys.modules.get(module), "__package__", None) or ""
    return module if file.stem == "__init__" else module.rpartition(".")[0]


def imported_by(statement: Any, module: str, name: str | None) -> Iterator[Definition]:
    """What an import in a module stands for, under this name or under all names."""
    relative = "." * getattr(statement, "level", 0) + getattr(statement, "module", "")
    source = importlib.util.resolve_name(relative, package_of(module)) if relative else ""
    for alias in statement.names:
        if name is not None and name_bound_by(alias) not in (name, "*"):
            continue
        submodule = f"{source}.{alias.name}"
        if isinstance(statement, ast.Import):
            yield Definition(alias.name)
        elif alias.name == "*":
            yield Definition(source, name)
        elif alias.name not in statements_by_name(source) and tree_of(submodule) is not None:
            yield Definition(submodule)
        else:
            yield Definition(source, alias.name)
