"""The model: its size and first weights, its layers, the cache, generation, the loss."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from attention import VARIANTS
from attention_paths.factored import Factors
from attention_paths.reference import Context
from config import Config
from errors import UserError
from generation import generate, next_logits
from layers.build import build_model
from layers.cache import KVCache
from layers.rope import Rope, Rotation
from layers.windows import limit_windows
from model import MLP
from optim import build_optimizers
from runtime.config_files import load_config
from tests import textbook
from tests.helpers import CONFIGS, ROWS, small_config, small_model

# Tensor Product Attention, with and without biases, and its variant with linear queries.
TPA = [
    "lssar_p3.py --projections=tpa",
    "t6.py --n_head=3 --head_size=6 --mlp_hidden=24",
    "softmax.py --projections=tpa --q_rank=None --kv_rank=3",
    "lssar_p3.py --projections=tpa --rope_share=0.25",
]
# Settings of a layer together.
COMBINED = [
    "lssar_p3.py --positions=none --n_kv_head=1",
    "lssar_p3.py --positions=alibi --sink=learned --gate=head --softcap=3",
    "lssar_p3.py --nope_share=0.5 --gate=element",
    "softmax.py --positions=alibi --nope_share=0.5",
    "lssar_p3.py --n_head=4 --n_kv_head=2 --nope_share=0.5 --local_window=3 --qk_norm=True",
    "lssar_p3.py --forget=True --nope_share=0.5 --local_window=3",
    "softmax.py --nope_every=2",
    "lssar_p3.py --nope_every=2 --nope_share=0.5 --local_window=3",
    "asentmax.py --positions=rope --nope_every=2 --nope_share=0 --local_window=3",
    "stick_breaking.py --projections=tpa",
    "lssar_p3.py --projections=tpa --forget=True --sink=learned --softcap=3 --gate=head",
    "softmax.py --projections=tpa --positions=alibi",
    "softmax.py --projections=tpa --nope_every=2",
    "ssmax.py --n_head=4 --n_kv_head=2 --nope_share=0.5 --nope_every=2",
    "lssar_p3.py --n_head=4 --n_kv_head=2 --head_size=6",
    "lssar_p3.py --window=3 --window_pattern=SSSL",
    "softmax.py --window=1 --window_pattern=SL",
    "lssar_p3.py --window=5 --window_pattern=SL --nope_share=0.5 --local_window=3",
    "t6.py --n_head=3 --head_size=6 --mlp_hidden=24 --window=3 --window_pattern=SL",
    "ssmax.py --n_head=4 --n_kv_head=2 --nope_share=0.5 --local_window=3 --rope_share=0.5",
]


def assert_near(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tokens(*shape, seed=0, n=257):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, n, shape, generator=generator)


def hidden_by_chunks(model, idx, sizes, cache):
    """The hidden states of idx [B, L], which the model reads in chunks of these sizes."""
    chunks = [model.hidden(chunk, cache) for chunk in idx.split(sizes, dim=1)]
    return torch.cat(chunks, dim=1)


def load_files(*files):
    paths = [str(CONFIGS / file) for file in files]
    return load_config(paths)


def on_meta(config):
    """A model of shapes alone, without memory for its weights."""
    with torch.device("meta"):
        return build_model(config)


# ---- size ----


GPT2_BLOCK = 12 * 768**2 + 13 * 768
GPT2_NORM = 2 * 768  # weights and biases
# A table of embeddings for each coordinate, and a linear layer that joins the two.
ORBITS_TABLES = 2 * 7003 * 768
ORBITS_LINEAR = (2 * 768 + 1) * 768
ORBITS_POSITIONS = 999 * 768
ORBITS_HEAD = 2 * 7003 * 768
ORBITS_EMBEDDINGS = ORBITS_TABLES + ORBITS_LINEAR + ORBITS_POSITIONS + ORBITS_HEAD
# T6 has 34 heads of 64 columns; the ranks of q, k and v are 10 in all.
T6_FACTORS = 768 * 10 * (34 + 64)
T6_OUTPUT_PROJECTION = 34 * 64 * 768
T6_SWIGLU = 3 * 768 * 2048
T6_MATRICES = T6_FACTORS + T6_OUTPUT_PROJECTION + T6_SWIGLU
T6_NORM = 768
T6_BLOCK = T6_MATRICES + 2 * T6_NORM


@pytest.mark.parametrize(
    "files, count",
    [
        # GPT-2's 124,439,808 without its 1024 x 768 learned positions
        ([], 123_653_376),
        # SSMax's 162,148,608 with s and b of 12 layers of 12 heads, and 1024 shared p_n
        (
            ["ablations/ssmax_probe.py", "scales/ssmax_paper.py"],
            162_148_608 + 288 + 1024,
        ),
        (
            ["scales/orbits/109m.py"],
            ORBITS_EMBEDDINGS + 12 * GPT2_BLOCK + GPT2_NORM,
        ),
        (
            ["t6.py"],
            768 * 50257 + 12 * T6_BLOCK + T6_NORM,
        ),
    ],
)
def test_parameter_count(files, count):
    model = on_meta(load_files(*files))
    assert model.count_parameters() == count
    assert model.wte.num_embeddings % 128 == 0


def test_rotations_of_inference_serve_training():
    model = small_model("softmax.py").float()
    x = torch.arange(40)[None]
    with torch.inference_mode():
        model(x)  # beyond the training length: its RoPE table is computed
    model(x, x).backward()


def test_pairs_have_a_table_and_a_vocabulary_for_each_coordinate():
    settings = ["--task=orbits", "--tie_embeddings=False", "--bins=100", "--positions=learned"]
    model = small_model("lssar_p3.py", *settings)
    x = tokens(2, 16, 2, n=103)
    y = tokens(2, 16, 2, n=103, seed=1)
    logits = model(x)
    assert logits.shape == (2, 16, 2, 103)
    first_logits, second_logits = logits.unbind(2)
    first_targets, second_targets = y.unbind(2)
    loss_of_first = F.cross_entropy(first_logits.flatten(0, 1), first_targets.flatten())
    loss_of_second = F.cross_entropy(second_logits.flatten(0, 1), second_targets.flatten())
    loss = model(x, y)
    assert_near(loss, (loss_of_first + loss_of_second) / 2)
    token_losses = model.token_losses(x, y)
    assert token_losses.shape == (2, 16, 2)
    torch.testing.assert_close(token_losses.mean().double(), loss, rtol=1e-5, atol=1e-5)

    first_table, second_table = model.wte.weight.view(2, 128, -1)
    first_ids, second_ids = x.unbind(2)
    pairs = torch.cat((first_table[first_ids], second_table[second_ids]), dim=-1)
    assert_near(model.wte(x), model.wte.linear(pairs))
    assert not first_table[103:].any()
    assert not second_table[103:].any()
    heads = model.lm_head.weight.view(2, 128, -1)
    assert not heads[:, 103:].any()


def test_flops():
    matrices_of_layer = 12 * 768**2
    head = 768 * 50257
    matrices = 12 * matrices_of_layer + head
    # the keys that a query sees on average
    keys = 1024 / 2
    # rows 1 to 256 see 1 to 256 keys, the others 256
    keys_in_window = (256 / 2 * 256 + 768 * 256) / 1024
    # the products QK and AV of a layer
    causal = 2 * 768 * keys
    windowed = 2 * 768 * keys_in_window

    assert on_meta(Config(window=256)).flops_per_token() == 6 * (matrices + 12 * windowed)
    for settings in (
        {},
        {"window": 1024},
        {"window": 4096},
        {"tie_embeddings": False},
    ):
        model = on_meta(Config(**settings))
        assert model.flops_per_token() == 6 * (matrices + 12 * causal)

    hybrid = on_meta(Config(nope_share=0.5, local_window=256))
    assert hybrid.flops_per_token() == 6 * (matrices + 12 * (causal + windowed) / 2)

    pattern = Config(window=256, window_pattern="SSSL", n_layer=10)
    matrices_of_ten = 10 * matrices_of_layer + head
    attention_of_ten = 7 * windowed + 3 * causal  # L: the 4th, 8th and last
    assert on_meta(pattern).flops_per_token() == 6 * (matrices_of_ten + attention_of_ten)


def test_flops_of_t6():
    matrices = 768 * 50257 + 12 * T6_MATRICES
    products = 12 * 10 * 34 * 64  # a b^T of 10 ranks
    causal = 12 * 34 * 64 * 1024
    t6 = on_meta(load_files("t6.py"))
    assert t6.flops_per_token() == 6 * (matrices + products + causal)


# ---- weights ----


def test_first_weights_are_gpt2s():
    torch.manual_seed(0)
    config = small_config("softmax.py", "--n_layer=8", "--n_embd=128", "--n_head=4")
    model = build_model(config)
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            assert not x.any()
        elif "ln_" in name:
            assert (x == 1).all()
        else:
            std = 0.02
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * 8)
            if name == "wte.weight":
                x = x[:257]
            assert x.std().item() == pytest.approx(std, rel=0.03)
            assert abs(x.mean().item()) < std / 20


@pytest.mark.parametrize("tied", [True, False])
def test_padded_ids_are_zero_never_predicted_and_never_trained(tied):
    model = small_model("softmax.py", f"--tie_embeddings={tied}")
    head = model.lm_head.weight
    for weight in (model.wte.weight, head):
        assert weight.shape == (384, 16)
        assert not weight[257:].any()
    x = tokens(2, 9)

    def outputs():
        return model(x), model(x, x), model.token_losses(x, x)

    before = outputs()
    with torch.no_grad():
        head[257:] = 100 * torch.randn(127, 16)
    assert_near(outputs(), before)
    assert model(x).shape == (2, 9, 257)
    sampled = generate(model, x, 20, temperature=5.0)
    assert sampled.max() < 257
    loss = model(x, x)
    loss.backward()
    assert not head.grad[257:].any()


def test_swiglu():
    x = torch.randn(3, 16, dtype=torch.float64)
    mlp = MLP(small_config("softmax.py", "--mlp=swiglu", "--mlp_hidden=24")).double()
    gate, up = mlp.c_fc(x).split(24, dim=-1)
    swish = gate * torch.sigmoid(gate)
    assert_near(mlp(x), mlp.c_proj(swish * up))


@pytest.mark.parametrize(
    "case",
    [
        *ROWS,
        *TPA,
        "softmax.py --tie_embeddings=False --norm=rmsnorm --mlp=swiglu --bias=False",
    ],
)
def test_every_parameter_is_trained(case):
    model = small_model(case)
    x = tokens(2, 16)
    y = tokens(2, 16, seed=1)
    loss = model(x, y)
    loss.backward()
    (optimizer,) = build_optimizers(model, model.config)
    decayed, not_decayed = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert not_decayed["weight_decay"] == 0
    decayed_ids = {id(x) for x in decayed["params"]}
    not_decayed_ids = {id(x) for x in not_decayed["params"]}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
        is_matrix = parameter.dim() == 2
        is_vector = parameter.dim() == 1
        assert (id(parameter) in decayed_ids) == is_matrix, name
        assert (id(parameter) in not_decayed_ids) == is_vector, name
        if name.endswith((".s", ".b")):
            assert gradient.all(), name
        if name.endswith("p_n"):  # row 1 has one key, whose weight is always 1
            assert gradient[0].abs() < 1e-12
            assert gradient[1:].all()


# ---- layers ----


def rotated(x, share, theta=10000.0):
    """RoPE as a product of complex numbers; x [.., L, d], its pairs (m, m + d/2)."""
    L, d = x.shape[-2:]
    first_still = round(share * d / 2)
    position = torch.arange(L, dtype=torch.float64)[:, None]
    frequencies = [theta ** (-2 * m / d) for m in range(d // 2)]
    angles = position * torch.tensor(frequencies, dtype=torch.float64)  # [L, d/2]
    angles[:, first_still:] = 0
    turns = torch.polar(torch.ones_like(angles), angles)
    real, imaginary = x.chunk(2, dim=-1)
    pairs = torch.complex(real, imaginary) * turns
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def rotated_after(nope, x, share):
    """x [B, H, L, d] with RoPE in all heads but the first `nope`."""
    still = x[:, :nope]
    turned = rotated(x[:, nope:], share)
    return torch.cat((still, turned), dim=1)


def tensor_products(config, number, u):
    """q, k and v [B, H, L, d]: Q_t = A_Q(x_t)^T B_Q(x_t) / R_Q, RoPE on B (T6, Sect. 3.1)."""
    H = config.n_head
    d = config.d_head
    has_rope = config.positions == "rope" and nope_heads(config, number) == 0
    columns = list(torch.split(u, column_sizes(config), dim=-1))

    def product(rank, has_rope):
        """[B, H, L, d], from the next columns of u."""
        a = columns.pop(0).unflatten(-1, (rank, H))  # [B, L, R, H]
        b = columns.pop(0).unflatten(-1, (rank, d)).transpose(1, 2)  # [B, R, L, d]
        if has_rope:
            b = rotated(b, config.rope_share)
        return torch.einsum("blrh,brld->bhld", a, b) / rank

    if config.q_rank is None:
        q = columns.pop(0).unflatten(-1, (H, d)).transpose(1, 2)
        if has_rope:
            q = rotated(q, config.rope_share)
    else:
        q = product(config.q_rank, has_rope)
    k = product(config.kv_rank, has_rope)
    v = product(config.kv_rank, has_rope=False)
    return q, k, v


def column_sizes(config):
    """The columns of A and B, for q, k and v; linear q have a single matrix."""
    H = config.n_head
    d = config.d_head
    sizes = []
    for rank in (config.q_rank, config.kv_rank, config.kv_rank):
        if rank is None:
            sizes.append(H * d)
        else:
            sizes += [rank * H, rank * d]
    return sizes


def nope_heads(config, number):
    """How many heads of layer `number` have no positions where others have."""
    share = config.nope_share
    if config.nope_every:
        share = share or 1
        if (number + 1) % config.nope_every:
            share = 0
    return round(config.n_head * share)


def linear_projections(config, number, layer, u):
    """q [B, H, L, d], k and v [B, Hk, L, d], after QK norm and RoPE."""
    H = config.n_head
    Hk = config.kv_heads
    heads = u.unflatten(-1, (H + 2 * Hk, -1)).transpose(1, 2)
    q, k, v = heads.split((H, Hk, Hk), dim=1)
    if config.qk_norm:
        q = rms_norm(q, layer.q_norm.weight)
        k = rms_norm(k, layer.k_norm.weight)
    if config.positions == "rope":
        queries_per_key = H // Hk
        nope = nope_heads(config, number)
        q = rotated_after(nope, q, config.rope_share)
        k = rotated_after(nope // queries_per_key, k, config.rope_share)
    return q, k, v


def rms_norm(x, weight):
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + 1e-5).sqrt() * weight


def context_by_formula(config, layer, x, score_scale):
    """What attention takes besides q, k and v, from the layer's input x [B, L, n]."""
    row_inputs = {}
    if layer.c_rows is not None:
        rows = x @ layer.c_rows.weight.T
        rows = rows.unflatten(-1, (2, config.n_head))  # [B, L, 2, H]
        row_inputs["u"] = rows[:, :, 0].transpose(1, 2)
        row_inputs["w"] = rows[:, :, 1].transpose(1, 2)
    log_forget = None
    if config.forget:
        gates = torch.sigmoid(x @ layer.c_forget.weight.T + layer.c_forget.bias)
        log_forget = gates.log().transpose(1, 2)
    return Context(score_scale, row_inputs, log_forget)


