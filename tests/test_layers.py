"""What each module of the repository may import: arrows run one way, and never in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom up: an entry is a module, or a package, which stands for the modules directly in
# it. A module may import what is in the lines above its own, and the other modules of its package.
LAYERS = (
    ("errors",),
    ("runtime.files",),
    ("runtime.device", "runtime.distributed"),
    ("data", "attention", "config"),
    ("attention_paths", "tasks"),
    ("layers",),
    ("model",),
    ("generation", "optim", "evaluation"),
    ("runtime.checkpoint",),
    ("runtime.divergence", "runtime.log", "runtime.pretrained", "runtime.preview"),
    ("train",),
    ("scripts.common",),
    ("scripts",),
    ("scripts.reproduce",),
    ("scripts.compare",),
)
LAYER = {entry: layer for layer, entries in enumerate(LAYERS) for entry in entries}
# What an exported model may need besides scripts.common.hf_modeling.
EXPORTED = {"errors", "attention", "config", "attention_paths", "layers", "model"}


def sources() -> dict[str, str]:
    """The text of every module by its name; __init__.py, tests and config files are left out."""
    files = [*ROOT.glob("*.py")]
    for package in ("attention_paths", "data", "layers", "runtime", "scripts", "tasks"):
        files += (ROOT / package).rglob("*.py")
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {names[file]: file.read_text() for file in files if file.name != "__init__.py"}


def imports(texts: dict[str, str]) -> dict[str, set[str]]:
    """The modules among these that each of them imports, at its top or anywhere else."""
    found = {}
    for name, text in texts.items():
        targets = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = ".".join(name.split(".")[: -node.level]) if node.level else ""
                origin = ".".join(filter(None, (package, node.module)))
                # a name is either a module of a package or something inside a module
                targets |= {f"{origin}.{alias.name}".lstrip(".") for alias in node.names} | {origin}
        found[name] = targets & texts.keys()
    return found


def entry(module: str) -> str:
    return module if module in LAYER else module.rpartition(".")[0]


def violations(texts: dict[str, str]) -> list[str]:
    """A sentence for each import that must not be there."""
    found, sentences = imports(texts), []
    for module, targets in found.items():
        for target in sorted(targets):
            below = LAYER[entry(target)] < LAYER[entry(module)]
            if not below and entry(target) != entry(module):
                sentences.append(f"{module} imports {target}, which is not below it")
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        sentences.append("circle of imports: " + " <- ".join(error.args[1]))
    return sentences


def test_imports_run_downwards_and_in_no_circle():
    assert [module for module in sources() if entry(module) not in LAYER] == []
    assert violations(sources()) == []
    assert all(path.read_text() == "" for path in ROOT.glob("[!.]*/**/__init__.py"))


def test_an_exported_model_needs_the_model_alone():
    found, needed = imports(sources()), ["scripts.common.hf_modeling"]
    for module in needed:  # it grows
        needed += sorted(found[module] - set(needed))
    assert {entry(module) for module in needed[1:]} == EXPORTED


@pytest.mark.parametrize(
    "texts, sentences",
    [
        ({"model": "from config import Config", "config": "import errors", "errors": ""}, []),
        ({"data.loader": "import attention_paths.phi as k", "attention_paths.phi": ""},
         ["data.loader imports attention_paths.phi, which is not below it"]),
        ({"runtime.device": "from .distributed import job", "runtime.distributed": ""},
         ["runtime.device imports runtime.distributed, which is not below it"]),
        ({"scripts.a": "import scripts.b", "scripts.b": "def f():\n    from scripts import a"},
         ["circle of imports: scripts.a <- scripts.b <- scripts.a"]),
    ],
)  # fmt: skip
def test_a_wrong_import_is_caught(texts, sentences):
    assert violations(texts) == sentences
