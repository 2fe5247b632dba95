"""The head's loss and its gradients, against torch's cross-entropy of all logits in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from layers import losses
from layers.losses import LinearCrossEntropy, softmax_
from tests.helpers import small_model

WIDTH = 6
N_VOCAB = 19
PADDED = 32
IGNORED = -100


def example(token_count, targets_per_token=1, dtype=torch.float64, scale=1.0):
    """Return hidden states, the head's weights, padding included, and targets."""
    generator = torch.Generator().manual_seed(token_count)
    x = torch.randn(token_count, WIDTH, generator=generator).to(dtype) * scale
    weight = torch.randn(targets_per_token, PADDED, WIDTH, generator=generator).to(dtype)
    weight = weight.flatten(0, 1)
    shape = [token_count]
    if targets_per_token > 1:
        shape.append(targets_per_token)
    targets = torch.randint(N_VOCAB, shape, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), targets


def leaf(x):
    return x.detach().requires_grad_()


def relative_error(actual, exact, **dimension):
    difference = actual.double() - exact
    return difference.norm(**dimension) / exact.norm(**dimension)


def plain_loss(x, weight, targets, logits_dtype=torch.float64):
    logits = x @ weight.T
    rounded = logits.detach().to(logits_dtype)
    logits = logits + (rounded - logits.detach())
    logits = logits.view(targets.numel(), -1)[:, :N_VOCAB]
    return F.cross_entropy(logits, targets.flatten())


def loss_and_gradients(x, weight, targets, loss_of=None, factor=1.0):
    if loss_of is None:
        loss = LinearCrossEntropy.apply(x, weight, targets, N_VOCAB, softmax_)
    else:
        loss = loss_of(x, weight, targets)
    gradients = torch.autograd.grad(loss * factor, (x, weight))
    return loss.detach(), *gradients


@pytest.fixture(params=["one chunk", "many chunks", "single tokens"])
def chunk_sizes(request, monkeypatch):
    """Split 70 tokens, and their softmax, and the vocabulary in several ways, with a rest."""
    sizes = {
        "one chunk": {
            "CHUNK_CPU": 1024,
            "CACHED_LOGITS": 2**19,
            "VOCABULARY_ROWS": 4096,
        },
        "many chunks": {
            "CHUNK_CPU": 32,
            "CACHED_LOGITS": 5 * PADDED,
            "VOCABULARY_ROWS": 20,
        },
        "single tokens": {
            "CHUNK_CPU": 1,
            "CACHED_LOGITS": 1,
            "VOCABULARY_ROWS": 1,
        },
    }
    for name, size in sizes[request.param].items():
        monkeypatch.setattr(losses, name, size)


@pytest.mark.parametrize("targets_per_token", [1, 2])
def test_loss_and_gradients_equal_those_of_all_logits(chunk_sizes, targets_per_token):
    x, weight, targets = example(70, targets_per_token)
    targets[::3] = IGNORED
    expected = loss_and_gradients(x, weight, targets, plain_loss, factor=0.3)
    actual = loss_and_gradients(x, weight, targets, factor=0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    _, _, weight_gradient = actual
    by_head = weight_gradient.view(targets_per_token, PADDED, WIDTH)
    padding = by_head[:, N_VOCAB:]
    assert not padding.any()


def test_token_losses_equal_those_of_all_logits(chunk_sizes):
    x, weight, targets = example(70, targets_per_token=2)
    x = x.detach()
    weight = weight.detach()
    logits = (x @ weight.T).view(140, PADDED)[:, :N_VOCAB]
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none")
    targets[::3] = -1
    expected = expected.view(70, 2).masked_fill(targets < 0, 0)
    actual = losses.token_losses(x, weight, targets, N_VOCAB)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=1e-6)
    by_columns = targets.T.contiguous().T  # the same targets, in another order in memory
    again = losses.token_losses(x, weight, by_columns, N_VOCAB)
    torch.testing.assert_close(again, actual, rtol=0, atol=0)


def test_a_model_has_these_losses():
    model = small_model("lssa.py")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(257, (2, 3, 20), generator=generator)
    logits = model(x).flatten(0, 1)
    expected = F.cross_entropy(logits, y.flatten(), reduction="none")
    loss = model(x, y)
    torch.testing.assert_close(loss, expected.mean(), rtol=1e-9, atol=0)
    token_losses = model.token_losses(x, y)
    assert token_losses.dtype == torch.float32
    torch.testing.assert_close(token_losses.flatten(), expected.float(), rtol=1e-6, atol=1e-6)


def test_without_a_target_the_loss_is_nan():
    x, weight, targets = example(4)
    targets[:] = IGNORED
    assert plain_loss(x, weight, targets).isnan()
    loss, *_ = loss_and_gradients(x, weight, targets)
    assert loss.isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_logits_give_finite_gradients(dtype):
    """Of several hundred, as their differences are."""
    x, weight, targets = example(40, dtype=dtype, scale=100)
    loss, *gradients = loss_and_gradients(x, weight, targets)
    assert loss.dtype == torch.float32
    exact_loss, *exact_gradients = loss_and_gradients(
        leaf(x.double()),
        leaf(weight.double()),
        targets,
        partial(plain_loss, logits_dtype=dtype),
    )
    assert loss.item() == pytest.approx(exact_loss.item(), rel=0.01)
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert relative_error(gradient, exact) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_products_in_its_dtype_and_sums_in_float32(dtype, monkeypatch):
    """Over 256 chunks, whose sum in a 16-bit dtype would lose digits.

    Also for a token whose probability is almost 1: its p - 1 must not be rounded to 0.
    """
    monkeypatch.setattr(losses, "CHUNK_CPU", 16)
    x, weight, _ = example(4096, dtype=torch.float32)
    logits = x @ weight[:N_VOCAB].T
    targets = logits.argmax(1)
    x = leaf(3 * x)
    exact_loss, exact_x, exact_weight = loss_and_gradients(
        leaf(x.to(dtype).double()),
        leaf(weight.to(dtype).double()),
        targets,
        partial(plain_loss, logits_dtype=dtype),
    )
    with torch.autocast("cpu", dtype):
        loss, x_gradient, weight_gradient = loss_and_gradients(x, weight, targets)
    assert x_gradient.dtype == torch.float32
    assert weight_gradient.dtype == torch.float32
    assert loss.item() == pytest.approx(exact_loss.item(), rel=0.001)
    error_by_token = relative_error(x_gradient, exact_x, dim=1)
    assert error_by_token.median() < 0.008
    assert relative_error(weight_gradient, exact_weight) < 0.002


def test_float16_keeps_gradients_that_only_the_loss_scale_keeps():
    """Divided by the number of targets alone, 1e-5 would be 0 in float16."""
    loss_scale = 2.0**16
    x, weight, targets = example(2000, dtype=torch.float32)
    weight = leaf(weight * 1e-3)
    _, *exact_gradients = loss_and_gradients(x, weight, targets, factor=loss_scale)
    with torch.autocast("cpu", torch.float16):
        _, *gradients = loss_and_gradients(x, weight, targets, factor=loss_scale)
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert relative_error(gradient, exact) < 0.01


def test_a_second_backward_pass_is_refused():
    """The gradient of the weights is scaled in its own memory."""
    x, weight, targets = example(8)
    loss = LinearCrossEntropy.apply(x, weight, targets, N_VOCAB, softmax_)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
