"""How many token ids a tokenizer has, and what identifies it, without loading it."""

import hashlib
import json
from pathlib import Path

from errors import UserError, check_choice

# The number of token ids of each built-in tokenizer, end-of-text included.
BUILT_IN = {"gpt2": 50257, "bytes": 257}
# The name of the copy of a tokenizer's file in the folders of shards, runs and exports.
TOKENIZER = "tokenizer.json"
# The number of token ids of all recall tasks.
RECALL_IDS = 256


def identify(tokenizer: str) -> str:
    """Return the built-in name of a tokenizer, or its file's checksum."""
    if tokenizer in BUILT_IN:
        return tokenizer
    return f"sha256:{hashlib.sha256(tokenizer_file(tokenizer).read_bytes()).hexdigest()}"


def tokenizer_file(tokenizer: str) -> Path:
    """Return the path of a tokenizer.json. Raises UserError where there is no file."""
    if not Path(tokenizer).is_file():
        check_choice("tokenizer", tokenizer, (*BUILT_IN, "the path of a tokenizer.json"))
    return Path(tokenizer)


def count_ids(tokenizer: str) -> int:
    """Return the number of token ids, end-of-text included.

    Raises UserError where the tokenizer is not built in and its file cannot be read.
    """
    if tokenizer in BUILT_IN:
        return BUILT_IN[tokenizer]
    file = tokenizer_file(tokenizer)
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]  # a list of Unigram, a dict of the other models
        if isinstance(vocabulary, dict):
            ids = list(vocabulary.values())
        else:
            ids = list(range(len(vocabulary)))
        ids += [token["id"] for token in content["added_tokens"]]
        return 1 + int(max(ids))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"tokenizer = {tokenizer!r} is not a tokenizer.json: {error!r}") from error
