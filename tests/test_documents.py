"""Attention within documents: a packed window computes what each document does alone."""

import functools
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attention_paths.reference import Context
from data.loader import Batching, TokenLoader, validation_tokens
from data.shards import read_shard, write_shard
from errors import UserError
from generation import generate
from layers.cache import KVCache
from layers.documents import positions_in_documents
from model import compile_model
from runtime.config_files import load_config
from tests.helpers import small_config, small_model
from tests.kernel_cases import DEVICE
from tests.runs import metrics, weights
from tests.test_attention import (
    CASES,
    SDPA_CASES,
    assert_near,
    build,
    draw,
    leaves,
)
from tests.test_model import COMBINED, TPA, hidden_by_chunks

END = 256  # end-of-text of bytes
# The documents of two sequences of 16 tokens: the first begins before the window or with it.
BOUNDS = [(0, 5, 6, 14, 16), (0, 12, 16)]
MODELS = [
    *COMBINED,
    *TPA,
    "fox.py",
    "swa.py",
    "ssmax.py",
    "lssa.py --positions=learned",
]


def random_tokens(*shape):
    """Ids of bytes, without an end-of-text."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(END, shape, generator=generator)


def packed_tokens():
    idx = random_tokens(2, 16)
    for row, bounds in zip(idx, BOUNDS, strict=True):
        row[list(bounds[1:-1])] = END
    return idx


def each_document():
    """The sequence and the tokens of each document, as slices."""
    for b, bounds in enumerate(BOUNDS):
        for start, end in pairwise(bounds):
            yield slice(b, b + 1), slice(start, end)


def packed_context(row_inputs, log_forget):
    positions = positions_in_documents(packed_tokens() == END)
    return Context(1.0, row_inputs, log_forget, positions)


def trunk_parameters(model):
    """The parameters on which hidden states depend."""
    return [p for name, p in model.named_parameters() if "lm_head" not in name]


# ---- a layer's attention ----


def gradients_of(out, tensors, gradient):
    """The gradient of each tensor; `out` may not depend on one, whose gradient is then 0."""
    return torch.autograd.grad(
        out,
        tensors,
        gradient,
        allow_unused=True,
        materialize_grads=True,
    )


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_path_computes_each_document_alone(case, forget, small_blocks):
    """Values and gradients, with a window and without."""
    generator = torch.Generator().manual_seed(1)
    u, w, decay = torch.randn(3, 2, 2, 16, dtype=torch.float64, generator=generator)
    inputs = leaves(*draw(16, 16), u, w, -decay.abs())
    q, k, v, u, w, log_forget = inputs
    row_inputs = {"u": u, "w": w}
    if not forget:
        log_forget = None
    gradient = torch.linspace(-1, 2, v.numel(), dtype=v.dtype).view_as(v)
    paths = ["reference", "auto"]
    if case in SDPA_CASES and not forget:  # elsewhere "auto" is "blocked"
        paths.append("blocked")
    for window in (None, 3):
        alone = build(case, f"--window={window}", "--attention_impl=reference").double()
        context = Context(1.0, row_inputs, log_forget)
        outputs = []
        for b, tokens in each_document():
            document = context.select(sequences=b, queries=tokens, keys=tokens)
            outputs.append(alone(q[b, :, tokens], k[b, :, tokens], v[b, :, tokens], document))
        first_sequence = torch.cat(outputs[:4], dim=2)
        second_sequence = torch.cat(outputs[4:], dim=2)
        expected = torch.cat((first_sequence, second_sequence))
        learned = [*inputs, *alone.parameters()]
        expected_gradients = gradients_of(expected, learned, gradient)
        for path in paths:
            attn = build(case, f"--window={window}", f"--attention_impl={path}").double()
            out = attn(q, k, v, packed_context(row_inputs, log_forget))
            learned = [*inputs, *attn.parameters()]
            gradients = gradients_of(out, learned, gradient)
            assert_near(out, expected)
            for actual, exact in zip(gradients, expected_gradients, strict=True):
                assert_near(actual, exact, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_crosses_the_bounds_of_a_document(case):
    """Weights and gradients beyond a document are exactly 0, in the row of its last query."""
    attn = build(case, "--attention_impl=reference").double()
    q, k, v = leaves(*draw(16, 16, H=2))
    A = attn.weights(q, k, packed_context({}, None))
    for b, bounds in enumerate(BOUNDS):
        for start, end in pairwise(bounds):
            row = A[b, :, end - 1]  # of the last query
            loss = row.square().sum()
            (gradient,) = torch.autograd.grad(loss, k, retain_graph=True)
            for x in (row, gradient[b].sum(-1)):
                assert not x[:, :start].any()
                assert not x[:, end:].any()
    assert not A.triu(1).any()


# ---- a model ----


@pytest.mark.parametrize("case", MODELS)
def test_a_model_computes_each_document_alone(case, small_blocks):
    model = small_model(case, "--document_mask")
    idx = packed_tokens()
    gradient = torch.linspace(-1, 2, 2 * 16 * 16, dtype=torch.float64).view(2, 16, 16)
    parameters = trunk_parameters(model)
    packed = model.hidden(idx)
    packed_gradients = torch.autograd.grad(packed, parameters, gradient, allow_unused=True)
    model.document_start = None
    loss = 0
    for b, tokens in each_document():
        alone = model.hidden(idx[b, tokens])
        assert_near(packed[b, tokens], alone)
        loss = loss + (alone * gradient[b, tokens]).sum()
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for actual, exact in zip(packed_gradients, expected, strict=True):
        if exact is None:
            assert actual is None
        else:
            assert_near(actual, exact, rtol=1e-8, atol=1e-9)
    joined = model.hidden(idx)
    assert not torch.allclose(joined, packed, atol=1e-3)


@pytest.mark.parametrize("case", ["hybrid_lssar_p5.py", "t6_lssar_p15.py"])
def test_a_model_by_the_kernels_is_the_reference(case):
    """Values, gradients and a cache of several documents."""
    pytest.importorskip("triton", reason="Triton is not installed")
    idx = packed_tokens().to(DEVICE)
    gradient = torch.linspace(-1, 2, 2 * 16 * 16, dtype=torch.float64, device=DEVICE)
    gradient = gradient.view(2, 16, 16)
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        model = small_model(case, "--document_mask", f"--attention_impl={impl}", "--n_layer=1")
        model = model.to(DEVICE, dtype)
        hidden = model.hidden(idx)
        gradients = torch.autograd.grad(hidden, trunk_parameters(model), gradient.to(dtype))
        with torch.no_grad():
            cached = hidden_by_chunks(model, idx, [13, 1, 1, 1], KVCache(16))
        results.append([hidden, *gradients, cached])
    for actual, exact in zip(*results, strict=True):
        error = (actual.double() - exact).norm()
        assert error < 1e-4 * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize("scaling", ["dynamic_ntk", "yarn"])
@pytest.mark.parametrize("case", ["ssmax.py", "lssar_p15.py", "hybrid.py", "t6.py --n_head=3"])
def test_rope_is_scaled_for_the_length_of_each_document(case, scaling):
    """The training length is 16; the documents of two sequences of 50 have 2 to 40 tokens."""
    model = small_model(f"{case} --head_size=6 --mlp_hidden=24", "--document_mask")
    model.scale_rope(scaling)
    idx = random_tokens(2, 50)
    idx[0, [20, 48]] = END
    idx[1, 10] = END
    packed = model.hidden(idx)
    for b, bounds in enumerate([(0, 20, 48, 50), (0, 10, 50)]):
        for start, end in pairwise(bounds):
            document = idx[b : b + 1, start:end]
            assert_near(packed[b : b + 1, start:end], model.hidden(document))
    last_document = idx[1:, 10:]
    for size in (50, 64):  # the last document of a text that goes on is longer
        cached = hidden_by_chunks(model, idx, [49, 1], KVCache(size))
        alone = model.hidden(last_document, KVCache(size - 10))
        assert_near(cached[1:, 10:], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_learned_positions_end_with_the_longest_document():
    model = small_model("lssa.py --positions=learned", "--document_mask")
    idx = random_tokens(1, 24)
    with pytest.raises(UserError, match="a length of 24 is beyond the 16 learned positions"):
        model.hidden(idx)
    idx[0, 10] = END
    packed = model.hidden(idx)
    alone = model.hidden(idx[:, 10:])
    assert_near(packed[:, 10:], alone)


@torch.no_grad()
def test_documents_may_begin_after_tokens_without_any():
    """`is_start` of a later call leaves the cached tokens in the first document."""
    model = small_model("ssmax.py")
    idx = random_tokens(2, 9)
    is_start = torch.zeros(2, 9, dtype=torch.bool)
    is_start[0, 6] = True
    whole = model.hidden(idx, is_start=is_start)
    cache = KVCache(9)
    model.hidden(idx[:, :4], cache)
    later = model.hidden(idx[:, 4:], cache, is_start[:, 4:])
    assert_near(later, whole[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("case", [*MODELS, "lssar_p3.py --window=4"])
def test_a_cache_knows_its_last_document(case):
    model = small_model(case, "--document_mask")
    idx = packed_tokens()
    whole = model.hidden(idx)
    for sizes in ([4, 1, 1, 7, 3], [13, 1, 1, 1]):
        cached = hidden_by_chunks(model, idx, sizes, KVCache(16))
        assert_near(cached, whole, rtol=1e-9, atol=1e-9)


def test_prompts_of_several_documents_continue_the_last_one():
    """Also of unequal lengths, which have a cache each."""
    model = small_model("ssmax.py", "--document_mask")
    first, second = packed_tokens()
    prompts = [first[:9], second[:14]]
    texts = generate(model, prompts, 2, temperature=0, never=END)
    for text, start in zip(texts, (6, 12), strict=True):
        prompt = text[None, start:-2]
        alone = generate(model, prompt, 2, temperature=0, never=END)
        assert torch.equal(text[start:], alone[0])


def test_the_padding_of_prompts_is_one_document():
    """Also if its id begins documents: varlen_attn has room for few of them."""
    model = small_model("ssmax.py", "--document_mask")
    model.document_start = 0  # prompts are padded with zeros
    positions = []

    def record(trunk, inputs):
        positions.append(inputs[2])

    model.trunk.register_forward_pre_hook(record)
    short = torch.tensor([5, 0, 7])
    long = torch.arange(1, 15)
    generate(model, [short, long], 1)
    begins_document = positions[0] == 0
    assert begins_document.shape == (2, 14)
    short_begins, long_begins = begins_document
    assert short_begins.nonzero().flatten().tolist() == [0, 11, 12]
    assert long_begins.nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize(
    "case",
    [
        "softmax.py",
        "lssar_p15.py",
        "hybrid.py",
        "stick_breaking.py",
        "lssar_p15.py --attention_impl=triton",
    ],
)
def test_blocks_compile_without_graph_breaks(case, monkeypatch):
    device = "cpu"
    if "triton" in case:
        pytest.importorskip("triton", reason="Triton is not installed")
        device = DEVICE
    torch._dynamo.reset()
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiled))
    model = small_model(case, "--document_mask", "--n_layer=3").float().to(device)
    compile_model(model)
    idx = packed_tokens().to(device)
    model(idx, idx)
    assert compiled.frame_count == 2  # the blocks' and the loss's
    model(idx.roll(1, dims=1), idx)
    assert compiled.frame_count == 2  # other documents take the same graphs


# ---- a run ----


MASKED = ("configs/ssmax.py", "--document_mask")


def test_validation_is_within_documents_and_the_run_says_how_long_they_are(
    train, documents, capsys
):
    run = train("run", *MASKED, f"--data_dir={documents}", "--max_iters=0")
    tokens = torch.from_numpy(validation_tokens(documents, 256, 257).astype(np.int64))
    model = small_model("ssmax.py", "--n_embd=32").float()
    model.load_state_dict(weights(run))
    losses = []
    for start in range(0, 256, 16):
        window = tokens[start : start + 17]
        bounds = [0]
        for i in range(1, 16):
            if window[i] == END:
                bounds.append(i)
        bounds.append(16)
        for begin, end in pairwise(bounds):
            x = window[None, begin:end]
            y = window[None, begin + 1 : end + 1]
            losses.append(model.token_losses(x, y).flatten())
    expected = torch.cat(losses).mean().item()
    assert metrics(run, "val_loss")[0] == pytest.approx(expected, rel=1e-5)
    printed = capsys.readouterr().out
    loader = TokenLoader(documents, Batching(16, 8, 0), 257)
    measured = loader.measure_documents(END)
    assert 3 < measured.per_sequence < 4
    assert f"a training sequence has {measured.per_sequence:.1f} documents on average" in printed
    lower, median, upper = measured.n_quartiles
    assert f"quartiles {lower}, {median} and {upper}\n" in printed
    assert "warning" not in printed


def test_documents_are_counted_in_all_windows(tmp_path):
    """By hand: windows of 8 tokens, the first with documents of 3 and 5, the second of 8."""
    tokens = np.zeros(17, np.uint16)
    tokens[[0, 3, 8]] = END
    write_shard(tmp_path / "x_train_000001.bin", tokens)
    write_shard(tmp_path / "x_val_000000.bin", tokens[9:])
    loader = TokenLoader(tmp_path, Batching(8, 2, 0), 257)
    measured = loader.measure_documents(END)
    assert measured.per_sequence == 1.5
    n_of_first_window = [1, 2, 3, 1, 2, 3, 4, 5]
    n_of_second_window = [1, 2, 3, 4, 5, 6, 7, 8]
    n = [*n_of_first_window, *n_of_second_window]
    quartiles = np.quantile(n, (0.25, 0.5, 0.75))
    assert measured.n_quartiles == [round(x) for x in quartiles]
    assert measured.shards_without == ["x_val_000000.bin"]
    with pytest.raises(UserError, match=r"no training shard of .* end-of-text token \(id 255\)"):
        loader.measure_documents(255)


def test_a_shard_without_documents_is_said(train, documents, tmp_path, capsys, refused):
    data = shutil.copytree(documents, tmp_path / "data")
    settings = (*MASKED, f"--data_dir={data}", "--max_iters=0")

    def remove_ends(name):
        tokens = read_shard(data / name)
        tokens[tokens == END] = 32
        write_shard(data / name, tokens)

    remove_ends("text_train_000002.bin")
    train("run", *settings)
    printed = capsys.readouterr().out
    assert "warning: no document begins in text_train_000002.bin" in printed
    remove_ends("text_train_000001.bin")
    refused(train, "other", *settings, says="no training shard of")


def test_a_resumed_run_keeps_its_mask(train, documents, refused):
    settings = ("configs/ssmax.py", f"--data_dir={documents}", "--max_iters=1")
    train("run", *settings)
    says = (
        "was trained with document_mask = False, so it cannot be resumed with True",
        "/run --document_mask=True --init_from=",
    )
    refused(train, "run", *settings, "--resume", "--document_mask", says=says)


def test_what_cannot_mask_documents_refuses_them(words_file, tmp_path):
    for task in ("orbits", "recall"):
        with pytest.raises(UserError, match="document_mask = True has an effect with task"):
            small_config("softmax.py", "--document_mask", f"--task={task}")
    with pytest.raises(UserError, match="vocab_size = 256 leaves it out"):
        small_config("softmax.py", "--document_mask", "--vocab_size=256")
    without_end = tmp_path / "tokenizer.json"
    content = words_file.read_text()
    without_end.write_text(content.replace("</s>", "<end>"))
    with pytest.raises(UserError, match="has no end-of-text token; looked for"):
        load_config([f"--tokenizer={without_end}", "--document_mask"])
    config = load_config([f"--tokenizer={words_file}", "--document_mask"])
    assert config.end_of_text == 6


def test_commands_that_read_no_documents_refuse_them(train, documents, call, refused):
    from scripts import attention_maps

    run = train("run", *MASKED, f"--data_dir={documents}", "--max_iters=0")
    refused(call, attention_maps, run, says="has document_mask: attention_maps cannot measure it")