def hybrid_by_formula(layer, nope, q, k, v, context):
    """[B, H, L, d]: the first `nope` heads see all keys, the others a local window."""
    H = q.shape[1]
    outputs = []
    if nope > 0:  # no RoPE, so no factor of YaRN
        heads = slice(nope)
        selected = replace(context.select(heads=heads), score_scale=1.0)
        y = textbook.attention(layer.attention, q[:, heads], k[:, heads], v[:, heads], selected)
        outputs.append(y)
    if nope < H:
        heads = slice(nope, None)
        local = layer.attentions()[-1]
        selected = context.select(heads=heads)
        y = textbook.attention(local, q[:, heads], k[:, heads], v[:, heads], selected)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("settings", ["", "--n_kv_head=2"])
def test_heads_of_a_hybrid_keep_the_memory_order_of_the_projections(settings):
    """[B, L, H, d], in which neither varlen nor the output projection copies them."""
    model = small_model(f"hybrid_ssmax.py {settings}")
    layer = model.trunk.blocks[0].attn
    x = torch.randn(2, 16, model.config.n_embd, dtype=layer.c_attn.weight.dtype)
    q, k, v = layer.project(x, model.trunk.rope(0, 16, 16))
    y = layer.attend(layer.attention, q, k, v, Context(), None)
    for heads in (q, k, y):
        assert heads.transpose(1, 2).is_contiguous()


