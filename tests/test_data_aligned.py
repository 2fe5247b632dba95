"""Aligned windows: each begins at a document, and they are those of a best fit by hand."""

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


@pytest.fixture
def data_dir(tmp_path):
    for i, (lengths, leading) in enumerate(zip(LENGTHS, LEADING, strict=True), start=1):
        tokens, _ = shards_of(lengths, leading, first_id=200 * i)
        write_shard(tmp_path / f"x_train_{i:06d}.bin", tokens)
    write_shard(tmp_path / "x_val_000000.bin", np.arange(1000, 1050, dtype=np.uint16))
    return tmp_path


def open_aligned(data_dir, batch_size, **more):
    return AlignedLoader(data_dir, Batching(T, batch_size, **more), 1050, END)


def packed_by_hand(documents, size):
    """The whole windows, filled by looking at every document that is left."""
    left = list(documents)
    windows = []
    window = []
    while left:
        space = size - len(window)
        fitting = [document for document in left if len(document) <= space]
        if fitting:
            longest = max(map(len, fitting))
            i = [len(document) for document in left].index(longest)
        else:
            i = min(range(len(left)), key=lambda i: len(left[i]))
        window += left.pop(i)[:space]
        if len(window) == size:
            windows.append(window)
            window = []
    return windows


def expected_windows():
    windows = []
    for i, (lengths, leading) in enumerate(zip(LENGTHS, LEADING, strict=True), start=1):
        tokens, starts = shards_of(lengths, leading, first_id=200 * i)
        documents = [document.tolist() for document in np.split(tokens, starts)[1:]]
        windows += packed_by_hand(documents, T + 1)
    return windows


def joined(batches):
    """The tokens of all batches, [n, T + 1]."""
    return torch.cat([torch.cat((x, y[:, -1:]), dim=1) for x, y in batches])


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_best_fit_is_the_best_fit_by_hand(size):
    rng = np.random.default_rng(size)
    for n in (1, 2, 5, 40):
        lengths = rng.integers(1, 1 + rng.choice([3, 2 * size + 1]), n)
        # a token is its document and its place there
        documents = [[(d, i) for i in range(length)] for d, length in enumerate(lengths)]
        expected = packed_by_hand(documents, size)
        order, kept = best_fit(lengths, size)
        actual = [(d, i) for d, count in zip(order, kept, strict=True) for i in range(count)]
        assert actual == [token for window in expected for token in window]


def test_an_epoch_has_each_window_once(data_dir):
    windows = sorted(expected_windows())
    loader = open_aligned(data_dir, 4, seed=0)
    n = loader.n_windows
    assert n == len(windows) == 13
    tokens = joined(loader.batch(step) for step in range(n))
    assert (tokens[:, 0] == END).all()
    epochs = tokens.view(4, n, T + 1).tolist()
    for epoch in epochs:
        assert sorted(epoch) == windows
    assert epochs[0] != epochs[1]
    x, y = loader.batch(0)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_used_and_cropped_tokens_are_all_tokens(data_dir):
    loader = open_aligned(data_dir, 4, seed=0)
    assert loader.tokens == sum(map(sum, LENGTHS)) + sum(LEADING)
    used = loader.n_windows * (T + 1)
    assert used + loader.cropped * loader.tokens == pytest.approx(loader.tokens)


def test_batches_depend_on_seed_and_step_alone(data_dir):
    whole = open_aligned(data_dir, 8, seed=3)
    expected = [whole.batch(step) for step in range(12)]
    for world_size in (1, 2, 4):
        ranks = [
            open_aligned(data_dir, 8, seed=3, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for step in (7, 8, 2, 2, 11, 0):
            shares = [loader.batch(step) for loader in ranks]
            for actual, exact in zip(zip(*shares, strict=True), expected[step], strict=True):
                assert torch.equal(torch.cat(actual), exact)
    other_seed, _ = open_aligned(data_dir, 8, seed=4).batch(0)
    assert not torch.equal(other_seed, expected[0][0])


def test_validation_stays_in_the_stream(data_dir):
    batching = Batching(T, 4, 0)
    stream = TokenLoader(data_dir, batching, 1050)
    aligned = open_aligned(data_dir, 4, seed=0)
    assert aligned.val_tokens == stream.val_tokens
    batches = [list(loader.validation_batches(49, 4)) for loader in (stream, aligned)]
    assert torch.equal(*map(joined, batches))


def test_documents_are_counted_in_aligned_windows(data_dir):
    windows = np.array(expected_windows())[:, :T]
    measured = open_aligned(data_dir, 4, seed=0).measure_documents(END)
    assert measured.per_window == pytest.approx((windows == END).sum() / len(windows))
    assert measured.shards_without == ["x_val_000000.bin"]


def test_what_cannot_be_aligned_is_refused(data_dir):
    open_aligned(data_dir, 13, seed=0)
    says = r"\d+ tokens, of which align_documents crops \d+\.\d%, 13 windows of 8 tokens"
    with pytest.raises(UserError, match=says):
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
    loader = AlignedLoader(documents, Batching(16, 8, 0), 257, 256)
    says = f"windows begin at a document: {loader.cropped:.1%} of the training tokens are cropped"
    assert 0 < loader.cropped < 0.5
    assert says in capsys.readouterr().out
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
    loader = AlignedLoader(documents, Batching(64, 8, 0), 257, 256)
    assert f"{loader.cropped:.1%} of the training tokens are cropped" in capsys.readouterr().out
