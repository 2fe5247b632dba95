"""Batches: each sequence once an epoch, for any number of processes, steps in any order."""

import os
import resource
import time

import numpy as np
import pytest
import torch

from data import shards
from data.loader import Batching, TokenLoader, shuffled, validation_tokens
from errors import UserError

T = 8
# of the first and the third shard; the second has no whole sequence
WINDOW_STARTS = [*range(0, 96, T), *range(109, 109 + 56, T)]


@pytest.fixture
def data_dir(tmp_path):
    """Three training shards of 101, 8 and 57 tokens, numbered through: 12 + 0 + 7 sequences."""
    numbered = np.arange(166, dtype=np.uint16)
    shards.write_shard(tmp_path / "x_train_000001.bin", numbered[:101])
    shards.write_shard(tmp_path / "x_train_000002.bin", numbered[101:109])
    shards.write_shard(tmp_path / "x_train_000003.bin", numbered[109:])
    val = np.arange(1000, 1050, dtype=np.uint16)
    shards.write_shard(tmp_path / "x_val_000000.bin", val[:20])
    shards.write_shard(tmp_path / "x_val_000001.bin", val[20:])
    return tmp_path


def open_loader(data_dir, batch_size, **more):
    batching = Batching(T, batch_size, **more)
    return TokenLoader(data_dir, batching, vocab_size=1050)


def open_ranks(data_dir, batch_size, world_size, **more):
    """The loader of each process."""
    loaders = []
    for rank in range(world_size):
        loaders.append(open_loader(data_dir, batch_size, rank=rank, world_size=world_size, **more))
    return loaders


