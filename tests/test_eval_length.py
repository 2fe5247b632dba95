"""Loss at lengths beyond the training length."""

import json
import shutil

import matplotlib.image
import numpy as np
import pytest
import torch

from data.loader import sampled_batches
from data.shards import read_meta, read_shard, write_meta
from model import GPT
from runtime import checkpoint
from scripts import eval_length


def direct_losses(run, shards, length, scaling="none", **scale):
    """Loss of each of the first 256 validation tokens in windows of this length: [windows, L]."""
    model = GPT(checkpoint.read_config(run)).eval().scale_rope(scaling, **scale)
    checkpoint.load_weights(model, run)
    tokens = torch.from_numpy(read_shard(shards / "text_val_000000.bin")[:257].astype(np.int64))
    rows = []
    for start in range(0, 256 // length * length, length):
        logits = model(tokens[None, start : start + length])[0].detach().double()
        targets = tokens[start + 1 : start + length + 1]
        rows.append(-logits.log_softmax(-1)[range(length), targets])
    return torch.stack(rows)


def test_eval_length_is_the_mean_loss_over_the_same_tokens(train, call, shards, capsys):
    run = train("run", "configs/lssar_p15.py")
    call(eval_length, run, "--lengths", "16,32,128", "--rope", "dynamic_ntk")
    (result,) = json.loads((run / "eval_length.json").read_text())
    assert result["variant"] == "lssar_p15" and result["rope"] == "dynamic_ntk"
    assert result["lengths"] == [16, 32, 128] and result["tokens"] == 256
    for length, loss in zip(result["lengths"], result["loss"], strict=True):
        base = 10000 * max(1, length / 16) ** (16 / 14)
        direct = direct_losses(run, shards, length, theta=base)
        assert direct.numel() == 256
        assert loss == pytest.approx(direct.mean().item(), rel=1e-5)
    printed = capsys.readouterr().out
    assert all(f"{loss:.4f}" in printed for loss in result["loss"])
    assert matplotlib.image.imread(run / "eval_length.png").std() > 0


def test_eval_length_of_several_runs_draws_one_picture(train, call, tmp_path, monkeypatch, capsys):
    runs = [train(name, f"configs/{name}.py", "--max_iters=1") for name in ("softmax", "lssa")]
    call(eval_length, *runs, "--lengths", "16,64")
    assert (tmp_path / "loss_by_length_softmax_lssa.png").exists()
    printed = capsys.readouterr().out
    assert "softmax" in printed and "lssa" in printed
    # the same question again is answered from the file, another one is not
    monkeypatch.setattr(eval_length, "position_losses", None)
    call(eval_length, *runs, "--lengths", "64")
    with pytest.raises(TypeError):
        call(eval_length, *runs, "--lengths", "16,64", "--rope", "yarn")


def test_eval_length_adds_scalings_and_lengths(train, call, shards, monkeypatch, capsys):
    run = train("run", "configs/ssmax.py")
    file, asked = run / "eval_length.json", ("--rope", "none,ntk:2,ntk,yarn")
    call(eval_length, run, *asked, "--lengths", "32")
    results = json.loads(file.read_text())
    assert [(r["rope"], r["rope_factor"]) for r in results] == [
        ("none", None), ("ntk", 2), ("ntk", None), ("yarn", None)
    ]  # fmt: skip
    for result in results:
        direct = direct_losses(run, shards, 32, result["rope"], factor=result["rope_factor"])
        assert result["loss"] == [pytest.approx(direct.mean().item(), rel=1e-5)]
    assert len({result["loss"][0] for result in results[1:]}) == 2  # ntk is ntk:2 at 32
    printed = capsys.readouterr().out
    for result, name in zip(results, ("none", "ntk:2", "ntk", "yarn"), strict=True):
        assert f"ssmax  {name} " in printed and f"{result['loss'][0]:.4f}" in printed

    # another length is added to the same measurement, and only it is measured; a stopped command
    # has kept what it had
    measure, lengths = eval_length.position_losses, []

    def stops(run, batches):
        means = measure(run, batches)
        if len(means) == 128:
            raise KeyboardInterrupt
        lengths.append(len(means))
        return means

    monkeypatch.setattr(eval_length, "position_losses", stops)
    with pytest.raises(SystemExit):
        call(eval_length, run, "--rope", "yarn", "--lengths", "64,32,16,128")
    again = json.loads(file.read_text())
    assert lengths == [64, 16] and again[:3] == results[:3]
    assert again[3]["lengths"] == [16, 32, 64] and again[3]["loss"][1] == results[3]["loss"][0]
    direct = direct_losses(run, shards, 16, "yarn").mean().item()
    assert again[3]["loss"][0] == pytest.approx(direct, rel=1e-5)
    # other tokens are another measurement
    call(eval_length, run, "--rope", "yarn", "--lengths", "32", "--tokens", "32")
    assert [r["tokens"] for r in json.loads(file.read_text())] == [256] * 4 + [32]


def test_eval_length_by_position(train, call, shards, capsys):
    run = train("run", "configs/sigmoid.py")
    call(eval_length, run, "--lengths", "16,64", "--rope", "linear,none", "--rope_theta", "5e5")
    before = json.loads((run / "eval_length.json").read_text())
    assert before[0]["loss_by_position"] == {}
    call(
        eval_length,
        run,
        "--lengths",
        "16,64",
        "--rope",
        "none",
        "--rope_theta",
        "5e5",
        "--per_position",
    )
    results = json.loads((run / "eval_length.json").read_text())
    assert results[0] == before[0] and results[1]["loss"] == before[1]["loss"]
    assert list(results[1]["loss_by_position"]) == ["64"]
    means = results[1]["loss_by_position"]["64"]
    direct = direct_losses(run, shards, 64, theta=5e5).mean(0)
    assert means == pytest.approx(direct.tolist(), rel=1e-5)
    assert sum(means) / 64 == pytest.approx(results[1]["loss"][1], rel=1e-12)
    assert matplotlib.image.imread(run / "loss_by_position.png").std() > 0


def test_eval_length_of_random_sequences(train, call, shards, monkeypatch, capsys):
    run = train("run", "configs/softmax.py")
    asked = ("--lengths", "48", "--rope", "none")
    call(eval_length, run, *asked)
    call(eval_length, run, *asked, "--samples", "7", "--sample_seed", "3", "--per_position")
    in_order, sampled = json.loads((run / "eval_length.json").read_text())
    assert (in_order["samples"], in_order["tokens"]) == (None, 240)
    assert (sampled["samples"], sampled["sample_seed"], sampled["tokens"]) == (7, 3, 7 * 48)
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    x, y = next(sampled_batches(shards, 48, 7, seed=3, batch_size=7))
    means = model.token_losses(x, y).mean(0)
    assert sampled["loss_by_position"]["48"] == pytest.approx(means.tolist(), rel=1e-5)
    # as many as the 600 tokens have side by side; the same again is not measured
    call(eval_length, run, *asked, "--samples", "100000")
    assert json.loads((run / "eval_length.json").read_text())[2]["samples"] == 12
    monkeypatch.setattr(eval_length, "position_losses", None)
    call(eval_length, run, *asked, "--samples", "100001")


def test_smoothed_is_a_mean_over_neighbours():
    values = torch.rand(400, dtype=torch.float64).tolist()
    smooth = eval_length.smoothed(values)
    for i in (0, 14, 15, 99, 379, 399):  # position i + 1
        half = (i + 1) // 16
        near = values[i - half : i + half + 1]
        assert smooth[i] == sum(near) / len(near)  # exactly: tables of the papers have these
    assert smooth[0] == values[0] and len(smooth) == 400


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "16,x"], "16,x"),
        (["--lengths", "0"], "positive"),
        (["--lengths", "16,1024"], "1024"),
        (["--tokens", "0"], "--tokens 0"),
        (["--samples", "9"], "one length, not 16,32,64,128,256"),
        (["--samples", "9", "--tokens", "9"], "not allowed with"),
        (["--data_dir", "nowhere"], "nowhere"),
        (["--checkpoint", "best", "--device", "gpu"], "gpu"),
        (["--rope", "none,yern"], "'yern'"),
        (["--rope", "ntk:x"], "'x'"),
        (["--rope", "ntk:0.5"], "0.5"),
        (["--rope", "linear:inf"], "factor = inf must be"),
        (["--rope", "ntk:1e300"], "factor = 1e+300 must be"),
        (["--rope_theta", "inf"], "theta = inf must be"),
        (["--rope_theta", "nan"], "theta = nan must be"),
        (["--rope", "none,yarn,none"], "distinct"),
    ],
)
def test_eval_length_refuses(train, call, capsys, arguments, message):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(eval_length, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (run / "eval_length.json").exists()


def test_eval_length_refuses_before_it_measures(train, call, shards, tmp_path, capsys):
    """What is wrong with any of the runs, before the first of them is measured."""
    run, bad = train("run", "--max_iters=1"), tmp_path / "bad"
    bad.mkdir()

    def refused(message, *arguments):
        with pytest.raises(SystemExit) as stop:
            call(eval_length, run, *arguments, "--lengths", "16")
        assert stop.value.code == 2 and message in capsys.readouterr().err
        assert not (run / "eval_length.json").exists()

    shutil.copy(run / "config.json", bad)
    refused(f"{bad}: no checkpoint in it", bad)
    for path in (run / "checkpoints.json", *run.glob("*.pt")):
        shutil.copy(path, bad)
    (bad / "eval_length.json").write_text('{"loss": 1}')
    refused("no list of measurements", bad)
    assert (bad / "eval_length.json").read_text() == '{"loss": 1}'
    other = shutil.copytree(shards, tmp_path / "other")
    write_meta(other, read_meta(other) | {"tokenizer": "gpt2"})
    refused("made with tokenizer 'gpt2'", "--data_dir", other)
