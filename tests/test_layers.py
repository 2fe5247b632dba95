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
    ("scripts.sweep",),
)
LAYER = {entry: layer for layer, entries in enumerate(LAYERS) for entry in entries}
# An exported model carries these files and no others.
EXPORTED = {
    "errors", "attention_paths.phi", "attention_paths.tiles", "attention_paths.forward",
    "attention_paths.backward", "attention_paths.decode", "attention_paths.launch",
    "attention_paths.fused", "attention_paths.reference", "attention_paths.blocked",
    "attention_paths.sdpa", "attention_paths.factored", "attention_paths.check",
    "attention_paths.module", "attention", "config", "layers.cache", "layers.heads",
    "layers.losses", "layers.pairs", "layers.projections", "layers.rope", "model",
    "scripts.common.hf_modeling",
}  # fmt: skip


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
            if module in EXPORTED and target not in EXPORTED:
                sentences.append(f"{module} is exported and imports {target}, which is not")
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        sentences.append("circle of imports: " + " <- ".join(error.args[1]))
    return sentences


def test_every_module_has_a_layer():
    assert [module for module in sources() if entry(module) not in LAYER] == []
    for package in (
        "attention_paths",
        "data",
        "runtime",
        "scripts",
        "scripts/common",
        "scripts/reproduce",
        "tasks",
    ):
        assert (ROOT / package / "__init__.py").read_text() == ""


def test_imports_run_downwards_and_in_no_circle():
    assert violations(sources()) == []


@pytest.mark.parametrize(
    "texts, sentences",
    [
        ({"model": "from config import Config", "config": "import errors", "errors": ""}, []),
        ({"scripts.a": "from scripts.b import f", "scripts.b": "from . import c",
          "scripts.c": ""}, []),
        ({"data.loader": "from model import GPT", "model": ""},
         ["data.loader imports model, which is not below it"]),
        ({"data.loader": "import attention_paths.phi as k", "attention_paths.phi": ""},
         ["data.loader imports attention_paths.phi, which is not below it"]),
        ({"runtime.files": "def f():\n    from runtime import log", "runtime.log": ""},
         ["runtime.files imports runtime.log, which is not below it"]),
        ({"runtime.device": "from .distributed import job", "runtime.distributed": ""},
         ["runtime.device imports runtime.distributed, which is not below it"]),
        ({"scripts.common.runs": "if True:\n    import scripts.needle", "scripts.needle": ""},
         ["scripts.common.runs imports scripts.needle, which is not below it"]),
        ({"scripts.needle": "from ..train import main", "train": ""}, []),
        ({"train": "from scripts.reproduce.tables import at", "scripts.reproduce.tables": ""},
         ["train imports scripts.reproduce.tables, which is not below it"]),
        ({"model": "from runtime.device import autocast", "runtime.device": ""},
         ["model is exported and imports runtime.device, which is not"]),
        ({"scripts.a": "import scripts.b", "scripts.b": "def f():\n    from scripts import a"},
         ["circle of imports: scripts.a <- scripts.b <- scripts.a"]),
    ],
)  # fmt: skip
def test_a_wrong_import_is_caught(texts, sentences):
    assert violations(texts) == sentences