def joined(batches):
    """x and y of all batches, [n, T]."""
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def assert_numbered(x, y):
    """Tokens that are numbered through follow each other in x, and from x to y."""
    first = x[:, :1]
    assert torch.equal(x, first + torch.arange(T))
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 255, 256, 257, 1000, 65537])
def test_shuffled_is_a_bijection(n):
    places = np.arange(n)
    middle = np.array([n // 2])
    for seed, epoch in ((0, 0), (0, 1), (1337, 5)):
        order = shuffled(places, n, seed, epoch)
        assert np.array_equal(np.sort(order), places)
        assert shuffled(middle, n, seed, epoch) == order[middle]


def test_shuffled_is_fixed_for_ever():
    """Another order would break resuming for every run started before the change."""
    whole = shuffled(np.arange(10), 10, seed=42, epoch=0)
    assert whole.tolist() == [6, 1, 3, 2, 7, 4, 5, 9, 8, 0]
    first = shuffled(np.arange(5), 1000, seed=7, epoch=3)
    assert first.tolist() == [362, 898, 857, 331, 276]


def test_every_sequence_once_an_epoch_in_an_order_of_its_own(data_dir):
    loader = open_loader(data_dir, 4, seed=0)
    assert loader.n_sequences == 19
    assert loader.tokens == 166
    # 19 batches of 4 are 4 epochs of 19, and most epochs end inside a batch
    x, y = joined([loader.batch(step) for step in range(19)])
    for tensor in (x, y):
        assert tensor.shape == (76, T)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert_numbered(x, y)
    epochs = x[:, 0].reshape(4, 19).tolist()
    for epoch in epochs:
        assert sorted(epoch) == WINDOW_STARTS
    orders = {tuple(epoch) for epoch in epochs}
    assert len(orders) == 4
    other_seed, _ = open_loader(data_dir, 4, seed=1).batch(0)
    assert not torch.equal(other_seed, x[:4])


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_same_global_batch_for_any_number_of_processes(data_dir, world_size):
    whole = open_loader(data_dir, 16, seed=3)
    ranks = open_ranks(data_dir, 16, world_size, seed=3)
    for step in (0, 1, 2, 100):
        shares = [loader.batch(step) for loader in ranks]
        for x, _ in shares:
            assert len(x) == 16 // world_size
        x, y = joined(shares)
        expected_x, expected_y = whole.batch(step)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_any_step_at_any_time(data_dir):
    straight = open_loader(data_dir, 4, seed=5)
    expected = []
    for step in range(30):
        x, _ = straight.batch(step)
        expected.append(x)
    jumping = open_loader(data_dir, 4, seed=5)
    for step in (7, 8, 9, 3, 3, 4, 29, 0, 1, 1):
        x, _ = jumping.batch(step)
        assert torch.equal(x, expected[step]), step
    resumed = open_loader(data_dir, 4, seed=5)
    x, _ = resumed.batch(17)
    assert torch.equal(x, expected[17])


def test_the_next_step_is_read_ahead(data_dir):
    loader = open_loader(data_dir, 4, seed=5)
    reads = []
    read = loader.read

    def recorded(step):
        reads.append(step)
        return read(step)

    loader.read = recorded
    for step in (0, 1):
        loader.batch(step)
        loader._ahead[step + 1].result()
        assert reads == [*range(step + 2)]


def test_a_token_outside_the_vocabulary_is_refused_with_its_batch(data_dir):
    whole = open_loader(data_dir, 1, seed=0)
    starts = [whole.batch(step)[0][0, 0].item() for step in range(19)]
    bad_step = starts.index(109 + T)  # the second sequence of the third shard
    path = data_dir / "x_train_000003.bin"
    tokens = shards.read_shard(path)
    tokens[T + 3 : T + 5] = 1050
    shards.write_shard(path, tokens)
    loader = open_loader(data_dir, 1, seed=0)
    for step in range(19):
        if step != bad_step:
            loader.batch(step)
    with pytest.raises(UserError, match=f"{path}: token {T + 3} is 1050, .* 0 to 1049"):
        loader.batch(bad_step)
    val = np.array([7, 1050, 1050], dtype=np.uint16)
    shards.write_shard(data_dir / "x_val_000001.bin", val)
    with pytest.raises(UserError, match="x_val_000001.bin: token 1 is 1050, .* 0 to 1049"):
        loader.validation_batches(24, 4)
    without_that_shard = list(loader.validation_batches(19, 4))
    assert len(without_that_shard) == 1


def test_a_shard_that_shrinks_is_refused(data_dir):
    loader = open_loader(data_dir, 19, seed=0)
    os.truncate(data_dir / "x_train_000003.bin", 1024 + 2 * 20)
    with pytest.raises(UserError, match="x_train_000003.bin has shrunk: it ends before token"):
        loader.batch(0)


def test_only_headers_and_sequences_are_read(tmp_path, request):
    """100 billion tokens, in files that are holes: 200 GB to any loader that reads them.

    They are more files than a process may open at first.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, hard_limit = limits
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard_limit))
    header = np.zeros(256, dtype="<i4")
    header[:3] = [20240520, 1, 10**8]
    for k in range(1000):
        split = "train" if k else "val"
        path = tmp_path / f"x_{split}_{k:06d}.bin"
        path.write_bytes(header.tobytes())
        os.truncate(path, 1024 + 2 * 10**8)
    begin = time.perf_counter()
    loader = TokenLoader(tmp_path, Batching(1024, 512, seed=0), vocab_size=1)
    assert loader.tokens == 999 * 10**8
    x, _ = loader.batch(9)
    assert x.shape == (512, 1024)
    next(loader.validation_batches(10485760, 8))
    assert time.perf_counter() - begin < 20  # here 0.2 s, and minutes where all is read


def test_too_little_is_refused(data_dir):
    open_loader(data_dir, 19, seed=0)
    message = f"{data_dir}: 166 tokens give .* a shard of 161 tokens would"
    with pytest.raises(UserError, match=message):
        open_loader(data_dir, 20, seed=0)
    loader = TokenLoader(data_dir, Batching(64, 1, 0), 1050)
    with pytest.raises(UserError, match=f"{data_dir}: val_tokens = 1000 leaves 49 .* of 64"):
        loader.validation_batches(1000, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_validation_is_shared_by_sequences(data_dir, world_size):
    of_one_shard = validation_tokens(data_dir, 5, 1050)
    of_two_shards = validation_tokens(data_dir, 30, 1050)
    assert of_one_shard.tolist() == list(range(1000, 1006))
    assert of_two_shards.tolist() == list(range(1000, 1031))
    whole_sequences = range(1000, 1040, T)  # of 47 tokens
    for rank, loader in enumerate(open_ranks(data_dir, 8, world_size, seed=0)):
        batches = list(loader.validation_batches(47, 2))
        for x, _ in batches[:-1]:
            assert len(x) == 2
        starts = []
        for x, y in batches:
            assert_numbered(x, y)
            starts += x[:, 0].tolist()
        assert starts == list(whole_sequences[rank::world_size])
    # all there are: 49 tokens have a successor
    loader = open_loader(data_dir, 8, seed=0)
    everything, _ = joined(loader.validation_batches(10**9, 4))
    assert len(everything) == 6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_batches_on_a_gpu(data_dir):
    host = open_loader(data_dir, 4, seed=0)
    loader = open_loader(data_dir, 4, seed=0, device=torch.device("cuda:0"))
    for step in range(5):
        x, y = loader.batch(step)
        assert x.is_cuda
        assert y.is_cuda
        expected, _ = host.batch(step)
        assert torch.equal(x.cpu(), expected)
    x, _ = next(loader.validation_batches(48, 2))
    assert x.is_cuda
    assert x[0].tolist() == list(range(1000, 1008))
