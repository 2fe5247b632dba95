"""The mean loss of a model, and its attention weights."""

import math

import pytest
import torch

from evaluation import attention_weights, mean_loss
from tests.helpers import ATTENTIONS, small_model


def test_mean_loss_is_over_tokens_not_over_batches():
    """Against each token's loss, from the logits in float64; batches and windows of any size."""
    model = small_model("softmax.py").eval()
    shapes = [(5, 16), (2, 16), (1, 16), (3, 9)]
    batches = [(torch.randint(257, shape), torch.randint(257, shape)) for shape in shapes]
    losses = []
    for x, y in batches:
        chances = model(x).detach().log_softmax(-1)
        losses += (-chances.gather(-1, y[..., None])).flatten().tolist()
    assert len(losses) == 16 * 8 + 27
    found = mean_loss(model, iter(batches), torch.device("cpu"), torch.float32)
    assert found == pytest.approx(math.fsum(losses) / len(losses), rel=1e-7)  # float32 logits
    by_batch = [mean_loss(model, [batch], torch.device("cpu"), torch.float32) for batch in batches]
    assert found != pytest.approx(sum(by_batch) / len(by_batch), rel=1e-5)


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_weights_are_what_the_layer_multiplies_v_by(case):
    model, length = small_model(case), 24  # beyond the training length
    model.scale_rope("yarn" if model.config.positions == "rope" else "none")
    idx = torch.randint(257, (2, length))
    calls = []
    attention = model.trunk.blocks[0].attn.attention
    hook = attention.register_forward_hook(lambda module, inputs, out: calls.append((inputs, out)))
    whole = attention_weights(model, idx, slice(None))
    hook.remove()
    (_, _, v, _), out = calls[0]
    torch.testing.assert_close(whole[0] @ v, out, rtol=1e-9, atol=1e-12)
    for rows in (slice(-1, None), slice(5, 9), slice(0, 1)):
        for some, all_rows in zip(attention_weights(model, idx, rows), whole, strict=True):
            torch.testing.assert_close(some, all_rows[:, :, rows], rtol=1e-9, atol=1e-12)
    sums = attention_weights(model, idx, slice(-1, None), lambda A: A[..., 3:7].sum(-1))
    torch.testing.assert_close(sums[1], whole[1][:, :, -1:, 3:7].sum(-1), rtol=1e-9, atol=1e-12)
    assert not attention._forward_hooks  # nothing stays behind
