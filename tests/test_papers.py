"""The papers' losses and settings, as the configs and experiments have them."""

import itertools
import re
from pathlib import Path

import pytest

from runtime.config_files import load_config
from scripts.common.papers import LSSAR, SSMAX
from scripts.reproduce.entries import open_scale
from scripts.reproduce.tables import EXPERIMENTS, NORM_AND_PAIRS
from tests.helpers import CONFIGS, ROWS


def first_line(row):
    text = (CONFIGS / row).read_text()
    return text.splitlines()[0]


LSSAR_ROWS = [row for row in ROWS if first_line(row).startswith("# LSSAR")]


@pytest.mark.parametrize("row", LSSAR_ROWS)
def test_first_line_of_every_config_has_the_papers_losses(row):
    line = first_line(row)
    losses = list(map(float, re.findall(r"\d+\.\d{3,}", line)))
    table = re.search(r"LSSAR Table (\w+)", line)[1].lower()
    if table == "1":
        rows = LSSAR["table1"]["rows"]
    else:
        rows = LSSAR[f"table_{table}"]["rows"]
        assert losses.pop() == rows["softmax"][0]
    assert losses == rows[Path(row).stem]


# A scale for each task.
SCALES = {
    "language": "124m",
    "orbits": "109m",
    "recall": "tiny",
    "language+recall": "tiny_and_text",
}


def entry_names(experiment):
    return [entry.name for entry in experiment.entries]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_entry_of_the_papers_has_a_config(name):
    experiment = EXPERIMENTS[name]
    scale = open_scale(SCALES[experiment.task], "out", experiment.task)
    names = set(entry_names(experiment))
    assert len(names) == len(experiment.entries)
    if experiment.compute is None:
        for entry in experiment.entries:
            run = scale.run(entry, 1337)
            assert run.arguments, entry
    paper = experiment.paper
    if paper:
        tables = paper.get("scales", {"": paper.get("rows")})
        names_of_paper = set().union(*tables.values())
        assert names & names_of_paper
        if experiment.title.startswith("LSSAR Table"):  # other experiments have a part of its rows
            assert names == names_of_paper


@pytest.mark.parametrize("variant", NORM_AND_PAIRS)
def test_a_variant_is_crossed_with_qk_norm_and_the_share_of_pairs(variant):
    """Whatever its config file has."""
    scale = open_scale("tiny_muon", "out")
    crossed = set()
    for entry in NORM_AND_PAIRS[variant].values():
        config = scale.run(entry, 1337).config
        assert config.attention == load_config([str(entry.file)]).attention
        crossed.add((config.qk_norm, config.rope_share, entry.name.endswith(":plain_rope")))
    assert crossed == set(itertools.product((False, True), (0.5, 1.0), (False, True)))


def test_the_entries_of_ssmax_are_the_papers():
    assert entry_names(EXPERIMENTS["ssmax_figure5"]) == list(SSMAX["rows"])


def test_the_scales_have_the_papers_steps():
    training = LSSAR["training"]
    for name, steps in training["steps"].items():
        config = open_scale(name, "out").config
        assert config.max_iters == steps
        assert config.block_size == training["trained_length"]


def test_losses_across_documents_come_first():
    """Whichever of them the run was trained with."""
    values = EXPERIMENTS["documents"].values
    assert values({"loss": [1, 2], "joined": {"loss": [3, 4]}}) == [3, 4, 1, 2]
    assert values({"loss": [1, 2], "apart": {"loss": [3, 4]}}) == [1, 2, 3, 4]
