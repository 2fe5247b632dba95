"""The fused kernels against the formulas in float64: on a GPU, or in Triton's interpreter."""

import functools
import math
import os
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

import attention
import attention_paths.fused
from attention import VARIANTS, Phi, Variant
from attention_paths.fused import obstacle, variant_obstacle
from attention_paths.reference import Context
from data.tasks import TASKS
from errors import UserError
from generation import generate
from layers.build import build_model
from model import compile_model
from runtime.config_files import load_config
from tests.fused import (
    DEVICE,
    FUSED,
    REFERENCE,
    SETTINGS,
    STARTS,
    TRITON,
    build,
    call,
    check_nans,
    compare,
    decode,
    draw,
    draw_off_kinks,
    evaluate,
    exact_evaluation,
    in_float64,
    inputs_of,
    kernels,
)
from tests.helpers import SMALL, small_config, small_model
from tests.runs import ROOT

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

from attention_paths.kernels import launch, phi, tiles  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_buffers")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# interpreted blocks are 32 queries and 16 keys: 37 is more than a block of each, and a part of one
LENGTHS = [4, 19, 1, 21, 5, 37, 3]


@pytest.mark.parametrize("case", FUSED)
def test_every_variant(case):
    index = FUSED.index(case)
    L, d = LENGTHS[index % len(LENGTHS)], (16, 24, 64)[index % 3]
    compare(case, draw_off_kinks(L, L, d, FLOAT32))


def each_document_alone(layer, q, k, v, context):
    """The layer's output where each of STARTS' documents is a sequence of its own."""
    sizes = [end - start for start, end in pairwise([0, *STARTS[:3], q.shape[2]])]
    documents = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([layer(*document) for document in documents], dim=2)


@pytest.mark.parametrize("case", FUSED)
def test_every_variant_within_documents(case):
    tensors = draw_off_kinks(21, 21, 16, FLOAT32)
    within = compare(f"{case} --document_mask", tensors)
    doubles = [x.double() for x in tensors]
    alone = evaluate(in_float64(case, 16), doubles, each_document_alone)
    for name, exact in alone.items():
        error = (within[name] - exact).norm()
        assert error <= 1e-4 * max(exact.norm(), tensors[-1].norm()), name


@pytest.mark.parametrize(
    "case",
    ["lssar_p15.py", "relu_li.py", "softpick.py --forget=True", "softmax_p3.py --sink=learned"],
)
def test_bfloat16(case):
    compare(case, inputs_of(case, draw_off_kinks(21, 21, 16, BFLOAT16)))


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    compare(case, inputs_of(case, draw_off_kinks(*SETTINGS[case], 16, FLOAT32, B=2)))


