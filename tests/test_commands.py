"""What several commands on finished runs refuse in the same way."""

import json
import shutil
import subprocess
import sys

import pytest

from model import GPT
from runtime import checkpoint
from scripts import attention_maps, eval_length, needle, sample
from tests.helpers import saved_run, small_config
from tests.runs import ROOT, refused


@pytest.mark.parametrize(
    "module, arguments",
    [
        (eval_length, ["--lengths=16,32", "--per_position"]),
        (attention_maps, ["--lengths=16", "--tokens=32", "--distances"]),
    ],
)
def test_a_measurement_of_other_weights_is_not_taken(
    shards, call, tmp_path, pictures, module, arguments
):
    """Another run's results, where the two differ in their weights only."""
    name = f"{module.__name__.removeprefix('scripts.')}.json"
    config = small_config("softmax.py", f"--data_dir={shards}", "--n_layer=1")
    other, run = (saved_run(tmp_path / name, GPT(config)) for name in "ab")
    call(module, other, *arguments)
    copied = json.loads((other / name).read_text())
    shutil.copy(other / name, run)
    call(module, run, *arguments)
    measured = json.loads((run / name).read_text())
    own = checkpoint.find(run).sha256
    assert [one["sha256"] for one in measured[len(copied) :]] == [own] * len(copied)
    assert measured[: len(copied)] == copied  # the other's stay


@pytest.mark.parametrize("module", [eval_length, sample, needle])
def test_a_folder_without_a_run_or_a_checkpoint_is_refused(trained, call, tmp_path, capsys, module):
    for _ in range(2):
        refused(capsys, lambda: call(module, tmp_path), "no checkpoint in it")
        shutil.copy(trained / "config.json", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# Libraries that take seconds to import, and that these commands do not need.
SLOW = ("torch._dynamo", "transformers", "lm_eval", "datasets", "pandas", "scipy", "sympy", "wandb")
AS_A_FILE = f"""
import runpy, sys
sys.path[0] = sys.argv[1].rpartition("/")[0]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print("slow:", [name for name in {SLOW} if name in sys.modules])
"""


def test_a_command_runs_as_a_file_from_any_folder(trained, tmp_path):
    """And starts quickly: it imports nothing that it does not need."""
    arguments = [ROOT / "scripts/sample.py", trained, "--max_new_tokens=2", "--device=cpu"]
    command = [sys.executable, "-c", AS_A_FILE, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "-" * 80 in done.stdout, done.stderr
    assert done.stdout.endswith("slow: []\n")
