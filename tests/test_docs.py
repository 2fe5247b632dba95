"""The documentation: its links, the modules and files that its commands name, the file tree."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.runs import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"python3? -m ([\w.]+)")
BASH = re.compile(r"```bash\n(.*?)```", re.S)
FILE = re.compile(r"\b(?:configs|scripts|tests)/[\w/]+\.(?:py|sh|yaml)\b")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.M):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page):
    text = page.read_text()
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page
        if path:
            target = page.parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
    for module in MODULE.findall(text):
        assert importlib.util.find_spec(module), module
    for block in BASH.findall(text):
        for path in FILE.findall(block):
            file = ROOT / path
            assert file.is_file(), path


def test_file_tree():
    readme = (ROOT / "README.md").read_text()
    _, _, section = readme.partition("\n## Files\n")
    tree = re.search(r"```\n(.*?)```", section, re.S)[1]
    modules = set()
    for line in tree.splitlines():
        path, *_ = line.split()
        assert (ROOT / path).exists(), path
        if path.endswith(".py"):
            modules.add(path)
    assert modules == {path.name for path in ROOT.glob("*.py")}
