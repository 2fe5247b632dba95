"""The mean loss of a model, and its attention weights."""

import math

import pytest
import torch

from evaluation import layer_attention_weights, mean_loss
from tests.helpers import small_model


def test_mean_loss_is_over_tokens_not_over_batches():
    """Against each token's loss, from the logits in float64; batches and windows of any size."""
    model = small_model("softmax.py").eval()
    batches = []
    losses = []
    for shape in [(5, 16), (2, 16), (1, 16), (3, 9)]:
        x = torch.randint(257, shape)
        y = torch.randint(257, shape)
        batches.append((x, y))
        log_probabilities = model(x).detach().log_softmax(-1)
        by_token = -log_probabilities.gather(-1, y[..., None])
        losses += by_token.flatten().tolist()
    assert len(losses) == 16 * 8 + 27
    expected = math.fsum(losses) / len(losses)
    loss = mean_loss(model, iter(batches), torch.float32)
    assert loss == pytest.approx(expected, rel=1e-7)  # float32 logits

    sum_over_batches = 0.0
    for batch in batches:
        sum_over_batches += mean_loss(model, [batch], torch.float32)
    assert loss != pytest.approx(sum_over_batches / len(batches), rel=1e-5)


@pytest.mark.parametrize(
    "case", ["softmax.py", "lssar_p3.py", "asentmax.py", "stick_breaking.py", "fox.py"]
)
def test_attention_weights_are_what_the_layer_multiplies_v_by(case):
    model = small_model(case)
    length = 24  # beyond the training length
    scaling = "none"
    if model.config.positions == "rope":
        scaling = "yarn"
    model.scale_rope(scaling)
    idx = torch.randint(257, (2, length))
    attention = model.trunk.blocks[0].attn.attention
    calls = []

    def record(module, inputs, output):
        calls.append((inputs, output))

    hook = attention.register_forward_hook(record)
    weights = layer_attention_weights(model, idx, slice(None))
    hook.remove()
    inputs, output = calls[0]
    _, _, v, _ = inputs
    assert_close(weights[0] @ v, output)

    row_slices = (slice(-1, None), slice(5, 9), slice(0, 1))
    for rows in row_slices:
        weights_of_rows = layer_attention_weights(model, idx, rows)
        for selected, whole in zip(weights_of_rows, weights, strict=True):
            assert_close(selected, whole[:, :, rows])

    def sum_of_four(A):
        return A[..., 3:7].sum(-1)

    sums = layer_attention_weights(model, idx, slice(-1, None), sum_of_four)
    assert_close(sums[1], sum_of_four(weights[1][:, :, -1:]))
    assert not attention._forward_hooks  # nothing stays behind


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
