"""Attention maps, and the numbers of the attention sink."""

import json
import math

import matplotlib.image
import numpy as np
import pytest
import torch

import evaluation
from data.shards import read_shard
from data.tokenizer import get_tokenizer
from model import GPT
from runtime import checkpoint
from scripts import attention_maps
from scripts.attention_maps import TEXT, group_sums, row_numbers, summary
from scripts.common import runner
from scripts.common.runner import load_run
from tests.helpers import saved_run, small_config, small_model


def read(run):
    """The run's measurements; what JSON has not, such as NaN, is an error."""

    def refuse(name):
        raise ValueError(name)

    return json.loads((run / "attention_maps.json").read_text(), parse_constant=refuse)


def last_layer_softmax(run, ids):
    """Softmax weights [H, L, L] of the second layer for ids [L], in float64, from the formulas."""
    model = GPT(checkpoint.read_config(run)).double().eval()
    checkpoint.load_weights(model, run)
    first, last = model.trunk.blocks
    L, H = len(ids), model.config.n_head
    frequencies = (10000 * max(1, L / 16) ** (16 / 14)) ** -(torch.arange(8).double() / 8)
    turns = torch.polar(torch.ones(L, 8).double(), torch.arange(L)[:, None] * frequencies)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)

    def heads(block, x):
        for part in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1):
            yield part.view(L, H, -1).transpose(0, 1)  # [H, L, 16]

    def softmax(q, k):
        q, k = (torch.complex(*part.chunk(2, dim=-1)) * turns for part in (q, k))
        scores = (q @ k.mH).real / math.sqrt(16)
        return scores.masked_fill(hidden, -math.inf).softmax(-1)

    with torch.no_grad():
        x = model.wte(torch.tensor(ids))
        q, k, v = heads(first, x)
        x = x + first.attn.c_proj((softmax(q, k) @ v).transpose(0, 1).reshape(L, -1))
        x = x + first.mlp(first.ln_2(x))
        q, k, _ = heads(last, x)
        return softmax(q, k).numpy()


def expected(maps):
    """The numbers of maps [windows][H, L, L] of distributions, row by row: {name: [H][groups]}."""
    H, L, _ = maps[0].shape
    names = ("first_token", "entropy", "entropy_share", "zeros", "sum")
    rows = {
        name: [[[] for _ in range(math.ceil(math.log2(L)))] for _ in range(H)] for name in names
    }
    for A in maps:
        for h in range(H):
            for n in range(2, L + 1):
                a = A[h, n - 1, :n]
                entropy = -sum(w * math.log(w) for w in a if w > 0)
                values = (a[0], entropy, entropy / math.log(n), float((a == 0).mean()), 1.0)
                for name, value in zip(names, values, strict=True):
                    rows[name][h][math.ceil(math.log2(n)) - 1].append(value)
    return rows


def test_numbers_of_softmax_against_the_formulas(train, call, shards, capsys):
    run = train("run", "configs/softmax.py")
    call(attention_maps, run, "--text", TEXT[:40], "--lengths", "48,16", "--tokens", "100")
    results = read(run)
    assert [(r["length"], r["tokens"], r["text"]) for r in results] == [
        (40, 40, TEXT[:40]), (16, 96, None), (48, 96, None)
    ]  # fmt: skip
    assert [r["data_dir"] for r in results] == [None, str(shards), str(shards)]
    tokens = read_shard(shards / "text_val_000000.bin").astype(int).tolist()
    windows = (
        [get_tokenizer("bytes").encode(TEXT[:40])],
        [tokens[i : i + 16] for i in range(0, 96, 16)],
        [tokens[:48], tokens[48:96]],
    )
    printed = capsys.readouterr().out
    for result, ids in zip(results, windows, strict=True):
        assert result["layer"] == 1 and result["variant"] == "softmax"
        rows = expected([last_layer_softmax(run, window) for window in ids])
        L = result["length"]
        assert result["keys"] == [2**i for i in range(1, 7) if 2**i <= L] + [L] * (L > 16)
        assert result["rows"] == [len(group) for group in rows["sum"][0]]
        for name, heads in rows.items():
            means = [[np.mean(group) for group in groups] for groups in heads]
            np.testing.assert_allclose(result["groups"][name], means, rtol=1e-4, atol=1e-7)
            means = [np.mean(sum(groups, [])) for groups in heads]
            np.testing.assert_allclose(result["heads"][name], means, rtol=1e-4, atol=1e-7)
            assert f"{np.mean(means):.4f}" in printed
        assert result["heads"]["dead"] == [0, 0]
    for name in ("attention_maps.png", "attention_by_row.png"):
        assert matplotlib.image.imread(run / name).std() > 0


