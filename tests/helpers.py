"""Every attention config of configs/, and small models made from them."""

import json
from pathlib import Path

import torch

from config import Config, load_config
from model import GPT
from runtime.checkpoint import Saver, write_header

CONFIGS = Path(__file__).parent.parent / "configs"
# Each row of the papers' tables, as a path within configs/. The scales are not attention variants.
ROWS = [
    path.relative_to(CONFIGS).as_posix()
    for folder in (CONFIGS, CONFIGS / "ablations")
    for path in sorted(folder.glob("*.py"))
]
# A run of a second.
SMALL = [
    "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--tokenizer=bytes",
    "--total_batch_size=128", "--batch_size=8", "--max_iters=6", "--warmup_iters=2",
    "--learning_rate=1e-2", "--eval_interval=3", "--checkpoint_interval=3", "--val_tokens=256",
    "--wandb_mode=disabled", "--device=cpu", "--schedule=constant",
]  # fmt: skip
# Narrower, for references that are loops in Python; batches that go with any block size.
SMALLER = ["--n_embd=16", "--batch_size=1", "--total_batch_size=16"]


def small_config(case: str, *more: str) -> Config:
    """A small model of a config file, with settings behind it if any ('relu_li.py --p=3')."""
    name, *settings = case.split()
    return load_config([str(CONFIGS / name), *SMALL, *SMALLER, *settings, *more])


def small_model(case: str, *more: str) -> GPT:
    """A float64 model whose weights are large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = GPT(small_config(case, *more)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)
            elif name.endswith((".s", ".b", ".p_n")):
                parameter.add_(torch.rand_like(parameter))
    return model


def saved_run(folder: Path, model: GPT) -> Path:
    """A run's folder as train.py leaves it, for an untrained model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_header(folder, model.config, job=None)
    state = {"model": model.state_dict(), "step": 7, "config": model.config.as_dict()}
    with Saver(folder, keep_last=1, keep_every=0) as saver:
        saver.save("step", state)
    return folder


def write_task(folder, name, docs, **settings):
    """A local task of lm-evaluation-harness in a folder: JSON is YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    settings = {"task": name, "test_split": "test", "metadata": {"version": 1}, **files, **settings}
    (folder / f"{name}.yaml").write_text(json.dumps(settings))