def layer_by_formula(config, number, layer, x, score_scale):
    """A layer's output [B, L, n] from its weights, its settings and tests.textbook."""
    H = config.n_head
    u = layer.c_attn(x)
    if config.projections == "tpa":
        q, k, v = tensor_products(config, number, u)
    else:
        q, k, v = linear_projections(config, number, layer, u)
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)

    nope = nope_heads(config, number)
    context = context_by_formula(config, layer, x, score_scale)
    if config.local_window:
        y = hybrid_by_formula(layer, nope, q, k, v, context)
    else:
        if isinstance(score_scale, float):  # YaRN's, of heads with RoPE
            score_scales = torch.full((1, H, 1, 1), score_scale, dtype=x.dtype)
            score_scales[:, :nope] = 1.0
            context = replace(context, score_scale=score_scales)
        y = textbook.attention(layer.attention, q, k, v, context)

    y = y.transpose(1, 2)  # [B, L, H, d]
    if config.gate != "none":
        gates = torch.sigmoid(x @ layer.c_gate.weight.T + layer.c_gate.bias)
        y = y * gates.unflatten(-1, (H, -1))
    return layer.c_proj(y.flatten(2))


def window_of(config, number):
    """The window of a layer; of two layers with a pattern only the first has one."""
    if config.window_pattern and number == 1:
        return None
    return config.window


