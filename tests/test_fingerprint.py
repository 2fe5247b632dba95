"""A variant's hash changes with its formulas, and with nothing else."""

import importlib.util
import subprocess
import sys

import pytest

from attention import VARIANTS
from attention_paths.fingerprint import differs, fingerprint
from tests.runs import ROOT

SOURCE = (ROOT / "attention.py").read_text()


def hashes(path, before="", after=""):
    """The hashes of all variants of attention.py with `before` replaced by `after`."""
    assert before in SOURCE
    path.write_text(SOURCE.replace(before, after, 1))
    spec = importlib.util.spec_from_file_location("edited", path)
    sys.modules["edited"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: fingerprint(variant) for name, variant in module.VARIANTS.items()}


def test_no_two_variants_share_a_hash_and_every_process_finds_the_same():
    found = [fingerprint(variant) for variant in VARIANTS.values()]
    assert len(set(found)) == len(found)
    code = """
from attention import VARIANTS
from attention_paths.fingerprint import fingerprint
print([fingerprint(variant) for variant in VARIANTS.values()])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(found)


@pytest.mark.parametrize(
    "before, after, changed",
    [
        ("math.log(rows.d) * rows.n", "2 * rows.n", {"lssa", "lssar", "softmax_cosine"}),
        ("threshold=40)", "threshold=41)", {"lssa", "softplus_logn", "phi_softplus"}),
        ("torch.exp(z - top) -", "torch.exp(z - top) +", {"softpick"}),
        ("x = rows.n * A", "x = A * rows.n", {"lssa_threshold"}),
        ("relu(z / power - tau)^power", "a docstring", set()),
        ("# LSSAR Table 1.", "# a comment", set()),
    ],
)
def test_the_hash_is_of_the_formulas_alone(tmp_path, before, after, changed):
    here, now = (hashes(tmp_path / f"{len(edit)}.py", *edit) for edit in ((), (before, after)))
    different = {name for name in here if differs(here[name], now[name])}
    assert changed <= different and "stick_breaking" not in different
    assert bool(changed) == bool(different)
    assert not differs(None, here["lssa"]) and not differs("2.7 abc", here["lssa"])
