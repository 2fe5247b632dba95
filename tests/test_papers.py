"""The papers' numbers, beside the configs that have them."""

import re
from pathlib import Path

import pytest

from scripts.common.papers import LSSAR, SSMAX
from scripts.reproduce.entries import open_scale
from scripts.reproduce.tables import EXPERIMENTS
from tests.helpers import CONFIGS, ROWS

FIRST_LINES = {row: (CONFIGS / row).read_text().splitlines()[0] for row in ROWS}


@pytest.mark.parametrize(
    "row", [row for row, line in FIRST_LINES.items() if line.startswith("# LSSAR")]
)
def test_first_line_of_every_config_has_the_papers_numbers(row):
    line = FIRST_LINES[row]
    losses = [float(number) for number in re.findall(r"\d+\.\d{3,}", line)]
    table = re.search(r"LSSAR Table (\w+)", line)[1].lower()
    if table == "1":
        rows = LSSAR["table1"]["rows"]
    else:
        rows = LSSAR[f"table_{table}"]["rows"]
        assert losses.pop() == rows["softmax"][0]
    assert losses == rows[Path(row).stem]


def test_every_entry_of_the_papers_has_a_config():
    scales = {
        "language": "124m",
        "orbits": "109m",
        "recall": "tiny",
        "language+recall": "tiny_and_text",
    }
    for name, experiment in EXPERIMENTS.items():
        scale = open_scale(scales[experiment.task], "out", experiment.task)
        names = {entry.name for entry in experiment.entries}
        assert len(names) == len(experiment.entries), name
        if experiment.compute is None:
            for entry in experiment.entries:
                assert scale.run(entry, 1337).arguments, (name, entry)
        paper = experiment.paper
        if paper:
            tables = paper.get("scales", {"": paper.get("rows")})
            assert any(names & set(rows) for rows in tables.values()), name
    names = {entry.name for entry in EXPERIMENTS["p_sweep"].entries}
    for p in (LSSAR["p_sweep"]["best"], *LSSAR["p_sweep"]["more"]):
        assert f"lssar_p{p}" in names


def test_the_entries_of_ssmax_are_the_papers():
    names = [entry.name for entry in EXPERIMENTS["ssmax_figure5"].entries]
    assert names == list(SSMAX["rows"])


def test_the_scales_have_the_papers_steps():
    training = LSSAR["training"]
    for name, steps in training["steps"].items():
        config = open_scale(name, "out").config
        assert config.max_iters == steps
        assert config.block_size == training["trained_length"]


def test_the_recipe_of_ssmax():
    """Its Tables 1 and 2, in configs/scales/ssmax_paper.py. The pops leave nothing unread."""
    config = open_scale("ssmax_paper", "out").config
    shape = dict(SSMAX["architecture"])
    assert shape.pop("layers") == config.n_layer
    assert shape.pop("heads") == config.n_head
    assert shape.pop("hidden") == config.n_embd
    assert shape.pop("feedforward") == config.mlp_hidden
    assert shape.pop("vocabulary") == config.n_vocab
    assert shape == {"parameters": "162M"}  # counted in test_model.py
    # as in LLaMA
    assert config.norm == "rmsnorm"
    assert config.mlp == "swiglu"
    assert config.bias is False
    recipe = dict(SSMAX["pretraining"])
    assert recipe.pop("optimizer").lower() == config.optimizer
    assert recipe.pop("betas") == [config.beta1, config.beta2]
    assert recipe.pop("weight_decay") == config.weight_decay
    assert recipe.pop("grad_clip") == config.grad_clip
    assert recipe.pop("learning_rate") == config.learning_rate
    assert recipe.pop("schedule").lower() == config.schedule
    assert recipe.pop("warmup_steps") == config.warmup_iters
    assert recipe.pop("rope_theta") == config.rope_theta
    assert recipe.pop("length") == config.block_size
    assert recipe.pop("tokens_a_step") == config.total_batch_size
    assert recipe.pop("steps") == config.max_iters
    assert recipe.pop("sequences") * config.block_size == config.total_batch_size
    tokens = config.max_iters * config.total_batch_size
    assert recipe.pop("tokens") == f"approximately {tokens / 1e9:.0f}B"
    # bfloat16 is a GPU's default here, there is no dropout, and the data are FineWeb
    assert recipe == {"dropout": 0.0, "dtype": "bfloat16", "dataset": "SlimPajama"}
