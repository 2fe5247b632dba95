"""The sliding-window control of models whose layers have different windows."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import layers.build
from errors import UserError
from layers.heads import build_attentions
from layers.windows import largest_window, limit_windows
from model import Block, SelfAttention, Trunk
from scripts import eval_length
from scripts.common import windows
from scripts.common.options import Options
from scripts.common.runs import rope_scaling
from scripts.common.validation import checked_tokens
from scripts.common.windows import check_windows
from tests.helpers import ROWS, measured_losses, saved_run, small_model

LENGTH = 64  # four times the training length
LENGTHS = (f"--lengths=16,{LENGTH}", "--tokens=256")
SL = "softmax.py --window=4 --window_pattern=SL"  # two layers, of which the first has a window


def own_lines(monkeypatch):
    """Windows by layer as a user writes them, without a setting."""

    def add_attention(self, config, layer):
        (self.attention,) = build_attentions(config, layer)
        self.attention.window = 4 if layer % 2 == 0 else None

    monkeypatch.setattr(SelfAttention, "add_attention", add_attention)


class TwoMaps(nn.Module):
    """The difference of two maps, of which the second has a small window."""

    p_n = None

    def __init__(self, config, layer):
        super().__init__()
        (self.full,) = build_attentions(config, layer)
        (self.near,) = build_attentions(config, layer)
        self.near.window = 4
        self.variant = self.full.variant

    def forward(self, q, k, v, context):
        return self.full(q, k, v, context) - 0.5 * self.near(q, k, v, context)


class Everything(TwoMaps):
    """Attention that knows no window."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.full, self.near

    def forward(self, q, k, v, context):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_module(module):
    """A patch that gives all layers this module as their attention."""

    class Layer(SelfAttention):
        def add_attention(self, config, layer):
            self.attention = module(config, layer)

    def patch(monkeypatch):
        monkeypatch.setattr(layers.build, "attention_layer", lambda config: Layer)

    return patch


def nothing(monkeypatch):
    pass


def loss_of_last_positions(model, shards):
    """The mean loss of 256 tokens where each layer computes the last position of a window of 16.

    Every position of every layer is computed by itself, from the 16 inputs that end there.
    """
    tokens = torch.from_numpy(checked_tokens(model.config, 256).astype("int64"))
    x = model.wte(tokens[:-1].view(-1, LENGTH))
    for block in model.trunk.blocks:
        outputs = []
        for end in range(1, LENGTH + 1):
            inputs = x[:, max(0, end - 16) : end]
            rotation = model.trunk.rope(0, inputs.shape[1], inputs.shape[1])
            outputs.append(block(inputs, rotation, None)[:, -1])
        x = torch.stack(outputs, dim=1)
    logits = model.logits(model.trunk.ln_f(x)).double()
    return F.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    "patch, case",
    [
        (nothing, SL),
        (nothing, "lssar_p3.py --window=5 --window_pattern=SL --nope_share=0.5 --local_window=30"),
        (own_lines, "softmax.py"),
        (with_module(TwoMaps), "lssar_p3.py"),
    ],
    ids=["pattern", "hybrid", "own lines", "two maps"],
)
def test_the_control_is_the_last_position_of_a_window(
    patch, case, monkeypatch, shards, call, tmp_path, capsys
):
    patch(monkeypatch)
    model = small_model(case, f"--data_dir={shards}", "--val_tokens=256").float()
    run = saved_run(tmp_path / "run", model)
    call(eval_length, run, *LENGTHS, "--rope=none")
    result, control = measured_losses(run)
    assert result["window"] is None
    assert control["window"] == 16
    with torch.no_grad():
        expected = loss_of_last_positions(model, shards)
    assert control["loss"][1] == pytest.approx(expected, rel=1e-5)
    assert control["loss"][0] == pytest.approx(result["loss"][0], rel=1e-6)
    assert abs(control["loss"][1] - result["loss"][1]) > 1e-3
    printed = capsys.readouterr().out
    assert "  sliding window of 16 " in printed
    gain = min(control["loss"]) - result["loss"][1]
    assert f"{gain:+.4f}" in printed
    # a limit on all layers, which is not the setting of some of them
    call(eval_length, run, *LENGTHS, "--rope=none", "--window=16")
    assert measured_losses(run) == [result, control]


