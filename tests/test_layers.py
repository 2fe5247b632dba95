"""What each module of the repository may import: from modules below it, never in a circle."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests.runs import ROOT

# From the bottom up. An entry is a module, or a package, which stands for the modules directly in
# it. A module may import what is in earlier lines, and the other modules of its package.
LAYERS = (
    ("errors",),
    ("runtime.files",),
    ("data.vocabulary",),
    ("runtime.nanogpt",),
    ("runtime.hf_config",),
    ("config", "runtime.distributed"),
    ("runtime.config_files",),
    ("runtime.device", "runtime.log", "runtime.run_folder"),
    ("data", "attention"),
    ("attention_paths.kernels",),
    ("attention_paths",),
    ("layers",),
    ("model",),
    ("layers.hybrid", "layers.pairs", "layers.tpa"),
    ("layers.build",),
    ("generation", "optim", "evaluation"),
    ("runtime.checkpoint",),
    ("runtime.metadata",),
    ("runtime.resuming",),
    ("runtime.describe", "runtime.memory", "runtime.pretrained"),
    ("train",),
    ("scripts.common",),
    ("scripts",),
    ("scripts.reproduce",),
    ("scripts.compare",),
)
HEIGHT = {}
for height, entries in enumerate(LAYERS):
    for entry in entries:
        HEIGHT[entry] = height


def python_files() -> dict[str, Path]:
    """The repository's modules by name, without tests, configs and __init__.py."""
    files = [*ROOT.glob("*.py")]
    for package in ("attention_paths", "data", "layers", "runtime", "scripts"):
        files += (ROOT / package).rglob("*.py")
    modules = {}
    for file in files:
        if file.name != "__init__.py":
            path = file.relative_to(ROOT).with_suffix("")
            modules[".".join(path.parts)] = file
    return modules


def imports_of(file: Path) -> set[str]:
    """What a file imports, at its top or anywhere else: modules, and names inside modules."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports from the repository's root"
            names.add(node.module)
            # each name is a module of a package, or something inside a module
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def entry_of(module: str) -> str:
    if module in HEIGHT:
        return module
    package, _, _ = module.rpartition(".")
    return package


def test_imports_run_downwards_and_in_no_circle():
    files = python_files()
    imports = {}
    for module, file in files.items():
        imports[module] = imports_of(file) & files.keys()
    assert [module for module in files if entry_of(module) not in HEIGHT] == []
    for module, imported in imports.items():
        entry = entry_of(module)
        for other in imported:
            if entry_of(other) != entry:
                is_below = HEIGHT[entry_of(other)] < HEIGHT[entry]
                assert is_below, f"{module} imports {other}, not below it"
    TopologicalSorter(imports).prepare()  # raises for a circle


def test_attention_imports_torch_alone():
    modules = {name.partition(".")[0] for name in imports_of(ROOT / "attention.py")}
    assert modules - sys.stdlib_module_names == {"torch"}


def test_init_files_are_empty():
    for path in ROOT.glob("[!.]*/**/__init__.py"):
        assert path.read_text() == "", path
