"""What each module of the repository may import: arrows run one way, and never in a circle."""

import ast
from graphlib import TopologicalSorter

from tests.runs import ROOT

# From the bottom up: an entry is a module, or a package, which stands for the modules directly in
# it. A module may import what is in the lines above its own, and the other modules of its package.
LAYERS = (
    ("errors",),
    ("data.vocabulary", "runtime.hf_config"),
    ("config", "runtime.files", "runtime.source"),
    ("runtime.device", "runtime.distributed"),
    ("data", "attention"),
    ("attention_paths.kernels",),
    ("attention_paths",),
    ("layers",),
    ("model",),
    ("layers.hybrid", "layers.pairs", "layers.tpa"),
    ("layers.build",),
    ("generation", "optim", "evaluation"),
    ("runtime.checkpoint",),
    ("runtime.log", "runtime.pretrained"),
    ("train",),
    ("scripts.common",),
    ("scripts",),
    ("scripts.reproduce",),
    ("scripts.compare",),
)
LAYER = {entry: layer for layer, entries in enumerate(LAYERS) for entry in entries}


def imports() -> dict[str, set[str]]:
    """The modules that each module imports, at its top or anywhere else, without __init__.py."""
    files = [*ROOT.glob("*.py")]
    for package in ("attention_paths", "data", "layers", "runtime", "scripts"):
        files += (file for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    found = {}
    for name, file in names.items():
        targets = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # a name is either a module of a package or something inside a module
                targets |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        found[name] = targets & names.keys()
    return found


def entry(module: str) -> str:
    return module if module in LAYER else module.rpartition(".")[0]


def test_imports_run_downwards_and_in_no_circle():
    found = imports()
    assert [module for module in found if entry(module) not in LAYER] == []
    for module, targets in found.items():
        for other in {entry(target) for target in targets} - {entry(module)}:
            assert LAYER[other] < LAYER[entry(module)], f"{module} imports {other}, not below it"
    TopologicalSorter(found).prepare()  # raises for a circle
    assert all(path.read_text() == "" for path in ROOT.glob("[!.]*/**/__init__.py"))
