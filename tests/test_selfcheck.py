"""The check of the kernels before a run: with kernels that are sound, wrong, and that raise."""

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from attention_paths import module
from attention_paths.module import Attention
from errors import UserError
from layers import selfcheck
from layers.build import build_model
from runtime.files import read_json
from tests.helpers import small_config

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from attention_paths.kernels import launch, phi  # noqa: E402

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="takes the kernels on a CPU")


@triton.jit
def raises(y):
    tl.static_assert(False, "no such phi")
    return y, y


@triton.jit
def wrong_slope(y):
    a, slope = phi.softplus(y)
    return a, slope * a


@pytest.fixture(params=[raises, wrong_slope], ids=["raises", "wrong"])
def broken(request, monkeypatch):
    """Breaks softplus; the fixture is what is said of it."""
    entry = launch.PHIS["softplus"]._replace(function=request.param, total=None)
    monkeypatch.setitem(launch.PHIS, "softplus", entry)
    return "no such phi" if request.param is raises else "gradient of . with 32 keys"


def check(case, *more, **others):
    """The model of a config after its check, and the facts for environment.json."""
    config = small_config(case, *more)
    model = build_model(config)
    return model, selfcheck.check_kernels(model, config, torch.float32, say=print, **others)


@pytest.mark.parametrize(
    "case",
    [
        "lssar_p15.py --window=8",
        "softmax.py --forget=True --n_kv_head=1",
        "hybrid_lssar_p5.py",
        "lssar_p3.py --document_mask",
    ],
)
def test_sound_kernels_agree(automatic, case, capsys):
    _, facts = check(case)
    assert facts["attention_path"] == "triton"
    assert 0 < facts["largest_error"] < 1e-4
    line = "attention path: triton, its kernels within .* of the reference"
    assert re.match(line, capsys.readouterr().out)


@pytest.mark.parametrize(
    "case, line",
    [
        ("ssmax.py", "sdpa"),
        ("lssa.py --attention_impl=reference", "reference"),
        ("fox.py", "blocked (not triton: this is cpu)"),
        ("entmax15.py", "blocked (not triton: its weights are functions of whole rows)"),
        ("hybrid_lssar_p5.py", "blocked and sdpa (not triton: this is cpu)"),
    ],
)
def test_the_path_is_printed_with_the_reason_for_blocks(case, line, capsys):
    _, facts = check(case)
    assert capsys.readouterr().out == f"attention path: {line}\n"
    assert facts["attention_path"] == line.partition(" (")[0]
    assert "largest_error" not in facts


def test_kernels_that_fail_are_replaced_or_refused(automatic, broken, capsys):
    model, facts = check("lssa.py")
    impls = {each.impl for each in model.modules() if isinstance(each, Attention)}
    assert impls == {facts["attention_path"]} == {"blocked"}
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(broken, line) and facts["problem"] in line
    with pytest.raises(UserError, match=broken):
        check("lssa.py", "--attention_impl=triton")


def test_kernels_that_join_documents_are_replaced(automatic, joining_kernels, capsys):
    _, facts = check("lssa.py", "--document_mask")
    assert facts["attention_path"] == "blocked"
    assert re.search("output with 32 keys differs", capsys.readouterr().err)


def test_wrong_decoding_is_noticed(automatic, monkeypatch):
    monkeypatch.setattr(launch, "decode", lambda q, out, arguments: out.zero_())
    _, facts = check("lssa.py")
    assert facts["attention_path"] == "blocked"
    assert "last output with" in facts["problem"]


def test_wrong_gradients_of_gates_are_noticed(automatic, monkeypatch):
    fused = module.fused

    def doubled(layer, q, k, v, context):
        gates = context.log_forget
        return fused(layer, q, k, v, replace(context, log_forget=2 * gates - gates.detach()))

    monkeypatch.setattr(module, "fused", doubled)
    _, facts = check("softmax.py --forget=True --sink=learned")
    assert "gradient of gates with" in facts["problem"]


def test_a_wide_window_is_checked_as_a_narrower_one(automatic, monkeypatch):
    """The reference holds all scores: of 64K keys it needs more memory than the run."""
    monkeypatch.setattr(selfcheck, "WIDEST_WINDOW", 8)
    evaluate = selfcheck.evaluate
    most_keys = 0

    def counted(layer, tensors, context):
        nonlocal most_keys
        most_keys = max(most_keys, tensors[1].shape[2])
        return evaluate(layer, tensors, context)

    monkeypatch.setattr(selfcheck, "evaluate", counted)
    model, facts = check("lssa.py", "--window=100")
    assert facts["attention_path"] == "triton"
    assert most_keys == 37 + 8
    assert model.attention_layers()[0].attention.window == 100


def test_kernels_of_one_and_of_two_stages_are_both_checked(automatic, monkeypatch):
    """The global and the local heads of a hybrid may differ in p alone."""
    checked = []
    check_module = selfcheck.check_module

    def recorded(attention, *arguments):
        checked.append(attention.p)
        return check_module(attention, *arguments)

    monkeypatch.setattr(selfcheck, "check_module", recorded)
    hybrid = ("--nope_share=0.5", "--local_window=8", "--window=8", "--attention_impl=triton")
    check("softmax.py --p=3", *hybrid)
    assert sorted(checked, key=str) == [3, None]


def test_too_little_memory_is_no_reason_for_another_path(automatic, monkeypatch):
    monkeypatch.setattr(selfcheck, "evaluate", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        check("lssa.py")


@pytest.mark.parametrize(
    "words, usable, raised",
    [
        ("out of memory", True, RuntimeError),
        ("an illegal memory access was encountered", False, torch.AcceleratorError),
        ("device kernel image is invalid", True, None),
    ],
)
def test_cuda_errors_that_triton_reports(words, usable, raised, monkeypatch):
    """As RuntimeErrors: only a kernel that cannot be launched is a reason for another path."""
    failure = RuntimeError(f"Triton Error [CUDA]: {words}")
    monkeypatch.setattr(selfcheck, "relative_errors", Mock(side_effect=failure))
    lasting = None if usable else torch.AcceleratorError(f"CUDA error: {words}")
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=lasting))
    q = SimpleNamespace(is_cuda=True, device=None)
    config = small_config("lssa.py")
    attention = build_model(config).attention_layers()[0].attention
    if raised is None:
        _, problem = selfcheck.check_module(attention, config, q, False, False)
        assert words in problem
    else:
        with pytest.raises(raised, match=words):
            selfcheck.check_module(attention, config, q, False, False)


def test_ranks_take_the_same_path(automatic, monkeypatch):
    monkeypatch.setattr(selfcheck, "all_reduce_max", lambda failed: 1)
    _, facts = check("lssa.py")
    assert facts["attention_path"] == "blocked"
    assert "another rank" in facts["problem"]


def test_a_rank_without_kernels_waits_for_the_others(monkeypatch):
    values = []
    monkeypatch.setattr(selfcheck, "all_reduce_max", lambda failed: values.append(failed) or 0)
    _, facts = check("softmax.py")
    assert values == [False]
    assert facts["attention_path"] == "sdpa"
    assert "largest_error" not in facts


def test_a_run_records_its_path(automatic, monkeypatch, train):
    entry = launch.PHIS["softplus"]._replace(function=raises)
    monkeypatch.setitem(launch.PHIS, "softplus", entry)
    run = train("run", "configs/lssa.py", "--max_iters=1")
    assert read_json(run / "environment.json")["attention_path"] == "blocked"
