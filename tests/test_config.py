"""The settings: defaults, composition, and a sentence for everything that is wrong."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from config import Config, micro_batch_size
from errors import UserError
from layers.heads import build_attentions
from runtime import run_folder
from runtime.config_files import help_text, load_config, read_file
from scripts import eval_length
from tests.helpers import CONFIGS, ROWS
from tests.runs import run_train


def config_names(pattern):
    return sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.glob(pattern))


SCALES = config_names("scales/*.py")
T6 = ["t6.py", "t6_lssar_p15.py"]


def at(name):
    """The path of a file of configs/, as an argument."""
    return str(CONFIGS / name)


def write(path, text):
    path.write_text(text)
    return str(path)


def refusal(*arguments):
    """The sentence that refuses a command line, by its settings or by the table of variants."""
    with pytest.raises(UserError) as caught:
        config = load_config([*arguments])
        build_attentions(config, layer=0)
    return str(caught.value)


# ---- what comes out ----


def test_defaults_are_the_124m_recipe():
    config = load_config([])
    recipe = dict(
        # model
        n_layer=12,
        n_head=12,
        n_embd=768,
        block_size=1024,
        n_vocab=50257,
        rope_theta=10000,
        norm="layernorm",
        mlp="gelu",
        bias=True,
        tie_embeddings=True,
        # attention
        attention="softmax",
        p=None,
        s_init=1,
        window=None,
        # batches and steps
        total_batch_size=524288,
        batch_size=0,
        max_iters=18865,
        eval_interval=250,
        val_tokens=10485760,
        # optimizer
        optimizer="adamw",
        learning_rate=6e-4,
        schedule="cosine",
        warmup_iters=700,
        min_lr=0,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        adam_eps=1e-8,
        grad_clip=1,
    )
    for key, value in recipe.items():
        assert getattr(config, key) == value, key
    assert micro_batch_size(config, world_size=8) == 64
    assert micro_batch_size(config, world_size=16) == 32


@pytest.mark.parametrize("name", [*ROWS, *T6])
def test_config_files_name_their_paper(name):
    comments = " ".join(re.findall(r"^# (.*)$", Path(at(name)).read_text(), re.MULTILINE))
    papers = r"LSSAR Table A?\d, |SSMax (\([a-f]\)|Eq\. \d)|Ours: "
    other_papers = r".*\b(201|202)\d\b|As hybrid.py, "  # by their year
    assert re.match(f"{papers}|{other_papers}", comments)


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_goes_with_every_scale(scale):
    width = load_config([at(scale)]).n_embd
    for row in (*ROWS, *T6):
        alone = load_config([at(row)])
        config = load_config([at(row), at(scale)])
        expected = (alone.attention, alone.p, width)
        assert (config.attention, config.p, config.n_embd) == expected, row


def test_later_files_and_then_the_command_line_win(tmp_path):
    first = write(tmp_path / "first.py", "max_iters = 1\nseed = 1\nbeta1 = 0.1\n")
    text = "import math\n_half = 1\nmax_iters = 2\nseed = 2 * _half\n"
    second = write(tmp_path / "second.py", text)
    config = load_config(["--max_iters=3", first, second])
    assert config.max_iters == 3
    assert config.seed == 2
    assert config.beta1 == 0.1
    assert load_config([second, first]).seed == 1
    assert load_config([first, "--seed=5", "--seed=6"]).seed == 6


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        (["--max_iters=1e3"], "max_iters", 1000),
        (["--p=3", "--attention=lssar"], "p", 3.0),
        (["--resume", "--init_from=out/a"], "resume", True),
        (["--bias=false"], "bias", False),
        (["--init_from=1=2"], "init_from", "1=2"),
    ],
)
def test_command_line_values(arguments, key, value):
    config = load_config(arguments)
    assert getattr(config, key) == value
    assert type(getattr(config, key)) is type(value)


@pytest.mark.parametrize(
    "arguments, out_dir",
    [
        ([], "out/softmax"),
        ([at("lssar_p15.py"), at("scales/tiny.py")], "out/lssar_p15_tiny"),
        ([at("lssar_p15.py"), at("scales/tiny.py"), "--p=7"], "out/lssar_p15_tiny,p=7"),
        ([at("lssar_p15.py"), at("scales/recall/tiny.py")], "out/lssar_p15_recall_tiny"),
        ([at("scales/t6/tiny.py")], "out/t6_tiny"),
        (
            ["--seed=2", at("softmax.py"), "--learning_rate=1e-3"],
            "out/softmax,learning_rate=0.001,seed=2",
        ),
        (["--attention=lssar", "--p=3", "--window=8"], "out/lssar_p3,window=8"),
        # a longer run, or one on another machine, is the same run
        ([at("softmax.py"), "--max_iters=9", "--data_dir=x", "--batch_size=1"], "out/softmax"),
        ([at("lssar_p3.py"), "--p=7", "--out_dir=out/p{p}"], "out/p{p}"),
        (["--out_dir=~/runs"], os.path.expanduser("~/runs")),
    ],
)
def test_out_dir(arguments, out_dir):
    assert load_config(arguments).out_dir == out_dir


def test_a_folder_of_many_settings_has_a_name_that_file_systems_take():
    """Every setting still counts."""
    settings = [f"--{key}=0.5" for key in ("learning_rate", "weight_decay", "beta1", "beta2")]
    settings += [f"--{key}=96" for key in ("n_embd", "n_layer", "block_size", "window")]
    folder = load_config([*settings, "--total_batch_size=96"]).out_dir
    assert len(folder) == len("out/") + 100
    assert folder.startswith("out/softmax,block_size=96,window=96,")
    assert folder == load_config(["--total_batch_size=96", *settings]).out_dir
    assert folder != load_config([*settings, "--total_batch_size=192"]).out_dir


def test_a_run_is_called_by_its_config_file(tmp_path, monkeypatch):
    mine = write(tmp_path / "mine.py", "rope_theta = 5e5\n")
    assert load_config([mine, at("scales/tiny.py")]).label == "mine"
    assert load_config([at("lssar_p15.py"), mine]).label == "lssar_p15_mine"
    assert load_config([mine, "--p=3", "--n_layer=2"]).label == "mine,p=3"
    assert load_config([mine, "--name=theta"]).label == "theta"
    assert load_config([write(tmp_path / "other.py", "name = 'mine'")]).label == "mine"
    with pytest.raises(UserError, match="other.py: name = None is NoneType; it must be str"):
        load_config([write(tmp_path / "other.py", "name = None")])
    folder = tmp_path / "scales"
    folder.mkdir()
    assert load_config([write(folder / "own.py", "n_layer = 2")]).label == "own"
    # without such a file, by its variant
    assert load_config([at("scales/tiny.py"), "--attention=lssar", "--p=3"]).label == "lssar_p3"
    monkeypatch.chdir(CONFIGS / "scales")
    assert load_config(["tiny.py", "--attention=lssar", "--p=3"]).label == "lssar_p3"
    # a run keeps its name
    run = tmp_path / "run"
    saved(run, name="mine")
    assert load_config(["--resume", str(run)]).label == "mine"
    assert load_config(["--resume", f"--out_dir={run}"]).label == "mine"
    assert load_config([str(run), "--p=5"]).label == "mine,p=5"
    saved(run, name="a/b")
    assert load_config([str(run)]).label == "a/b"
    saved(run, name="")
    assert load_config([str(run)]).label == "lssar_p3"


def test_a_run_whose_recorded_data_folder_cannot_be_looked_up(tmp_path):
    """As in another user's home folder; samples need no data. A name may be too long instead."""
    saved(tmp_path, data_dir="data/mine")
    write(tmp_path / "data_dir.txt", "/" + "a" * 300)
    assert load_config([str(tmp_path)]).data_dir == "data/mine"


