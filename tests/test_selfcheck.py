"""The check of the kernels before a run: with kernels that are sound, wrong, and that raise."""

import re

import pytest
import torch

from attention_paths.module import Attention
from errors import UserError
from layers.selfcheck import check_kernels
from runtime.files import read_json
from tests.helpers import small_config

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from attention_paths import launch, phi  # noqa: E402

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="takes the kernels on a CPU")
CPU = torch.device("cpu")


@triton.jit
def raises(y):
    tl.static_assert(False, "no such phi")
    return y, y


@triton.jit
def wrong_slope(y):
    a, slope = phi.softplus(y)
    return a, slope * a


@pytest.fixture
def automatic(monkeypatch):
    """Makes 'auto' take the kernels, as on a GPU."""
    path = Attention.path
    monkeypatch.setattr(Attention, "path", lambda *a: "triton" if a[0].impl == "auto" else path(*a))


@pytest.fixture(params=[raises, wrong_slope], ids=["raises", "wrong"])
def broken(request, monkeypatch):
    """Breaks softplus; the fixture is what is said of it."""
    entry = launch.PHIS["softplus"]._replace(function=request.param, total=None)
    monkeypatch.setitem(launch.PHIS, "softplus", entry)
    return (
        "forward_one_stage: .*no such phi"
        if request.param is raises
        else "gradient of . with 77 keys"
    )


@pytest.mark.parametrize(
    "case",
    ["lssar_p15.py --window=8", "softmax.py --forget=True --n_kv_head=1", "hybrid_lssar_p5.py"],
)
def test_sound_kernels_agree(automatic, case, capsys):
    config = small_config(case)
    same, facts = check_kernels(config, CPU, torch.float32)
    assert same == config and facts["attention_path"] == "triton"
    assert 0 < facts["largest_error"] < 1e-4
    assert "attention by the fused kernels, within" in capsys.readouterr().out


def test_kernels_that_fail_are_replaced_or_refused(automatic, broken, capsys):
    config, facts = check_kernels(small_config("lssa.py"), CPU, torch.float32)
    assert config.attention_impl == facts["attention_path"] == "blocked"
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(broken, line) and facts["problem"] in line
    with pytest.raises(UserError, match=broken):
        check_kernels(small_config("lssa.py", "--attention_impl=triton"), CPU, torch.float32)


def test_ranks_take_the_same_path(automatic):
    config, facts = check_kernels(small_config("lssa.py"), CPU, torch.float32, lambda failed: True)
    assert config.attention_impl == "blocked" and "another rank" in facts["problem"]


def test_a_run_records_its_path(automatic, monkeypatch, train):
    entry = launch.PHIS["softplus"]._replace(function=raises)
    monkeypatch.setitem(launch.PHIS, "softplus", entry)
    run = train("run", "configs/lssa.py", "--max_iters=1")
    assert read_json(run / "environment.json")["attention_path"] == "blocked"