def assert_attentions_have_their_settings(config, number, layer):
    nope = nope_heads(config, number)
    attentions = layer.attentions()
    if nope > 0 or not config.local_window:
        attention = attentions[0]
        assert attention.variant is VARIANTS[config.attention]
        assert attention.window == window_of(config, number)
        if config.positions == "alibi":
            assert attention.alibi_heads == config.n_head - nope
        else:
            assert attention.alibi_heads == 0
    if config.local_window and nope < config.n_head:
        local = attentions[-1]
        assert local.variant is VARIANTS["softmax"]
        assert local.p is None
        assert local.window == config.local_window


@torch.no_grad()
@pytest.mark.parametrize("case", [*ROWS, *TPA, *COMBINED])
def test_a_layer_is_its_formula(case):
    """At a length beyond the training length, with YaRN's factor on the scores of RoPE's heads."""
    model = small_model(case)
    config = model.config
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    yarn_factor = 1.7
    rotation = None
    if config.positions == "rope":
        cos, sin = angles_of(20, d=config.d_head, share=config.rope_share)
        rotation = Rotation(cos, sin, yarn_factor)
    layers_differ = config.nope_every or config.window_pattern
    for number in range(2 if layers_differ else 1):
        layer = model.trunk.blocks[number].attn
        if config.qk_norm:
            layer.q_norm.weight.copy_(torch.rand(config.d_head))
            layer.k_norm.weight.copy_(torch.rand(config.d_head))
        assert_attentions_have_their_settings(config, number, layer)
        has_rope = rotation is not None and nope_heads(config, number) < config.n_head
        score_scale = 1.0
        if has_rope:
            score_scale = yarn_factor
        expected = layer_by_formula(config, number, layer, x, score_scale)
        assert_near(layer(x, rotation, None), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "case, seen",
    [
        ("softmax.py --positions=none", 20),
        ("lssar_p3.py --window=6 --positions=none", 6),
        ("asentmax.py --positions=none --nope_share=0", 20),
        ("lssar_p3.py --projections=tpa --positions=none", 20),
    ],
)
def test_scores_grow_with_the_keys_that_a_query_sees(case, seen):
    model = small_model(case).scale_scores(5.0)
    layer = model.trunk.blocks[0].attn
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    n = torch.arange(1, 21, dtype=torch.float64).clamp_max(seen)[:, None]
    growth = (5 + n).log() / math.log(5)
    expected = layer_by_formula(model.config, 0, layer, x, growth)
    assert_near(layer(x, None, None), expected)
    # after a cache n counts the cached keys
    idx = tokens(2, 20)
    hidden = hidden_by_chunks(model, idx, [7, 1, 12], KVCache(20))
    assert_near(hidden, model.hidden(idx), 1e-12)
    # and None takes the factor away
    unscaled = layer_by_formula(model.config, 0, layer, x, 1.0)
    model.scale_scores(None)
    assert_near(layer(x, None, None), unscaled)


