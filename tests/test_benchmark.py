"""The benchmark: its models, what a step is, its tables."""

import multiprocessing

import pytest
import torch

from attention_paths.module import Attention
from model import GPT, Trunk
from runtime.config_files import load_config
from runtime.files import read_json
from scripts import benchmark

TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--tokenizer=bytes", "--device=cpu"]
SHORT = [*TINY, "--block_size=8", "--batch_size=2", "--total_batch_size=16"]


def build_step(name, phase, *settings, plain=False):
    """One step of a phase with the model of a config file."""
    config = load_config([f"configs/{name}.py", *settings])
    return benchmark.build_step(config, phase, torch.device("cpu"), plain, print)


@pytest.fixture
def table(call, capsys, monkeypatch):
    """Run the command with figures of 1 for the first model, 2 for the second and so on.

    Returns the models, by name, and the lines printed.
    """
    measured_models = {}

    def measure(models, rounds, phases):
        measured_models.update(models)
        columns = []
        for phase in phases:
            columns += [f"{phase}_ms", f"{phase}_ms_spread", f"{phase}_mb"]
        return {name: dict.fromkeys(columns, n) for n, name in enumerate(models, 1)}

    monkeypatch.setattr(benchmark, "measure", measure)

    def run(*arguments):
        measured_models.clear()
        call(benchmark, *arguments)
        return measured_models, capsys.readouterr().out.splitlines()

    return run


def test_the_papers_figures_stand_beside_every_path(table):
    configs = [f"configs/{name}.py" for name in ("softmax", "lssar_p15", "relu_li", "t6")]
    _, lines = table(*configs, "--impls=auto,reference")
    for i, line in enumerate(lines):
        if line.startswith("lssar_p15"):
            assert lines[i + 1].startswith("  paper, A100")
            assert "250.3 (2.08)" in lines[i + 1]
    assert sum(line.startswith("lssar_p15") for line in lines) == 2
    assert sum("paper, A100" in line for line in lines) == 4
    # the paper has not measured a softmax with a window, LSSAR with another p, other batches, T6,
    # or other phases
    configs = [f"configs/{name}.py" for name in ("softmax", "swa", "gated", "prope")]
    _, lines = table(*configs)
    assert sum("paper, A100" in line for line in lines) == 1
    for setting in ("--p=3", "--batch_size=8"):
        _, lines = table("configs/softmax.py", "configs/lssa.py", setting)
        assert not any("paper, A100" in line for line in lines)
    models, lines = table("configs/softmax.py", "configs/t6.py", "--phases=decode", "--p=3")
    assert lines[-1].startswith("t6 ")
    assert "2.0 (2.00)" in lines[-1]
    assert models["t6"].p == 3  # no option of the command, though --phases begins with it


def test_a_model_of_every_path_and_one_plain_model(table):
    models, _ = table(
        "plain",
        "configs/lssar_p3.py",
        "--impls=auto,unfused",
        "--block_size=32",
        "--batch_size=2",
        "--phases=train",
    )
    assert [*models] == ["plain", "lssar_p3 auto", "lssar_p3 unfused"]
    assert models["plain"].attention_impl == "auto"
    config = models["lssar_p3 unfused"]
    assert config.block_size == 32
    assert config.batch_size == 2
    assert config.compile is False
    models, _ = table("configs/softmax.py", "--attention_impl=blocked", "--phases=train")
    assert models["softmax"].attention_impl == "blocked"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["configs/softmax.py", "configs/../configs/softmax.py"], "two models are called softmax"),
        (["configs/softmax.py", "configs/scales/tiny.py"], "as settings: --n_layer=4"),
        (["plain", "--optimizer=muon"], "plain is trained with adamw, not with muon"),
        (
            ["configs/softmax.py", "--task=orbits", "--tie_embeddings=False"],
            "one token a position, not task = orbits",
        ),
        (["plain", "--document_mask"], "plain takes no --document_mask"),
        (["plain", "--out=configs"], "--out configs is a folder"),
        (["plain", "--rounds=0"], "--rounds 0 must be at least 1"),
        (["plain", "--phases=eval"], "--phases = 'eval'; it must be one of train"),
        (
            ["configs/softmax.py", "configs/fox.py", "--phases=attention"],
            "fox: --phases attention knows no gates",
        ),
        (["configs/softmax.py", "--attention=lssar"], "softmax: attention = 'lssar' needs p"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, refused, monkeypatch, arguments, says):
    """Before anything is measured, also of a later model."""
    monkeypatch.setattr(benchmark, "measure", pytest.fail)
    refused(call, benchmark, *arguments, *SHORT, says=says)


def test_a_batch_size_that_would_be_fitted_is_refused(call, refused):
    says = "takes the size to measure"
    refused(call, benchmark, "configs/softmax.py", *SHORT, "--batch_size=0", says=says)


def test_steps_are_measured_in_processes_of_their_own(call, monkeypatch, tmp_path):
    # fork the processes from one that has imported torch already
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    monkeypatch.delattr(benchmark, "_step", raising=False)  # another test may have taken steps
    out = tmp_path / "new/b.json"
    call(
        benchmark,
        "configs/lssar_p3.py",
        *TINY,
        "--rounds=2",
        "--block_size=16",
        "--phases=eval,attention",
        f"--out={out}",
    )
    written = read_json(out)
    assert not hasattr(benchmark, "_step")  # no step was taken in this process
    assert written["settings"]["rounds"] == 2
    figures = written["rows"]["lssar_p3"]
    assert figures["attention_path"].startswith("blocked")
    for phase in ("eval", "attention"):
        low, high = figures[f"{phase}_ms_spread"]
        assert 0 < low < high
        assert figures[f"{phase}_ms"] == pytest.approx((low + high) / 2)  # the median of two
        assert figures[f"{phase}_mb"] > 50


