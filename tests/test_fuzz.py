"""Whatever a user gives works, or is refused in one sentence without a traceback; what is refused
changes no file.
"""

import json
import math
import os
import re
import shutil
import string
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train as training
from config import SETTINGS, Config
from data import text
from data.shards import write_shard
from data.tokenizer import get_tokenizer
from errors import UserError
from layers.build import build_model
from runtime import checkpoint, run_folder
from runtime.config_files import load_config
from scripts import sample
from tests.helpers import SMALL, SMALLER, saved_run


def fuzz(examples):
    """Run so many examples, the same ones every time: what fails in CI fails everywhere."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


texts = st.text(st.characters(exclude_categories=[]), max_size=30)
numbers = st.one_of(
    st.integers(-(10**20), 10**20),
    st.sampled_from([0, 1, 2, 3, 7, 64, 1024, 524288, 10**15]),
)
values = st.one_of(
    texts,
    numbers.map(str),
    st.floats().map(repr),
    st.sampled_from(["None", "True", "[]", "{}", "()", "1e999", "-1", "0x10", "1_000", "'a'", ""]),
)
keys = st.one_of(st.sampled_from(sorted(SETTINGS)), texts)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def valid_or_refused(make):
    """Asserts that make() gives a config whose values Config accepts unchanged, or a UserError."""
    try:
        config = make()
    except UserError as error:
        assert 0 < len(str(error)) < 2000
        return
    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    for value in config.as_dict().values():
        if isinstance(value, float):
            assert math.isfinite(value)


@fuzz(300)
@given(st.lists(st.tuples(keys, values), max_size=4))
def test_command_lines(pairs):
    valid_or_refused(lambda: load_config([f"--{key}={value}" for key, value in pairs]))


# ---- runs ----

settings_of_a_run = {
    "adam_eps": st.floats(0, 1),
    "attention": st.sampled_from(["ssmax", "relu_shen", "lssar", "sigmoid"]),
    "batch_size": numbers,
    "beta1": st.floats(0, 1),
    "beta2": st.floats(0, 1),
    "checkpoint_interval": numbers,
    "data_dir": texts,
    "device": texts,
    "eval_interval": numbers,
    "grad_clip": st.floats(0, 1e300),
    "init_from": texts,
    "keep_last": numbers,
    "learning_rate": st.floats(0, 1e300),
    "min_lr": st.floats(),
    "n_embd": st.sampled_from([0, 2, 6, 12, 10**9, 10**15]),
    "norm": texts,
    "optimizer": st.sampled_from(["adamw", "muon"]),
    "out_dir": texts,
    "rope_theta": st.floats(1, 1e308),
    "s_init": st.floats(),
    "seed": numbers,
    "timeout": st.floats(),
    "total_batch_size": numbers,
    "val_tokens": numbers,
    "warmup_iters": numbers,
    "weight_decay": st.floats(0, 1e300),
}


@fuzz(40)
@given(st.data())
def test_runs_of_any_settings(train, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    name = f"run{data.draw(st.integers(0, 10**9))}"
    keys = data.draw(st.lists(st.sampled_from(sorted(settings_of_a_run)), max_size=3, unique=True))
    arguments = [f"--{key}={data.draw(settings_of_a_run[key])}" for key in keys]
    files = set(tmp_path.iterdir())
    try:
        train(name, "--max_iters=1", *arguments)
    except SystemExit as stop:
        assert stop.code in (1, 2)  # diverged, or refused
        if stop.code == 2:
            assert set(tmp_path.iterdir()) == files
    shutil.rmtree(tmp_path / name, ignore_errors=True)


def mutated(draw, content):
    """These bytes with some of them changed, cut off or added."""
    content = bytearray(content)
    positions = st.integers(0, len(content) - 1)
    for position, byte in draw(st.lists(st.tuples(positions, st.integers(0, 255)))):
        content[position] = byte
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    return bytes(content) + draw(st.binary(max_size=5))


@fuzz(40)
@given(st.data())
def test_checkpoints_of_other_content(trained, tmp_path, data):
    """A checkpoint with other fields, and no checksum beside it, is loaded or refused."""
    file = tmp_path / "alone.pt"
    content = torch.load(trained / "step_000006.pt", weights_only=True)
    tensors = [torch.tensor(1.0), torch.zeros(3), torch.zeros(0, 2, dtype=torch.int8)]
    replacements = st.one_of(json_values, st.sampled_from(tensors))
    torch.save(altered(data.draw, content, replacements), file)

    def load():
        model = build_model(run_folder.read_config(file))
        checkpoint.load_weights(model, checkpoint.find(file))

    works_or_refuses(load)


# ---- every file that is read from a folder ----


def altered(draw, value, replacements):
    """A value with an entry of it, at any depth, removed, under another key or replaced."""
    is_container = isinstance(value, dict | list) and len(value) > 0
    if not is_container or draw(st.integers(0, 3)) == 0:
        return draw(replacements)
    copy = value.copy()
    if isinstance(value, dict):
        keys = sorted(value, key=str)
    else:
        keys = range(len(value))
    key = draw(st.sampled_from(keys))
    change = draw(st.integers(0, 5))
    if change > 1:
        copy[key] = altered(draw, value[key], replacements)
    elif change == 1 and isinstance(value, dict):
        new_key = draw(st.one_of(st.just(HOSTILE), st.text(string.printable)))
        copy[new_key] = copy.pop(key)
    else:
        del copy[key]
    return copy


@st.composite
def contents(draw, good):
    """What may be in a file instead of its good JSON, or of the first of its lines of JSON."""
    if draw(st.integers(0, 5)) == 0:
        return mutated(draw, good)
    try:
        value = json.loads(good)
        lines = []
    except ValueError:
        first, *lines = good.split(b"\n")
        value = json.loads(first)
    replacements = st.one_of(json_values, st.just(HOSTILE))
    if draw(st.integers(0, 5)) == 0:
        value = draw(replacements)
    else:
        value = altered(draw, value, replacements)
    return b"\n".join([json.dumps(value).encode(), *lines])


# A file beside the folder, as a name within it might lead there.
HOSTILE = "../outside/text_train_000001.bin"


def resumed(folder):
    run_training(folder, "--resume", f"--out_dir={folder}", "--max_iters=4")


def sampled(folder):
    get_tokenizer.cache_clear()  # the file has changed
    run_command(sample, folder, "--prompt=the cat", "--max_new_tokens=2", "--device=cpu")


def shards_made(folder):
    texts = folder.parent / "texts"
    run_command(text, texts, f"--out_dir={folder}", "--shard_size=40", "--workers=1")


def trained_on(folder):
    out = folder.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    run_training(
        *SMALL,
        "--max_iters=1",
        "--val_tokens=16",
        f"--data_dir={folder}",
        f"--out_dir={out}",
    )


def run_training(*arguments):
    training.main.__wrapped__(load_config(list(map(str, arguments))))


def run_command(module, *arguments):
    """Call a command's main in this process; what it refuses raises UserError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main.__wrapped__()