def test_a_path_that_is_not_utf_8_is_refused():
    """torch reads no checkpoint there."""
    with pytest.raises(UserError, match=r"out_dir = 'out/caf\\udce9' is not UTF-8"):
        load_config(["--out_dir=out/caf\udce9"])
    assert load_config(["--out_dir=out/café"]).out_dir == "out/café"


def saved(folder, **changes):
    """A run's config.json, as train.py writes it."""
    folder.mkdir(exist_ok=True)
    config = load_config([at("lssar_p3.py"), "--seed=5", "--out_dir=elsewhere"])
    values = config.as_dict() | changes
    return write(folder / "config.json", json.dumps(values))


def test_a_run_stands_for_its_settings(tmp_path):
    folder = tmp_path / "p{3}"
    saved(folder, resume=True, init_from="base")
    config = load_config([str(folder)])
    assert config.attention == "lssar"
    assert config.p == 3
    assert config.seed == 5
    assert config.out_dir == str(folder)
    assert config.init_from == "base"
    assert not config.resume


def test_a_resumed_run_stands_for_its_settings(tmp_path):
    """Its folder may have moved; init_from, which was for its first start, is cleared."""
    saved(tmp_path / "p{3}", resume=True, init_from="base")
    (tmp_path / "p{3}").rename(tmp_path / "p3")
    run = str(tmp_path / "p3")
    for argument in (run, f"--out_dir={run}"):
        config = load_config(["--resume", argument, "--max_iters=7"])
        assert config.attention == "lssar"
        assert config.out_dir == run
        assert config.max_iters == 7
        assert config.resume
        assert config.init_from == ""
    # with config files in the command, the run's settings are not read
    config = load_config(["--resume", at("ssmax.py"), f"--out_dir={tmp_path}"])
    assert config.attention == "ssmax"