@torch.no_grad()
def test_scores_grow_in_every_layer_whatever_its_window():
    """But not in the local heads of a hybrid."""
    settings = "--nope_every=2 --local_window=3 --window=6 --window_pattern=SL"
    model = small_model(f"hybrid.py {settings}")
    limit_windows(model, 5)
    model.scale_scores(5.0)
    bases = []
    for layer in model.attention_layers():
        bases.append([(attention.window, attention.log_base) for attention in layer.attentions()])
    assert bases == [[(3, None)], [(5, 5.0), (3, None)]]


@pytest.mark.parametrize("case", ["fox.py", "gated.py", "asentmax.py --positions=rope"])
def test_extra_projections_leave_the_other_initial_weights_as_they_are(case):
    """So that runs of one seed, which are compared in pairs, begin with the same trunk."""
    torch.manual_seed(3)
    model = build_model(small_config(case))
    torch.manual_seed(3)
    softmax = build_model(small_config("softmax.py", f"--bias={model.config.bias}"))
    weights = dict(model.named_parameters())
    for name, weight in softmax.named_parameters():
        assert torch.equal(weights.pop(name), weight), name
    assert any("c_gate" in x or "c_forget" in x or "c_rows" in x for x in weights)
    for name, weight in weights.items():
        if weight.dim() == 2:
            assert 0.01 < weight.std() < 0.04, name


# ---- RoPE ----


