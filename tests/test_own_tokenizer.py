"""A user's tokenizer.json, from text to shards, a run, its evaluation and its export."""

import json
import re
import shutil

import numpy as np
import pytest

from data import text
from data.shards import write_shard
from data.tokenizer import get_tokenizer
from data.vocabulary import identify
from errors import UserError
from runtime import run_folder
from scripts import attention_maps, eval_length, export_hf, passkey, sample
from scripts.common.runs import load_run
from tests.corpora import make_documents
from tests.runs import ROOT, metrics


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The tokenizer's file, of 300 ids, the folder of shards, and another file of as many ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("own")
    (folder / "input.txt").write_text("\n\n".join(make_documents(60)))
    for name, mark in (("own.json", "</s>"), ("other.json", "<|endoftext|>")):
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[mark],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train([str(folder / "input.txt")], trainer)
        bpe.save(str(folder / name))
    arguments = [str(folder / "input.txt"), "--tokenizer", str(folder / "own.json")]
    text.main([*arguments, f"--out_dir={folder / 'shards'}", "--workers=1"])
    return folder / "own.json", folder / "shards", folder / "other.json"


def test_end_of_text_in_a_text_is_text_even_if_its_token_is_not_special(made, tmp_path):
    file, *_ = made
    content = json.loads(file.read_text())
    (added,) = content["added_tokens"]
    added["special"] = False
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(content))
    tokenizer = get_tokenizer(str(path))
    text_with_mark = f"a{tokenizer.eot_text}b"
    ids = tokenizer.encode(text_with_mark)
    assert tokenizer.eot not in ids
    assert ids == get_tokenizer(str(file)).encode(text_with_mark)


def test_a_tokenizer_json_goes_with_runs_and_exports(made, train, call, tmp_path, capsys, refused):
    file, shards, other = made
    content = file.read_bytes()
    tokenizer = get_tokenizer(str(file))
    identity = identify(str(file))
    assert (shards / "tokenizer.json").read_bytes() == content
    meta = json.loads((shards / "meta.json").read_text())
    assert meta["tokenizer"] == identity
    assert tokenizer.n_vocab == 300

    data = f"--data_dir={shards}"
    hint = f"but tokenizer = 'bytes'; to train on it: --tokenizer={shards / 'tokenizer.json'}"
    refused(train, "run", data, says=(identity, hint))
    says = f"is a folder: give '{shards / 'tokenizer.json'}'"
    refused(train, "run", data, f"--tokenizer={shards}", says=says)
    refused(train, "run", data, f"--tokenizer={other}", says="other.json' (sha256:")
    folder = train("run", data, f"--tokenizer={file}")
    assert (folder / "tokenizer.json").read_bytes() == content
    more = (data, "--resume", "--max_iters=9")
    say = f"was made with tokenizer {identity!r}, but tokenizer = '{other}'"
    refused(train, "run", *more, f"--tokenizer={other}", says=say)
    train("run", *more, f"--tokenizer={shards / 'tokenizer.json'}")  # another copy
    assert sorted(metrics(folder)) == list(range(1, 10))

    moved = folder.rename(tmp_path / "moved")
    config = run_folder.read_config(moved)
    assert config.tokenizer == str(moved / "tokenizer.json")
    assert config.n_vocab == 300
    capsys.readouterr()
    call(sample, moved, "--prompt=the cat", "--max_new_tokens=5")
    assert capsys.readouterr().out.startswith("the cat")
    call(eval_length, moved, "--lengths=16,32", "--rope=none")
    pytest.importorskip("safetensors")
    call(export_hf, moved, tmp_path / "export")
    exported_tokenizer = get_tokenizer(str(tmp_path / "export/tokenizer.json"))
    assert exported_tokenizer.encode("the cat") == tokenizer.encode("the cat")
    exported = json.loads((tmp_path / "export/config.json").read_text())
    assert exported["settings"]["tokenizer"] == identity
    assert exported["vocab_size"] == 300
    assert exported["eos_token_id"] == tokenizer.eot
    special = json.loads((tmp_path / "export/tokenizer_config.json").read_text())
    assert special["eos_token"] == "</s>"


def test_fewer_ids_than_the_tokenizers_are_refused(train, refused, tmp_path):
    """Also by a dry run before the data are made."""
    says = "vocab_size = 200 is less than the 257 ids of tokenizer = 'bytes'; ids of your own need"
    refused(train, "run", "--vocab_size=200", says=says)
    refused(train, "run", "--vocab_size=200", f"--data_dir={tmp_path}/no", "--dry_run", says=says)


def test_ids_beyond_the_tokenizers_are_used_after_training(train, call, tmp_path, capsys):
    """The model names them as often as others; as text they are nothing."""
    (tmp_path / "shards").mkdir()
    ids = np.random.default_rng(0).integers(257, 1500, 400)
    for split in ("train", "val"):
        write_shard(tmp_path / f"shards/own_{split}_000000.bin", ids)
    run = train("run", f"--data_dir={tmp_path / 'shards'}", "--vocab_size=1500", "--max_iters=2")
    capsys.readouterr()
    call(sample, run, "--prompt=the cat", "--max_new_tokens=50")
    assert capsys.readouterr().out.startswith("the cat")
    call(passkey, run, "--trials=1", "--lengths=300")
    call(attention_maps, run, "--text=the cat", "--tokens=64", "--lengths=16")


def test_ids_of_ones_own(tmp_path, monkeypatch, train, call, capsys, refused):
    """As docs/data.md describes them."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    file = tmp_path / "ids.json"
    ids = " ".join(map(str, np.random.default_rng(0).integers(0, 1499, 400)))
    (tmp_path / "x.txt").write_text(ids)
    out = tmp_path / "shards"
    text.main([str(tmp_path / "x.txt"), f"--tokenizer={file}", f"--out_dir={out}"])
    run = train("run", f"--data_dir={out}", f"--tokenizer={file}", "--max_iters=2")
    capsys.readouterr()
    call(sample, run, "--prompt=12 5 900", "--max_new_tokens=5")
    generated = capsys.readouterr().out.splitlines()[0].split()
    assert generated[:3] == ["12", "5", "900"]
    assert len(generated) == 8
    says = "tokenizer.json: cannot encode '\\nQuestion"
    refused(call, passkey, run, "--trials=1", "--lengths=300", says=says)


def test_a_run_with_another_tokenizer_file_is_refused(made, train, call, tmp_path, refused):
    file, shards, other = made
    folder = train("run", f"--data_dir={shards}", f"--tokenizer={file}", "--max_iters=1")
    altered = shutil.copytree(folder, tmp_path / "altered")
    shutil.copy(other, altered / "tokenizer.json")
    with pytest.raises(UserError, match="tokenizer is sha256:.* there, sha256:.* here"):
        load_run(altered)
    (altered / "tokenizer.json").unlink()
    call(sample, altered, "--max_new_tokens=2")  # the file that config.json names is still there
    alone = tmp_path / "alone/mine.pt"
    alone.parent.mkdir()
    shutil.copy(folder / "step_000001.pt", alone)
    says = f"{alone} needs the tokenizer.json of its run in the same folder: {alone.parent} has no"
    refused(call, sample, alone, says=says)