def test_a_run_of_nearly_that_name_is_suggested(tmp_path):
    saved(tmp_path / "lssar_p15_tiny")
    (tmp_path / "lssar_p15s").mkdir()  # nearer, but no run
    saved(tmp_path / "lssar_p15_tiny,p=7,optimizer=muon,learning_rate=0.001,seed=3")
    says = f"does not exist; did you mean {tmp_path}/lssar_p15_tiny?"
    assert says in refusal("--resume", str(tmp_path / "lssar_p15"))
    assert says in refusal("--resume", str(tmp_path / "lsar_p15_tiny"))
    assert ",seed=3?" in refusal("--resume", str(tmp_path / "lssar_p15_tiny,p=7"))


def test_a_run_with_a_setting_of_another_version_is_refused(tmp_path):
    path = saved(tmp_path / "run", dropout=0.1)
    says = f"{path} sets 'dropout', which is not a setting; python train.py --help lists them; "
    says += "the run's environment.json names the commit"
    with pytest.raises(UserError, match=re.escape(says)):
        run_folder.read_config(tmp_path / "run")
    assert says in refusal("--resume", str(tmp_path / "run"))


def test_data_of_the_repository_is_found_from_anywhere(tmp_path, monkeypatch):
    repository = CONFIGS.parent
    monkeypatch.chdir(tmp_path)
    in_repository = str(repository / "docs")  # a folder that is always there
    assert load_config(["--data_dir=docs"]).data_dir == in_repository
    saved(tmp_path / "run", data_dir="docs")
    assert run_folder.read_config(tmp_path / "run").data_dir == in_repository
    (tmp_path / "docs").mkdir()
    assert load_config(["--data_dir=docs"]).data_dir == "docs"
    assert load_config(["--data_dir=nowhere"]).data_dir == "nowhere"


def test_a_run_finds_its_relative_data_from_anywhere(
    train, call, shards, tmp_path, monkeypatch, refused
):
    """And where they are gone the message names the folder that is missing."""
    home = tmp_path / "home"
    data = shutil.copytree(shards, home / "bytes")
    monkeypatch.chdir(home)
    run = train("run", "--data_dir=bytes", "--max_iters=3")
    monkeypatch.chdir(tmp_path)
    for source in (run, run / "step_000003.pt"):
        assert run_folder.read_config(source).data_dir == str(data)
    assert load_config(["--resume", str(run)]).data_dir == str(data)
    other = shutil.copytree(shards, tmp_path / "bytes")  # of the same name
    assert run_folder.read_config(run).data_dir == str(data)
    shutil.rmtree(other)
    says = "bytes does not exist: name the folder of the shards with --data_dir"
    refused(run_train, "--data_dir=bytes", "--resume", f"--out_dir={run}", says=says)
    shutil.rmtree(data)
    refused(run_train, "--resume", run, "--max_iters=5", says=says)
    refused(call, eval_length, run, says=says)


@pytest.mark.parametrize("argument", ["--help", "--lerning_rate=1"])
def test_help_and_refusals_do_not_wait_for_torch(argument):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", argument],
        cwd=CONFIGS.parent,
        capture_output=True,
        text=True,
    )
    if argument == "--help":
        assert done.returncode == 0
        assert "  --learning_rate=" in done.stdout
    else:
        assert done.returncode == 2
        assert "did you mean learning_rate" in done.stderr
        assert "Traceback" not in done.stderr
    # the modules imported
    assert "config" in done.stderr
    assert "torch" not in done.stderr
    assert "numpy" not in done.stderr


def test_derived_values():
    for heads in (7, 14, 3):  # 0.28 * 25 is 7.000000000000001
        config = Config(n_head=25, n_embd=50, nope_share=heads / 25)
        assert config.nope_heads(layer=0) == heads
    config = load_config([at("lssar_p3.py")])
    assert Config(**config.as_dict()) == config
    assert config.replace(p=15).variant_name == "lssar_p15"
    assert config.replace(p=2.5).variant_name == "lssar_p2.5"
    assert config.p == 3


