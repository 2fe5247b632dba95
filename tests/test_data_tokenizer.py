"""The tokenizers: known ids, an independent implementation, and the cutting of long texts."""

import random

import numpy as np
import pytest

from data import tokenizer
from data.tokenizer import get_tokenizer, split_text
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
    "text, ids",
    [
        ("hello world", [31373, 995]),
        ("Hello, world!\n", [15496, 11, 995, 0, 198]),
        (" the", [262]),
        ("!", [0]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_known_gpt2_ids(text, ids):
    gpt2 = get_tokenizer("gpt2")
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


@pytest.fixture(scope="module")
def hugging_face():
    """The tokenizers library's BPE, built from the same merges by rules of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    lines = tokenizer.MERGES_FILE.read_text(encoding="utf-8").split("\n")[1:-1]
    merges = [tuple(line.split(" ")) for line in lines]
    # GPT-2's vocabulary lists the single characters by code point, and then the merges.
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def test_gpt2_equals_an_independent_implementation(hugging_face):
    gpt2 = get_tokenizer("gpt2")
    assert hugging_face.get_vocab_size() == gpt2.eot == 50256
    source = tokenizer.__file__
    for text in [*TEXTS, open(source, encoding="utf-8").read(), *random_texts(300, 60)]:
        assert gpt2.encode(text) == hugging_face.encode(text).ids, repr(text)


@pytest.mark.parametrize("name, n_vocab, eot", [("gpt2", 50257, 50256), ("bytes", 257, 256)])
def test_both_tokenizers(name, n_vocab, eot):
    tok = get_tokenizer(name)
    assert (tok.name, tok.n_vocab, tok.eot) == (name, n_vocab, eot)
    for text in TEXTS:
        ids = tok.encode(text)
        assert all(type(i) is int and 0 <= i < eot for i in ids)
        assert tok.decode(ids) == text
        array = tok.encode_array(text)
        assert array.dtype == np.uint16 and array.tolist() == ids
    assert tok.decode([*tok.encode("a"), eot]) == "a<|endoftext|>"
    assert tok.decode(tok.encode_array("numpy ids")) == "numpy ids"
    # Surrogates, as broken JSON escapes give them: a pair is its character, a lone one U+FFFD.
    assert tok.decode(tok.encode("a\ud83d\ude00b\ud800c")) == "a😀b\ufffdc"


def test_bytes_are_utf8():
    assert get_tokenizer("bytes").encode("é\n") == [0xC3, 0xA9, 0x0A]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_split_text_keeps_the_ids(name):
    tok = get_tokenizer(name)
    for text in [*TEXTS, *random_texts(200, 80, seed=1)]:
        for size in (1, 3, 10):
            pieces = list(split_text(text, size))
            assert "".join(pieces) == text
            assert sum((tok.encode(piece) for piece in pieces), []) == tok.encode(text), repr(text)


def test_split_text_cuts_to_size():
    pieces = list(split_text("word " * 1000, 100))
    assert len(pieces) == 50 and max(map(len, pieces)) < 110
    assert list(split_text("unbroken" * 100, 100)) == ["unbroken" * 100]


def test_whitespace_too_long_for_the_pattern():
    """tiktoken alone refuses this text: its pattern runs out of stack."""
    gpt2 = get_tokenizer("gpt2")
    text = "a" + "\n" * 1_200_000 + "b" + " " * 1_200_000
    with pytest.raises(ValueError, match="stack"):
        gpt2._encode(text)
    assert gpt2.decode(gpt2.encode_array(text)) == text
    # The same rule on a length that the pattern can do.
    short = "a" + "\n" * 5000 + "b c" + " " * 3000 + "\nd" + " " * 2000
    assert gpt2._encode_pieces(short).tolist() == gpt2._encode(short).tolist()


def test_an_altered_merges_file_is_refused(tmp_path, monkeypatch):
    altered = tmp_path / "gpt2.bpe"
    altered.write_bytes(tokenizer.MERGES_FILE.read_bytes().replace(b"h e\n", b"e h\n", 1))
    monkeypatch.setattr(tokenizer, "MERGES_FILE", altered)
    with pytest.raises(UserError, match=f"{altered}: sha256 is .* that of GPT-2's vocab.bpe is"):
        tokenizer.GPT2Tokenizer()
    altered.unlink()
    with pytest.raises(UserError, match=f"{altered}: GPT-2's merges cannot be read"):
        tokenizer.GPT2Tokenizer()


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(UserError, match="'gpt3'; there are: gpt2, bytes"):
        get_tokenizer("gpt3")