def angles_of(L, d=64, trained=1024, **rope):
    """cos, sin [L, d/2] in float64."""
    frequencies, _ = Rope(d, trained, **rope).frequencies(L)
    angles = torch.arange(L, dtype=torch.float64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def base(frequencies):
    """The theta of a plain RoPE, asserting that these are its frequencies."""
    pairs = len(frequencies)
    theta = frequencies[1].item() ** -pairs
    plain = [theta ** (-m / pairs) for m in range(pairs)]
    assert_near(frequencies, torch.tensor(plain, dtype=torch.float64))
    return theta


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_rotations_are_exact_also_in_a_converted_model(theta):
    trunk = build_model(small_config("softmax.py", f"--rope_theta={theta}")).bfloat16().trunk
    for L in (16, 17):  # 16: the length that the model was made with
        trunk(torch.zeros(1, L, 16, dtype=torch.bfloat16))
        cos, _ = angles_of(L, d=8, theta=theta)
        assert_near(trunk.rope.cos.double(), cos, 1e-6)


def test_frequencies():
    """The published bases of dynamic NTK; position interpolation; NTK-aware scaling."""
    dynamic_ntk = Rope(64, 1024, scaling="dynamic_ntk")
    for length, theta in ((2048, 20452), (16384, 174970)):
        frequencies, on_scores = dynamic_ntk.frequencies(length)
        assert round(base(frequencies)) == theta
        assert on_scores == 1

    powers = [10000 ** (-m / 32) for m in range(32)]
    plain = torch.tensor(powers, dtype=torch.float64)
    frequencies, _ = Rope(64, 1024).frequencies(3072)
    assert_near(frequencies, plain)

    for factor, s in ((None, 3.0), (8.0, 8.0)):
        linear = Rope(64, 1024, scaling="linear", factor=factor)
        frequencies, on_scores = linear.frequencies(3072)
        assert_near(frequencies, plain / s)
        assert on_scores == 1
        ntk = Rope(64, 1024, scaling="ntk", factor=factor)
        frequencies, on_scores = ntk.frequencies(3072)
        assert base(frequencies) == pytest.approx(10000 * s ** (64 / 62))
        assert on_scores == 1
        assert_near(frequencies[-1], plain[-1] / s)  # the slowest pair is interpolated in full


def yarn(d, theta, trained, s):
    """Peng et al. 2023, after their code: frequencies, and the factor on cos and sin."""

    def dimension(rotations):
        """The pair that turns this often in the training length."""
        radians = rotations * 2 * math.pi
        return d * math.log(trained / radians) / (2 * math.log(theta))

    low = max(math.floor(dimension(32)), 0)
    high = min(math.ceil(dimension(1)), d - 1)
    frequencies = []
    for m in range(d // 2):
        extrapolated = theta ** (-2 * m / d)
        interpolated = extrapolated / s
        ramp = (m - low) / (high - low)
        share = min(max(ramp, 0), 1)  # of interpolation
        frequencies.append(interpolated * share + extrapolated * (1 - share))
    on_cos_and_sin = 0.1 * math.log(s) + 1
    return torch.tensor(frequencies, dtype=torch.float64), on_cos_and_sin


@pytest.mark.parametrize(
    "d, theta, trained, length, factor",
    [
        (64, 10000.0, 1024, 4096, 16.0),
        (128, 500000.0, 8192, 16384, None),
        # every pair turns more than once in the training length: none is interpolated in full
        (64, 100.0, 1024, 4096, None),
    ],
)
def test_yarn_is_its_authors_formula(d, theta, trained, length, factor):
    rope = Rope(d, trained, theta, "yarn", factor)
    frequencies, on_scores = rope.frequencies(length)
    s = factor or length / trained
    expected, on_cos_and_sin = yarn(d, theta, trained, s)
    assert_near(frequencies, expected)
    assert on_scores == pytest.approx(on_cos_and_sin**2)


@pytest.mark.parametrize("scaling", Rope.SCALINGS)
def test_slow_pairs_do_not_turn_and_fast_pairs_turn_as_without_a_share(scaling):
    rope = Rope(64, 1024, scaling=scaling)
    rope_of_half = Rope(64, 1024, scaling=scaling, share=0.5)
    all_turn, on_scores = rope.frequencies(4096)
    half_turn, on_scores_of_half = rope_of_half.frequencies(4096)
    assert torch.equal(half_turn[:16], all_turn[:16])
    assert not half_turn[16:].any()
    assert on_scores_of_half == on_scores


def test_a_scaled_model_keeps_its_share():
    model = small_model("prope.py")
    model.scale_rope("dynamic_ntk", theta=500.0)
    assert model.trunk.rope.rope.share == 0.5
    x = tokens(2, 40)
    everywhere = small_model("softmax.py")
    everywhere.scale_rope("dynamic_ntk", theta=500.0)
    everywhere.load_state_dict(model.state_dict())
    assert not torch.equal(model(x), everywhere(x))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic_ntk", "yarn"])
def test_no_scaling_by_length_changes_the_trained_lengths(scaling):
    model = small_model("lssa.py")
    for L in (1, 9, 16):
        x = tokens(2, L)
        model.scale_rope("none")
        plain = model(x)
        model.scale_rope(scaling)
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize(
    "settings, arguments, message",
    [
        (
            [],
            {"scaling": "yarn", "factor": 0.5},
            "rope factor = 0.5 must be at least 1",
        ),
        (
            [],
            {"scaling": "none", "factor": 2.0},
            "rope factor = 2.0 needs a scaling other than",
        ),
        (
            ["--positions=alibi"],
            {"scaling": "ntk"},
            "positions = 'alibi': there is no RoPE",
        ),
    ],
)
def test_refused_rope_scalings(settings, arguments, message):
    model = small_model("softmax.py", *settings)
    with pytest.raises(UserError, match=message):
        model.scale_rope(**arguments)


# ---- positions ----


def test_learned_positions_are_added_and_end():
    model = small_model("lssa.py", "--positions=learned")
    plain = small_model("lssa.py", "--positions=none")
    plain.load_state_dict(model.state_dict(), strict=False)
    x = model.wte(tokens(2, 16))
    positions = model.trunk.wpe.weight
    assert_near(model.trunk(x), plain.trunk(x + positions))

    prompt = tokens(1, 6)
    with pytest.raises(UserError, match="a length of 17 is beyond the 16 learned positions"):
        generate(model, prompt, 12)
    ids = generate(model, prompt, 11, temperature=0)  # the last token is never fed
    assert torch.equal(ids, greedy(model, prompt, 11))

    untrained = build_model(small_config("softmax.py", "--positions=learned"))
    assert 0.015 < untrained.trunk.wpe.weight.std() < 0.025


# ---- cache and generation ----


def cached_positions(config, number, group, length):
    """How many of `length` positions a layer's cache keeps for one of its groups of heads."""
    window = window_of(config, number)
    if config.local_window:
        first_is_local = nope_heads(config, number) == 0
        if group > 0 or first_is_local:
            window = config.local_window
    if window is None:
        return length
    return min(length, window)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4, 18])