def test_help_has_every_setting_with_its_default_and_a_word():
    lines = help_text().splitlines()
    for field in dataclasses.fields(Config):
        option = f"  --{field.name}="
        (line,) = [line for line in lines if line.startswith(option)]
        default, _, words = line.removeprefix(option).partition(" ")
        assert default == repr(field.default)
        assert len(words.strip()) > 3


# ---- what is refused ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        # names
        (
            "--learing_rate=1",
            "the command line sets 'learing_rate', which is not a setting; "
            "did you mean learning_rate?",
        ),
        ("--attention=lsar", "attention = 'lsar'; did you mean lssar? it must be one of softmax,"),
        # types
        ("--n_layer=2.5", "n_layer = 2.5 is float; it must be int"),
        # ranges
        ("--n_layer=0", "n_layer = 0 must be at least 1"),
        (
            "--learning_rate=1e300",
            "learning_rate = 1e+300 must be a number between -2**63 and 2**63",
        ),
        (
            "--vocab_size=70000",
            "70000 token ids, from tokenizer, vocab_size or bins, are more than the 65536 of a "
            "uint16",
        ),
        ("--tokenizer=gtp2", "tokenizer = 'gtp2'; did you mean gpt2?"),
        (
            "--task=orbits",
            "task = 'orbits' cannot tie its head to its embedding: add tie_embeddings = False",
        ),
        # values that contradict each other
        (
            "--attention=lssar",
            "attention = 'lssar' needs p, the power of its re-weighting, such as p = 15",
        ),
        (
            "--attention=sigmoid --p=3",
            "attention = 'sigmoid' cannot have p = 3.0: re-weighting "
            "needs l1 and weights that are never negative",
        ),
        (
            "--sink=one --attention=sigmoid",
            "attention = 'sigmoid' cannot have a sink, which needs l1",
        ),
        ("--n_head=7", "n_embd = 768 is not divisible by n_head = 7"),
        ("--n_kv_head=5", "n_head = 12 is not a multiple of n_kv_head = 5"),
        (
            "--head_size=63",
            "head_size (by default n_embd / n_head) = 63 must be even: RoPE rotates pairs",
        ),
        ("--nope_every=13", "nope_every = 13 must be 0 or from 2 to n_layer = 12"),
        ("--keep_every=7", "keep_every = 7 must be a multiple of checkpoint_interval = 1000"),
        ("--rope_share=0.3", "rope_share = 0.3 of the 32 pairs of a head is 9.6 pairs"),
        ("--rope_share=0", "is 0 pairs; it must be a whole number from 1 to 32"),
        ("--rope_share=0.5 --positions=none", "rope_share = 0.5 has an effect with positions"),
        ("--nope_share=0.3", "nope_share = 0.3 of n_head = 12 is 3.6 heads"),
        ("--nope_share=0.25 --n_kv_head=3", "it must be a multiple of n_head / n_kv_head = 4"),
        ("--min_lr=1e-3", "min_lr = 0.001 is above learning_rate = 0.0006"),
        ("--schedule=trapezoidal --cooldown_iters=20000", "warmup_iters + cooldown_iters = 20700"),
        # settings without effect
        (
            "--s_init=2 --attention=lssa",
            "attention = 'lssa' cannot have s_init = 2.0: it has no learned s",
        ),
        (
            "--q_rank=None",
            "q_rank = None has an effect with projections = 'tpa' only, not with 'linear'",
        ),
        (
            "--local_window=9",
            "local_window = 9 needs heads without positions: set nope_share or nope_every",
        ),
        ("--window_pattern=SSSL", "gives none of n_layer = 12 layers a window: window = None"),
        ("--rope_theta=1", "rope_theta = 1 must be above 1"),
        ("--max_iters=1000000000000", "must be below 1000000000000"),
        ("--window=9 --window_pattern=SSXL", "may contain only S and L, such as SSSL"),
        ("--window=9 --window_pattern=LS --n_layer=2", "layers a window: window = 9"),
        # the command line itself
        ("no_config.json", "config file or run no_config.json does not exist"),
        ("configs/lsar_p15.py", "does not exist; did you mean configs/lssar_p15.py?"),
        ("tiny", "does not exist; did you mean configs/scales/tiny.py?"),
        ("configs", "configs has no config.json; a run is a folder that train.py made"),
    ],
)
def test_refused(arguments, message):
    assert message in refusal(*arguments.split())


