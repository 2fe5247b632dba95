"""The call of torch's varlen_attn, which needs a GPU: here a function of its documented meaning."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_paths import varlen
from attention_paths.module import Attention
from attention_paths.reference import NO_CONTEXT, Context
from config import Config
from errors import UserError
from layers.build import build_model
from layers.documents import positions_in_documents
from layers.selfcheck import MANY_KEYS, attentions_by_path, check_kernels, why_not_faster
from tests.helpers import small_config
from tests.test_attention import (
    SDPA_CASES,
    assert_near,
    build,
    draw,
    leaves,
    with_gradients,
)
from tests.test_documents import END, packed_tokens
from train import check_capacity

BFLOAT16 = torch.bfloat16


def documented_varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Attention within sequences, one after the other; window_size: keys to the left and right."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert cu_seq_q[-1] == len(query)
    assert cu_seq_k[-1] == len(key) == len(value)
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    outputs = []
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        assert 0 <= end - begin <= min(max_q, max_k)
        position = torch.arange(end - begin)
        distance = position[:, None] - position
        mask = distance >= -right
        if left >= 0:
            mask &= distance <= left
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("case", SDPA_CASES)
def test_the_call_computes_the_reference(case, kv_heads, window, documents, monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", documented_varlen_attn)
    attn = build(case, "--n_head=4", f"--n_kv_head={kv_heads}", f"--window={window}").double()
    attn.impl = "reference"
    q, k, v = draw(16, 16, B=2, H=4)
    inputs = leaves(q, k[:, :kv_heads], v[:, :kv_heads])
    context = NO_CONTEXT
    if documents:
        context = Context(document_positions=positions_in_documents(packed_tokens() == END))
    expected = with_gradients(attn, attn, inputs, context)
    call = functools.partial(varlen.varlen, attn)
    assert_near(with_gradients(call, attn, inputs, context), expected)


def test_boundaries_have_one_shape_and_graph(monkeypatch):
    """Also of other documents: a document of one token, one that fills the sequence."""
    monkeypatch.setattr(varlen, "ALWAYS_ROOM", 6)
    counter = CompileCounter()
    boundaries = torch.compile(varlen.sequence_boundaries, backend=counter, fullgraph=True)
    device = torch.device("cpu")
    for starts in ([], [1], [7], [3, 4, 6, 7]):
        is_start = torch.zeros(2, 8, dtype=torch.bool)
        is_start[1, starts] = True
        positions = positions_in_documents(is_start)
        expected = [0, 8, *(8 + start for start in starts)]
        expected += [16] * (7 - len(expected))
        assert boundaries(2, 8, positions, device).tolist() == expected
    assert counter.frame_count == 1
    is_start[0, 2] = True
    positions = positions_in_documents(is_start)
    with pytest.raises(RuntimeError, match="more documents than varlen_attn has room for"):
        varlen.sequence_boundaries(2, 8, positions, device)
    monkeypatch.setattr(varlen, "SHORTEST_MEAN", 2)
    assert len(varlen.sequence_boundaries(2, 8, positions, device)) == 9


def test_boundaries_of_all_lengths_share_a_graph():
    torch._dynamo.reset()
    counter = CompileCounter()

    @functools.partial(torch.compile, backend=counter, fullgraph=True)
    def boundaries(positions):
        return varlen.sequence_boundaries(*positions.shape, positions, positions.device)

    for length in (16, 12, 9):
        positions = torch.arange(length, dtype=torch.int32).repeat(2, 1)
        assert boundaries(positions)[:3].tolist() == [0, length, 2 * length]
    assert counter.frame_count == 2  # of the first length, and of any


def test_a_row_begins_a_sequence_where_a_window_of_one_key_hides_its_cache():
    positions = torch.tensor([[5], [0], [2]])
    boundaries = varlen.sequence_boundaries(3, 1, positions, positions.device)
    assert boundaries.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("case", ["softmax.py", "ssmax.py"])
def test_torchs_operator_takes_the_arguments(case):
    """The operator itself, with its gradients, without its kernels."""
    attn = build(case, "--n_head=4", "--n_kv_head=2", "--window=100")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 300, 8, attn.head_size, dtype=BFLOAT16, requires_grad=True)
        q, k, v = x.transpose(1, 2).split((4, 2, 2), dim=1)
        positions = torch.zeros(2, 300, dtype=torch.int32)
        out = varlen.varlen(attn, q, k, v, Context(document_positions=positions))
        assert out.shape == q.shape
        assert out.dtype == BFLOAT16
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.shape == x.shape


def test_the_path_of_softmax_on_a_gpu(monkeypatch):
    gpu = SimpleNamespace(major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    documents = Context(document_positions=torch.zeros(1, 300, dtype=torch.int32))

    def path(*settings, dtype=BFLOAT16, queries=300, context=NO_CONTEXT):
        attn = build("softmax.py", "--n_embd=64", "--n_head=1", *settings)
        with FakeTensorMode():
            q = torch.empty(1, 1, queries, attn.head_size, device="cuda", dtype=dtype)
        monkeypatch.setattr("attention_paths.module.unsupported_reason", lambda *_: "not asked for")
        return attn.path(q, 300, context)

    assert path() == "sdpa"
    assert path("--window=300") == "sdpa"
    assert path("--window=100") == "varlen"
    assert path(context=documents) == "varlen"
    assert path("--window=100", "--softcap=5") == "blocked"
    for options in (
        {"dtype": torch.float32},
        {"queries": 7},  # the others' keys are in a cache
    ):
        assert path("--window=100", **options) == "sdpa"
    assert path("--window=100", "--n_embd=36") == "sdpa"
    gpu = SimpleNamespace(major=7, minor=5)
    assert path("--window=100") == "sdpa"


@pytest.mark.parametrize(
    "settings, capability, reason",
    [
        ((), (8, 0), ""),
        ((), (7, 5), "it needs compute capability 8.0 or newer"),
        (("--window_pattern=SL",), (8, 0), ""),
        (("--window_pattern=SL",), (7, 5), "it needs compute capability 8.0 or newer"),
        (("--document_mask",), (7, 5), "it needs compute capability 8.0 or newer"),
        (("--document_mask", "--n_embd=36"), (8, 0), "head size 18 is not a multiple of 8"),
    ],
)
def test_the_path_is_reported_with_why_it_is_not_varlen(settings, capability, reason, monkeypatch):
    major, minor = capability
    gpu = SimpleNamespace(major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr("attention_paths.module.unsupported_reason", lambda *_: "not asked for")
    config = small_config("softmax.py", "--window=8", *settings)
    model = build_model(config)
    context = NO_CONTEXT
    if config.document_mask:
        context = Context(document_positions=torch.zeros(1, 300, dtype=torch.int32))
    with FakeTensorMode():
        queries = torch.empty(1, 1, 1, 1, device="cuda", dtype=BFLOAT16)
        queries = queries.expand(1, 1, MANY_KEYS, 1)
        by_path = attentions_by_path(model, queries, context)
        text = why_not_faster(by_path, queries, context)
    assert text == "" or text.count(" (not varlen: ") == 1
    assert reason in text
    assert bool(reason) == bool(text)


@pytest.mark.parametrize("wider, path", [(0, "varlen"), (1, "blocked")])
@pytest.mark.parametrize(
    "case",
    ["softmax.py --window=8", "softmax.py --window=1000", "ssmax.py --window=8 --document_mask"],
)
def test_the_self_check_compares_it_with_the_reference(case, wider, path, monkeypatch, capsys):
    """A window that is one key wider is noticed, also if it hides no key of the check's lengths."""

    def by_varlen(layer, q, Lk, context):
        if layer.impl != "auto":
            return layer.impl
        return "varlen" if q.shape[2] == Lk else "reference"

    def attn(*tensors, window_size, **options):
        left, right = window_size
        return documented_varlen_attn(*tensors, window_size=(left + wider, right), **options)

    monkeypatch.setattr(Attention, "path", by_varlen)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attn)
    config = small_config(case)
    model = build_model(config)
    facts = check_kernels(model, config, torch.float32, say=print)
    assert facts["attention_path"] == path
    impls = {module.impl for module in model.modules() if isinstance(module, Attention)}
    assert impls == {"blocked" if wider else "auto"}
    printed = capsys.readouterr()
    assert ("the kernels fail: output with" in printed.err) == bool(wider)
    assert ("its kernels within" in printed.out) == (not wider)


def test_grouped_queries_where_torch_has_no_enable_gqa(monkeypatch):
    """As in torch 2.11, which takes fewer heads of keys without it."""

    def attn(*tensors, scale, window_size):
        return documented_varlen_attn(
            *tensors, scale=scale, window_size=window_size, enable_gqa=True
        )

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attn)
    layer = build("softmax.py", "--n_head=4", "--n_kv_head=2", "--window=3").double()
    q, k, v = draw(16, 16, B=2, H=4)
    out = varlen.varlen(layer, q, k[:, :2], v[:, :2], NO_CONTEXT)
    layer.impl = "reference"
    assert torch.allclose(out, layer(q, k[:, :2], v[:, :2]))


def test_too_many_documents_end_a_run_at_its_start():
    config = Config(batch_size=64)
    check_capacity(config, documents_per_sequence=31.0)
    with pytest.raises(UserError, match="2112 documents on average, and varlen_attn takes at most"):
        check_capacity(config, documents_per_sequence=33.0)
