"""Loss at lengths beyond the training length."""

import json
import shutil

import matplotlib.image
import numpy as np
import pytest
import torch

from data.loader import sampled_batches
from data.shards import read_meta, read_shard, write_meta, write_shard
from data.tokenizer import identify
from model import GPT
from runtime import checkpoint
from scripts import eval_length
from scripts.reproduce.tables import EXPERIMENTS
from tests.helpers import saved_run, set_meta, small_config
from tests.runs import refused


def direct_losses(run, shards, length, scaling="none", changes=None, **scale):
    """Loss of each of the first 256 validation tokens in windows of this length: [windows, L]."""
    config = checkpoint.read_config(run).replace(**changes or {})
    model = GPT(config).eval().scale_rope(scaling, **scale)
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
    result, control = json.loads((run / "eval_length.json").read_text())
    assert result["variant"] == "lssar_p15" and result["rope"] == "dynamic_ntk"
    assert result["window"] is None and result["p"] == 15
    assert result["lengths"] == [16, 32, 128] and result["tokens"] == 256
    for length, loss in zip(result["lengths"], result["loss"], strict=True):
        base = 10000 * max(1, length / 16) ** (16 / 14)
        direct = direct_losses(run, shards, length, theta=base)
        assert direct.numel() == 256
        assert loss == pytest.approx(direct.mean().item(), rel=1e-5)
    # beside it the same weights in a window of the training length, plain RoPE
    assert (control["window"], control["rope"], control["lengths"]) == (16, "none", [16, 32, 128])
    for length, loss in zip(control["lengths"], control["loss"], strict=True):
        direct = direct_losses(run, shards, length, changes={"window": 16})
        assert loss == pytest.approx(direct.mean().item(), rel=1e-5)
    printed = capsys.readouterr().out
    assert all(f"{loss:.4f}" in printed for loss in result["loss"] + control["loss"])
    assert f"{control['loss'][-1] - result['loss'][-1]:+.4f}" in printed
    assert f"latest checkpoint, step 6, {result['sha256'][:8]}; trained at 16; 256 tok" in printed
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
    assert [(r["rope"], r["rope_factor"], r["window"]) for r in results] == [
        ("none", None, None), ("ntk", 2, None), ("ntk", None, None), ("yarn", None, None),
        ("none", None, 16),
    ]  # fmt: skip
    *results, _ = results
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

    def stops(run, batches, restart):
        means = measure(run, batches, restart)
        if len(means) == 128:
            raise KeyboardInterrupt
        lengths.append(len(means))
        return means

    monkeypatch.setattr(eval_length, "position_losses", stops)
    with pytest.raises(SystemExit):
        call(eval_length, run, "--rope", "yarn", "--lengths", "64,32,16,128")
    again = json.loads(file.read_text())
    assert lengths == [16, 64] and again[:3] == results[:3] and len(again) == 5
    assert again[3]["lengths"] == [16, 32, 64] and again[3]["loss"][1] == results[3]["loss"][0]
    direct = direct_losses(run, shards, 16, "yarn").mean().item()
    assert again[3]["loss"][0] == pytest.approx(direct, rel=1e-5)
    # other tokens are another measurement
    call(eval_length, run, "--rope", "yarn", "--lengths", "32", "--tokens", "32")
    assert [r["tokens"] for r in json.loads(file.read_text())] == [256] * 5 + [32] * 2
    # lengths may be given in any order: the gain is that of the longest
    capsys.readouterr()
    for order in ("16,64", "64,16"):
        call(eval_length, run, "--lengths", order)
    first, second = capsys.readouterr().out.split("gain from context, at")[:2]
    assert first.split("\n")[-3:-1] == second.split("\n")[-3:-1]


@pytest.mark.parametrize("window, gain", [([2.2, 2.6], -0.3), ([2.2, 2.1], -0.4)])
def test_the_gain_is_over_the_better_of_two_controls(window, gain):
    """Without positions a sliding window may harm a model; independent windows never do."""
    row = {"trained_length": 16, "lengths": [16, 64], "loss": [2.2, 2.5]}
    control = {"lengths": [16, 64], "loss": window, "trained_length": 16}
    run = eval_length.MeasuredRun("softmax", [row], control)
    assert run.gain(row) == pytest.approx(gain)
    values = EXPERIMENTS["p_sweep"].measurement.values
    config = small_config("softmax.py", "--block_size=16")
    lengths = [16, 32, 64, 128, 256]
    losses = {"lengths": lengths, "loss": [2.2, 2.3, 2.3, 2.4, 2.5]}
    other = {"lengths": lengths, "loss": [window[0], 2.2, 2.2, 2.2, window[1]]}
    assert values(losses | {"control": other}, config)[-1] == pytest.approx(gain)