@pytest.mark.parametrize(
    "case", ["lssar_p15.py --window=9", "relu_li.py --n_kv_head=1", "ssmax_bias.py --sink=learned"]
)
def test_without_atomics(case, monkeypatch):
    """The same bits again."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    tensors = inputs_of(case, draw_off_kinks(35, 37, 16, FLOAT32))
    first, second = compare(case, tensors), evaluate(kernels(case, 16), tensors)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_any_strides():
    """q, k and v as slices of one projection, as the model has them, and every other column."""
    packed = torch.randn(2, 19, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = packed[..., ::2].permute(2, 0, 3, 1, 4).unbind()
    gradient = torch.randn(2, 2, 19, 1).expand(-1, -1, -1, 16)  # stride 0 along the head
    compare("lssar_p3.py", (q, k, v, gradient))


# ---- extreme inputs ----


@pytest.mark.parametrize("case", ["lssar_p15.py", "softmax_p15.py"])
@pytest.mark.parametrize("inputs", ["equal keys", "zero queries"])
def test_tied_rows_stay_uniform_with_bounded_gradients(case, inputs):
    q, k, v, gradient = draw(21, 21, 16, FLOAT32)
    if inputs == "equal keys":
        k = k[:, :, :1].expand_as(k).contiguous()
    else:
        q = torch.zeros_like(q)
    found = evaluate(kernels(case, 16), (q, k, v, gradient))
    exact = exact_evaluation(case, (q, k, v, gradient))
    mean = v.double().cumsum(2) / torch.arange(1, 22)[:, None]
    torch.testing.assert_close(found["out"], mean.flatten(), rtol=0, atol=1e-5)
    for name in found:
        # a zero query's gradient is 1e6 times another's: l2_normalise divides it by 1e-6
        scale = max(gradient.norm(), exact[name].norm())
        assert (found[name] - exact[name]).norm() < 1e-5 * scale


@pytest.mark.parametrize("size", [-1e4, 1, 1e4])
@pytest.mark.parametrize(
    "case",
    [
        "softmax.py --sink=learned --window=3",
        "softmax_p3.py",
        "sigmoid_l1.py --window=3",
        "sigmoid_logn_l1_p15.py --sink=learned",
        "ablations/phi_softplus.py --sink=learned",
        "ablations/phi_softplus.py --p=3 --window=3",
    ],
)
def test_scores_and_sinks_of_ten_thousand(case, size):
    """Rows where phi underflows or overflows are shifted, tile by tile.

    A head's sink is far above or far below. With the window rows see no key of their first tiles.
    """
    q, k, v, gradient = draw(21, 21, 16, FLOAT32)
    q = size / 4 * q.abs()
    k = k.abs() * torch.linspace(0.9, 1.1, 21)[:, None]
    layer, exactly = kernels(case, 16), in_float64(case, 16)
    if layer.sink is not None:
        layer.sink.data.copy_(torch.tensor([1e4, -1e4]))
        exactly.sink.data.copy_(layer.sink.data)
    found = evaluate(layer, (q, k, v, gradient))
    assert all(x.isfinite().all() for x in found.values())
    out = call(exactly, q.double(), k.double(), v.double()).detach()
    torch.testing.assert_close(found["out"], out.flatten(), rtol=0, atol=2e-2)
    last = decode(layer, q, k, v).double()
    torch.testing.assert_close(last, out[:, :, -1:], rtol=0, atol=2e-2)


@pytest.mark.parametrize("case", ["relu_li.py", "relu_li.py --p=3"])
def test_dead_rows_are_zero_in_value_and_gradient(case):
    q, k, v, gradient = draw(20, 20, 16, FLOAT32)
    tensors = -q.abs(), k.abs(), v, gradient  # no score is above 0
    assert all((x == 0).all() for x in evaluate(kernels(case, 16), tensors).values())


@pytest.mark.parametrize("case", ["softmax.py --forget=True", "lssar_p3.py --forget=True"])
def test_forget_gates_that_are_nearly_closed(case):
    """Biases of rows and keys that nearly cancel, and would make the padding of a tile infinite."""
    gates = 10 * torch.randn(1, 2, 37, generator=torch.Generator().manual_seed(0)) - 10
    assert F.logsigmoid(gates).sum(-1).max() < -300
    tensors = inputs_of(case, draw(37, 37, 16, FLOAT32), gates)
    found = evaluate(kernels(case, 16), tensors)
    for name, exact in exact_evaluation(case, tensors).items():
        size = max(exact.norm(), 1e-2 * tensors[-1].norm())
        assert (found[name] - exact).norm() < 1e-4 * size, name


def test_alibi_is_exact_near_the_last_key():
    """Its biases are counted from there: counted from the first, they would round to 1e-3."""
    case, L = "softmax_alibi.py --window=40", 2**14
    q, k, v = torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, L, 16), torch.eye(16).repeat(L // 16, 1)
    v, layer = v.expand(1, 2, -1, -1), kernels(case, 16)
    out = call(in_float64(case, 16), *(x[:, :, -41:].double() for x in (q, k, v)))
    for found in (call(layer, q, k, v), decode(layer, q, k, v)):
        assert (found - out[:, :, -found.shape[2] :]).abs().max() < 1e-6


def test_softpick_of_extreme_scores():
    """Rows of large scores, of zeros, of scores far below 0, which get no weight, and of both."""
    _, _, v, gradient = draw(20, 20, 16, FLOAT32, B=2)
    alternating = 1e4 * (1 - 2 * (torch.arange(20) % 2))
    scores = 1e4 + torch.arange(20.0), torch.zeros(20), torch.full((20,), -1e4), alternating
    q, k = torch.zeros(2, 2, 20, 16), torch.zeros(2, 2, 20, 16)
    q[..., 0], k[..., 0] = 4, torch.stack(scores).view(2, 2, 20)
    layer = kernels("softpick.py", 16)
    found = evaluate(layer, (q, k, v, gradient))
    assert all(x.isfinite().all() for x in found.values())
    out, dv, v_row = found["out"].view(4, 20, 16), found["dv"].view(4, 20, 16), v.view(4, 20, 16)
    assert not out[1:3].any() and not dv[1:3].any()
    last = decode(layer, q, k, v).view(4, 16).double()
    first = torch.softmax(torch.arange(20.0), 0) @ v_row[0]
    for expected, row in ((first, 0), (v_row[3, ::2].mean(0), 3)):
        for found_row in (out[row, -1], last[row]):
            torch.testing.assert_close(found_row, expected.double(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "case",
    [
        "relu_li.py",
        "lssar_p15.py",
        "softmax.py --forget=True --sink=learned --softcap=5",
        "lssar_p3.py --forget=True --sink=learned",
    ],
)
def test_a_nan_comes_out_as_nan(case):
    check_nans(case, draw(20, 20, 16, FLOAT32), 7)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's tiles are larger")
@pytest.mark.parametrize("edge", ["--window=12", "--document_mask"])
@pytest.mark.parametrize("case, atomic", [("lssar_p15.py", True), ("ssmax_bias.py", False)])
def test_tiles_that_no_row_sees_are_never_visited(case, atomic, edge, monkeypatch):
    """Rows 32 to 63 see keys in tiles from 16 on; keys 0 to 15 are seen in tiles of rows up to 31.

    What is outside is NaN, which any use of it, even with weight 0, would pass on.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not atomic)
    layer = build(case, 16, edge, TRITON)
    q, k, v, gradient = draw(64, 64, 16, FLOAT32)
    clean = evaluate(build(case, 16, edge, REFERENCE), (q, k, v, gradient))
    nan = torch.full((1, 2, 32, 16), math.nan)
    k_late, v_late = (torch.cat((nan[:, :, :16], x[:, :, 16:]), dim=2) for x in (k, v))
    q_early, gradient_early = (torch.cat((x[:, :, :32], nan), dim=2) for x in (q, gradient))
    for tensors, inside in (
        ((q, k_late, v_late, gradient), slice(32, 64)),
        ((q_early, k, v, gradient_early), slice(0, 16)),
    ):
        found = evaluate(layer, tensors)
        for name in ("out", "dq", "dk", "dv"):
            ours, expected = (x[name].view(q.shape)[:, :, inside] for x in (found, clean))
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