# What users do with each file: in the folder of a run, and in a folder of shards.
USES = {
    "config.json": (resumed, sampled),
    "tokenizer.json": (sampled,),
    "metrics.jsonl": (resumed,),
    "meta.json": (trained_on, shards_made),
}


@pytest.fixture
def used(request, tmp_path, trained, shards, words_file):
    """A folder's good file, and how to use the folder with another file in its place.

    Using it asserts that nothing beside the folder changes.
    """
    name = request.param
    good = tmp_path / "good"
    folder = tmp_path / "folder"
    outside = tmp_path / "outside"
    outside.mkdir()
    write_shard(outside / "text_train_000001.bin", np.arange(40, dtype=np.uint16))
    make_good_folder(name, good, shards, words_file)

    def files_beside():
        """The content of every file that no command may change; None for a folder."""
        files = {}
        for path in tmp_path.rglob("*"):
            if not path.is_relative_to(folder) and not path.is_relative_to(tmp_path / "out"):
                files[path] = path.read_bytes() if path.is_file() else None
        return files

    def use(put):
        """Whether one of the commands works once `put` has made the file."""
        worked = []
        for call in USES[name]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            (folder / name).unlink()
            put(folder / name)
            before = files_beside()
            worked.append(works_or_refuses(lambda call=call: call(folder)))
            assert files_beside() == before
        return any(worked)

    # not all commands have to work: a run's folder is not made anew
    assert use(lambda path: shutil.copy(good / name, path))
    return good / name, use


def make_good_folder(name, good, shards, words_file):
    """The folder that a file of this name is in: a run's, or a folder of shards."""
    if name == "meta.json":
        texts = good.parent / "texts"
        texts.mkdir()
        for k in range(2):
            (texts / f"{k}.txt").write_text("some text " * 12)
        shards_made(good)
    elif name == "tokenizer.json":
        config = load_config([*SMALL, f"--tokenizer={words_file}"])
        saved_run(good, build_model(config))
    else:
        run_settings = [*SMALL, *SMALLER, "--max_iters=2", f"--data_dir={shards}"]
        run_training(*run_settings, f"--out_dir={good}")


def works_or_refuses(use):
    """Whether the call works; it may refuse, in one sentence, or need too much memory."""
    try:
        use()
    except UserError as error:
        assert 0 < len(str(error)) < 3000
        assert "\n" not in str(error)
        return False
    except RuntimeError as error:  # errors.command makes a sentence of it
        assert "to allocate" in str(error)
        return False
    except SystemExit as stop:  # a run of other settings may diverge
        assert stop.code == 1
    return True


@pytest.mark.parametrize("used", USES, indirect=True)
@fuzz(15)
@given(st.data())
def test_files_of_other_content(used, data):
    good, use = used
    content = data.draw(contents(good.read_bytes()))
    use(lambda path: path.write_bytes(content))


@pytest.mark.parametrize("used", USES, indirect=True)
def test_names_links_and_pipes_lead_nowhere(used, tmp_path):
    """Neither a path in a file nor a link in its place makes a command touch another file."""
    good, use = used
    text = good.read_text()
    names = sorted(set(re.findall(r'"[^"]*"', text)))
    for name in names[:12]:
        hostile_text = text.replace(name, f'"{HOSTILE}"')
        use(lambda file, content=hostile_text: file.write_text(content))
    outside = tmp_path / "outside"
    shutil.copy(good, outside / "file")
    for target in (outside / "file", outside / "none", outside):
        use(lambda file, target=target: file.symlink_to(target))
    use(os.mkfifo)
    use(os.mkdir)
