"""The validation tokens that every length of an evaluation covers."""

import pytest

from errors import UserError
from scripts.common.validation import data_facts, default_lengths
from tests.helpers import small_config


def test_tokens_fill_whole_windows_of_every_length(shards):
    config = small_config("softmax.py")
    for wanted, tokens in ((256, 240), (10**6, 576)):  # of the 600 there are
        assert data_facts(str(shards), (16, 48), wanted, config)["tokens"] == tokens
    with pytest.raises(UserError, match="599 validation tokens, but lengths .* multiple of 1024"):
        data_facts(str(shards), (16, 1024), 10**6, config)


def test_learned_positions_end_at_the_training_length():
    config, learned = small_config("softmax.py"), small_config("softmax.py --positions=learned")
    assert default_lengths([config], (1, 4)) == (16, 64)
    assert default_lengths([learned], (1, 4)) == default_lengths([learned, config], (1, 4)) == (16,)
    longer = small_config("softmax.py --positions=learned --block_size=32 --total_batch_size=32")
    assert default_lengths([config, longer], (1, 1.5, 2, 4)) == (16, 24, 32)
    with pytest.raises(UserError, match="a length of 17 is beyond .* at block_size = 16"):
        data_facts("nowhere", (8, 17), 256, learned)
