"""Configs compared with the first one: their runs, the paired differences, the table."""

import json
import statistics

import pytest

from scripts import compare
from tests.helpers import CONFIGS, SMALL, measured_losses, not_blank, read_table, write_scale
from tests.runs import metrics


@pytest.fixture
def compared(call, commands, scale, shards, tmp_path):
    """`python -m scripts.compare ...` at a small scale; returns the folder of the table."""

    def run(*arguments):
        common = [f"--out={tmp_path / 'out'}", f"--results={tmp_path / 'results'}"]
        if not any(argument.startswith("--scale") for argument in arguments):
            common += [f"--scale={scale}", f"--data_dir={shards}", "--wandb_mode=disabled"]
        call(compare, *arguments, *common)
        return max((tmp_path / "results").glob("*/compare_*"), key=lambda x: x.stat().st_mtime)

    return run


@pytest.fixture
def mine(tmp_path):
    """A config of the user's, which overrides the scale."""
    path = tmp_path / "mine.py"
    path.write_text("attention = 'ssmax'\nn_layer = 1\n")
    return str(path)


FILES = ("softmax.py", "lssar_p15.py", "scales/tiny.py")
SOFTMAX, LSSAR, TINY = (str(CONFIGS / name) for name in FILES)


def test_two_configs_end_to_end(compared, commands, mine, tmp_path, capsys):
    folder = compared(SOFTMAX, mine, "--seeds=2", "--lengths=64")
    printed, table = capsys.readouterr().out, read_table(folder)
    assert folder.name == "compare_softmax_mine" and len(commands) == 4
    assert printed.index("4 runs") < printed.index("step 6/6") < printed.index("| `softmax` |")
    for name, layers in (("softmax", 2), ("mine", 1)):
        for seed, run in zip((1337, 1338), table["rows"][name]["runs"], strict=True):
            config = json.loads((tmp_path / f"out/small/{name}/seed{seed}/config.json").read_text())
            assert (config["n_layer"], config["seed"], run["seed"]) == (layers, seed, seed)
            own, control = measured_losses(tmp_path / f"out/small/{name}/seed{seed}")
            assert run["values"][:3] == [*own["loss"], control["loss"][-1]]
    mine, softmax = (table["rows"][name] for name in ("mine", "softmax"))
    for i, difference in enumerate(mine["difference"]["mean"]):
        seeds = zip(mine["runs"], softmax["runs"], strict=True)
        pairs = [one["values"][i] - other["values"][i] for one, other in seeds]
        assert difference == pytest.approx(statistics.mean(pairs))
        assert f"{difference:+z.4f} ± {statistics.stdev(pairs):.4f}" in printed
        assert all(f"{pair:+z.4f} |" in printed for pair in pairs)
        own = [run["values"][i] for run in mine["runs"]]
        assert f" {statistics.mean(own):.4f} ± {statistics.stdev(own):.4f} |" in printed
    assert not_blank(folder / "compare_softmax_mine.png")


def test_a_grid(compared, commands):
    folder = compared(SOFTMAX, "--attention=softmax,lssar", "--p=3", "--lengths=16")
    names = ["softmax,attention=softmax,p=3", "softmax,attention=lssar,p=3"]
    assert list(read_table(folder)["rows"]) == names and len(commands) == 2
    commands.clear()  # a larger grid shares the runs
    compared(SOFTMAX, "--attention=softmax,lssar", "--p=3,5", "--lengths=16")
    assert len(commands) == 2
    folder = compared(SOFTMAX, f"{SOFTMAX}:plain_rope", "--lengths=64")  # of one run
    ropes = [row["runs"][0]["evaluation"]["rope"] for row in read_table(folder)["rows"].values()]
    assert folder.name == "compare_softmax_softmax-plain_rope" and len(commands) == 3
    assert ropes == ["dynamic_ntk", "none"]


@pytest.mark.parametrize(
    "task, settings, unit",
    [("recall", "--val_tokens=64", "answers that are right (%)"),
     ("orbits", "--planets=1 --systems=20 --bins=50", "validation loss (nats per token)")],
)  # fmt: skip
def test_other_tasks(compared, tmp_path, task, settings, unit):
    sizes = ["--block_size=64", "--batch_size=2", "--tie_embeddings=False", "--tokenizer=gpt2"]
    file = write_scale(tmp_path / "small.py", *SMALL, f"--task={task}", *sizes, *settings.split())
    folder = compared(SOFTMAX, LSSAR, f"--scale={file}", "--lengths=64")
    table = read_table(folder)
    assert table["unit"] == unit and list(table["rows"]) == ["softmax", "lssar_p15"]
    assert folder.name == f"compare_{task}_softmax_lssar_p15"  # text has compare_softmax_lssar_p15
    if task == "orbits":
        loss = metrics(tmp_path / "out/orbits/small/lssar_p15/seed1337", "val_loss")[6]
        assert table["rows"]["lssar_p15"]["mean"] == [loss]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([SOFTMAX], ["nothing to compare", "two configs", "--p=3,5"]),
        ([SOFTMAX, "--p=3,3.0"], ["two entries are called softmax,p=3"]),
        ([SOFTMAX, "--attention=lssa,lsar,softmax"], ["did you mean lssar?"]),
        ([SOFTMAX, "--attention=softmax,lssar"], ["attention = 'lssar' needs p"]),
        ([SOFTMAX, "--block_size=16,32"], ["--block_size", "--scale FILE.py"]),
        ([SOFTMAX, TINY], ["it has val_tokens = 65536, not the scale's 256"]),
        ([SOFTMAX, LSSAR, "--scale=recal/tiny"], ["'recal/tiny' must be a file of configs/scales"]),
        ([SOFTMAX, LSSAR, "--seeds=0"], ["--seeds 0 must be at least 1"]),
        ([SOFTMAX, f"{SOFTMAX}:plain"], ["'plain' must be one of", "plain_rope, "]),
        ([SOFTMAX, "--p=3", "--p=5"], ["--p needs its values once: --p=VALUE,VALUE"]),
        ([f"{SOFTMAX}:yarn", "--nope_share=0,0.5"], ["nope_share = 0.5 leaves heads without RoPE"]),
        ([f"{SOFTMAX}:yarn", "--positions=rope,none"], ["has positions = 'none': no RoPE"]),
        ([SOFTMAX, "--p=[3]"], ["p = [3]", "must be"]),
        ([SOFTMAX, LSSAR, "--lengths=4096"], ["validation tokens", "4096"]),
    ],
)
def test_refusals_come_before_any_work(compared, commands, tmp_path, arguments, parts, refused):
    refused(compared, *arguments, says=parts)
    assert not commands and not (tmp_path / "out").exists()