@pytest.mark.usefixtures("pictures")
def test_the_control_of_smaller_windows_has_them(monkeypatch, shards, call, tmp_path, capsys):
    """Also where no setting says so."""
    own_lines(monkeypatch)
    model = small_model("softmax.py --n_layer=1", f"--data_dir={shards}", "--val_tokens=256")
    run = saved_run(tmp_path / "run", model.float())
    call(eval_length, run, *LENGTHS, "--rope=dynamic_ntk")
    _, control = measured_losses(run)
    assert control["window"] == 4
    assert "  sliding window of 4 " in capsys.readouterr().out


def test_windows_set_in_code_decide_whether_rope_is_scaled(monkeypatch):
    def add_attention(self, config, layer):
        (self.attention,) = build_attentions(config, layer)
        self.attention.window = LENGTH // 4 + 1

    monkeypatch.setattr(SelfAttention, "add_attention", add_attention)
    model = small_model("swa.py --window=4")
    assert rope_scaling(model.config, Options(), model) == "dynamic_ntk"


def test_attention_that_ignores_the_window_has_no_control(
    monkeypatch, shards, call, tmp_path, refused
):
    with_module(Everything)(monkeypatch)
    model = small_model("softmax.py", f"--data_dir={shards}", "--val_tokens=256")
    run = saved_run(tmp_path / "run", model.float())
    says = "the layers of this model see more than a window shows them"
    refused(call, eval_length, run, *LENGTHS, says=says)
    (before,) = measured_losses(run)
    call(eval_length, run, *LENGTHS, "--no_control")
    assert measured_losses(run) == [before]


def test_a_model_that_is_not_finite_is_not_said_to_ignore_windows(shards, call, tmp_path, refused):
    model = small_model("softmax.py", f"--data_dir={shards}", "--val_tokens=256").float()
    with torch.no_grad():
        model.trunk.ln_f.weight.fill_(math.nan)
    run = saved_run(tmp_path / "run", model)
    refused(call, eval_length, run, *LENGTHS, says="the outputs of this model are not finite")


@pytest.mark.usefixtures("pictures")
def test_blocks_of_another_signature_have_a_control(monkeypatch, shards, call, tmp_path):
    """As where each block adds the embeddings, and returns more than its output."""
    forward = Block.forward

    def block_forward(self, x, embeddings, rotation):
        y = forward(self, x + embeddings, rotation, None)
        return y, y.mean()

    def trunk_forward(self, x, cache=None, document_positions=None):
        embeddings = x
        rotation = self.rope(0, x.shape[1], x.shape[1])
        for block in self.blocks:
            x, _ = block(x, embeddings, rotation)
        return self.ln_f(x)

    monkeypatch.setattr(Block, "forward", block_forward)
    monkeypatch.setattr(Trunk, "forward", trunk_forward)
    model = small_model("softmax.py", f"--data_dir={shards}", "--val_tokens=256").float()
    run = saved_run(tmp_path / "run", model)
    call(eval_length, run, *LENGTHS, "--rope=none")
    result, control = measured_losses(run)
    assert abs(control["loss"][1] - result["loss"][1]) > 1e-3


WIDER_THAN_LIMIT = [row for row in ROWS if row != "swa.py"]


@pytest.mark.parametrize("case", [*WIDER_THAN_LIMIT, "swa.py --window=64", "t6.py"])
def test_every_config_keeps_to_a_limit(case, monkeypatch):
    model = small_model(case).float()
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        check_windows(model, cpu, dtype)
    limit_windows(model, 16)
    assert largest_window(model) == 16
    monkeypatch.setattr(windows, "limit_windows", lambda model, window: None)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UserError, match="more than a window shows them"):
            check_windows(model, cpu, dtype)