def all_keys(length):
    """The keys that the rows of heads without a window see."""
    return torch.arange(1, length + 1)[None]


@pytest.mark.parametrize(
    "settings, windows",
    [
        ("softmax.py --window=4", (4, 4)),
        ("hybrid.py --local_window=1 --window=6", (6, 1)),
    ],
)
def test_keys_that_a_window_hides_do_not_count(settings, windows, shards, call, tmp_path):
    """An untrained model's weights are nearly equal over the keys that its rows see."""
    model = GPT(small_config(settings, f"--data_dir={shards}"))
    run = saved_run(tmp_path / "run", model)
    call(attention_maps, run, "--lengths", "16", "--tokens", "16", "--text", TEXT[:20])
    result = read(run)[1]
    parts = [part for part, _ in model.attention_layers()[1].parts()]
    assert result["head_windows"] == [part.window for part in parts for _ in range(part.n_head)]
    ids = torch.from_numpy(read_shard(shards / "text_val_000000.bin")[:16].astype(np.int64))
    A = evaluation.attention_weights(model, ids[None], slice(None))[1][0].double().numpy()
    heads = [
        [A[head, i, max(0, i + 1 - window) : i + 1] for i in range(1, 16)]
        for head, window in enumerate(windows)
    ]
    shares = [
        np.mean([-(a * np.log(a)).sum() / math.log(len(a)) if len(a) > 1 else 1 for a in rows])
        for rows in heads
    ]
    assert min(shares) > 0.99
    assert result["heads"]["entropy_share"] == pytest.approx(shares, rel=1e-5)
    assert result["heads"]["zeros"] == [0, 0] and result["rows"] == [1, 2, 4, 8]
    # what a head's window hides is white, as what comes after
    panels = attention_maps.plot_maps(load_run(run), 1, ids.tolist(), torch.tensor(A))
    drawn = [axes.images[0].get_array().count() for axes in panels.axes[:2]]
    assert drawn == [1 + sum(map(len, rows)) for rows in heads]


def test_rows_that_are_no_distributions():
    A = torch.tensor([
        [1, 0, 0, 0, 0],
        [0.1, -0.3, 0, 0, 0],  # |A| makes 1/4, 3/4
        [0, 0, 0, 0, 0],  # dead
        [2, 2, 2, 2, 0],  # equal, of sum 8
        [0, 0, -3, 0, 0],  # all on one key
    ])[None]  # fmt: skip
    result = summary(group_sums(row_numbers(A).double(), all_keys(5)), 5)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert result["keys"] == [2, 4, 5] and result["rows"] == [1, 2, 1]
    groups = result["groups"]
    assert groups["dead"] == [[0, 1, 0]]
    wanted = {
        "first_token": [0.25, 0.25, 0],
        "entropy": [entropy, math.log(4), 0],
        "entropy_share": [entropy / math.log(2), 1, 0],
        "zeros": [0, 0, 0.8],
        "sum": [0.4, 8, 3],
    }
    for name, values in wanted.items():
        assert groups[name] == [pytest.approx(values, rel=1e-6)]
        assert result["heads"][name] == [pytest.approx(sum(values) / 3, rel=1e-6)]
    assert result["heads"]["dead"] == [0.25]
    zeros = row_numbers(torch.zeros(1, 4, 4)).double()
    nothing = summary(group_sums(zeros, all_keys(4)), 4)
    assert nothing["groups"]["entropy"] == [[None, None]] and nothing["heads"]["sum"] == [None]


def test_a_sink_is_seen(capsys):
    """One head that looks at the first token only, one that spreads out, one that looks back."""
    L = 8
    A = torch.zeros(3, L, L)
    A[0, :, 0] = 1
    A[1] = torch.ones(L, L).tril() / torch.arange(1, L + 1)[:, None]
    A[2] = torch.eye(L)
    result = summary(group_sums(row_numbers(A).double(), all_keys(L)), L)
    assert result["groups"]["first_token"][0] == [1, 1, 1]
    assert result["heads"]["entropy_share"] == pytest.approx([0, 1, 0])
    equal = sum(1 / n for n in range(2, L + 1)) / (L - 1)
    assert result["heads"]["first_token"] == pytest.approx([1, equal, 0])
    attention_maps.print_numbers(["run"], [result | {"text": None, "length": L, "layer": 0}])
    lines = capsys.readouterr().out.splitlines()
    assert "1 of 3" in lines[-2] and f"{equal:.4f}" in lines[-1] and f"{equal:.4f}" not in lines[-2]