@pytest.mark.parametrize("case", [*ROWS, *TPA, *COMBINED])
def test_a_cache_changes_nothing(case, window):
    settings = [f"--window={window}"]
    if window is None:
        settings.append("--window_pattern=")  # which needs a window
    model = small_model(case, *settings)
    if model.config.positions == "rope":
        model.scale_rope("yarn")
    idx = tokens(2, 24)  # beyond the training length
    whole = model.hidden(idx)
    for sizes in ([5, 1, 7, 10, 1], [18, 1, 1, 4]):
        cache = KVCache(24)
        assert_near(hidden_by_chunks(model, idx, sizes, cache), whole, 1e-12)
        assert cache.length == 24
        groups = 0
        for number, layer in enumerate(model.attention_layers()):
            for group, attention in enumerate(layer.attentions()):
                positions = cached_positions(model.config, number, group, 24)
                key, value, *_ = cache.stored[attention]
                assert key.shape[2] == positions
                assert value.shape[2] == positions
                groups += 1
        assert len(cache.stored) == groups


def test_the_norm_of_factors_that_cancel_is_at_least_their_rounding():
    first = torch.randn(500, 16)
    second = 3e-4 * torch.randn(500, 16) - first
    a = torch.ones(1, 2, 500, 1)
    b = torch.stack((first, second))[None]
    vectors = Factors(a.double(), b.double()).expand()
    exact = vectors.square().sum(-1)
    bound = 2 * Factors(a, b).squared_norms()[:, :, 0]
    assert (exact <= bound).all()


def greedy(model, ids, new):
    """Without a cache: the model reads the whole text again for every token."""
    for _ in range(new):
        likeliest = model(ids)[:, -1:].argmax(-1)
        ids = torch.cat((ids, likeliest), dim=1)
    return ids


@torch.no_grad()
@pytest.mark.parametrize("case", [*ROWS, *TPA, *COMBINED, "lssa.py --positions=learned"])
def test_prompts_of_several_lengths_are_continued_as_each_alone(case):
    """In one batch, also beyond the training length, with RoPE scaled for each text's length."""
    model = small_model(case, "--tie_embeddings=False", "--block_size=8")
    prompts = [tokens(length, seed=length) for length in (2, 5, 3)]
    new = 3
    scalings = ["none"]
    if model.trunk.wpe is None:
        prompts.append(tokens(10))
        new = 4  # the prompt of 5 passes the training length, and the one of 10 begins beyond it
    if model.trunk.rope is not None:
        scalings += ["dynamic_ntk", "yarn"]
    for scaling in scalings:
        model.scale_rope(scaling)
        texts = generate(model, prompts, new, temperature=0)
        for prompt, text in zip(prompts, texts, strict=True):
            (alone,) = generate(model, prompt[None], new, temperature=0)
            assert torch.equal(text, alone)
            if scaling == "none":
                n = len(prompt)
                likeliest = model(text[None])[0].argmax(-1)
                assert torch.equal(text[n:], likeliest[n - 1 : -1])


def test_generation_fixes_dynamic_ntk_by_the_final_length():
    model = small_model("lssar_p3.py", "--tie_embeddings=False")
    prompt = tokens(2, 10)
    model.scale_rope("dynamic_ntk")
    ids = generate(model, prompt, 30, temperature=0)
    theta_at_40_tokens = 10000 * (40 / 16) ** (8 / 6)
    model.scale_rope("none", theta=theta_at_40_tokens)
    assert torch.equal(ids, greedy(model, prompt, 30))
    model.scale_rope("none")
    assert not torch.equal(ids, greedy(model, prompt, 30))


