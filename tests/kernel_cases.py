"""Layers and inputs for the fused kernels, and the comparison that their tests make."""

import itertools
import math

import torch
import torch.nn.functional as F

from attention import VARIANTS
from attention_paths.fused import variant_unsupported_reason
from attention_paths.reference import Context
from layers.documents import positions_in_documents
from layers.heads import build_attentions
from tests.helpers import ATTENTIONS, small_config

TRITON = "--attention_impl=triton"
REFERENCE = "--attention_impl=reference"
BLOCK_SIZE = 64  # the training length: the tests' lengths are smaller, equal and larger
# where the kernels run: without a GPU, in Triton's interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The configs whose variant the kernels can compute.
FUSED = []
for case in ATTENTIONS:
    variant = VARIANTS[small_config(case).attention]
    if variant_unsupported_reason(variant, head_size=64) is None:
        FUSED.append(case)

# Settings, and (Lq, Lk) for blocks of 32 queries and 16 keys. They cover whole powers, which are
# computed by multiplication, and other powers; each setting alone and several together; one stage
# and two; queries that follow a cache; a window's edge in the diagonal's tile and in another; tiles
# that a window of 50 shows whole.
SETTINGS = {
    "lssa.py --p=1": (19, 19),
    "ablations/phi_softplus.py --p=100": (19, 19),
    "softmax.py --window=1": (21, 21),
    "lssar_p15.py --window=8": (33, 50),
    "relu_shen.py --window=50": (70, 70),
    "lssa.py --n_kv_head=1": (5, 37),
    "lssar_p3.py --n_kv_head=1 --window=31": (20, 40),
    "softmax.py --sink=learned --n_kv_head=1": (5, 37),
    "ssmax_bias.py --positions=alibi --window=3": (21, 24),
    "lssar_p3.py --positions=alibi --nope_share=0.5 --sink=one": (18, 18),
    "softmax.py --forget=True --softcap=3 --n_kv_head=1": (18, 20),
    "softmax.py --forget=True --sink=learned": (17, 18),
    "softmax_p3.py --forget=True": (17, 18),
    "sigmoid_logn.py --forget=True --window=9": (18, 20),
    "sigmoid_l1.py --p=2 --softcap=3 --sink=learned": (17, 18),
    "ablations/phi_softplus.py --p=1.5 --forget=True --n_kv_head=1": (17, 18),
    "ablations/phi_gelu.py --forget=True": (17, 18),
    "softpick.py --forget=True --softcap=3 --window=9": (18, 20),
    "relu_li.py --softcap=10000": (19, 19),
    "lssar_p15.py --document_mask": (70, 70),
    "lssa.py --document_mask --n_kv_head=1": (5, 50),
    "sigmoid_logn.py --document_mask --window=24": (35, 45),
    "ssmax_bias.py --document_mask --positions=alibi --sink=learned --window=8": (33, 50),
    "lssar_p3.py --document_mask --forget=True --softcap=3 --window=12": (21, 21),
}

# Where documents begin. In the first sequence of a batch: at a tile's border and within tiles; one
# document has a single token. In the other sequences: at the last token of a tile of keys.
STARTS = [5, 6, 16, 43, 127, 200]
OTHER_STARTS = [63]


def build_layer(case, d, *more):
    """The attention of a config file, with settings behind it if any, and scalars of its own."""
    sizes = [
        f"--n_embd={2 * d}",
        f"--block_size={BLOCK_SIZE}",
        f"--total_batch_size={BLOCK_SIZE}",
    ]
    config = small_config(case, *sizes, *more)
    layer = build_attentions(config, layer=0)[0]
    layer.document_mask = config.document_mask  # which layer_output reads
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            change = torch.rand(parameter.shape, generator=generator)
            parameter.add_(0.3 * change)
    return layer.to(DEVICE)


