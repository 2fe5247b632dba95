"""The tokenizers: known ids, an independent implementation, and the cutting of long texts."""

import base64
import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from config import Config
from data import tokenizer
from data.tokenizer import get_tokenizer, read_ranks, split_text
from data.vocabulary import BUILT_IN, count_ids, identify
from errors import UserError

TEXTS = [
    "hello world",
    "  two  spaces\n\n\n and\ttabs \r\n\r\n   trailing   ",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # it's we'll I'd they've 'tis\n",
    "naïve café — “quotes” … 東京は日本の首都です。Привет, мир! مرحبا 👩‍👩‍👧‍👦 e\u0301",
    "\u00a0\u2003nbsp\u3000wide\x1c\x1d\x85\u200bzero\ufeffbom\x00nul",
    "<|endoftext|> is text",
    "1234567890 ²½Ⅷ ٣",
    "",
    "\n",
    " " * 50 + "x" + "\n" * 50,
]
ALPHABET = " \n\t\r\x1c\x85\u00a0\u3000'sdtlve aZé東1²_.!👍\u0301"


def random_texts(n, length, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(length))) for _ in range(n)]


def test_a_missing_library_is_named(words_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=f"{words_file}: this needs `pip install tokenizers`"):
        tokenizer.open_file(str(words_file))


@pytest.mark.parametrize(
    "name, text, ids",
    [
        ("gpt2", "hello world", [31373, 995]),
        ("gpt2", "Hello, world!\n", [15496, 11, 995, 0, 198]),
        ("gpt2", " the", [262]),
        ("gpt2", "<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("bytes", "é\n", [0xC3, 0xA9, 0x0A]),
    ],
)
def test_known_ids(name, text, ids):
    assert get_tokenizer(name).encode(text) == ids
    assert get_tokenizer(name).decode(ids) == text


@pytest.mark.parametrize("name, n_vocab, eot", [("gpt2", 50257, 50256), ("bytes", 257, 256)])
def test_both_tokenizers(name, n_vocab, eot):
    tok = get_tokenizer(name)
    assert tok.n_vocab == BUILT_IN[name] == n_vocab
    assert tok.eot == eot
    for text in TEXTS:
        ids = tok.encode(text)
        for i in ids:
            assert type(i) is int
            assert 0 <= i < eot
        assert tok.decode(ids) == text
        array = tok.encode_array(text)
        assert array.dtype == np.uint16
        assert array.tolist() == ids
    assert tok.decode([*tok.encode("a"), eot, n_vocab, 60000]) == "a<|endoftext|>"
    # surrogates, as broken JSON escapes give them: a pair is its character, a lone one U+FFFD
    assert tok.decode(tok.encode("a\ud83d\ude00b\ud800c")) == "a😀b\ufffdc"


def test_more_spaces_than_tiktoken_can_encode_are_a_sentence():
    with pytest.raises(UserError, match="tiktoken cannot encode 'ab'.*stack"):
        get_tokenizer("gpt2").encode(" " * 1_100_000 + "ab")


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_split_text_keeps_the_ids(name):
    tok = get_tokenizer(name)
    for text in [*TEXTS, *random_texts(200, 80, seed=1)]:
        for size in (1, 3, 10):
            pieces = list(split_text([text], size))
            assert list(split_text(text, size)) == pieces  # in chunks of one character
            assert "".join(pieces) == text
            ids = [i for piece in pieces for i in tok.encode(piece)]
            assert ids == tok.encode(text), repr(text)
    pieces = list(split_text(["word " * 1000], 100))
    assert len(pieces) == 50
    assert max(map(len, pieces)) < 110
    assert list(split_text(["unbroken" * 50] * 2, 100)) == ["unbroken" * 100]


def test_gpt2_is_tiktokens(monkeypatch):
    """Its ranks have the hash that tiktoken checks its download against."""
    from tiktoken_ext import openai_public

    hashes = []

    def load(_, expected_hash):
        hashes.append(expected_hash)

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", load)
    encoding = openai_public.r50k_base()
    assert encoding["pat_str"] == tokenizer.PATTERN
    assert encoding["special_tokens"] == {"<|endoftext|>": 50256}
    digest = hashlib.sha256()
    for token, rank in read_ranks(tokenizer.MERGES_FILE).items():
        digest.update(base64.b64encode(token) + b" %d\n" % rank)
    assert hashes == [digest.hexdigest()]


# ---- a tokenizer.json ----


def test_a_file_with_gpt2s_vocabulary_is_gpt2(gpt2_file):
    """The tokenizers library, by rules of its own, gives the ids of tiktoken."""
    from_file = get_tokenizer(str(gpt2_file))
    gpt2 = get_tokenizer("gpt2")
    assert from_file.n_vocab == 50257
    assert from_file.eot == 50256
    assert from_file.eot_text == "<|endoftext|>"
    digest = hashlib.sha256(gpt2_file.read_bytes()).hexdigest()
    assert identify(str(gpt2_file)) == f"sha256:{digest}"
    assert identify("gpt2") == "gpt2"
    source = Path(tokenizer.__file__).read_text()
    for text in [*TEXTS, source, *random_texts(300, 60), "a\ud83d\ude00b\ud800c"]:
        ids = gpt2.encode(text)
        assert from_file.encode(text) == ids, repr(text)
        assert from_file.decode(ids) == gpt2.decode(ids), repr(text)
    assert from_file.decode([50256, 64, 50257, 60000, 65]) == "<|endoftext|>ab"


def test_a_file_of_words(words_file):
    """Another model, another end of text, and settings that must not matter: it truncates, and adds
    tokens."""
    tok = get_tokenizer(str(words_file))
    assert tok.n_vocab == 7
    assert tok.eot == 6
    assert tok.eot_text == "</s>"
    assert tok.encode("the cat sat </s>") == [1, 2, 3, 0]
    assert tok.decode([1, 2, 6]) == "the cat </s>"
    assert tok.encode("the " * 9) == [1] * 9
    assert count_ids(str(words_file)) == 7


@pytest.mark.parametrize(
    "change, says, config_says",
    [
        (
            lambda c: c.clear(),
            "bad.json: cannot be read by tokenizers: ",
            "is not a tokenizer.json",
        ),
        (
            lambda c: c.update(model={"vocab": {"a": "1"}}, added_tokens=[]),
            "bad.json: cannot be read by tokenizers: ",
            "is not a tokenizer.json",
        ),
        (
            lambda c: c["model"]["vocab"].update(large=65536),
            "a shard's uint16",
            "65537 token ids",
        ),
        (
            lambda c: c["added_tokens"].clear(),
            "has no end-of-text token; looked for <.endoftext",
            None,
        ),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(words_file, tmp_path, change, says, config_says):
    content = json.loads(words_file.read_text())
    change(content)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        get_tokenizer(str(path))
    if config_says:  # a Config needs no end of text
        with pytest.raises(UserError, match=config_says):
            Config(tokenizer=str(path))
