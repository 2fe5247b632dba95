"""Loss at lengths beyond the training length."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config import Config
from data.shards import read_shard, write_shard
from layers import selfcheck
from layers.build import build_model
from runtime import checkpoint, run_folder
from scripts import attention_maps, copying, eval_length, needle
from scripts.common.validation import checked_tokens, stretches
from tests.helpers import measured_losses, not_blank, reverse_shards, saved_run, small_config


@pytest.fixture(scope="module")
def save_untrained(shards, tmp_path_factory):
    """Save an untrained model with a training length of 16; returns its folder."""

    def save(case, *more):
        torch.manual_seed(0)
        config = small_config(case, f"--data_dir={shards}", "--val_tokens=256", *more)
        folder = tmp_path_factory.mktemp("runs") / case.removesuffix(".py")
        return saved_run(folder, build_model(config))

    return save


def first_tokens(shards):
    """The first 256 validation tokens and the one that follows."""
    shard = read_shard(shards / "text_val_000000.bin")
    return torch.from_numpy(shard[:257].astype(np.int64))


def direct_losses(run, shards, length, scaling="none", changes=None, **scale):
    """Loss of each of the first 256 validation tokens in windows of this length: [windows, L]."""
    config = run_folder.read_config(run).replace(**changes or {})
    model = build_model(config).eval().scale_rope(scaling, **scale)
    checkpoint.load_weights(model, checkpoint.find(run))
    tokens = first_tokens(shards)
    windows = []
    for number in range(256 // length):
        start = number * length
        x = tokens[start : start + length]
        targets = tokens[start + 1 : start + length + 1]
        logits = model(x[None])[0].detach().double()
        losses = F.cross_entropy(logits, targets, reduction="none")
        windows.append(losses)
    return torch.stack(windows)


def direct_loss(*arguments, **settings):
    """The mean of `direct_losses`, which a measured loss equals up to rounding."""
    losses = direct_losses(*arguments, **settings)
    return pytest.approx(losses.mean().item(), rel=1e-5)


def test_eval_length_is_the_mean_loss_over_the_same_tokens(save_untrained, call, shards, capsys):
    run = save_untrained("lssar_p15.py")
    call(eval_length, run, "--lengths", "128,16,32", "--rope", "dynamic_ntk", "--tokens=256")
    result, control = measured_losses(run)
    assert result["variant"] == "lssar_p15"
    assert result["rope"] == "dynamic_ntk"
    assert result["lengths"] == [16, 32, 128]
    assert result["tokens"] == 256
    for length, loss in zip(result["lengths"], result["loss"], strict=True):
        base = 10000 * max(1, length / 16) ** (8 / 6)
        losses = direct_losses(run, shards, length, theta=base)
        assert losses.numel() == 256
        assert loss == pytest.approx(losses.mean().item(), rel=1e-5)
        # over two stretches, as long as the longest window
        by_stretch = losses.view(2, 128).mean(1)
        part = result["parts"][f"{length} tokens"]
        assert part["by_stretch"] == pytest.approx(by_stretch.tolist(), abs=1e-5)
        error = (by_stretch.std() / 2**0.5).item()
        assert part["standard_error"] == pytest.approx(error, rel=1e-3)
    # beside it the same weights in a window of the training length, plain RoPE
    assert control["window"] == 16
    assert control["rope"] == "none"
    assert control["lengths"] == [16, 32, 128]
    for length, loss in zip(control["lengths"], control["loss"], strict=True):
        assert loss == direct_loss(run, shards, length, changes={"window": 16})
    better_control = min(control["loss"][0], control["loss"][-1])
    gain = better_control - result["loss"][-1]
    assert f"{gain:+.4f}" in capsys.readouterr().out
    assert not_blank(run / "loss_by_length.png")


@pytest.fixture
def measured(monkeypatch):
    """The lengths that are measured from now on; the length 128 stops the command."""
    measure = eval_length.mean_losses
    lengths = []

    def recorded(run, batches):
        means = measure(run, batches)
        by_position, _ = means
        if len(by_position) == 128:
            raise KeyboardInterrupt
        lengths.append(len(by_position))
        return means

    monkeypatch.setattr(eval_length, "mean_losses", recorded)
    return lengths


@pytest.mark.usefixtures("pictures")
def test_nothing_is_measured_twice(save_untrained, call, shards, measured, capsys):
    run = save_untrained("softmax.py")
    for options, lengths in (
        ([], [16, 32, 16, 32]),  # and the control
        ([], []),
        (["--rope=none"], [16, 32]),
        (["--rope=none", "--window=64"], [16, 32]),
        (["--rope=none", "--rope_theta=500"], [16, 32]),
        (["--rope=ntk", "--rope_factor=2", "--no_control"], [16, 32]),
        (["--whole_documents", "--no_control"], [16, 32]),
        (["--rope=yarn", "--lengths=64,32"], [32, 64, 64]),  # and the control
    ):
        capsys.readouterr()
        call(eval_length, run, "--lengths=16,32", *options)
        assert measured == lengths, options
        measured.clear()
        printed = capsys.readouterr().out
        has_control = "--no_control" not in options
        assert ("gain:" in printed) == has_control
        is_without_t = "--lengths=64,32" in options  # T is 16
        assert ("the gain is over the sliding window alone" in printed) == is_without_t
    measurements = measured_losses(run)
    plain, longer_window, other_base, ntk, dynamic_ntk, _, control = measurements
    for measurement in (longer_window, dynamic_ntk, control):
        # at 16 tokens nothing is scaled or hidden
        assert measurement["loss"][0] == pytest.approx(plain["loss"][0], rel=1e-6)
    assert plain["loss"][1] == direct_loss(run, shards, 32)
    assert other_base["loss"][1] == direct_loss(run, shards, 32, theta=500)
    assert ntk["loss"][1] == direct_loss(run, shards, 32, "ntk", factor=2)
    # all of these tokens are one document
    chunks = dynamic_ntk["parts"]
    assert chunks["32 tokens in 32 of whole documents"] == chunks["32 tokens"]
    # a stopped command has stored what it had; other tokens are another measurement
    with pytest.raises(SystemExit):
        call(eval_length, run, "--rope=yarn", "--lengths=16,32,128")
    stopped = measured_losses(run)[-1]
    assert sorted(stopped["lengths"]) == [16, 32, 64]
    call(eval_length, run, "--rope=yarn", "--lengths=32", "--tokens=32")
    tokens = [measurement["tokens"] for measurement in measured_losses(run)]
    assert tokens == [256] * 7 + [32] * 2


@pytest.mark.usefixtures("pictures")
def test_runs_trained_on_other_data_in_one_folder_are_not_measured_together(
    train, call, shards, tmp_path, refused, capsys
):
    """And each of them is measured with a warning once its shards have changed."""
    data = shutil.copytree(shards, tmp_path / "data")
    first = train("first", "--max_iters=0", f"--data_dir={data}")
    warning = f"was trained on training shards that differ from {data}"
    call(eval_length, first, "--lengths=16")
    assert "warning" not in capsys.readouterr().err
    other = shutil.copytree(shards, tmp_path / "other")
    reverse_shards(other)
    call(eval_length, first, "--lengths=16", "--tokens=32", f"--data_dir={other}")
    assert "warning" not in capsys.readouterr().err  # another text on purpose
    reverse_shards(data)
    call(eval_length, first, "--lengths=16", "--tokens=64")
    assert warning in capsys.readouterr().err
    second = train("second", "--max_iters=0", f"--data_dir={data}")
    arguments = (first, second, "--lengths=16")
    says = f"{second} was trained on training shards that differ from {first}"
    refused(call, eval_length, *arguments, says=says)
    call(eval_length, *arguments, f"--data_dir={data}")


@pytest.mark.parametrize("window, gain, error", [([2.2, 2.6], -0.3, 0.25), ([2.2, 2.1], -0.4, 0.5)])
def test_the_gain_is_over_the_better_of_two_controls(window, gain, error):
    """Without positions a window may harm a model; reading T tokens at a time never does."""

    def parts(losses, steps):
        """Two stretches, whose losses lie `step` below and above their mean."""
        return {
            f"{length} tokens": {"length": length, "loss": loss, "by_stretch": [loss - d, loss + d]}
            for length, loss, d in zip((16, 64), losses, steps, strict=True)
        }

    result = {
        "trained_length": 16,
        "parts": parts([2.2, 2.5], (0.5, 0.75)),
        "control": {"parts": parts(window, (0.5, 0.25))},
    }
    assert eval_length.gain(result) == pytest.approx(gain)
    # the stretches differ by 0.75 - 0.5 or 0.75 - 0.25 from their mean; of two, that is the error
    assert eval_length.gain_error(result) == pytest.approx(error)
    result["parts"]["64 tokens"]["by_stretch"] = [2.5, 2.5, 2.5, 2.5]  # of another command
    assert eval_length.gain_error(result) is None
    assert eval_length.gain({"loss": [2.2]}) is None


@pytest.mark.usefixtures("pictures")
def test_a_measurement_of_other_text_or_weights_is_not_taken(
    save_untrained, call, shards, tmp_path
):
    shards = shutil.copytree(shards, tmp_path / "shards")
    run = save_untrained("softmax.py", f"--data_dir={shards}")
    call(eval_length, run, "--lengths", "16")
    reverse_shards(shards, "val")
    for cached in (checked_tokens, stretches):  # another process
        cached.cache_clear()
    call(eval_length, run, "--lengths", "16")
    old, new = measured_losses(run)
    assert old["data_dir"] == new["data_dir"]
    assert old["loss"] != new["loss"]
    assert new["loss"] == [direct_loss(run, shards, 16)]
    # another run, which differs in its weights alone
    model = build_model(run_folder.read_config(run))
    other = saved_run(tmp_path / "other", model)
    shutil.copy(run / "eval_length.json", other)
    call(eval_length, other, "--lengths", "16")
    *copied, measured = measured_losses(other)
    assert copied == [old, new]
    assert measured["sha256"] == checkpoint.find(other).id["sha256"]


def test_eval_length_by_position(save_untrained, call, shards):
    run = save_untrained("sigmoid.py")
    call(eval_length, run, "--lengths=16,64", "--rope=none", "--rope_theta=5e5", "--per_position")
    plain, windowed = json.loads((run / "eval_length.json").read_text())
    for result, settings in (
        (windowed, {"changes": {"window": 16}}),
        (plain, {"theta": 5e5}),
    ):
        short, long = result["parts"].values()
        by_position = long["loss_by_position"]
        direct = direct_losses(run, shards, 64, **settings).mean(0)
        assert by_position == pytest.approx(direct.tolist(), rel=1e-5)
        assert sum(by_position) / 64 == pytest.approx(long["loss"], rel=1e-12)
        assert "loss_by_position" not in short
    assert not_blank(run / "loss_by_position.png")


@pytest.mark.usefixtures("pictures")
def test_a_run_with_document_mask_is_measured_apart_and_joined(
    save_untrained, call, shards, tmp_path, capsys
):
    data = shutil.copytree(shards, tmp_path / "data")
    (path,) = data.glob("*_val_*.bin")
    tokens = read_shard(path)
    tokens[::11] = 256  # end-of-text
    write_shard(path, tokens)
    masked = save_untrained("ssmax.py", f"--data_dir={data}", "--document_mask")
    plain = save_untrained("softmax.py", f"--data_dir={data}")
    options = ("--lengths=16,64", "--per_position")
    call(eval_length, masked, plain, *options, "--documents=trained")
    printed = capsys.readouterr().out
    assert "  joined" not in printed
    assert "joined: the same weights" not in printed
    assert "no document begins" not in printed
    call(eval_length, masked, plain, *options)
    measurements = json.loads((masked / "eval_length.json").read_text())
    # the control has a window
    control, result = sorted(measurements, key=lambda measurement: measurement["window"] or 99)
    parts = result["parts"]
    assert list(control["parts"]) == ["16 tokens apart", "64 tokens apart by position"]
    result_of_plain = measured_losses(plain)[0]
    assert list(result_of_plain["parts"]) == ["16 tokens", "64 tokens by position"]
    for documents in ("apart", "joined"):
        changes = {"document_mask": documents == "apart"}
        short = parts[f"16 tokens {documents}"]
        assert short["documents"] == documents
        assert short["loss"] == direct_loss(masked, data, 16, "dynamic_ntk", changes)
        long = parts[f"64 tokens {documents} by position"]
        assert long["documents"] == documents
        assert long["loss"] == direct_loss(masked, data, 64, "dynamic_ntk", changes)
        direct = direct_losses(masked, data, 64, "dynamic_ntk", changes).mean(0)
        assert long["loss_by_position"] == pytest.approx(direct.tolist(), rel=1e-5)
    printed = re.sub("(?<=[a-z0-9]) +", " ", capsys.readouterr().out)
    for says in (
        f"  joined {parts['16 tokens joined']['loss']:.4f}",
        "apart, with the document mask as in training: ssmax, document_mask True\njoined: ",
        "softmax, document_mask False: trained and measured without the mask",
    ):
        assert says in printed
    result |= eval_length.LossByLength().summarise(parts)
    for by_position in (False, True):
        figure = eval_length.plot({"a": result}, "", by_position)
        (legend,) = figure.legends
        labels = [text.get_text() for text in legend.texts]
        assert labels == ["a", "a, joined"]
    call(eval_length, masked, "--lengths=5", "--whole_documents")
    assert "apart" not in capsys.readouterr().out

    call(eval_length, plain, *options, "--documents=both")
    # the control has fewer parts
    _, result = sorted(measured_losses(plain), key=lambda measured: len(measured["parts"]))
    parts = result["parts"]
    for length, suffix in ((16, ""), (64, " by position")):
        loss = parts[f"{length} tokens apart{suffix}"]["loss"]
        assert loss == direct_loss(plain, data, length, "dynamic_ntk", {"document_mask": True})
        assert loss != parts[f"{length} tokens{suffix}"]["loss"]
    printed = capsys.readouterr().out
    assert "apart: the same weights, with the document mask\n" in printed
    assert "as in training" not in printed

    tokens[:] = 7
    write_shard(path, tokens)
    call(eval_length, masked, *options)
    assert "no document begins in this text" in capsys.readouterr().out


def test_kernels_are_checked_within_documents_before_they_measure_apart(
    save_untrained, call, refused, joining_kernels
):
    """Also of a run that was trained without the mask."""
    run = save_untrained("lssa.py")
    options = ("--lengths=16", "--tokens=32", "--attention_impl=triton", "--documents=both")
    keys = min(selfcheck.ODD, selfcheck.EVEN)
    says = f"the kernels fail: output with {keys} keys differs"
    refused(call, eval_length, run, *options, says=says)


@pytest.mark.usefixtures("pictures")
def test_other_attention_than_in_training(save_untrained, call, shards, capsys):
    run = save_untrained("lssa.py", "--window=4")
    call(eval_length, run, "--lengths=16,64", "--p=15")
    call(eval_length, run, "--lengths=16,64", "--window=3", "--p=15")
    # the control of a run that was trained with a shorter window is the run itself
    result, limited = measured_losses(run)
    assert result["variant"] == "lssa"
    assert result["p"] == 15
    assert result["window"] == 4
    assert result["rope"] == "none"
    assert limited["window"] == 3
    for measurement in (result, limited):
        changes = {"window": measurement["window"], "p": 15.0}
        loss_at_64 = measurement["loss"][1]
        assert loss_at_64 == direct_loss(run, shards, 64, measurement["rope"], changes)
    # a window above the model's hides nothing: it is measured already
    call(eval_length, run, "--lengths=16,64", "--window=8", "--p=15")
    assert len(measured_losses(run)) == 2
    # a run without RoPE has none to scale; another variant is another measurement
    run = save_untrained("softmax.py", "--positions=none")
    call(eval_length, run, "--lengths=16,64", "--attention=adaptive_temperature")
    result, *_ = measured_losses(run)
    assert result["variant"] == "softmax as adaptive_temperature"
    assert result["rope"] == "none"
    title = "(nats per token), attention adaptive_temperature, rope none\n"
    assert title in capsys.readouterr().out
    changes = {"attention": "adaptive_temperature"}
    assert result["loss"][1] == direct_loss(run, shards, 64, changes=changes)


@pytest.mark.usefixtures("pictures")
def test_scores_that_grow_are_another_measurement(save_untrained, call, shards, measured, capsys):
    run = save_untrained("softmax.py", "--positions=none")
    call(eval_length, run, "--lengths=16,64", "--no_control")
    call(eval_length, run, "--lengths=16,64", "--log_base=5")
    assert measured == [16, 64] * 3
    assert "rope none, log_base 5\n" in capsys.readouterr().out
    call(eval_length, run, "--lengths=16,64", "--no_control")
    assert len(measured) == 6
    plain, scaled, control = measured_losses(run)
    model = build_model(run_folder.read_config(run)).eval().scale_scores(5.0)
    checkpoint.load_weights(model, checkpoint.find(run))
    tokens = first_tokens(shards)
    x = tokens[:-1].view(4, 64)
    y = tokens[1:].view(4, 64)
    loss = model(x, y).item()
    assert scaled["loss"][1] == pytest.approx(loss, rel=1e-5)
    assert scaled["loss"][1] != plain["loss"][1]
    assert control["log_base"] is None
    assert control["loss"][1] == direct_loss(run, shards, 64, changes={"window": 16})


@pytest.mark.usefixtures("pictures")
def test_runs_of_a_table_have_the_same_text(save_untrained, call, shards, tmp_path, refused):
    run = save_untrained("softmax.py")
    longer = save_untrained(
        "lssa.py",
        "--block_size=32",
        "--total_batch_size=32",
        "--val_tokens=128",
    )
    copy = shutil.copytree(shards, tmp_path / "copy")
    other = save_untrained("softmax.py", f"--data_dir={copy}")
    for command in (eval_length, copying, attention_maps, needle):
        refused(call, command, run, other, says=[str(tmp_path / "copy"), "--data_dir DIR"])
    # the same tokens for all
    call(eval_length, run, longer, "--lengths", "16,64")
    for path in (run, longer):
        assert measured_losses(path)[0]["tokens"] == 128


def test_a_loss_that_is_not_finite_has_no_standard_error():
    errors = [math.nan, 0.25, None, math.inf, 0.5]
    assert eval_length.error_range(errors) == "0.2500 to 0.5000"
    assert eval_length.error_range([math.nan]) == ""


def test_a_small_model_is_measured_on_fewer_tokens():
    large = Config()  # 85M weights in blocks
    small = Config(n_layer=4, n_head=4, n_embd=128)
    assert eval_length.default_tokens(large, (128, 16384)) == 3538944
    assert eval_length.default_tokens(small, (128, 2048)) == 32768
    assert eval_length.default_tokens(small, (128, 8192)) == 65536  # at least 8 windows


def test_smoothed_is_a_mean_over_neighbours():
    values = torch.rand(400, dtype=torch.float64).tolist()
    smooth = eval_length.smoothed(values)
    assert len(smooth) == 400
    for i in (0, 14, 15, 99, 379, 399):  # position i + 1
        half = (i + 1) // 16
        near = values[i - half : i + half + 1]
        assert smooth[i] == sum(near) / len(near)  # exactly: tables of the papers have these


def test_refusals_before_anything_is_measured(save_untrained, call, refused):
    run = save_untrained("softmax.py", "--positions=none")
    bad = save_untrained("softmax.py")
    for option in ("--rope=yarn", "--rope_theta=500"):
        says = f"{option.split('=')[0]}: {run} has positions = 'none': no RoPE"
        refused(call, eval_length, run, option, says=says)
    refused(call, eval_length, bad, "--rope_factor=2", says="--rope_factor 2 needs --rope")
    refused(call, eval_length, run, "--log_base=1", says="--log_base = 1.0 must be above 1")
    for base in ("nan", "inf"):
        refused(
            call,
            eval_length,
            run,
            f"--log_base={base}",
            says="must be a number between -2**63 and 2**63",
        )
    # what is wrong with any of the runs, before the first of them is measured
    damaged = bad / "eval_length.json"
    damaged.write_text('{"loss": 1}')
    refused(call, eval_length, run, bad, "--lengths=16", says="eval_length.json: damaged")
    assert damaged.read_text() == '{"loss": 1}'
    assert not (run / "eval_length.json").exists()
