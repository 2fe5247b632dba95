"""Aligned windows: each begins at a document, and a best fit by hand gives the same windows."""

import numpy as np
import pytest
import torch

from data.aligned import AlignedLoader, best_fit
from data.loader import Batching, TokenLoader
from data.shards import write_shard
from errors import UserError
from tests.helpers import small_config
from tests.runs import metrics

T = 8
END = 0  # end-of-text; no other token of these shards comes twice
# The first and the last shard begin within a document; the second has no whole window.
LENGTHS = [
    [1, 3, 9, 4, 2, 20, 9, 5, 1, 30, 3, 3, 11, 2, 6, 8, 4],
    [5, 1],
    [7, 7, 7, 2, 1, 12, 40, 3],
]
LEADING = [4, 0, 1]


def shards_of(lengths, leading, first_id=1):
    tokens = first_id + np.arange(leading + sum(lengths), dtype=np.uint16)
    starts = leading + np.cumsum([0, *lengths[:-1]])
    tokens[starts] = END
    return tokens, starts


def training_shards():
    """The tokens of each training shard, and where its documents begin."""
    shards = []
    for lengths, leading in zip(LENGTHS, LEADING, strict=True):
        first_id = 200 * (len(shards) + 1)
        shards.append(shards_of(lengths, leading, first_id))
    return shards


@pytest.fixture
def data_dir(tmp_path):
    for number, (tokens, _) in enumerate(training_shards(), start=1):
        write_shard(tmp_path / f"x_train_{number:06d}.bin", tokens)
    val = np.arange(1000, 1050, dtype=np.uint16)
    write_shard(tmp_path / "x_val_000000.bin", val)
    return tmp_path


def open_aligned(data_dir, batch_size, **more):
    batching = Batching(T, batch_size, **more)
    return AlignedLoader(data_dir, batching, 1050, END)


def packed_by_hand(documents, size):
    """The whole windows, filled by looking at every document that is left."""
    left = list(documents)
    windows = []
    window = []
    while left:
        space = size - len(window)
        lengths = [len(document) for document in left]
        fitting = [length for length in lengths if length <= space]
        if fitting:
            best_length = max(fitting)
        else:
            best_length = min(lengths)  # what does not fit is cropped
        document = left.pop(lengths.index(best_length))
        window += document[:space]
        if len(window) == size:
            windows.append(window)
            window = []
    return windows


def expected_windows():
    windows = []
    for tokens, starts in training_shards():
        _, *documents = np.split(tokens, starts)
        windows += packed_by_hand([document.tolist() for document in documents], T + 1)
    return windows


def joined(batches):
    """The tokens of all batches, [n, T + 1]."""
    windows = []
    for x, y in batches:
        last = y[:, -1:]
        windows.append(torch.cat((x, last), dim=1))
    return torch.cat(windows)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_best_fit_is_the_best_fit_by_hand(size):
    rng = np.random.default_rng(size)
    for n in (1, 2, 5, 40):
        longest = rng.choice([3, 2 * size + 1])
        lengths = rng.integers(1, 1 + longest, n)
        # a token is its document and its place there
        documents = []
        for number, length in enumerate(lengths):
            documents.append([(number, place) for place in range(length)])
        expected = []
        for window in packed_by_hand(documents, size):
            expected += window
        order, kept = best_fit(lengths, size)
        actual = []
        for number, count in zip(order, kept, strict=True):
            actual += [(number, place) for place in range(count)]
        assert actual == expected


def test_an_epoch_has_each_window_once(data_dir):
    windows = sorted(expected_windows())
    loader = open_aligned(data_dir, 4, seed=0)
    n = loader.n_sequences
    assert n == 13
    assert len(windows) == 13
    tokens = joined(loader.batch(step) for step in range(n))
    assert (tokens[:, 0] == END).all()
    epochs = tokens.view(4, n, T + 1).tolist()
    for epoch in epochs:
        assert sorted(epoch) == windows
    assert epochs[0] != epochs[1]
    x, y = loader.batch(0)
    assert x.dtype == torch.int64
    assert y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_used_and_cropped_tokens_are_all_tokens(data_dir):
    loader = open_aligned(data_dir, 4, seed=0)
    in_documents = sum(sum(lengths) for lengths in LENGTHS)
    assert loader.tokens == in_documents + sum(LEADING)
    used = loader.n_sequences * (T + 1)
    cropped = loader.cropped * loader.tokens
    assert used + cropped == pytest.approx(loader.tokens)


