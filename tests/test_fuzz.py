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
from config import SETTINGS, Config, load_config
from data import text
from data.shards import write_shard
from data.tokenizer import get_tokenizer
from errors import UserError
from layers.build import build_model
from runtime import checkpoint
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
    st.integers(-(10**20), 10**20), st.sampled_from([0, 1, 2, 3, 7, 64, 1024, 524288, 10**15])
)
values = st.one_of(
    texts, numbers.map(str), st.floats().map(repr),
    st.sampled_from(["None", "True", "[]", "{}", "()", "1e999", "-1", "0x10", "1_000", "'a'", ""]),
)  # fmt: skip
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
        assert str(error) and len(str(error)) < 2000
        return
    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    assert all(math.isfinite(x) for x in config.as_dict().values() if isinstance(x, float))


@fuzz(300)
@given(st.lists(st.tuples(keys, values), max_size=4))
def test_command_lines(pairs):
    valid_or_refused(lambda: load_config([f"--{key}={value}" for key, value in pairs]))


# ---- runs ----

settings_of_a_run = {
    "learning_rate": st.floats(0, 1e300), "adam_eps": st.floats(0, 1), "s_init": st.floats(),
    "beta1": st.floats(0, 1), "beta2": st.floats(0, 1), "grad_clip": st.floats(0, 1e300),
    "weight_decay": st.floats(0, 1e300), "rope_theta": st.floats(1, 1e308), "seed": numbers,
    "gamma": st.floats(), "eval_interval": numbers, "val_tokens": numbers, "timeout": st.floats(),
    "warmup_iters": numbers, "keep_last": numbers, "checkpoint_interval": numbers, "norm": texts,
    "min_lr": st.floats(), "batch_size": numbers, "total_batch_size": numbers, "out_dir": texts,
    "optimizer": st.sampled_from(["adamw", "muon"]), "device": texts, "data_dir": texts,
    "init_from": texts, "n_embd": st.sampled_from([0, 2, 6, 12, 10**9, 10**15]),
    "attention": st.sampled_from(["ssmax", "relu_shen", "lssar", "sigmoid"]),
}  # fmt: skip


@fuzz(40)
@given(st.data())
def test_runs_of_any_settings(train, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    name = f"run{data.draw(st.integers(0, 10**9))}"
    keys = data.draw(st.lists(st.sampled_from(sorted(settings_of_a_run)), max_size=3, unique=True))
    more = [f"--{key}={data.draw(settings_of_a_run[key])}" for key in keys]
    try:
        train(name, "--max_iters=1", *more)
    except SystemExit as stop:
        assert stop.code in (1, 2)  # diverged, or refused
    shutil.rmtree(tmp_path / name, ignore_errors=True)


def mutated(draw, data):
    """These bytes with some of them changed, cut off or added."""
    data = bytearray(data)
    for at, value in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)))):
        data[at] = value
    data = data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    return bytes(data + draw(st.binary(max_size=5)))


@fuzz(40)
@given(st.data())
def test_checkpoints_of_other_content(trained, tmp_path, data):
    """A checkpoint with other fields, and no checksum beside it, is loaded or refused."""
    file = tmp_path / "alone.pt"
    content = torch.load(trained / "step_000006.pt", weights_only=True)
    tensors = torch.tensor(1.0), torch.zeros(3), torch.zeros(0, 2, dtype=torch.int8)
    others = st.one_of(json_values, st.sampled_from(tensors))
    torch.save(altered(data.draw, content, others), file)
    valid_use(lambda: checkpoint.load_weights(build_model(checkpoint.read_config(file)), file))


# ---- every file that is read from a folder ----


