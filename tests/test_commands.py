"""What several commands on finished runs refuse in the same way."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from model import GPT
from runtime import checkpoint
from scripts import attention_maps, eval_length, needle, sample
from tests.helpers import SMALL, saved_run, small_config
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


# What transformers imports of Hugging Face's package `kernels`, where that is installed.
KERNELS = """
from unittest.mock import MagicMock

__version__ = "0.17.0"
kernelize = lambda model, **options: model
use_kernel_forward_from_hub = use_kernelized_func = lambda name: lambda layer: layer

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""
WITH_KERNELS = """
import runpy, sys
def run(script, *arguments):
    sys.argv = [script, *arguments]
    sys.path[0] = script.rpartition("/")[0]
    runpy.run_path(script, run_name="__main__")

root, shards, *small = sys.argv[1:]
start = ["--init_from=hf:gpt2", "--data_dir=" + shards, "--out_dir=run", "--max_iters=0"]
run(root + "/train.py", *small, *start)
run(root + "/scripts/sample.py", "run", "--max_new_tokens=2", "--device=cpu")
run(root + "/scripts/export_hf.py", "run", "exported")
import transformers
transformers.AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
assert transformers.utils.is_kernels_available()
print("kernels:", sys.modules["kernels"].__file__)
"""


def test_hugging_faces_package_kernels_may_be_installed(shards, tmp_path):
    """transformers 5 imports it: a module of ours with this name would hide it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=257, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "kernels").mkdir()
    stub = tmp_path / "kernels/__init__.py"
    stub.write_text(KERNELS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", WITH_KERNELS, str(ROOT), str(shards), *SMALL],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"kernels: {stub}\n")


def test_an_installation_has_no_modules():
    """`pip install -e .` would put modules named data or config in the way of other projects."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"] == setuptools["py-modules"] == []