def test_other_text_in_the_same_folder_is_measured_anew(train, call, shards, tmp_path):
    shards = shutil.copytree(shards, tmp_path / "shards")
    run = train("run", "--max_iters=1", f"--data_dir={shards}")
    call(eval_length, run, "--lengths", "16")
    (path,) = shards.glob("*_val_*.bin")
    write_shard(path, read_shard(path)[::-1].copy())
    call(eval_length, run, "--lengths", "16")
    old, new = json.loads((run / "eval_length.json").read_text())
    assert old["data_dir"] == new["data_dir"] and old["loss"] != new["loss"]
    assert new["loss"] == [pytest.approx(direct_losses(run, shards, 16).mean().item(), rel=1e-5)]


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
    windowed = results[2]["loss_by_position"]["64"]
    direct = direct_losses(run, shards, 64, changes={"window": 16}).mean(0)
    assert results[2]["window"] == 16 and windowed == pytest.approx(direct.tolist(), rel=1e-5)
    means = results[1]["loss_by_position"]["64"]
    direct = direct_losses(run, shards, 64, theta=5e5).mean(0)
    assert means == pytest.approx(direct.tolist(), rel=1e-5)
    assert sum(means) / 64 == pytest.approx(results[1]["loss"][1], rel=1e-12)
    assert matplotlib.image.imread(run / "loss_by_position.png").std() > 0


def test_other_attention_than_in_training(train, call, shards, capsys):
    run = train("run", "configs/lssa.py")
    call(eval_length, run, "--lengths", "16,64", "--window", "8", "--p", "15", "--restart")
    result, control, restarted = json.loads((run / "eval_length.json").read_text())
    assert (result["variant"], result["p"], result["window"]) == ("lssa", 15, 8)
    for one, changes in ((result, {"window": 8, "p": 15.0}), (control, {"window": 16, "p": 15.0})):
        for i, length in enumerate((16, 64)):
            ntk = {"scaling": one["rope"]}
            direct = direct_losses(run, shards, length, changes=changes, **ntk).mean().item()
            assert one["loss"][i] == pytest.approx(direct, rel=1e-5)
    # independent windows of the training length: the same at every length
    direct = direct_losses(run, shards, 16, changes={"p": 15.0}).mean().item()
    assert restarted["restart"] and restarted["loss"] == pytest.approx([direct] * 2, rel=1e-5)
    printed = capsys.readouterr().out
    assert "independent windows of 16" in printed and "dynamic_ntk, window 8, p 15" in printed
    # the window of a run that was trained with a shorter one stays
    run = train("windowed", "--window=4")
    call(eval_length, run, "--lengths", "16")
    (result, control) = json.loads((run / "eval_length.json").read_text())
    assert (result["window"], control["window"], control["rope"]) == (4, 4, "none")
    # another row of the table, and a run without RoPE, which has none to scale
    run = train("nope", "--positions=none")
    with pytest.raises(SystemExit):  # at once, not when its turn comes
        call(eval_length, run, "--lengths", "16,64", "--rope", "none,yarn")
    assert not (run / "eval_length.json").exists()
    call(eval_length, run, "--lengths", "16,64", "--attention", "adaptive_temperature")
    result, *_ = json.loads((run / "eval_length.json").read_text())
    assert (result["variant"], result["rope"]) == ("softmax as adaptive_temperature", "none")
    changes = {"attention": "adaptive_temperature"}
    direct = [direct_losses(run, shards, n, changes=changes).mean().item() for n in (16, 64)]
    assert result["loss"] == pytest.approx(direct, rel=1e-5)
    call(eval_length, run, "--lengths", "16,64")  # the run's own is another measurement
    assert len(json.loads((run / "eval_length.json").read_text())) > 2


