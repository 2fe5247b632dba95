"""The validation tokens that every length of an evaluation covers."""

import pytest

from errors import UserError
from scripts.common.validation import default_lengths, sampled_sequences, shared_tokens
from tests.helpers import small_config


def test_tokens_fill_whole_windows_of_every_length(shards):
    config = small_config("softmax.py")
    assert shared_tokens(str(shards), (16, 48), 256, config) == 240
    assert shared_tokens(str(shards), (16, 48), 10**6, config) == 576  # of the 600 there are
    with pytest.raises(UserError, match="599 validation tokens, but lengths .* multiple of 1024"):
        shared_tokens(str(shards), (16, 1024), 10**6, config)


def test_random_sequences_are_at_most_those_side_by_side(shards):
    config = small_config("softmax.py")
    assert sampled_sequences(str(shards), 100, 100_000, config) == 5  # of the 600 tokens
    assert sampled_sequences(str(shards), 100, 3, config) == 3
    with pytest.raises(UserError, match="600 validation tokens have no sequence of 600"):
        sampled_sequences(str(shards), 600, 3, config)


def test_learned_positions_end_at_the_training_length():
    config, learned = small_config("softmax.py"), small_config("softmax.py --positions=learned")
    assert default_lengths([config]) == (16, 32, 64, 128, 256)
    assert default_lengths([learned]) == default_lengths([learned, config]) == (16,)
    longer = small_config("softmax.py --positions=learned --block_size=32 --total_batch_size=32")
    assert default_lengths([config, longer], (1, 1.5, 2, 4)) == (16, 24, 32)
    with pytest.raises(UserError, match="a length of 17 is beyond .* at block_size = 16"):
        shared_tokens("nowhere", (8, 17), 256, learned)
