"""Commands as a user starts them."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import SMALL
from tests.runs import ROOT

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
SLOW = (
    "torch._dynamo",
    "transformers",
    "lm_eval",
    "datasets",
    "pandas",
    "scipy",
    "sympy",
    "wandb",
)
COMMANDS = f"""
import runpy, sys
trained, shards, *small = sys.argv[1:]
def run(module, *arguments):
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

run("scripts.sample", trained, "--max_new_tokens=2", "--device=cpu")
print("slow:", [name for name in {SLOW} if name in sys.modules])
start = ["--init_from=hf:gpt2", "--data_dir=" + shards, "--out_dir=run", "--max_iters=0"]
run("train", *small, *start)
run("scripts.export_hf", "run", "exported")
import transformers
transformers.AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
assert transformers.utils.is_kernels_available()
print("kernels:", sys.modules["kernels"].__file__)
"""


def test_commands_run_from_any_folder(trained, shards, tmp_path):
    """They import nothing slow that they do not need, and hide no module of other packages: a
    module of ours named kernels would end transformers."""
    transformers = pytest.importorskip("transformers")
    gpt2_config = transformers.GPT2Config(
        vocab_size=257,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
    )
    elsewhere = tmp_path / "elsewhere"
    transformers.GPT2LMHeadModel(gpt2_config).save_pretrained(elsewhere / "gpt2")
    stub = tmp_path / "kernels/__init__.py"
    stub.parent.mkdir()
    stub.write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(trained), str(shards), *SMALL],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "-" * 80 in done.stdout
    assert "\nslow: []\n" in done.stdout
    assert done.stdout.endswith(f"kernels: {stub}\n")
    settings = json.loads((elsewhere / "run/config.json").read_text())
    assert settings["init_from"] == "hf:gpt2"


# What a Python on Windows lacks, and how it calls itself.
ON_WINDOWS = """
import runpy, sys
import filelock, matplotlib.figure, msgspec, numpy, torch, tqdm
for name in ("fcntl", "resource"):
    sys.modules[name] = None
sys.platform = "win32"
sys.path.insert(0, ".")
for command in ("train.py", "scripts/curves.py"):
    sys.argv = [command]
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as stop:
        print(command, stop.code)
"""


def test_on_windows_a_command_says_what_it_needs():
    done = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "train.py 2\nscripts/curves.py 2\n", done.stderr
    words = "error: this runs on Linux and macOS; on Windows use WSL"
    first, second = done.stderr.splitlines()
    assert first.startswith(words)
    assert second.startswith(words)
