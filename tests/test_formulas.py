"""The hash of a layer's formulas: it changes where attention computes something else."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attention
import layers.heads
from attention import VARIANTS, log_d_log_n
from attention_paths import reference
from attention_paths.module import Attention
from attention_paths.reference import ReferenceAttention
from config import Config
from layers.formulas import formulas_hash
from tests.runs import ROOT

SOFTMAX = Config(n_layer=4, n_head=4, n_embd=96)
LSSAR = SOFTMAX.replace(attention="lssar", p=15.0)
HYBRID = LSSAR.replace(nope_share=0.5, local_window=256)


@pytest.fixture
def edit(monkeypatch):
    """Give an entry of VARIANTS other fields."""

    def edit(name, **fields):
        monkeypatch.setitem(VARIANTS, name, replace(VARIANTS[name], **fields))

    return edit


def test_a_variant_that_draws_random_numbers_has_one_hash(edit):
    edit("softmax", reweight=lambda A, rows: F.dropout(A, 0.5))
    state = torch.get_rng_state()
    assert formulas_hash(SOFTMAX) == formulas_hash(SOFTMAX)
    assert torch.equal(torch.get_rng_state(), state)


def test_p_n_beyond_the_training_length_counts(monkeypatch):
    """Its last value, in place of 0."""
    config = SOFTMAX.replace(attention="ssmax_probe")
    before = formulas_hash(config)
    rows = ReferenceAttention.rows

    def edited(self, *arguments):
        result = rows(self, *arguments)
        if self.p_n is not None:
            result.p_n = result.p_n * (result.n <= len(self.p_n))
        return result

    monkeypatch.setattr(ReferenceAttention, "rows", edited)
    assert formulas_hash(config) != before


def test_every_variant_has_a_hash_of_its_own():
    hashes = {}
    for name, variant in VARIANTS.items():
        config = SOFTMAX.replace(attention=name, p=15.0 if variant.takes_p else None)
        hashes.setdefault(formulas_hash(config), []).append(name)
    assert [names for names in hashes.values() if len(names) > 1] == [["lssa", "lssar"]]


@pytest.mark.parametrize(
    "settings",
    [
        {"p": 3.0},
        {"window": 256},
        {"window": 256, "window_pattern": "SL"},
        {"softcap": 30.0},
        {"sink": "one"},
        {"sink": "learned"},
        {"forget": True},
        {"positions": "alibi"},
        {"positions": "alibi", "nope_share": 0.5},
        {"nope_share": 0.5, "local_window": 256},
        {"nope_share": 0.25, "local_window": 256},
        {"nope_every": 4, "local_window": 256},
        {"n_head": 6},
        {"n_layer": 6},
    ],
    ids=str,
)
def test_settings_of_attention_change_the_hash(settings):
    config = SOFTMAX.replace(attention="lssa")
    assert formulas_hash(config.replace(**settings)) != formulas_hash(config)


OTHER_SCALES = {
    "of the size of a head": lambda rows: rows.d**-0.51,
    "of n": lambda rows: log_d_log_n(rows) * 1.001,
    "beyond the training length": lambda rows: math.log(rows.d) * rows.n.clamp_max(rows.T).log(),
    "of the head": lambda rows: log_d_log_n(rows) * (1 + rows.head / len(rows.head)),
}


@pytest.mark.parametrize("scale", OTHER_SCALES.values(), ids=OTHER_SCALES)
@pytest.mark.parametrize("config", [LSSAR, HYBRID], ids=["alone", "in a hybrid"])
def test_another_scale_is_noticed(scale, config, edit):
    before = formulas_hash(config)
    edit("lssar", scale=scale)
    assert formulas_hash(config) != before


def test_another_phi_is_noticed(edit):
    before = formulas_hash(LSSAR)
    edit("lssar", phi=VARIANTS["relu_li"].phi)
    assert formulas_hash(LSSAR) != before


def test_other_softmax_in_the_local_heads_of_a_hybrid_is_noticed(edit):
    before = formulas_hash(HYBRID)
    edit("softmax", scale=lambda rows: 1.0)
    assert formulas_hash(HYBRID) != before


@pytest.mark.parametrize("n", [64, 100, 1000, 4000])
def test_a_formula_that_changes_beyond_n_keys_is_noticed(edit, n):
    before = formulas_hash(SOFTMAX)
    edit("softmax", scale=lambda rows: torch.where(rows.n > n, 2.0, 1.0) * rows.d**-0.5)
    assert formulas_hash(SOFTMAX) != before


def test_other_shared_code_is_noticed(monkeypatch):
    before = formulas_hash(LSSAR)
    weights = attention.attention_weights
    monkeypatch.setattr(
        reference, "attention_weights", lambda *arguments: weights(*arguments).sqrt()
    )
    assert formulas_hash(LSSAR) != before


def test_a_subclass_of_attention_is_noticed(monkeypatch):
    class Halved(Attention):
        def forward(self, *inputs):
            return super().forward(*inputs) / 2

    def build_heads(config, heads, window):
        return Halved(VARIANTS[config.attention], len(heads), config.d_head)

    before = formulas_hash(SOFTMAX)
    monkeypatch.setattr(layers.heads, "build_heads", build_heads)
    assert formulas_hash(SOFTMAX) != before


def test_the_same_formula_in_other_words_has_the_same_hash(edit):
    config = SOFTMAX.replace(attention="ssmax")
    before = formulas_hash(config)
    edit("ssmax", scale=lambda rows: rows.n.log() / math.sqrt(rows.d) * rows.s)
    assert formulas_hash(config) == before


def test_initial_values_and_random_state_do_not_count():
    config = SOFTMAX.replace(attention="ssmax_bias")
    before = formulas_hash(config)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert formulas_hash(config.replace(s_init=0.5, seed=3)) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_other_processors_compute_the_same_hash():
    code = "from layers.formulas import formulas_hash; from tests.test_formulas import *\n"
    code += "print(formulas_hash(LSSAR))\n"
    code += "print(formulas_hash(SOFTMAX.replace(attention='exp')))"  # has the largest outputs
    environment = os.environ | {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    hashes = [formulas_hash(LSSAR), formulas_hash(SOFTMAX.replace(attention="exp"))]
    assert done.stdout.decode().split("\n")[:2] == hashes