# ---- a user's own ----


@triton.jit
def elu1(z):
    e = tl.exp(tl.minimum(z, 0.0))
    return tl.where(z > 0, z + 1, e), e


@pytest.mark.parametrize("p", ["", " --p=3"])
def test_a_phi_scale_and_bias_of_ones_own(p, monkeypatch):
    """The scale and the bias are learnt, and the queries are normalised."""
    monkeypatch.setitem(launch.PHIS, "elu1", phi.Function(elu1))
    own = Variant(
        Phi(lambda z: F.elu(z) + 1, kernel="elu1"),
        scale=lambda r: r.s * r.n.log() + 1,
        bias=lambda r: r.b,
        l2_normalise=True,
        learnable=("s", "b"),
    )
    monkeypatch.setitem(VARIANTS, "elu1", own)
    found = compare(f"softmax.py --attention=elu1{p}", draw(21, 21, 16, FLOAT32, B=2))
    assert found["ds"].norm() > 0 and found["db"].norm() > 0


# ---- phi ----


@triton.jit
def apply(Z, A, SLOPES, N: tl.constexpr, PHI: tl.constexpr):
    at = tl.arange(0, N)
    a, slope = PHI(tl.load(Z + at))
    tl.store(A + at, a)
    tl.store(SLOPES + at, slope)