def altered(draw, value, others):
    """A value with a part of it, at any depth, removed, under another key or replaced."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        copy = value.copy()
        keys = sorted(value, key=str) if isinstance(value, dict) else range(len(value))
        key, how = draw(st.sampled_from(keys)), draw(st.integers(0, 5))
        if how > 1:
            copy[key] = altered(draw, value[key], others)
        elif how and isinstance(value, dict):
            copy[draw(st.one_of(st.just(HOSTILE), st.text(string.printable)))] = copy.pop(key)
        else:
            del copy[key]
        return copy
    return draw(others)


@st.composite
def contents(draw, good):
    """What may be in a file in place of its good JSON, or of the first of its lines of JSON."""
    if draw(st.integers(0, 5)) == 0:
        return mutated(draw, good)
    first, *lines = good.split(b"\n")
    try:
        value, lines = json.loads(good), []
    except ValueError:
        value = json.loads(first)
    others = st.one_of(json_values, st.just(HOSTILE))
    value = altered(draw, value, others) if draw(st.integers(0, 5)) else draw(others)
    return b"\n".join([json.dumps(value).encode(), *lines])


# A file beside the folder, as a name within it might lead there.
HOSTILE = "../outside/text_train_000001.bin"


def resumed(folder):
    run_command(training, folder, "--resume", f"--out_dir={folder}", "--max_iters=4")


def sampled(folder):
    get_tokenizer.cache_clear()  # the file has changed
    run_command(sample, folder, "--prompt=the cat", "--max_new_tokens=2", "--device=cpu")


def shards_made(folder):
    texts = folder.parent / "texts"
    run_command(text, texts, f"--out_dir={folder}", "--shard_size=40", "--workers=1")


def trained_on(folder):
    out = folder.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    run_command(
        training, *SMALL, "--max_iters=1", "--val_tokens=16", f"--data_dir={folder}",
        f"--out_dir={out}"
    )  # fmt: skip


def run_command(module, *arguments):
    """A command's main, in this process: it works, or refuses in one sentence."""
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
def used(request, tmp_path, trained, shards, words_file, no_fsync):
    """A folder's good file, and how to use the folder with another file in its place.

    Using it asserts that nothing beside the folder changes.
    """
    name = request.param
    folder, good, outside = tmp_path / "folder", tmp_path / "good", tmp_path / "outside"
    outside.mkdir()
    write_shard(outside / "text_train_000001.bin", np.arange(40, dtype=np.uint16))
    if name == "meta.json":
        (tmp_path / "texts").mkdir()
        for k in range(2):
            (tmp_path / "texts" / f"{k}.txt").write_text("some text " * 12)
        shards_made(good)
    else:
        settings = [*SMALL, *SMALLER, "--max_iters=2", f"--data_dir={shards}"]
        run_command(training, *settings, f"--out_dir={good}")
    if name == "tokenizer.json":
        shutil.rmtree(good)
        saved_run(good, build_model(load_config([*SMALL, f"--tokenizer={words_file}"])))

    def beside():
        found = {path for path in tmp_path.rglob("*") if folder not in (path, *path.parents)}
        found -= {path for path in found if tmp_path / "out" in (path, *path.parents)}
        return {path: path.read_bytes() for path in found if path.is_file()} | {"all": found}

    def use(put):
        worked = []
        for call in USES[name]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            (folder / name).unlink()
            put(folder / name)
            before = beside()
            worked.append(valid_use(lambda call=call: call(folder)))
            assert beside() == before
        return any(worked)

    # not all commands have to work: a run's folder is not made anew
    assert use(lambda path: shutil.copy(good / name, path))
    return good / name, use


def valid_use(use):
    """Whether the call works; it may refuse, in one sentence, or need too much memory."""
    try:
        use()
    except UserError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 3000
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
    outside = tmp_path / "outside"
    text = good.read_text()
    names = sorted(set(re.findall(r'"[^"]*"', text)))[:12]
    for name in names:
        use(lambda file, name=name: file.write_text(text.replace(name, f'"{HOSTILE}"')))
    shutil.copy(good, outside / "file")
    for target in (outside / "file", outside / "none", outside):
        use(lambda file, target=target: file.symlink_to(target))
    use(os.mkfifo)
    use(os.mkdir)