def test_validation_stays_in_the_stream(data_dir):
    batching = Batching(T, 4, 0)
    stream = TokenLoader(data_dir, batching, 1050)
    aligned = open_aligned(data_dir, 4, seed=0)
    assert aligned.val_tokens == stream.val_tokens
    expected = joined(stream.validation_batches(49, 4))
    assert torch.equal(joined(aligned.validation_batches(49, 4)), expected)


def test_documents_are_counted_in_aligned_windows(data_dir):
    windows = np.array(expected_windows())[:, :T]
    documents = (windows == END).sum()
    measured = open_aligned(data_dir, 4, seed=0).measure_documents(END)
    assert measured.per_sequence == pytest.approx(documents / len(windows))
    assert measured.shards_without == ["x_val_000000.bin"]


def test_what_cannot_be_aligned_is_refused(data_dir):
    open_aligned(data_dir, 13, seed=0)
    cropped = r"\d+ tokens, of which align_documents crops \d+\.\d%, give 13 sequences of 8 tokens"
    needed = (
        r"fewer than the 14 of a step \(total_batch_size / block_size\); more documents are needed"
    )
    with pytest.raises(UserError, match=rf"{cropped} .* {needed}"):
        open_aligned(data_dir, 14, seed=0)
    path = data_dir / "x_train_000002.bin"
    write_shard(path, np.arange(1, 50, dtype=np.uint16))
    says = rf"align_documents = True, but {path} has no end-of-text token \(id 0\)"
    with pytest.raises(UserError, match=says):
        open_aligned(data_dir, 4, seed=0)
    for task in ("orbits", "recall"):
        with pytest.raises(UserError, match="align_documents = True has an effect with task"):
            small_config("softmax.py", "--align_documents", f"--task={task}")
    says = "align_documents needs end-of-text, id 256 .* vocab_size = 256 leaves it out"
    with pytest.raises(UserError, match=says):
        small_config("softmax.py", "--align_documents", "--vocab_size=256")


# ---- a run ----


@pytest.mark.parametrize("more", [[], ["--document_mask"]])
def test_a_run_says_what_is_cropped_and_validates_on_the_same(train, documents, capsys, more):
    settings = ["configs/ssmax.py", f"--data_dir={documents}", "--max_iters=3", *more]
    stream = train("stream", *settings)
    capsys.readouterr()
    aligned = train("aligned", *settings, "--align_documents")
    printed = capsys.readouterr().out
    loader = AlignedLoader(documents, Batching(16, 8, 0), 257, 256)
    assert 0 < loader.cropped < 0.5
    says = f"training sequences begin at a document: {loader.cropped:.1%} of the tokens are"
    assert says in printed
    assert metrics(aligned, "val_loss")[0] == metrics(stream, "val_loss")[0]
    assert metrics(aligned)[1] != metrics(stream)[1]


def test_a_resumed_run_goes_on_with_the_same_batches(train, documents, refused):
    settings = ["configs/ssmax.py", f"--data_dir={documents}", "--align_documents"]
    straight = train("straight", *settings, "--max_iters=4")
    train("run", *settings, "--max_iters=2")
    resumed = train("run", *settings, "--max_iters=4", "--resume")
    assert metrics(resumed) == metrics(straight)
    says = "was trained with align_documents = True, so it cannot be resumed with False"
    refused(train, "run", *settings[:2], "--max_iters=5", "--resume", says=says)


def test_text_in_turn_with_recall_is_aligned(train, documents, capsys):
    settings = ["configs/ssmax.py", f"--data_dir={documents}", "--align_documents"]
    longer = ["--block_size=64", "--total_batch_size=512", "--max_iters=2"]
    train("run", *settings, *longer, "--task=language+recall")
    printed = capsys.readouterr().out
    loader = AlignedLoader(documents, Batching(64, 8, 0), 257, 256)
    assert f"{loader.cropped:.1%} of the tokens are cropped" in printed
