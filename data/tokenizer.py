"""Text to token ids and back: GPT-2's BPE, plain bytes, or a tokenizer.json of Hugging Face.

`gpt2.bpe` holds GPT-2's merges: `vocab.bpe` of OpenAI's GPT-2 release (github.com/openai/gpt-2,
modified MIT licence, copyright 2019 OpenAI), byte for byte, so that nothing is ever downloaded.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config import TOKENIZER, VOCABULARY, tokenizer_file
from errors import UserError
from runtime.files import atomic_write

END_OF_TEXT = "<|endoftext|>"
MERGES_FILE = Path(__file__).with_name("gpt2.bpe")
# GPT-2's pre-tokeniser, as tiktoken writes it: merges never cross the pieces that it matches.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
MAX_IDS = 1 << 16
# Names of the end of a text in tokenizer.json files; the first that a file has is taken.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# A space or line break after anything but whitespace.
SAFE_SPLIT = re.compile(r"(?<=\S)(?=[ \n])")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Nothing is added to a text, and the mark of a special token within a text is ordinary text.
    Characters that UTF-8 cannot encode, lone surrogates, become U+FFFD.
    """

    n_vocab: int
    eot: int  # the id of the end of a text
    mark: str  # and its text
    to_ids: Callable[[str], NDArray[np.integer]]
    to_text: Callable[[list[int]], str]

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> NDArray[np.uint16]:
        """The ids as an array [tokens]."""
        # pairs of surrogates, as JSON escapes them, are joined
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.to_ids(text).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """`eot` becomes its mark, invalid UTF-8 U+FFFD; ids that are no token are left out."""
        return self.to_text([int(i) for i in ids if i < self.n_vocab])


def open_gpt2() -> Tokenizer:
    """GPT-2's byte-level BPE, computed by tiktoken."""
    import tiktoken

    encoding = tiktoken.Encoding(
        name="gpt2",
        pat_str=PATTERN,
        mergeable_ranks=read_ranks(MERGES_FILE),
        special_tokens={END_OF_TEXT: 50256},
    )
    encode = partial(encoding.encode_to_numpy, disallowed_special=())
    return Tokenizer(50257, 50256, END_OF_TEXT, encode, encoding.decode)


def open_bytes() -> Tokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and an end-of-text id."""

    def encode(text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(ids: list[int]) -> str:
        parts = [END_OF_TEXT.encode() if i == 256 else bytes([i]) for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    return Tokenizer(257, 256, END_OF_TEXT, encode, decode)


def open_file(path: str) -> Tokenizer:
    """A tokenizer.json of Hugging Face's tokenizers.

    Raises UserError where the file cannot be read, has more ids than fit uint16, or has no token
    for the end of a text.
    """
    file = str(tokenizer_file(path))
    try:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{path}: cannot be read by tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    n_vocab = 1 + max(vocabulary.values(), default=0)
    if n_vocab > MAX_IDS:
        raise UserError(f"{path}: {n_vocab:,} ids, but a shard's uint16 tokens have {MAX_IDS:,}")
    mark = next((mark for mark in ENDS_OF_TEXT if mark in vocabulary), None)
    if mark is None:
        raise UserError(f"{path}: none of its tokens is one of {', '.join(ENDS_OF_TEXT)}")

    def encode(text: str) -> NDArray[np.integer]:
        # only a batch is encoded without Python's lock
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint16)

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return Tokenizer(n_vocab, vocabulary[mark], mark, encode, decode)


@cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "gpt2" or "bytes", or a tokenizer.json at the path `name`.

    Raises UserError where it is neither, or the tokenizer's file is damaged.
    """
    if name == "gpt2":
        return open_gpt2()
    return open_bytes() if name == "bytes" else open_file(name)


def copy_tokenizer(tokenizer: str, folder: Path) -> None:
    """Copy a tokenizer's file into a folder; a built-in tokenizer has none."""
    if tokenizer not in VOCABULARY:
        with atomic_write(folder / TOKENIZER) as file:
            file.write(tokenizer_file(tokenizer).read_bytes())


def split_text(text: str, size: int) -> Iterator[str]:
    """Cut a text into parts of about `size` characters whose ids, joined, are those of the text.

    Cuts are made only before a space or a line break that follows a non-whitespace character.
    GPT-2's pre-tokeniser always starts a new piece there, since its pieces have whitespace only at
    their start or consist of nothing else; and as the text before the cut does not end in
    whitespace, the pattern's look-ahead past whitespace never reaches the cut. A text without such
    places stays whole. With a tokenizer.json whose tokens cross words a few ids at a cut may
    differ.
    """
    start = 0
    while len(text) - start > size:
        cut = SAFE_SPLIT.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's files, in order of token id.

    Printable Latin-1 stands for itself; the other bytes become the characters from 256 on.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def read_ranks(path: Path) -> dict[bytes, int]:
    """GPT-2's token ranks {bytes: id}: 256 single bytes, then one token for each merge."""
    byte_of = {symbol: b for b, symbol in byte_symbols().items()}
    ranks = {bytes([b]): rank for rank, b in enumerate(byte_symbols())}
    for merge in path.read_text(encoding="utf-8").splitlines()[1:]:  # the first is a version
        ranks[bytes(byte_of[c] for c in merge if c != " ")] = len(ranks)
    return ranks