def test_runs_that_cannot_be_compared(train, call, shards, tmp_path, capsys):
    run = train("run", "--max_iters=1")
    longer = train(
        "longer", "--max_iters=1", "--block_size=32", "--batch_size=4", "--val_tokens=128"
    )
    copy = shutil.copytree(shards, tmp_path / "copy")
    other = train("other", "--max_iters=1", f"--data_dir={copy}")
    with pytest.raises(SystemExit) as stop:
        call(eval_length, run, other)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"was trained on {copy}" in message and "--data_dir" in message
    # the same tokens for all, and no multiples where the training lengths differ
    call(eval_length, run, longer, "--lengths", "16,64")
    results = [json.loads((path / "eval_length.json").read_text())[0] for path in (run, longer)]
    assert [one["tokens"] for one in results] == [128, 128]
    assert "of the training length  " not in capsys.readouterr().out


def test_different_tokenizers_are_refused(text, call, tmp_path, capsys):
    paths = []
    for name, shared in text.items():
        config = small_config("softmax.py", f"--tokenizer={name}", f"--data_dir={shared}")
        paths.append(saved_run(tmp_path / name, GPT(config)))
    say = "losses per token of different tokenizers cannot be compared"
    refused(capsys, lambda: call(eval_length, *paths, "--lengths=4"), say)


def test_copies_of_one_tokenizers_file_are_one_tokenizer(call, words_file, tmp_path, capsys):
    """Each run has its own copy."""
    folders = [tmp_path / name for name in ("shards", "others")]
    for folder in folders:
        folder.mkdir()
        write_shard(folder / "text_val_000000.bin", np.resize(np.arange(5, dtype=np.uint16), 99))
        write_meta(folder, set_meta(identify(str(words_file))))
    paths = []
    for name, folder in (("one", folders[0]), ("two", folders[0]), ("other", folders[1])):
        config = small_config("softmax.py", f"--tokenizer={words_file}", f"--data_dir={folder}")
        paths.append(saved_run(tmp_path / name, GPT(config.replace(val_tokens=8))))
    one, two, other = paths
    call(eval_length, one, two, "--lengths=4")
    call(eval_length, one, two, "--lengths=4", "--samples=3")
    printed = capsys.readouterr().out
    assert printed.count("nats per token") == 2
    refused(capsys, lambda: call(eval_length, one, other, "--lengths=4"), "different text cannot")


def test_learned_positions_are_not_exceeded(shards, call, tmp_path, capsys):
    paths = []
    for name, case in (("learned", "softmax.py --positions=learned"), ("rope", "softmax.py")):
        paths.append(saved_run(tmp_path / name, GPT(small_config(case, f"--data_dir={shards}"))))
    for more in ("--lengths=16,32", "--lengths=32 --samples=2"):
        say = "a length of 32 is beyond its learned positions, which end at block_size = 16"
        refused(capsys, lambda more=more: call(eval_length, *paths[::-1], *more.split()), say)
    assert not [*tmp_path.glob("*/eval_length.json")]
    call(eval_length, *paths)
    for path in paths:
        (result,) = json.loads((path / "eval_length.json").read_text())
        assert result["lengths"] == [16]


def test_eval_length_of_random_sequences(train, call, shards, monkeypatch, capsys):
    run = train("run", "configs/softmax.py")
    asked = ("--lengths", "48", "--rope", "none")
    call(eval_length, run, *asked)
    call(eval_length, run, *asked, "--samples", "7", "--sample_seed", "3", "--per_position")
    in_order, _, sampled, windowed = json.loads((run / "eval_length.json").read_text())
    assert (in_order["samples"], in_order["tokens"]) == (None, 240)
    assert (sampled["samples"], sampled["sample_seed"], sampled["tokens"]) == (7, 3, 7 * 48)
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    x, y = next(sampled_batches(shards, 48, 7, seed=3, batch_size=7))
    means = model.token_losses(x, y).mean(0)
    assert sampled["loss_by_position"]["48"] == pytest.approx(means.tolist(), rel=1e-5)
    assert (windowed["samples"], windowed["window"]) == (7, 16)
    # as many as the 600 tokens have side by side; the same again is not measured
    call(eval_length, run, *asked, "--samples", "100000")
    assert json.loads((run / "eval_length.json").read_text())[4]["samples"] == 12
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
        (["--tokens", "9", "--samples", "8"], "--samples 8 and --tokens 9 exclude each other"),
        (["--window", "0"], "--window 0 must be at least 1"),
        (["--p", "0.5"], "p = 0.5 must be at least 1"),
        (["--attention", "lsar"], "attention = 'lsar'; did you mean 'lssar'?"),
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
