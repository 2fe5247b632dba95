"""The validation tokens that every length of an evaluation covers."""

import numpy as np
import pytest
import torch

from data.shards import write_shard
from errors import UserError
from scripts.common.validation import default_lengths, stretches, windows
from tests.helpers import small_config


def test_tokens_fill_whole_windows_of_every_length(shards):
    config = small_config("softmax.py", f"--data_dir={shards}")
    of_256_tokens = stretches((16, 48), 256, config)
    assert of_256_tokens[:, 1:].size == 240
    all_there_are = stretches((16, 48), 10**6, config)
    assert all_there_are[:, 1:].size == 576  # of 600
    with pytest.raises(UserError, match="the text has 599 validation tokens .* multiple of 1024"):
        stretches((16, 1024), 10**6, config)
    with pytest.raises(UserError, match="256 validation tokens are read .--tokens.* of 512"):
        stretches((16, 512), 256, config)


def test_windows_inside_documents(tmp_path):
    """Every token of the text is its number, so that a window says where it lies."""
    text = np.arange(300, dtype=np.uint16) % 250
    begins = [0, 9, 42, 43, 120]  # documents of 9, 33, 1, 77 and 180 tokens
    text[begins] = 256
    write_shard(tmp_path / "text_val_000000.bin", text)
    config = small_config("softmax.py", f"--data_dir={tmp_path}")

    stretch = stretches((8, 32), 10**6, config, whole_documents=True)
    starts = [9, 43, 75, *range(120, 280, 32)]
    assert np.array_equal(stretch, pieces(text, starts, 33))

    x, y = next(windows(stretch, 8, torch.device("cpu")))
    starts_of_8 = []
    for start in starts:
        starts_of_8 += [start, start + 8, start + 16, start + 24]
    starts_of_targets = [start + 1 for start in starts_of_8]
    assert np.array_equal(x, pieces(text, starts_of_8, 8))
    assert np.array_equal(y, pieces(text, starts_of_targets, 8))

    of_70_tokens = stretches((8, 32), 70, config, whole_documents=True)
    assert len(of_70_tokens) == 2
    with pytest.raises(
        UserError, match="the longest document has 179 tokens with a target, but .* multiple of 256"
    ):
        stretches((256,), 10**6, config, whole_documents=True)

    without = tmp_path / "without"
    without.mkdir()
    write_shard(without / "text_val_000000.bin", np.zeros(300, np.uint16))
    config = config.replace(data_dir=str(without))
    with pytest.raises(UserError, match="no document begins in this text"):
        stretches((8,), 10**6, config, whole_documents=True)


def pieces(text, starts, length):
    """The tokens from each start on, [starts, length]."""
    rows = [text[start : start + length] for start in starts]
    return np.stack(rows)


def test_learned_positions_end_at_the_training_length():
    config = small_config("softmax.py")
    learned = small_config("softmax.py --positions=learned")
    assert default_lengths([config], (1, 4)) == (16, 64)
    assert default_lengths([learned], (1, 4)) == (16,)
    assert default_lengths([learned, config], (1, 4)) == (16,)
    longer = small_config("softmax.py --positions=learned --block_size=32 --total_batch_size=32")
    assert default_lengths([config, longer], (1, 1.5, 2, 4)) == (16, 24, 32)
    with pytest.raises(UserError, match="a length of 17 is beyond .* at block_size = 16"):
        stretches((8, 17), 256, learned)