def test_a_round_on_a_gpu_waits_after_its_last_step(monkeypatch):
    taken = []
    monkeypatch.setattr(benchmark, "synchronize", lambda: taken.append("wait"))
    monkeypatch.setattr(benchmark, "memory_mb", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: taken.append("free"))
    monkeypatch.setattr(benchmark, "_step", lambda: taken.append("step"), raising=False)
    monkeypatch.setattr(benchmark, "_device", torch.device("cpu"), raising=False)
    benchmark.timed_step()
    assert taken == ["wait", "step", "wait"]
    taken.clear()
    monkeypatch.setattr(benchmark, "_device", torch.device("cuda"))
    benchmark.timed_step()
    assert taken == ["step", "wait", *["step"] * benchmark.STEPS, "wait", "free"]


def test_one_layer_of_a_pattern_has_the_window(monkeypatch):
    windows = []

    def noting_forward(self, q, k, v, context):
        windows.append(self.window)
        return q + k + v

    monkeypatch.setattr(Attention, "forward", noting_forward)
    build_step("sssl", "attention", *SHORT, "--n_layer=4", "--window=3")()
    assert windows == [3] * benchmark.CALLS


@pytest.mark.parametrize("phase, backward", [("attention", benchmark.CALLS), ("attention_eval", 0)])
def test_attention_alone_is_measured_with_and_without_gradients(monkeypatch, phase, backward):
    forward = Attention.forward
    grad = torch.autograd.grad
    calls = []

    def noting_forward(self, q, k, v, context):
        calls.append("forward")
        return forward(self, q, k, v, context)

    def noting_grad(*arguments):
        calls.append("backward")
        return grad(*arguments)

    monkeypatch.setattr(Attention, "forward", noting_forward)
    monkeypatch.setattr(torch.autograd, "grad", noting_grad)
    step = build_step("softmax", phase, *SHORT)
    calls.clear()  # without the check of the kernels
    step()
    assert calls.count("forward") == benchmark.CALLS
    assert calls.count("backward") == backward


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_unfused_holds_all_logits(monkeypatch, phase):
    """The paper's setting; otherwise the losses are computed in chunks."""
    positions = []
    logits = GPT.logits

    def counting_logits(self, x):
        positions.append(x.shape[:-1].numel())
        return logits(self, x)

    monkeypatch.setattr(GPT, "logits", counting_logits)
    small = [*TINY, "--block_size=512", "--batch_size=2", "--total_batch_size=1024"]
    build_step("lssar_p15", phase, *small, *benchmark.UNFUSED)()
    assert positions == [1024]
    positions.clear()
    build_step("lssar_p15", phase, *small)()
    assert positions == []


@pytest.mark.parametrize("plain", [False, True])
def test_a_training_step_changes_the_weights(monkeypatch, plain):
    models = []
    build_optimizers = benchmark.build_optimizers

    def noting_build(model, config):
        models.append(model)
        return build_optimizers(model, config)

    monkeypatch.setattr(benchmark, "build_optimizers", noting_build)
    train = build_step("softmax", "train", *SHORT, "--positions=learned", plain=plain)
    (model,) = models
    assert model.training
    weight = model.wte.weight
    before = weight.detach().clone()
    train()
    assert not torch.equal(weight, before)
    assert weight.grad is None
    if plain:
        parameters = sum(p.numel() for p in model.blocks.parameters())
        assert parameters == 3280 + 32  # one block, the last LayerNorm
    else:
        parameters = sum(p.numel() for p in model.trunk.parameters())
        assert parameters == 3280 + 32 + 8 * 16  # and positions


def test_the_plain_model_is_causal():
    model = benchmark.PlainGPT(load_config([*SHORT, "--block_size=4"]))
    x = torch.arange(4)[None]
    changed = torch.tensor([[0, 7, 8, 9]])
    first = torch.tensor([[5, -100, -100, -100]])
    last = first.flip(1)
    torch.testing.assert_close(model(x, first), model(changed, first))
    assert not torch.isclose(model(x, last), model(changed, last))


def test_documents_begin_within_the_windows(monkeypatch):
    """In training and in attention alone; the cache of a generated token is one document."""
    monkeypatch.setattr(benchmark, "DOCUMENT_LENGTH", 3)
    documents = []
    forward = Attention.forward

    def noting_forward(self, q, k, v, context):
        documents.append(context.document_positions)
        return forward(self, q, k, v, context)

    monkeypatch.setattr(Attention, "forward", noting_forward)
    for phase in ("train", "attention"):
        build_step("ssmax", phase, *SHORT, "--document_mask")()
        positions = documents.pop()
        assert positions.shape == (2, 8)
        assert (positions[:, 1:] == 0).any()
    build_step("ssmax", "decode", *SHORT, "--document_mask")()
    assert documents.pop() is None


def test_a_generated_token_is_that_after_a_full_cache(monkeypatch):
    calls = []
    forward = Trunk.forward

    def noting_forward(self, x, cache, document_positions):
        calls.append((x.shape[:2], cache.length, cache.size))
        assert not self.training
        return forward(self, x, cache, document_positions)

    monkeypatch.setattr(Trunk, "forward", noting_forward)
    decode = build_step("lssar_p3", "decode", *SHORT, "--projections=tpa")
    decode()
    decode()
    assert calls == [((2, 1), 0, 8), ((2, 1), 7, 8), ((2, 1), 7, 8)]
