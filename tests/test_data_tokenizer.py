"""The tokenizers: known ids, an independent implementation, and the cutting of long texts."""

import base64
import hashlib
import json
import random
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
    assert (tok.n_vocab, tok.eot) == (n_vocab, eot) and BUILT_IN[name] == n_vocab
    for text in TEXTS:
        ids = tok.encode(text)
        assert all(type(i) is int and 0 <= i < eot for i in ids)
        assert tok.decode(ids) == text
        array = tok.encode_array(text)
        assert array.dtype == np.uint16 and array.tolist() == ids
    assert tok.decode([*tok.encode("a"), eot, n_vocab, 60000]) == "a<|endoftext|>"
    # surrogates, as broken JSON escapes give them: a pair is its character, a lone one U+FFFD
    assert tok.decode(tok.encode("a\ud83d\ude00b\ud800c")) == "a😀b\ufffdc"


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_split_text_keeps_the_ids(name):
    tok = get_tokenizer(name)
    for text in [*TEXTS, *random_texts(200, 80, seed=1)]:
        for size in (1, 3, 10):
            pieces = list(split_text(text, size))
            assert "".join(pieces) == text
            assert sum((tok.encode(piece) for piece in pieces), []) == tok.encode(text), repr(text)
    pieces = list(split_text("word " * 1000, 100))
    assert len(pieces) == 50 and max(map(len, pieces)) < 110
    assert list(split_text("unbroken" * 100, 100)) == ["unbroken" * 100]


def test_gpt2_is_tiktokens(monkeypatch):
    """Its ranks have the hash that tiktoken checks its download against."""
    from tiktoken_ext import openai_public

    hashes = []
    monkeypatch.setattr(
        openai_public, "load_tiktoken_bpe", lambda _, expected_hash: hashes.append(expected_hash)
    )
    wanted, ranks = openai_public.r50k_base(), read_ranks(tokenizer.MERGES_FILE)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    assert hashes == [hashlib.sha256(b"".join(lines)).hexdigest()]
    assert wanted["pat_str"] == tokenizer.PATTERN
    assert wanted["special_tokens"] == {"<|endoftext|>": 50256}


# ---- a tokenizer.json ----


def test_a_file_with_gpt2s_vocabulary_is_gpt2(gpt2_file):
    """The tokenizers library, by rules of its own, gives the ids of tiktoken."""
    own, gpt2 = get_tokenizer(str(gpt2_file)), get_tokenizer("gpt2")
    assert (own.n_vocab, own.eot, own.mark) == (50257, 50256, "<|endoftext|>")
    digest = hashlib.sha256(gpt2_file.read_bytes()).hexdigest()
    assert identify(str(gpt2_file)) == f"sha256:{digest}" and identify("gpt2") == "gpt2"
    source = Path(tokenizer.__file__).read_text()
    for text in [*TEXTS, source, *random_texts(300, 60), "a\ud83d\ude00b\ud800c"]:
        ids = gpt2.encode(text)
        assert own.encode(text) == ids and own.decode(ids) == gpt2.decode(ids), repr(text)
    assert own.decode([50256, 64, 50257, 60000, 65]) == "<|endoftext|>ab"


def test_a_file_of_words(words_file):
    """Another model, another end of text, and settings that must not matter: it truncates and adds
    tokens of its own."""
    tok = get_tokenizer(str(words_file))
    assert (tok.n_vocab, tok.eot, tok.mark) == (7, 6, "</s>")
    assert tok.encode("the cat sat </s>") == [1, 2, 3, 0]
    assert tok.decode([1, 2, 6]) == "the cat </s>"
    assert tok.encode("the " * 9) == [1] * 9
    assert count_ids(str(words_file)) == 7


@pytest.mark.parametrize(
    "change, says",
    [
        (dict.clear, ["bad.json: cannot be read by tokenizers: ", "is not a tokenizer.json"]),
        (
            lambda c: c["model"]["vocab"].update(large=65536),
            ["a shard's uint16", "65537 token ids"],
        ),
        (lambda c: c["added_tokens"].clear(), ["none of its tokens is one of <.endoftext"]),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(words_file, tmp_path, change, says):
    content, path = json.loads(words_file.read_text()), tmp_path / "bad.json"
    change(content)
    path.write_text(json.dumps(content))
    makes = get_tokenizer, lambda file: Config(tokenizer=file)
    for make, message in zip(makes, says, strict=False):  # a Config needs no end of text
        with pytest.raises(UserError, match=message):
            make(str(path))