def test_a_cache_that_is_too_small_is_refused():
    model = small_model("fox.py")
    cache = KVCache(10)
    model.hidden(tokens(1, 10), cache)
    with pytest.raises(UserError, match="a cache of 10 positions is too small for 11"):
        model.hidden(tokens(1, 1), cache)


def test_at_a_high_temperature_any_token_is_sampled_but_the_forbidden_one():
    model = small_model("softmax.py").float()
    prompts = tokens(1, 6).expand(400, -1)
    hot = generate(model, prompts, 1, temperature=1e6, never=3)
    sampled = hot[:, -1]
    assert len(sampled.unique()) > 150
    assert 3 not in sampled


@pytest.mark.parametrize("temperature, k", [(0.3, None), (3.0, None), (0.1, 3)])
def test_samples_follow_the_softmax_of_logits_over_temperature(temperature, k):
    """Their mean log-probability, to 5 standard errors of 4,000 samples; -inf beyond the top k."""
    model = small_model("softmax.py")
    x = tokens(1, 3)
    logits = model(x)[0, -1].detach()
    top = logits.topk(k or 257)
    p = (top.values / temperature).softmax(-1)
    log_p = torch.full((257,), -math.inf, dtype=torch.float64)
    log_p[top.indices] = p.log()
    ids = generate(
        model,
        x.expand(4000, -1),
        1,
        temperature=temperature,
        top_k=k,
        generator=torch.Generator().manual_seed(1),
    )
    mean = (p * p.log()).sum()
    deviation = (p * (p.log() - mean).square()).sum().sqrt()
    assert (log_p[ids[:, -1]].mean() - mean).abs() < 5 * deviation / math.sqrt(4000)


# ---- loss ----


@pytest.mark.parametrize("L", [8, 128])
def test_loss_under_autocast_is_near_the_exact_one(L):
    model = small_model("lssar_p3.py").float()
    x = tokens(8, L)
    y = tokens(8, L, seed=1)
    exact = model(x, y).item()
    with torch.autocast("cpu", torch.bfloat16):
        mean_loss = model(x, y)
        token_losses = model.token_losses(x, y)
        for loss in (mean_loss, token_losses.mean()):
            assert loss.dtype == torch.float32
            assert loss.item() == pytest.approx(exact, rel=0.02)
        logits = next_logits(model, x, KVCache(L))
    assert not torch.equal(logits, logits.bfloat16().float())  # the likeliest must not tie


# ---- Tensor Product Attention ----


@pytest.mark.parametrize("scale", [None, "355m", "45m", "tiny"])
def test_t6_has_as_many_parameters_as_gpt2(scale):
    gpt2_files = []
    t6_files = []
    if scale is not None:
        gpt2_files = [f"scales/{scale}.py"]
        t6_files = [f"scales/{scale}.py", f"scales/t6/{scale}.py"]
    gpt2 = load_files(*gpt2_files)
    t6 = load_files("t6.py", *t6_files)
    lssar = load_files("t6_lssar_p15.py", *t6_files)
    t6_parameters = on_meta(t6).count_parameters()
    gpt2_parameters = on_meta(gpt2).count_parameters()
    assert t6_parameters == pytest.approx(gpt2_parameters, rel=6e-3)
    assert t6.d_head == gpt2.d_head
    assert t6.mlp_hidden == 8 * t6.n_embd // 3
    with_softmax = lssar.replace(
        name=t6.name,
        attention="softmax",
        p=None,
        out_dir=t6.out_dir,
    )
    assert with_softmax == t6


def test_first_weights_of_t6_are_its_authors():
    torch.manual_seed(0)
    config = load_config([str(CONFIGS / "t6.py"), "--n_layer=1", "--tokenizer=bytes"])
    (block,) = build_model(config).trunk.blocks
    assert not block.attn.c_proj.weight.any()
    assert not block.mlp.c_proj.weight.any()
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.01)
    shapes = [
        (768, 34, 6),  # a of q
        (768, 6, 64),  # b of q
        (768, 34, 2),  # a of k
        (768, 2, 64),  # b of k
        (768, 34, 2),  # a of v
        (768, 2, 64),  # b of v
    ]
    rows = [math.prod(shape[1:]) for shape in shapes]
    weights = block.attn.c_attn.weight.split(rows)
    for weight, shape in zip(weights, shapes, strict=True):
        drawn = torch.nn.init.xavier_uniform_(torch.empty(shape))
        std = drawn.std().item()
        largest = drawn.abs().max().item()
        assert weight.std().item() == pytest.approx(std, rel=0.01)
        assert weight.abs().max().item() == pytest.approx(largest, rel=1e-3)
