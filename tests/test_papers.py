"""The papers' numbers, beside the configs that have them."""

import re
from pathlib import Path

import pytest

from scripts.common.papers import LSSAR, SSMAX
from scripts.reproduce import entries, tables
from tests.helpers import CONFIGS, ROWS

FIRST_LINES = {row: (CONFIGS / row).read_text().splitlines()[0] for row in ROWS}


@pytest.mark.parametrize(
    "row", [row for row, line in FIRST_LINES.items() if line.startswith("# LSSAR")]
)
def test_first_line_of_every_config_has_the_papers_numbers(row):
    line, name = FIRST_LINES[row], Path(row).stem
    table = re.search(r"LSSAR Table (\w+)", line)[1].lower()
    section = LSSAR["table1" if table == "1" else f"table_{table}"]
    numbers = [float(number) for number in re.findall(r"\d+\.\d{3,}", line)]
    if table != "1":
        assert numbers.pop() == section["rows"]["softmax"][0]
    assert numbers == section["rows"][name]


def test_every_entry_of_the_papers_has_a_config():
    for name, experiment in tables.EXPERIMENTS.items():
        scales = {"orbits": "109m", "recall": "tiny", "language+recall": "tiny_and_text"}
        scale = scales.get(experiment.task, "124m")
        work = entries.open_scale(scale, "out", experiment.task)
        for entry in () if experiment.compute else experiment.entries:
            assert work.run(entry, 1337).arguments, (name, entry)
        if experiment.paper:
            scales = experiment.paper.get("scales", {"": experiment.paper.get("rows")})
            assert any(set(there) & set(experiment.entries) for there in scales.values()), name
    for p in (LSSAR["p_sweep"]["best"], *LSSAR["p_sweep"]["more"]):
        assert f"lssar_p{p}" in tables.EXPERIMENTS["p_sweep"].entries


def test_the_scales_have_the_papers_steps():
    training_facts = LSSAR["training"]
    for name, steps in training_facts["steps"].items():
        config = entries.open_scale(name, "out").config
        assert (config.max_iters, config.block_size) == (steps, training_facts["trained_length"])


def test_the_recipe_of_ssmax():
    """Its Tables 1 and 2, in configs/scales/ssmax_paper.py. The pops leave nothing unread."""
    config = entries.open_scale("ssmax_paper", "out").config
    shape, recipe = dict(SSMAX["architecture"]), dict(SSMAX["pretraining"])
    settings = {
        "layers": "n_layer", "heads": "n_head", "hidden": "n_embd", "feedforward": "mlp_hidden",
        "vocabulary": "n_vocab", "optimizer": "optimizer", "weight_decay": "weight_decay",
        "grad_clip": "grad_clip", "learning_rate": "learning_rate", "schedule": "schedule",
        "warmup_steps": "warmup_iters", "length": "block_size", "rope_theta": "rope_theta",
        "tokens_a_step": "total_batch_size", "steps": "max_iters",
    }  # fmt: skip
    for name, setting in settings.items():
        value = (shape if name in shape else recipe).pop(name)
        value = value.lower() if isinstance(value, str) else value
        assert getattr(config, setting) == value, name
    assert recipe.pop("betas") == [config.beta1, config.beta2]
    assert (config.norm, config.mlp, config.bias) == ("rmsnorm", "swiglu", False)  # as in LLaMA
    assert recipe.pop("sequences") * config.block_size == config.total_batch_size
    tokens = config.max_iters * config.total_batch_size
    assert recipe.pop("tokens") == f"approximately {tokens / 1e9:.0f}B"
    assert shape == {"parameters": "162M"}  # counted in test_model.py
    # bfloat16 is a GPU's default here, there is no dropout, and the data are FineWeb
    assert recipe == {"dropout": 0.0, "dtype": "bfloat16", "dataset": "SlimPajama"}