def test_a_config_file_may_have_helpers(tmp_path):
    """Modules, functions, classes, and values whose names begin with an underscore."""
    write(tmp_path / "helpers_of_this_test.py", "depth = 3\n")
    text = """
import math
from math import sqrt
import helpers_of_this_test

_base = 32
_n, _s = 2, 8

def doubled(x):
    return 2 * x

class Sizes:
    head = 4

n_embd = doubled(_base)
max_iters = math.ceil(sqrt(math.pi))
for _i in range(3):
    n_embd *= _n
n_head = Sizes.head * helpers_of_this_test.depth
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        values = read_file(write(tmp_path / "mine.py", text))
    assert values == {"n_embd": 512, "max_iters": 2, "n_head": 12}


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "n_layers = 3",
            "'n_layers', which is not a setting; did you mean n_layer?",
        ),
        ("n_layers = 3\nn_embd = 64 * n_layers", "did you mean n_layer?"),
        (
            "lr = 1e-3\nlearning_rate = lr",
            "'lr', which is not a setting; did you mean learning_rate?",
        ),
        ("n_layer = 3\ndropout = 0.1", "'dropout', which is not a setting; python train.py --help"),
        ("base = 32\nn_embd = 2 * base", "lists them; names of your own begin with _"),
        ("n_layer = 1 / 0", "config file {path} fails: ZeroDivisionError: division by zero"),
        ("attention: 'lssa'", "config file {path} has `attention: ..`, which sets nothing"),
    ],
)
def test_refused_files(text, message, tmp_path):
    path = write(tmp_path / "mine.py", text)
    assert message.format(path=path) in refusal(path)


@pytest.mark.parametrize(
    "total, batch, block, processes, fitting",
    [
        (524288, 64, 1024, 8, 64),
        (524288, 64, 1024, 16, 32),  # two nodes
        (524288, 48, 1024, 1, 32),
        (9 * 64, 4, 64, 1, 3),
        (7 * 64, 5, 64, 7, 1),
        (128, 64, 64, 1, 2),
        (96 * 64, 0, 64, 1, 48),
    ],
)
def test_the_micro_batch_is_the_largest_divisor(total, batch, block, processes, fitting):
    sizes = SimpleNamespace(total_batch_size=total, batch_size=batch, block_size=block)
    assert micro_batch_size(sizes, processes) == fitting


def test_a_batch_that_processes_cannot_share_is_refused():
    """The advice keeps the global batch, and works."""
    sizes = SimpleNamespace(total_batch_size=512 * 1024, batch_size=64, block_size=1024)
    with pytest.raises(UserError, match="12 processes cannot share the 512 sequences") as caught:
        micro_batch_size(sizes, world_size=12)
    (proposed,) = re.findall(r"; (\d+) would work$", str(caught.value))
    assert micro_batch_size(sizes, int(proposed)) == 64
    sizes.total_batch_size = 1000
    with pytest.raises(UserError, match="total_batch_size = 1000 is not a multiple of block_size"):
        micro_batch_size(sizes, world_size=1)


def test_the_sweep_over_p_is_made_of_settings():
    sweep = yaml.safe_load((CONFIGS / "sweeps/p.yaml").read_text())
    fixed = []
    for argument in sweep["command"]:
        if argument.startswith("--"):
            fixed.append(argument)
    choices = []
    for key, parameter in sweep["parameters"].items():
        choices.append([f"--{key}={value}" for value in parameter["values"]])
    combinations = list(itertools.product(*choices))
    folders = {load_config([*combination, *fixed]).out_dir for combination in combinations}
    assert len(folders) == len(combinations)
    assert sweep["parameters"].keys() == {"p", "attention"}
    # on any machine, and a second agent continues what a first one left
    assert sweep["command"][:4] == ["${env}", "${interpreter}", "${program}", "${args}"]
    assert load_config(fixed).resume == "auto"


def test_a_window_below_1_is_a_share_of_the_training_length():
    assert Config(window=0.25).window == 256
    hybrid = Config(block_size=18, total_batch_size=18, nope_share=0.5, local_window=0.25)
    assert hybrid.local_window == 4
    assert Config(block_size=2, total_batch_size=2, window=0.25).window == 1
    assert Config(window=256).replace(block_size=512).window == 256
    for key in ("window", "local_window"):
        for value in (1.0, 1.5, 1e3, 0.0, -0.5):
            says = f"{key} = {value} must be a share of block_size below 1, such as 0.25, or"
            with pytest.raises(UserError, match=says):
                Config(nope_share=0.5, **{key: value})
