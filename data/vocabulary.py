"""How many token ids a tokenizer has, and what identifies it, without loading it."""

import hashlib
import json
from pathlib import Path

from errors import UserError, check_choice

# The number of token ids of each built-in tokenizer, end-of-text included.
BUILT_IN = {"gpt2": 50257, "bytes": 257}
# The name of the copy of a tokenizer's file in the folders of shards and runs.
TOKENIZER = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# End-of-text tokens of tokenizer.json files; the first one that a file has is used.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# The number of token ids of all recall tasks.
RECALL_IDS = 256


def identify(tokenizer: str) -> str:
    """Return the built-in name of a tokenizer, or its file's checksum."""
    if tokenizer in BUILT_IN:
        return tokenizer
    return f"sha256:{hashlib.sha256(tokenizer_file(tokenizer).read_bytes()).hexdigest()}"


def tokenizer_file(tokenizer: str) -> Path:
    """Return the path of a tokenizer.json. Raises UserError if there is no file."""
    if not Path(tokenizer).is_file():
        inside = Path(tokenizer, TOKENIZER)
        if inside.is_file():
            raise UserError(f"tokenizer = {tokenizer!r} is a folder: give {str(inside)!r}")
        if tokenizer.endswith(".json"):
            raise UserError(f"tokenizer = {tokenizer!r}: there is no such file")
        check_choice("tokenizer", tokenizer, (*BUILT_IN, "the path of a tokenizer.json"))
    return Path(tokenizer)


def count_ids(tokenizer: str) -> int:
    """Return the number of token ids, end-of-text included.

    Raises UserError if the tokenizer is not built in and its file cannot be read.
    """
    if tokenizer in BUILT_IN:
        return BUILT_IN[tokenizer]
    return 1 + max(ids_by_text(tokenizer).values())


def end_of_text(tokenizer: str) -> tuple[str, int]:
    """Return the text and the id of the end-of-text token.

    Raises UserError as count_ids, and where the tokenizer has no such token.
    """
    if tokenizer in BUILT_IN:
        return END_OF_TEXT, BUILT_IN[tokenizer] - 1
    ids = ids_by_text(tokenizer)
    for mark in ENDS_OF_TEXT:
        if mark in ids:
            return mark, ids[mark]
    raise UserError(f"{tokenizer} has no end-of-text token; looked for {', '.join(ENDS_OF_TEXT)}")


def ids_by_text(tokenizer: str) -> dict[str, int]:
    """Read the ids of a tokenizer.json, by the texts of its tokens.

    Raises UserError if the file cannot be read.
    """
    file = tokenizer_file(tokenizer)
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]  # a list of Unigram, a dict of the other models
        if isinstance(vocabulary, dict):
            ids = dict(vocabulary)
        else:
            ids = {text: i for i, (text, _) in enumerate(vocabulary)}
        ids |= {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        1 + max(ids.values())  # raises where there are none, or an id is not a number
        return ids
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"tokenizer = {tokenizer!r} is not a tokenizer.json: {error!r}") from error
