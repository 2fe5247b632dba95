"""A hash of the source code that computes a result, to recognise results of other code.

The hash covers the syntax trees of some definitions, and of all definitions that they reach by
name, in this repository and in the user's modules. Comments, docstrings, annotations, formatting
and the order of definitions do not count. The hash is the same in every process and with every
version of Python.
"""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Fields of a syntax tree that compute nothing, or that only some versions of Python have.
SILENT = ("annotation", "returns", "ctx", "kind", "type_comment", "type_ignores", "type_params")
# Folders of packages that others have written.
PACKAGES = {"site-packages", "dist-packages"}


class Definition(NamedTuple):
    """A top-level name of a module, a name inside a class ("Rows.window"), or the whole module.

    With a key it is only the value under this key, in the dict of this name.
    """

    module: str
    name: str | None = None
    key: str | None = None


def definition_of(function: Any) -> Definition:
    """Where a function or a class is defined; for a lambda and for an object its whole module."""
    function = getattr(function, "func", function)  # of a partial function
    module = getattr(function, "__module__", None) or "builtins"
    name = getattr(function, "__qualname__", "<object>").partition(".")[0]
    return Definition(module, None if name[0] == "<" else name)


@functools.cache
def source_hash(roots: tuple[Definition, ...], closed: tuple[str, ...] = ()) -> str:
    """A hash of `roots` and of all definitions that they reach, except in `closed` packages.

    From installed packages only the names of imports count.
    """
    known = set()
    texts = set()
    remaining = list(roots)
    while remaining:
        definition = remaining.pop()
        if definition in known:
            continue
        known.add(definition)
        if tree_of(definition.module) is None:
            texts.add(f"{definition.module} {definition.name}")
        for node in nodes_of(definition):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                texts.add(ast.dump(node))
            for other in reached_by(node, definition):
                if other.module.partition(".")[0] not in closed:
                    remaining.append(other)
    digest = hashlib.sha256("\n".join(sorted(texts)).encode())
    return f"syntax {digest.hexdigest()[:16]}"


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
        for name, value in list(fields.items()):
            if isinstance(value, list):
                value[:] = [child for child in value if not is_docstring(child)]
            if name in SILENT or value is None or value == []:
                del fields[name]
    return tree


def file_of(module: str) -> Path | None:
    """The source of a module, which is not imported for that."""
    if module in sys.modules:
        path = Path(getattr(sys.modules[module], "__file__", None) or "")
        return path if path.suffix == ".py" else None
    for folder in sys.path:
        path = Path(folder, *module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def nodes_of(definition: Definition) -> list[Any]:
    """The syntax trees of a definition; none where its module has no such name."""
    module, name, key = definition
    body = getattr(tree_of(module), "body", [])
    if name is None:
        return body
    name, _, inner_name = name.partition(".")
    statements = [statement for statement in body if {name, "*"} & names_set_by(statement)]
    if key is not None:
        return [node for statement in statements for node in under_key(statement, key)]
    if inner_name:
        body = statements[0].body
        return [statement for statement in body if inner_name in names_set_by(statement)]
    return statements


@functools.cache
def names_set_by(statement: Any) -> set[str]:
    """The names that a statement at the top of a module sets; all names in a loop or X += y."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Expr):  # a call may change anything
        return {"*"}
    places = [statement]
    if isinstance(statement, ast.Assign):
        places = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        places = [statement.target]
    names = set()
    for place in places:
        for node in ast.walk(place):
            names.add(name_bound_by(node))
    return names


def name_bound_by(node: Any) -> str:
    """The name of a variable, a definition or an import: x for `import x.y`."""
    if isinstance(node, ast.Name):
        return node.id
    name = getattr(node, "asname", None) or getattr(node, "name", None) or ""
    return name.partition(".")[0]


def under_key(statement: Any, key: str) -> list[ast.AST]:
    """What a statement that sets or changes a dict may put under a key."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=other))], value=value):
            return [value] if other == key else []
        case ast.AnnAssign(value=ast.Dict(keys=keys, values=values)):
            items = zip(keys, values, strict=True)
            return [value for label, value in items if getattr(label, "value", key) == key]
    return [statement]


def reached_by(node: ast.AST, definition: Definition) -> Iterator[Definition]:
    """The definitions that a syntax tree of a definition names or imports."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield Definition(definition.module, inner.id)
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            for alias in inner.names:
                # of an import at the top only the name that is reached
                at_top = inner is node and definition.name is not None
                if not at_top or name_bound_by(alias) in (definition.name, "*"):
                    yield imported(inner, alias, definition.module)


def imported(statement: Any, alias: ast.alias, module: str) -> Definition:
    """What an import in a module stands for."""
    if isinstance(statement, ast.Import):
        return Definition(alias.name)
    source = "." * statement.level + getattr(statement, "module", "")
    source = importlib.util.resolve_name(source, package_of(module))
    submodule = f"{source}.{alias.name}"
    if tree_of(submodule) is not None:
        return Definition(submodule)
    return Definition(source, None if alias.name == "*" else alias.name)


def package_of(module: str) -> str:
    """The package that a module's relative imports start from."""
    file = file_of(module)
    if module == "__main__" or file is None:
        return getattr(sys.modules.get(module), "__package__", None) or ""
    return module if file.stem == "__init__" else module.rpartition(".")[0]
