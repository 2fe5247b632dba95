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

from data.vocabulary import (
    BUILT_IN,
    END_OF_TEXT,
    TOKENIZER,
    count_ids,
    end_of_text,
    tokenizer_file,
)
from errors import UserError
from runtime.files import atomic_write

MERGES_FILE = Path(__file__).with_name("gpt2.bpe")
# GPT-2's pre-tokeniser in tiktoken's notation: merges never cross the pieces that it matches.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
MAX_IDS = 1 << 16
# A space or line break after anything but whitespace.
SAFE_SPLIT = re.compile(r"(?<=\S)(?=[ \r\n])")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Encoding adds no tokens, and a special token's name within a text is ordinary text, unless a
    tokenizer.json has it among its model's pieces too, as Unigram may. Characters that UTF-8 cannot
    encode, lone surrogates, become U+FFFD.
    """

    n_vocab: int
    eot: int  # the id of end-of-text
    eot_text: str
    to_ids: Callable[[str], NDArray[np.integer]]
    to_text: Callable[[list[int]], str]

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> NDArray[np.uint16]:
        """The ids as an array [tokens]."""
        # join pairs of surrogates, which come from JSON escapes
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.to_ids(text).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: `eot` is `eot_text`, invalid UTF-8 U+FFFD; unknown ids are skipped."""
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

    def encode(text: str) -> NDArray[np.integer]:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:  # over a million spaces exceed the stack of its expressions
            raise UserError(f"tiktoken cannot encode {text.strip()[:30]!r}: {error}") from error

    return Tokenizer(50257, 50256, END_OF_TEXT, encode, encoding.decode)


def open_bytes() -> Tokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and an end-of-text id."""

    def encode(text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(ids: list[int]) -> str:
        text = bytearray()
        for i in ids:
            text += END_OF_TEXT.encode() if i == 256 else bytes([i])
        return text.decode(errors="replace")

    return Tokenizer(257, 256, END_OF_TEXT, encode, decode)


def open_file(path: str) -> Tokenizer:
    """A tokenizer.json of Hugging Face's tokenizers.

    Raises UserError if the file cannot be read, has more ids than fit uint16, or has no end-of-text
    token, and if the library is missing.
    """
    file = str(tokenizer_file(path))
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path}: this needs `pip install tokenizers`") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{path}: cannot be read by tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    n_vocab = count_ids(path)
    if n_vocab > MAX_IDS:
        raise UserError(f"{path}: {n_vocab:,} ids, but a shard's uint16 tokens have {MAX_IDS:,}")
    mark, eot = end_of_text(path)
    tokenizer.add_special_tokens([mark])  # texts would be cut at an added token that is not special

    def encode(text: str) -> NDArray[np.integer]:
        try:
            # encoding a batch releases the GIL, encoding a single text does not
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise UserError(
                f"{path}: cannot encode {text[:30]!r}: {error}; a text must be made of its tokens"
            ) from error
        return np.array(encoding.ids, dtype=np.uint16)

    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return Tokenizer(n_vocab, eot, mark, encode, decode)


@cache
def get_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer "gpt2" or "bytes", or a tokenizer.json at the path `name`.

    Raises UserError if it is neither, or the file is damaged.
    """
    if name == "gpt2":
        return open_gpt2()
    if name == "bytes":
        return open_bytes()
    return open_file(name)


def copy_tokenizer(tokenizer: str, folder: Path) -> None:
    """Copy a tokenizer's file into a folder; a built-in tokenizer has none."""
    if tokenizer not in BUILT_IN:
        with atomic_write(folder / TOKENIZER) as file:
            file.write(tokenizer_file(tokenizer).read_bytes())


def split_text(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Cut a text into pieces of about `size` characters whose ids, joined, are the text's ids.

    The text may come in chunks of any sizes: the pieces are the same.

    Cuts are made only before a space or a line break that follows a non-whitespace character.
    GPT-2's pre-tokeniser always starts a new piece there, since its pieces have whitespace only at
    their start or consist of nothing else; and as the text before the cut does not end in
    whitespace, the pattern's look-ahead past whitespace never reaches the cut. A text without such
    places stays whole. With a tokenizer.json whose tokens cross words a few ids at a cut may
    differ.
    """
    text = ""
    for chunk in chunks:
        search_from = max(size, len(text))  # what came before has no place for a cut
        text += chunk
        start = 0
        while cut := SAFE_SPLIT.search(text, search_from):
            yield text[start : cut.start()]
            start = cut.start()
            search_from = start + size
        text = text[start:]
    yield text


def byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's files, in order of token id.

    Printable Latin-1 stands for itself; the other bytes become the characters from 256 on.
    """
    symbols = {}
    others = []
    for byte in range(256):
        if chr(byte).isprintable() and chr(byte) != " ":
            symbols[byte] = chr(byte)
        else:
            others.append(byte)
    for i, byte in enumerate(others):
        symbols[byte] = chr(256 + i)
    return symbols


def read_ranks(path: Path) -> dict[bytes, int]:
    """GPT-2's token ranks {bytes: id}: 256 single bytes, then one token for each merge."""
    byte_of = {}
    ranks = {}
    for rank, (byte, symbol) in enumerate(byte_symbols().items()):
        byte_of[symbol] = byte
        ranks[bytes([byte])] = rank
    for merge in path.read_text(encoding="utf-8").splitlines()[1:]:  # the first is a version
        token = bytes(byte_of[symbol] for symbol in merge.replace(" ", ""))
        ranks[token] = len(ranks)
    return ranks