def draw(Lq, Lk, d, dtype, B=1, seed=0):
    """q, k, v and the output's gradient, [B, 2, L, d]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for L in (Lq, Lk, Lk, Lq):
        x = torch.randn(B, 2, L, d, generator=generator)
        tensors.append(x.to(dtype))
    q, k, v, gradient = tensors
    # Each query's score with its own key is made 1 or more, so that no row's l1 norm is 0, or so
    # small that rounding decides, as in the first row of a relu.
    own_keys = k[:, :, -Lq:]
    exact_q = q.double()
    products = (exact_q * own_keys).sum(-1, keepdim=True)
    sign = torch.where(products < 0, -1, 1)
    with_score_1 = exact_q * (math.sqrt(d) / exact_q.square().sum(-1, keepdim=True))
    own_keys.copy_(sign * own_keys + with_score_1)
    return q, k, v, gradient


def draw_off_kinks(Lq, Lk, d, dtype, B=1, seed=0, window=None):
    """The first draw, from this seed on, in which rounding to float32 moves no number over a kink.

    The slope jumps at score 0 for relu and for |phi| in a signed l1, at 6 for relu6, and at
    A = 1 / n for the recentred l1: one element on the wrong side is an error of 1e-3.
    """
    position = torch.arange(Lk)
    position_of_queries = position[Lk - Lq :]
    distance = position_of_queries[:, None] - position
    is_in_window = distance < (window or Lk)
    seen = (distance >= 0) & is_in_window
    n = seen.sum(-1, keepdim=True)
    recentred = seen & (n > 3)
    for draw_seed in itertools.count(seed):
        tensors = draw(Lq, Lk, d, dtype, B, draw_seed)
        q, k, _, _ = tensors
        z = q.double() @ k.double().mT / math.sqrt(d)
        A = z.masked_fill(~seen, -math.inf).softmax(-1)
        over_mean = n * A - 1
        scores = z[..., seen]
        from_kinks = torch.cat((scores, scores - 6, over_mean[..., recentred]), -1)
        if from_kinks.abs().min() > 1e-6:
            return tensors


def inputs_of(case, tensors, gates=None):
    """A draw's tensors with as many heads of keys as a case's settings say, and its forget gates.

    `gates` are the logits of the gates, [B, 2, Lk].
    """
    config = small_config(case)
    q, k, v, gradient = tensors
    if gates is None:
        generator = torch.Generator().manual_seed(0)
        gates = 2 + torch.randn(*k.shape[:3], generator=generator)
    k = k[:, : config.kv_heads].contiguous()
    v = v[:, : config.kv_heads].contiguous()
    if config.forget:
        return [q, k, v, F.logsigmoid(gates), gradient]
    return [q, k, v, gradient]


def document_positions(B, Lq, Lk):
    """The positions within documents of the last Lq of Lk tokens, [B, Lq]."""
    is_start = torch.zeros(B, Lk, dtype=torch.bool)
    starts = [token for token in STARTS if token < Lk]
    other_starts = [token for token in OTHER_STARTS if token < Lk]
    is_start[:1, starts] = True
    is_start[1:, other_starts] = True
    positions = positions_in_documents(is_start)
    return positions[:, Lk - Lq :]


def kernels(case, d, *more):
    return build_layer(case, d, TRITON, *more)


def in_float64(case, d, *more):
    """The truth of comparisons: the reference path in float64."""
    return build_layer(case, d, REFERENCE, *more).double()


def layer_output(layer, q, k, v, log_forget=None, formula=None):
    """The output of the layer, or of formula(layer, q, k, v, context): from the CPU to the CPU.

    With document_mask attention stays within the documents of `document_positions`.
    """
    positions = None
    if layer.document_mask:
        B, _, Lq, _ = q.shape
        Lk = k.shape[2]
        positions = document_positions(B, Lq, Lk).to(DEVICE)
    if log_forget is not None:
        log_forget = log_forget.to(DEVICE)
    context = Context(log_forget=log_forget, document_positions=positions)
    q = q.to(DEVICE)
    k = k.to(DEVICE)
    v = v.to(DEVICE)
    if formula is None:
        out = layer(q, k, v, context)
    else:
        out = formula(layer, q, k, v, context)
    return out.cpu()


def decode(layer, q, *others):
    """The last query's output, without gradients."""
    with torch.no_grad():
        return layer_output(layer, q[:, :, -1:], *others)


def evaluate(layer, tensors, formula=None):
    """The output of the layer, or of formula(layer, q, k, v, context), and its gradients.

    Both by name, flat, in float64; gradients are by the inputs and every parameter. `tensors` are
    q, k, v, perhaps forget gates, and the output's gradient.
    """
    *inputs, gradient = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]  # a clone would be contiguous
    out = layer_output(layer, *inputs, formula=formula)
    learned = dict(layer.named_parameters())
    gradients = torch.autograd.grad(out, [*inputs, *learned.values()], gradient)
    names = ["q", "k", "v", "log_forget"][: len(inputs)]
    results = {"out": out}
    for name, x in zip([*names, *learned], gradients, strict=True):
        results[f"d{name}"] = x
    return {name: x.detach().double().cpu().flatten() for name, x in results.items()}


def exact_evaluation(case, tensors):
    d = tensors[0].shape[-1]
    in_doubles = [x.double() for x in tensors]
    return evaluate(in_float64(case, d), in_doubles)


def compare(case, tensors, formula=None, coarser=None):
    """Asserts that the kernels' error is at most twice a formula's error in the same dtype, plus
    roundings, which p multiplies. The last row is also computed by decoding.

    The truth is the reference path in float64, and the formula that path too by default. `coarser`
    is the dtype of products where they are less exact than the inputs. Returns what the kernels
    computed.
    """
    *inputs, gradient = tensors
    q, k, *_ = inputs
    d = q.shape[-1]
    layer = kernels(case, d)
    truth = exact_evaluation(case, tensors)
    ours = evaluate(layer, tensors)
    bar = evaluate(build_layer(case, d, REFERENCE), tensors, formula)
    eps = torch.finfo(coarser or q.dtype).eps
    p = layer.p or 0
    if q.dtype is torch.float32:
        rounding = (16 + 2 * p) * eps
        if "s" in layer.variant.learnable:
            # exp makes a rounding of a score, which SSMax multiplies by log n, a relative error of
            # its weight: on an H200 dv of ssmax_bias at 1,024 keys is off by 45 eps, the formula's
            # by 12.
            rounding += 16 * eps
        tolerance = 2e-5
    else:
        rounding = (1 + p / 4) * eps
        tolerance = 2e-2
    # Errors are relative, but with few or tied keys most gradients are 0, and then relative to the
    # incoming gradient. A learned number's gradient is one sum of terms that cancel.
    keys = min(k.shape[2], layer.window or math.inf)
    least_scale = gradient.double().norm()
    if keys > 5:
        least_scale = 1e-3 * least_scale
    for name, exact in truth.items():
        scale = max(exact.norm(), least_scale)
        if name not in ("out", "dq", "dk", "dv"):
            scale = 10 * scale
        error = (ours[name] - exact).norm()
        allowed = 2 * (bar[name] - exact).norm()
        assert error <= allowed + rounding * scale, (name, error / scale, allowed / scale)
    last = truth["out"].view(q.shape)[:, :, -1:]
    error = (decode(layer, *inputs) - last).abs().max()
    assert error <= tolerance * max(1, last.abs().max())
    return ours