@pytest.mark.parametrize("name", [name for name in phi.PHIS if name != "softpick"])
def test_phis_and_their_slopes(name):
    """To float32 precision; in an exponential tail relative to its small numbers."""
    phis = {variant.phi.kernel: variant.phi for variant in VARIANTS.values()}
    z = torch.linspace(-40, 12, 1024)  # no kink among them
    found = torch.empty(2, 1024, device=DEVICE)
    entry = phi.PHIS[name]
    apply[(1,)]((entry.argument * z).to(DEVICE), *found, N=1024, PHI=entry.function)
    found = found.cpu()
    z = z.double().requires_grad_()
    expected = phis[name.removesuffix("16")].function(z)
    slopes = torch.autograd.grad(expected.sum(), z)
    tail = name.startswith(("exp", "sigmoid", "softplus", "gelu"))
    rtol = 1.5e-5 if name in ("softplus16", "gelu") else 3e-6
    tolerance = dict(rtol=rtol, atol=1e-36 if tail else 1e-6)
    torch.testing.assert_close(found[0].double() / entry.value, expected.detach(), **tolerance)
    torch.testing.assert_close(found[1].double(), *slopes, **tolerance)


@triton.jit
def total(Y, TOTALS, N: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)
    y = tl.load(Y + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(TOTALS + row, phi.softplus_total(y))


def test_sums_of_softplus_by_products():
    """Far below 0, where a product's logarithm has no digits of it, and where it overflows."""
    keys = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    y = torch.cat([keys - 58, keys - 20, 8 * keys, keys / 1e4, torch.zeros(1, 128)])
    y[2, 5:] = -math.inf  # hidden
    found = torch.empty(len(y), device=DEVICE)
    total[(len(y),)](y.to(DEVICE), found, N=128)
    tail = torch.exp2(y.double()) / math.log(2)
    sums = torch.log2(1 + torch.exp2(y.double())).where(y > -40, tail)
    torch.testing.assert_close(found.double().cpu(), sums.sum(1), rtol=6e-7, atol=0)


def test_constants_and_phis_are_those_of_the_table():
    assert tiles.DEAD.value == attention.DEAD and tiles.TIED.value == attention.TIED
    for own in (variant.phi for variant in VARIANTS.values() if variant.phi.kernel is not None):
        entry = phi.PHIS[own.kernel]
        assert entry.rectified or (entry.shift is None) == (own.shift is None)


# ---- within torch and the model ----


def test_the_operators_are_well_formed():
    """Schema, fake tensors and autograd registration, by torch's own checks."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    q, k, v, _ = (x.to(DEVICE) for x in draw(20, 20, 16, FLOAT32))
    ones = torch.ones(1, 2, 20, device=DEVICE)
    first_key = (7 * (torch.arange(20, dtype=torch.int32, device=DEVICE) // 7)).expand(1, 2, -1)
    choices = dict(
        phi="softplus",
        p=3.0,
        scale=1.0,
        shifted=False,
        signed=False,
        window=None,
        softcap=None,
        unit=False,
    )
    inputs = launch.Inputs(
        q.clone().requires_grad_(),
        k.clone().requires_grad_(),
        v.clone().requires_grad_(),
        bias=ones,
        gain=None,
        sink=None,
        key_bias=ones,
        first_key=first_key,
    )
    torch.library.opcheck(launch.forward, inputs, dict(save=True, **choices), test_utils=checks)
    last = inputs._replace(q=q[:, :, -1:], bias=ones[..., -1:], first_key=first_key[..., -1:])
    torch.library.opcheck(launch.forward, last, dict(save=False, **choices), test_utils=checks)


def test_compiles_without_graph_breaks():
    layer, tensors = kernels("lssar_p15.py", 16), draw(20, 20, 16, FLOAT32)
    eager = evaluate(layer, tensors)
    layer.compile(fullgraph=True, backend="aot_eager")
    compiled = evaluate(layer, tensors)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("case", ["softmax.py", f"lssar_p15.py {TRITON}", f"hybrid.py {TRITON}"])
@pytest.mark.parametrize("task, graphs", [("recall", 2), ("language", 3)])
def test_all_layers_share_a_graph_of_each_length_or_of_any(case, task, graphs, monkeypatch):
    torch._dynamo.reset()
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiled))
    model = small_model(case, "--n_layer=3", f"--task={task}").float().to(DEVICE)
    compile_model(model, TASKS[task].varied_lengths)
    for length in (16, 12, 9):
        model(*[torch.arange(2 * length, device=DEVICE).view(2, -1)] * 2)
    assert compiled.frame_count == graphs + 2  # two are the loss's


def test_a_model_generates_as_with_the_reference():
    case = "lssar_p3.py --positions=alibi --sink=learned --gate=head --window=9 --n_kv_head=1"
    idx = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = []
    for impl in (TRITON, REFERENCE):
        torch.manual_seed(0)
        model = build_model(small_config(case, impl, "--n_layer=1", "--block_size=16")).eval()
        model.to(DEVICE)
        loss = model(idx[:, :-1], idx[:, 1:]).item()
        found.append((loss, generate(model, idx[:, :5], 6, temperature=0)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.equal(found[0][1], found[1][1])


def test_what_the_kernels_cannot_compute_is_refused(monkeypatch):
    q = torch.zeros(1, 2, 4, 8)
    layer = build("lssa.py", 8, TRITON)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(UserError, match=f"bfloat16 and float32, not in {dtype}"):
            layer(*(q.to(DEVICE, dtype) for _ in range(3)))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(UserError, match="NVIDIA GPU.*cpu"):
        layer(q, q, q)
    monkeypatch.setattr(attention_paths.fused, "launch", None)
    with pytest.raises(UserError, match="Triton is not installed"):
        layer(q, q, q)
    assert "no kernel" in variant_obstacle(Variant(Phi(torch.relu, kernel=None)), 16)
    for settings, message in (
        (["--attention=softmax_inverse"], "attention_impl.*softmax_inverse.*not the paper's"),
        (["--attention=lssa", "--n_embd=512"], "head size 256 is above 128"),
    ):
        with pytest.raises(UserError, match=message):
            build_model(load_config([*SMALL, *settings, TRITON]))


def test_gpus_that_cannot_run_the_kernels(monkeypatch):
    gpu, q = (
        SimpleNamespace(
            is_cuda=True,
            major=8,
            minor=0,
            device=None,
            dtype=BFLOAT16,
            shape=(1, 2, 1, 16),
        ),
    ) * 2
    layer = build("lssar_p15.py", 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert obstacle(layer, q) is None
    softmax = build("softmax.py", 16)
    assert softmax.path(q, 4) == "sdpa"
    # keys are in a cache, which varlen_attn does not take
    assert softmax.path(q, 4, Context(document_positions=torch.zeros(1, 4))) == "triton"
    gpu.major, gpu.minor = 7, 5
    assert "8.0 or newer, and this is 7.5" in obstacle(layer, q)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in obstacle(layer, q)


# ---- without a GPU: block shapes and machine code ----


def test_no_kernel_returns_none():
    """Triton 3.6 cannot compile it."""
    texts = [path.read_text() for path in (ROOT / "attention_paths" / "kernels").glob("*.py")]
    assert not any("@triton.jit" in text and "return None" in text for text in texts)


def test_shapes_fit_every_kernel():
    """softplus_total takes at most 128 keys, and every head size up to 128 has a shape."""
    for table in launch.SHAPES.values():
        for shapes in table.values():
            assert max(shapes) == 128 and all(n <= 128 for _, n, _, _ in shapes.values())


@pytest.mark.parametrize(
    "arguments",
    [["--quick"], *(pytest.param(x, marks=pytest.mark.long) for x in ([], ["--variants"]))],
)
def test_machine_code_is_that_of_the_table(arguments):
    """Of one variant's kernels; with -m long of all, and every variant launches."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert arguments or done.stdout.count("instructions") == 48
