"""Tables that need no run, against the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from scripts.reproduce import __main__ as reproduce
from scripts.reproduce import formulas


def test_fading_and_focus_are_the_papers_formulas():
    """SSMax Eqs. 1 and 2, on the vectors of Figs. 1 and 3."""
    for name, power in (("softmax", lambda n: math.e), ("ssmax", lambda n: n**0.43)):
        values, curves = formulas.attention_fading(name)
        for n, value in [*zip(formulas.SIZES, values, strict=True), *zip(*curves[""], strict=True)]:
            assert value == pytest.approx(1 / (1 + (n - 1) * power(n) ** (-2 - 3)))
    for name, (variant, s) in formulas.FOCUS.items():
        values, _ = formulas.attention_focus(name)
        for n, value in zip(formulas.SIZES, values, strict=True):
            scale = s * math.log(n) if variant == "ssmax" else 1
            others = np.exp(scale * np.arange(n - 1) / (n - 2)).sum()
            assert value == pytest.approx(math.log(others) / scale, abs=1e-3)


def test_gradient_slopes():
    """e^-x against x^-2, and the slope at the highest score of LSSA."""
    slopes = {name: formulas.gradient_slopes(name)[0] for name in ("softmax", "lssa", "lssar_p15")}
    assert slopes["softmax"][0] == pytest.approx(-1, abs=1e-3)
    assert slopes["lssa"][:2] == pytest.approx([0, -2], abs=1e-3)
    x, K = formulas.HIGHEST, 1023 * math.log(2)
    exact = -2 * x / (x + K)  # of K / (x + K)^2, which is (A9)
    assert slopes["lssa"][2] == pytest.approx(exact, abs=1e-3)
    a = x / (x + K)
    growth = 14 * 1024 * a * (1 - a) / (1024 * a - 1)  # of r^14
    assert slopes["lssar_p15"][2] == pytest.approx(exact + growth, abs=1e-2)


def test_entropies_of_softmax(monkeypatch):
    monkeypatch.setattr(formulas, "LENGTHS", (16, 64))
    generator = torch.Generator().manual_seed(1337)
    q, k = (torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (64, 64))
    expected = []
    for n in (16, 64):
        shares = (q @ k[:n].T / 8).softmax(-1)
        expected.append(-(shares * shares.log()).sum(-1).mean().item())
    values, _ = formulas.random_entropy("softmax")
    assert values == pytest.approx([*expected, (expected[1] - expected[0]) / math.log(4)])


def test_a_table_of_formulas_needs_no_run(call, tmp_path):
    """Its values and the paper's are side by side, and no seed or size of a model is named."""
    arguments = ["gradient_slopes", "--scale=124m", f"--results={tmp_path}", f"--out={tmp_path}"]
    call(reproduce, *arguments)
    text = (tmp_path / "124m/gradient_slopes/table.md").read_text()
    assert "layers" not in text and "seed" not in text and "-1.0000 (-1.0000" in text