def test_blocks_of_rows_make_the_same_weights(monkeypatch):
    model = small_model("lssar_p15.py")
    idx = torch.randint(257, (2, 24))
    (whole,) = evaluation.attention_weights(model, idx, slice(None), layers=slice(1, 2))
    monkeypatch.setattr(evaluation, "BLOCK_QUERIES", 5)
    layers = evaluation.attention_weights(model, idx, slice(3, 21))
    torch.testing.assert_close(layers[1], whole[:, :, 3:21], rtol=1e-10, atol=1e-12)
    (numbers,) = evaluation.attention_weights(model, idx, slice(None), row_numbers, slice(1, 2))
    torch.testing.assert_close(numbers, row_numbers(whole), rtol=1e-10, atol=1e-12)


def test_several_runs_are_compared(train, call, tmp_path, monkeypatch, capsys):
    """Signed, unnormalised and sparse variants, with dead rows."""
    names = ("relu_wortsman", "sigmoid", "lssar_p15", "ablations/softmax_inverse")
    runs = [train(name.split("/")[-1], f"configs/{name}.py", "--max_iters=1") for name in names]
    capsys.readouterr()
    call(attention_maps, *runs, "--layer", "0", "--lengths", "16,32", "--tokens", "64")
    picture = tmp_path / f"attention_by_row_{'_'.join(run.name for run in runs)}.png"
    assert matplotlib.image.imread(picture).std() > 0
    printed = capsys.readouterr().out
    for run in runs:
        assert sum(line.startswith(run.name) for line in printed.splitlines()) == 3
        results = read(run)
        assert [(r["length"], r["layer"]) for r in results] == [(len(TEXT), 0), (16, 0), (32, 0)]
        # the maps differ from head to head, and the keys that a row may not see are white
        picture = matplotlib.image.imread(run / "attention_maps.png")[..., :3]
        assert (picture == 1).all(-1).mean() > 0.3 and len(
            np.unique(picture.reshape(-1, 3), 0)
        ) > 20
    by_name = {run.name: read(run)[2]["heads"] for run in runs}
    assert by_name["softmax_inverse"]["sum"] == pytest.approx([1, 1])
    assert min(by_name["lssar_p15"]["zeros"]) > 0.2 and by_name["sigmoid"]["zeros"] == [0, 0]
    assert min(by_name["relu_wortsman"]["dead"]) > 0 and by_name["lssar_p15"]["dead"] == [0, 0]

    # validation tokens are not measured again; another layer is added
    before = [read(run)[1:] for run in runs]
    monkeypatch.setattr(attention_maps, "validation_batches", None)
    call(attention_maps, *runs, "--layer", "0", "--lengths", "16,32", "--tokens", "64")
    for run, results in zip(runs, before, strict=True):
        assert read(run)[1:] == results and len(read(run)) == 3
    with pytest.raises(TypeError):
        call(attention_maps, *runs, "--lengths", "16,32", "--tokens", "64")
    # the other layer's maps were drawn over the first one's
    drawn = [(r["layer"], r["picture"]) for r in read(runs[0]) if "picture" in r]
    assert drawn == [(1, "attention_maps.png")]
    paths = []
    for module in (attention_maps, runner):
        monkeypatch.setattr(module, "save_picture", lambda figure, path: paths.append(path))
    call(attention_maps, runs[0], "--tokens", "0", f"--out={tmp_path / 'mine.png'}")
    assert paths == [tmp_path / "mine.png"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layer", "2"], "layers 0 to 1"),
        (["--layer", "-3"], "--layer -3"),
        (["--text", ""], "0 tokens"),
        (["--text", "a"], "1 tokens"),
        (["--text", "a" * 2049], "2049 tokens"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--lengths", "16,1024"], "1024"),
        (["--lengths", "1"], "at least 2"),
        (["--rope", "none,yarn"], "'none,yarn'"),
    ],
)
def test_refuses_before_anything_is_written(train, call, capsys, arguments, message):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(attention_maps, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(run.glob("attention_*"))


def test_refuses_for_all_runs_before_the_first(train, call, tmp_path, capsys):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(attention_maps, run, tmp_path)
    assert stop.value.code == 2 and "no config.json" in capsys.readouterr().err
    assert not list(run.glob("attention_*"))


def test_text_of_a_file(train, call, tmp_path):
    run, file = train("run", "--max_iters=1"), tmp_path / "text.txt"
    file.write_text("It costs $5, café.\n", encoding="utf-8")
    call(attention_maps, run, "--file", file, "--tokens", "0", "--data_dir", "nowhere")
    (result,) = read(run)
    assert result["text"] == "It costs $5, café.\n" and result["length"] == 20
    assert matplotlib.image.imread(run / "attention_by_row.png").std() > 0
