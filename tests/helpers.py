"""Every attention config of configs/, small models made from them, and runs for the commands."""

import json
import re
from contextlib import closing
from pathlib import Path

import matplotlib.image
import numpy as np
import torch

from config import Config
from data.shards import read_shard, write_shard
from layers.build import build_model
from model import GPT
from runtime.checkpoint import Saver, Training
from runtime.config_files import load_config
from runtime.metadata import write_run_metadata
from scripts.common.runs import Run

CONFIGS = Path(__file__).parent.parent / "configs"
# Each entry of the papers' tables, as a path within configs/. Scales are not attention variants,
# nor is T6, which has the attention of softmax.py and lssar_p15.py.
ROWS = [
    path.relative_to(CONFIGS).as_posix()
    for folder in (CONFIGS, CONFIGS / "ablations")
    for path in sorted(folder.glob("*.py"))
    if not path.name.startswith("t6")
]
# Files whose attention is another file's: they differ in the rest of the model.
SAME_ATTENTION = (
    "softmax_nope.py",
    "swa.py",
    "sssl.py",
    "qk_norm.py",
    "prope.py",
    "gated.py",
    "fox.py",
)
ATTENTIONS = [row for row in ROWS if row not in SAME_ATTENTION and not row.startswith("hybrid")]
# Small models of two heads, and the window of each head.
HEAD_WINDOWS = [
    ("softmax.py", (None, None)),
    ("softmax.py --window=1", (1, 1)),
    ("hybrid.py --local_window=1 --window=6", (6, 1)),
    ("relu_li.py", (None, None)),
]
# A run of a second.
SMALL = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--tokenizer=bytes",
    "--total_batch_size=128",
    "--batch_size=8",
    "--max_iters=6",
    "--warmup_iters=2",
    "--learning_rate=1e-2",
    "--schedule=constant",
    "--min_lr=0",
    "--eval_interval=3",
    "--checkpoint_interval=3",
    "--val_tokens=256",
    "--wandb_mode=disabled",
    "--device=cpu",
]
# Narrower, for references that are loops in Python; batches that go with any block size.
SMALLER = ["--n_embd=16", "--batch_size=1", "--total_batch_size=16"]


def write_scale(path: Path, *settings: str) -> Path:
    """A scale file: the settings of a command line that are not the defaults."""
    values = load_config([*settings, "--out_dir="]).as_dict()
    with open(path, "w") as file:
        for key, value in values.items():
            if value != getattr(Config, key):
                file.write(f"{key} = {value!r}\n")
    return path


def small_config(case: str, *more: str) -> Config:
    """A small model of a config file, with settings behind it if any ('relu_li.py --p=3')."""
    name, *settings = case.split()
    size = [*SMALL, *SMALLER]
    if "quarter" in name:
        size.append("--n_head=4")  # of which a quarter is one
    return load_config([str(CONFIGS / name), *size, *settings, *more])


def small_model(case: str, *more: str) -> GPT:
    """A float64 model whose weights are large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = build_model(small_config(case, *more)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and parameter.any():
                parameter.mul_(10)
            elif parameter.dim() >= 2:
                parameter.normal_(std=0.2)  # the output projections of 'tpa'
            elif name.endswith((".s", ".b", ".p_n")):
                parameter.add_(torch.rand_like(parameter))
    return model


def set_meta(tokenizer: str, **more) -> dict:
    """The meta.json of a folder of shards, as the data commands leave it."""
    content = {
        "tokenizer": tokenizer,
        "shard_size": 1000,
        "documents": "f",
        "source": "tests",
        "complete": True,
        "shards": [],
    }
    return content | more


def saved_run(folder: Path, model: GPT) -> Path:
    """A run's folder as train.py leaves it, for an untrained model."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(model, torch.float32, [], torch.amp.GradScaler("cpu"), step=7)
    config = model.config.replace(out_dir=str(folder))
    write_run_metadata(config, {}, training)
    with closing(Saver(config, None)) as saver:
        saver.save("step", training.state(config))
        saver.wait()
    return folder


def write_task(folder, name, docs, **settings):
    """A local task of lm-evaluation-harness in a folder: JSON is YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": name,
        "test_split": "test",
        "metadata": {"version": 1},
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | settings))


def reverse_shard(path: Path) -> None:
    """Write a shard's tokens in the opposite order: other data in a file of the same size."""
    write_shard(path, read_shard(path)[::-1])


def reverse_shards(folder: Path, split: str = "train") -> None:
    """Reverse the tokens of each shard of a split."""
    for path in folder.glob(f"*_{split}_*.bin"):
        reverse_shard(path)


class Malicious:
    """Its unpickling would run code."""

    def __reduce__(self):
        return print, ("run",)


class Reader:
    """Stands for generate: finds a pattern in each prompt and answers with it, after `change`."""

    def __init__(self, tokenizer, pattern, change=str):
        self.tokenizer = tokenizer
        self.pattern = pattern
        self.change = change
        self.lengths = set()
        self.never = set()

    def __call__(self, model, idx, max_new_tokens, *, temperature, never):
        assert temperature == 0
        self.lengths.add(idx.shape[1])
        self.never.add(never)
        answers = []
        for row in idx.tolist():
            (match,) = re.findall(self.pattern, self.tokenizer.decode(row))
            answer = self.tokenizer.encode(f" {self.change(match)}. And the")
            answer += [self.tokenizer.eot] * 20
            answers.append(answer[:max_new_tokens])
        return torch.cat((idx, torch.tensor(answers)), dim=1)


def stub_run(path, tokenizer: str, model=None) -> Run:
    config = small_config("softmax.py", f"--tokenizer={tokenizer}")
    facts = {"variant": "softmax", "trained_length": 16, "rope": "none"}
    return Run(path, config, model, torch.device("cpu"), torch.float32, facts)


def measured_losses(run):
    """The measurements of eval_length, each with the lists of its lengths and losses."""
    measurements = json.loads((run / "eval_length.json").read_text())
    for measurement in measurements:
        parts = measurement["parts"].values()
        measurement["lengths"] = [part["length"] for part in parts]
        measurement["loss"] = [part["loss"] for part in parts]
    return measurements


def read_table(folder):
    return json.loads((folder / "table.json").read_text())


def not_blank(path):
    return matplotlib.image.imread(path).std() > 0


def validation_ids(shards):
    """The first two windows of 16 validation tokens, [2, 16]."""
    tokens = read_shard(shards / "text_val_000000.bin", 32)
    return torch.from_numpy(tokens.astype(np.int64)).view(2, 16)


def visible_keys(windows):
    """Which of 16 keys each of 16 queries sees, [heads, 16, 16], for the window of each head."""
    i, j = np.indices((16, 16))
    heads = []
    for window in windows:
        first = i - (window or 16) + 1
        is_visible = (first <= j) & (j <= i)
        heads.append(is_visible)
    return np.stack(heads)
