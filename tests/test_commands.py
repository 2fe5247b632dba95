"""What commands on finished runs have in common, and what an installation is."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest

from model import GPT
from runtime import checkpoint
from scripts import eval_length, needle, sample
from tests.helpers import SMALL, saved_run, small_config
from tests.runs import ROOT, refused


def test_a_measurement_of_other_weights_is_not_taken(shards, call, tmp_path, pictures):
    """Another run's results, where the two differ in their weights only."""
    config = small_config("softmax.py", f"--data_dir={shards}", "--n_layer=1")
    other, run = (saved_run(tmp_path / name, GPT(config)) for name in "ab")
    call(eval_length, other, "--lengths=16,32")
    copied = json.loads((other / "eval_length.json").read_text())
    shutil.copy(other / "eval_length.json", run)
    call(eval_length, run, "--lengths=16,32")
    measured = json.loads((run / "eval_length.json").read_text())
    own = checkpoint.find(run).id["sha256"]
    assert [one["sha256"] for one in measured[len(copied) :]] == [own] * len(copied)
    assert measured[: len(copied)] == copied  # the other's stay


@pytest.mark.parametrize("module", [eval_length, sample, needle])
def test_a_folder_without_a_run_or_a_checkpoint_is_refused(trained, call, tmp_path, capsys, module):
    for _ in range(2):
        refused(capsys, lambda: call(module, tmp_path), "no checkpoint in it")
        shutil.copy(trained / "config.json", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# What transformers 5 imports of Hugging Face's package `kernels`, where it is installed.
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
# Libraries that take seconds to import, and that most commands do not need.
SLOW = ("torch._dynamo", "transformers", "lm_eval", "datasets", "pandas", "scipy", "sympy", "wandb")
COMMANDS = f"""
import runpy, sys
root, trained, shards, *small = sys.argv[1:]
def run(script, *arguments):
    sys.argv = [f"{{root}}/{{script}}", *arguments]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

run("scripts/sample.py", trained, "--max_new_tokens=2", "--device=cpu")
print("slow:", [name for name in {SLOW} if name in sys.modules])
start = ["--init_from=hf:gpt2", "--data_dir=" + shards, "--out_dir=run", "--max_iters=0"]
run("train.py", *small, *start)
run("scripts/export_hf.py", "run", "exported")
import transformers
transformers.AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
assert transformers.utils.is_kernels_available()
print("kernels:", sys.modules["kernels"].__file__)
"""


def test_commands_run_as_files_from_any_folder(trained, shards, tmp_path):
    """They import nothing slow that they do not need, and hide no module of other packages: a
    module of ours named kernels would end transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=257, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    stub = tmp_path / "kernels/__init__.py"
    stub.parent.mkdir()
    stub.write_text(KERNELS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", COMMANDS, *map(str, (ROOT, trained, shards)), *SMALL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "-" * 80 in done.stdout and "\nslow: []\n" in done.stdout
    assert done.stdout.endswith(f"kernels: {stub}\n")
    began = json.loads((tmp_path / "run/began_with.json").read_text())
    assert began["step"] == 0 and len(began["sha256"]) == 64


def test_an_installation_has_no_modules():
    """`pip install -e .` would put modules named data or config in the way of other projects."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"] == setuptools["py-modules"] == []
