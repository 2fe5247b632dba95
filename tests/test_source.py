"""Which edits of the source make a number another one: each is noticed, and nothing else is."""

import ast
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache, lru_cache, partial

import pytest
import torch

import layers.heads
from attention import VARIANTS, Phi, Variant
from config import Config
from layers.formulas import SHARED_FORMULAS, formulas_hash
from runtime import source
from runtime.source import Definition, definition_of, nodes_of, source_hash
from scripts import eval_length, passkey, recall
from scripts.common.runner import code_hash
from tests.runs import ROOT

ATTENTION = (ROOT / "attention.py").read_text()


def forget_sources():
    """As in another process, which reads all source anew."""
    for function in vars(source).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@cache
def unedited(hash_of, value):
    """The hash as it is without an edit, computed once for all tests."""
    return hash_of(value)


@pytest.fixture(autouse=True)
def fresh():
    yield
    forget_sources()


@pytest.fixture(autouse=True, scope="module")
def equal_sources_share_a_tree():
    """Most files are the same in all tests; making a tree takes most of the time of a hash."""
    tree_of = source.tree_of.__wrapped__
    trees = {}

    @cache
    def shared_tree_of(module):
        file = source.file_of(module)
        key = (module, file, file and file.read_bytes())
        if key not in trees:
            trees[key] = tree_of(module)
        return trees[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "tree_of", shared_tree_of)
        yield


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Let hashes see a file of the repository after an edit."""
    file_of = source.file_of

    def edit(file, before, after=None):
        text = (ROOT / file).read_text()
        new_text = before(text) if callable(before) else text.replace(before, after)
        assert new_text != text, f"{file} no longer has {before!r}: adapt this entry"
        copy = tmp_path / file.replace("/", "_")
        copy.write_text(new_text)
        module = file.removesuffix(".py").replace("/", ".")
        monkeypatch.setattr(source, "file_of", lambda x: copy if x == module else file_of(x))
        forget_sources()

    return edit


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Write a module of a user's own, and let it be found."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
        forget_sources()

    return write


# ---- formulas ----

LSSAR = {"attention": "lssar", "p": 15.0}
HYBRID = LSSAR | {"nope_share": 0.5, "local_window": 64}
EDITED_FORMULAS = {
    "a formula": (
        {"attention": "softpick"},
        ("attention.py", "torch.exp(z - top) - torch", "torch.exp(z - top) + torch"),
    ),
    "a scale that variants share": (
        {"attention": "softmax_cosine"},
        ("attention.py", "math.log(rows.d) * rows.n.log()", "2 * rows.n.log()"),
    ),
    "a lambda in the table": (
        {"attention": "ssmax"},
        ("attention.py", "rows.s * rows.n.log() * rows.d**-0.5", "rows.s * rows.d**-0.5"),
    ),
    "a flag in the table": (
        {"attention": "softmax_inverse"},
        ("attention.py", "Variant(EXP, reweight=negate)", "Variant(EXP, reweight=recentre)"),
    ),
    "a helper two calls deep": ({}, ("attention.py", "norm < 2.0**-32", "norm < 2.0**-30")),
    "a constant": ({}, ("attention.py", "DEAD = 1e-30", "DEAD = 1e-29")),
    "a constant in a function": (LSSAR, ("attention.py", "threshold=40", "threshold=41")),
    "a default argument": ({}, ("attention.py", "signed: bool = False)", "signed: bool = True)")),
    "a default of a field": ({}, ("attention.py", "zero: float = -math.inf", "zero: float = 0.0")),
    "a default formula": (
        {},
        ("attention.py", "    return rows.d**-0.5\n", "    return rows.d**-0.4\n"),
    ),
    "a later statement": (
        LSSAR,
        ("attention.py", "\n\ndef attention_w", '\nVARIANTS["lssar"] = other\n\ndef attention_w'),
    ),
    "a call": (
        LSSAR,
        ("attention.py", "\n\ndef attention_w", "\nVARIANTS.update(other)\n\ndef attention_w"),
    ),
    "entries of another table": (
        LSSAR,
        ("attention.py", "Variant] = {\n", "Variant] = {\n    **OTHER,\n"),
    ),
    "an import": ({}, ("attention.py", "import torch\n", "import jax as torch\n")),
    "the re-weighting": (LSSAR, ("attention.py", "(rows.n > 3) &", "(rows.n > 2) &")),
    "the window": ({"window": 8}, ("attention.py", " - self.window", " - 2")),
    "the soft cap": ({"softcap": 9.0}, ("attention.py", "torch.tanh(z", "torch.sin(z")),
    "the sink": ({"sink": "one"}, ("attention.py", "rows.sink.expand", "rows.sink.neg().expand")),
    "unit vectors": (LSSAR, ("attention.py", "+ 1e-12)", "+ 1e-6)")),
    "unit vectors of a cache": (
        LSSAR,
        ("attention_paths/reference.py", " + 1e-12)", " + 1e-6)"),
    ),
    "slopes of ALiBi": (
        {"positions": "alibi"},
        ("attention_paths/reference.py", "-8 * h", "-320 * h"),
    ),
    "heads with ALiBi": (
        {"positions": "alibi"},
        ("layers/heads.py", "head >= config.nope_heads()", "head > config.nope_heads()"),
    ),
    "forget gates": (
        {"forget": True},
        ("attention_paths/reference.py", ".cumsum(-1)", ".cumprod(-1)"),
    ),
    "powers on a CPU": (LSSAR, ("attention_paths/power.py", "if not 3 < p", "if not 2 < p")),
    "heads without positions": (
        {"nope_share": 0.5},
        ("config.py", "return round(self.n_head", "return int(self.n_head"),
    ),
    "softmax beside another variant": (
        HYBRID,
        ("attention.py", '"softmax": Variant(EXP)', '"softmax": Variant(SIGMOID)'),
    ),
}


@pytest.mark.parametrize("settings, edit", EDITED_FORMULAS.values(), ids=EDITED_FORMULAS)
def test_an_edited_formula_is_noticed(settings, edit, edited):
    config = Config(**settings)
    before = unedited(formulas_hash, config)
    edited(*edit)
    assert before != formulas_hash(config)


EXP_LINE, SIGMOID_LINE = re.findall("^(?:EXP|SIGMOID) = .*", ATTENTION, re.M)
SAME_FORMULAS = {
    "comments": ("attention.py", " # ", " # Edited: "),
    "docstrings": ("attention.py", lambda text: re.sub(r'"""(?=\w)', '"""Edited: ', text)),
    "format": ("attention.py", lambda text: ast.unparse(ast.parse(text))),
    "annotations": ("attention.py", "rows: Rows) -> Tensor:", "rows: object) -> float:"),
    "another variant": ("attention.py", "torch.exp(z - top) -", "torch.exp(z - top) +"),
    "a new variant": (
        "attention.py",
        "\n\ndef attention_w",
        '\nVARIANTS["elu"] = Variant(Phi(F.elu))\n\ndef attention_w',
    ),
    "a new entry of the table": (
        "attention.py",
        '    "softmax": Variant(EXP),\n',
        '    "softmax": Variant(EXP),\n    "elu": Variant(Phi(F.elu)),\n',
    ),
    "a function that is not used": (
        "attention.py",
        "\n\ndef tied",
        "\n\ndef unused(x):\n    return x\n\n\ndef tied",
    ),
    "the order of definitions": (
        "attention.py",
        f"{EXP_LINE}\n{SIGMOID_LINE}\n",
        f"{SIGMOID_LINE}\n{EXP_LINE}\n",
    ),
    "a new import": ("attention.py", "import math\n", "import math\nimport os\n"),
    "a new name in an import": ("attention.py", "import dataclass,", "import astuple, dataclass,"),
    "a new setting": ("config.py", "    def nope_heads", "    new = 1\n\n    def nope_heads"),
    "how a kernel is launched": ("attention_paths/fused.py", "return ", "return 1 and "),
}


@pytest.mark.parametrize("edit", SAME_FORMULAS.values(), ids=SAME_FORMULAS)
def test_what_is_no_formula_changes_no_hash(edit, edited):
    config = Config(**LSSAR)
    before = unedited(formulas_hash, config)
    edited(*edit)
    assert formulas_hash(config) == before


def test_no_two_variants_share_a_hash():
    hashes = set()
    for name, variant in VARIANTS.items():
        hashes.add(formulas_hash(Config(attention=name, p=15.0 if variant.takes_p else None)))
    assert len(hashes) == len(VARIANTS)


def test_the_formulas_of_a_subclass_of_attention_count(monkeypatch, tmp_path):
    text = """
from attention_paths.module import Attention

SHARE = 0.2


class Own(Attention):
    def forward(self, *inputs):
        return SHARE * super().forward(*inputs)
"""
    (tmp_path / "own_attention.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_attention").Own

    def build_heads(config, heads, window):
        return own(VARIANTS[config.attention], len(heads), config.d_head)

    without = formulas_hash(Config())
    monkeypatch.setattr(layers.heads, "build_heads", build_heads)
    before = formulas_hash(Config())
    assert before != without
    (tmp_path / "own_attention.py").write_text(text.replace("0.2", "0.3"))
    forget_sources()
    assert formulas_hash(Config()) != before


# ---- formulas of a user's own ----

MINE = '''
import functools

import torch

import shapes
from shapes import Base, gain


FACTOR = torch.tensor([0.12345678])
FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh}
NAMES = {"relu", "tanh", "elu", "gelu"}
LIMITS = {}
LIMITS["low"] = -1.0
LIMITS |= {"high": 1.0}
STEEP = functools.partial(gain, by=3)
SOFTPLUS = torch.nn.Softplus(beta=2)


class Tent(Base):
    """A tent."""

    height = 1.0

    def __call__(self, z):
        return self.clipped(z) * self.height


@functools.lru_cache(maxsize=4)
def width(n, *, least=1):
    return max(n, least)


def tent(z):
    for name in NAMES:
        z = FUNCTIONS.get(name, shapes.bend)(z)
    return STEEP(Tent()(z) * FACTOR / width(3)) + SOFTPLUS(z).clamp(LIMITS["low"], LIMITS["high"])
'''
SHAPES = """
import sys


def set_up():
    global by
    by = 1.0


set_up()


def gain(z, by):
    return z * by


def bend(z):
    return bent(z, 0.5)


def bent(z, by):
    return z.abs() * by


class Base:
    low = 0

    def clipped(self, z):
        return z.clamp_min(self.low)
"""
EDITED_MODULES = {
    "a tensor": ("FACTOR = torch.tensor([0.12345678])", "FACTOR = torch.tensor([0.12345679])"),
    "a dict of functions": ('"tanh": torch.tanh', '"tanh": torch.sin'),
    "a set of names": ('"gelu"}', '"silu"}'),
    "an item of a dict": ('LIMITS["low"] = -1.0', 'LIMITS["low"] = -2.0'),
    "items added to a dict": ('{"high": 1.0}', '{"high": 2.0}'),
    "an argument of a partial function": ("by=3)", "by=4)"),
    "an argument of an object": ("Softplus(beta=2)", "Softplus(beta=3)"),
    "an attribute of a class": ("height = 1.0", "height = 2.0"),
    "a call of an object": ("* self.height", "+ self.height"),
    "an argument of a decorator": ("maxsize=4", "maxsize=5"),
    "a cached function": ("max(n, least)", "max(n, least + 1)"),
    "a keyword-only default": ("least=1)", "least=2)"),
    "a module's function": ("return bent(z, 0.5)", "return bent(z, 0.4)"),
    "what a module's function calls": ("z.abs() * by", "z.abs() + by"),
    "what is imported": ("return z * by", "return z + by"),
    "a base class": ("clamp_min(self.low)", "clamp_max(self.low)"),
    "what a call at the top sets": ("by = 1.0", "by = 2.0"),
}


@pytest.mark.parametrize("edit", EDITED_MODULES.values(), ids=EDITED_MODULES)
def test_an_edited_module_of_ones_own_is_noticed(edit, own_module):
    own_module("mine", MINE)
    own_module("shapes", SHAPES)
    before = source_hash((Definition("mine", "tent"),))
    assert (edit[0] in MINE) != (edit[0] in SHAPES)
    own_module("mine", MINE.replace(*edit))
    own_module("shapes", SHAPES.replace(*edit))
    assert before != source_hash((Definition("mine", "tent"),))


@pytest.mark.parametrize(
    "statement, function",
    [
        ("import kit.waves", "kit.waves.wave"),
        ("import kit.waves as waves", "waves.wave"),
        ("from kit import waves", "waves.wave"),
        ("from kit import wave", "wave"),  # by a relative import in the package
        ("from kit.waves import wave as other", "other"),
        ("from kit.waves import *", "wave"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_every_form_of_import_is_followed(statement, function, inside, own_module):
    if inside and "*" in statement:
        pytest.skip("Python allows it at the top of a module only")
    above, within = ("", statement) if inside else (statement, "pass")
    own_module("mine", f"{above}\n\ndef f(z):\n    {within}\n    return {function}(z)\n")
    own_module("kit/__init__", "from .waves import wave\n")
    own_module("kit/waves", "def wave(z):\n    return z.sin()\n")
    before = source_hash((Definition("mine", "f"),))
    own_module("kit/waves", "def wave(z):\n    return z.cos()\n")
    assert before != source_hash((Definition("mine", "f"),))


def test_a_module_that_runs_as_a_script(own_module, tmp_path):
    """Its hash is the one that it has where it is imported."""
    own_module("kit/__init__", "")
    own_module("kit/waves", "def wave(z):\n    return z.sin()\n")
    script = """
from runtime.source import definition_of, source_hash
from .waves import wave

def measure(z):
    return wave(z) / 2

if __name__ == "__main__":
    print(definition_of(measure).module, source_hash((definition_of(measure),)))
"""
    own_module("kit/tool", script)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "kit.tool"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    module, as_script = done.stdout.decode().strip().split(" ", 1)
    assert module == "__main__"
    assert as_script == source_hash((Definition("kit.tool", "measure"),))
    own_module("kit/waves", "def wave(z):\n    return z.cos()\n")
    assert as_script != source_hash((Definition("kit.tool", "measure"),))


def test_a_module_that_attention_imports(edited, own_module):
    own_module("mine", "def half(z):\n    return z / 2\n")
    entry = '\nfrom mine import half\nVARIANTS["softmax"] = Variant(Phi(half))\n\ndef attention_w'
    edit = ("attention.py", "\n\ndef attention_w", entry)
    edited(*edit)
    before = formulas_hash(Config())
    own_module("mine", "def half(z):\n    return z / 3\n")
    edited(*edit)
    assert before != formulas_hash(Config())


def test_a_variant_that_a_script_adds(own_module, monkeypatch):
    """Its source is the module of its functions: of a lambda, a partial function, an object."""
    module = "from dataclasses import dataclass\nhalf = lambda z, by=2: z / by\n"
    module += "class Third:\n    def __call__(self, z):\n        return z / 3\n"
    module += "@dataclass(frozen=True)\nclass Fourth(Third):\n    pass\n"
    own_module("script", module)
    script = importlib.import_module("script")
    functions = (
        script.half,
        partial(script.half, by=4),
        script.Third(),
        script.Fourth(),
        lru_cache(script.half),
    )
    assert definition_of(script.half) == Definition("script")

    def hash_with(function):
        monkeypatch.setitem(VARIANTS, "own", Variant(Phi(function, zero=0.0, signed=True)))
        return formulas_hash(Config(attention="own"))

    before = [hash_with(function) for function in functions]
    own_module("script", module.replace("z / by", "z * by"))
    for function, hash_before in zip(functions, before, strict=True):
        assert hash_before != hash_with(function)
    # what has no source of a user's own is hashed all the same
    for function in (torch.nn.Softsign(), eval("lambda z: z"), torch.expm1, torch.Tensor.expm1):
        assert hash_with(function).startswith("syntax ")
    del sys.modules["script"]


# ---- evaluations ----

EDITED_CODE = {
    "its own function": ("scripts/eval_length.py", "total + losses.sum(0)", "losses.sum(0)"),
    "its own constant": ("scripts/eval_length.py", "weights // 24", "weights // 25"),
    "an option": ("scripts/eval_length.py", "per_position: bool = option(False", "x = option(True"),
    "its chunks": ("scripts/eval_length.py", 'name = f"{length} tokens"', 'name = f"{length}"'),
    "shared code": ("scripts/common/validation.py", "math.lcm(*lengths)", "max(lengths)"),
    "how runs are opened": ("scripts/common/runs.py", "model.scale_rope(", "model.rescale("),
    "the size of a batch": ("scripts/common/runs.py", "BATCH_TOKENS = 16384", "BATCH_TOKENS = 9"),
    "the model": ("model.py", "F.gelu(", "F.relu("),
    "the shards' format": ("data/shards.py", "HEADER_INTS = 256", "HEADER_INTS = 128"),
    "RoPE": ("layers/rope.py", "return ", "return 2 * "),
    "a path of attention": ("attention_paths/sdpa.py", "enable_gqa=", "enable="),
}


@pytest.mark.parametrize("edit", EDITED_CODE.values(), ids=EDITED_CODE)
def test_edited_code_of_an_evaluation_is_noticed(edit, edited):
    before = unedited(code_hash, eval_length.EVAL_LENGTH)
    edited(*edit)
    assert before != code_hash(eval_length.EVAL_LENGTH)


SAME_CODE = {
    "a docstring": ("scripts/eval_length.py", "Mean losses in nats of windows", "The means"),
    "its table": ("scripts/eval_length.py", "print_table(table, width=9)", "print_table(table)"),
    "its picture": ("scripts/eval_length.py", "SMOOTHING = 16", "SMOOTHING = 17"),
    "another evaluation": ("scripts/passkey.py", "LARGEST_KEY = 50000", "LARGEST_KEY = 5"),
    "all pictures": ("scripts/common/plots.py", "figure", "picture"),
    "a variant": ("attention.py", "torch.exp(z - top) -", "torch.exp(z - top) +"),
    "a setting": ("config.py", "    def nope_heads", "    new = 1\n\n    def nope_heads"),
}


@pytest.mark.parametrize("edit", SAME_CODE.values(), ids=SAME_CODE)
def test_what_decides_no_number_of_an_evaluation(edit, edited):
    before = unedited(code_hash, eval_length.EVAL_LENGTH)
    edited(*edit)
    assert code_hash(eval_length.EVAL_LENGTH) == before


@pytest.mark.parametrize(
    "evaluation, edit",
    [
        (passkey.PASSKEY, ("scripts/common/retrieval.py", "[0-9]+", "[0-9]*")),
        (passkey.PASSKEY, ("generation.py", "return ", "return 1 + ")),
        (passkey.PASSKEY, ("data/tokenizer.py", "return ", "return 1 + ")),
        (recall.RECALL, ("data/recall.py", "PAIRS = 4", "PAIRS = 3")),
    ],
)
def test_edited_code_of_other_evaluations(evaluation, edit, edited):
    before = unedited(code_hash, evaluation)
    edited(*edit)
    assert before != code_hash(evaluation)


def test_the_file_of_an_evaluation_may_have_any_name(own_module):
    """By the module of its functions, also of those in partial functions."""
    text = "HALF = 0.5\ndef measure(options, run, chunk):\n    return {'value': HALF}\n"
    own_module("any_file", text)
    module = importlib.import_module("any_file")
    evaluation = replace(eval_length.EVAL_LENGTH, name="other", measure=partial(module.measure))
    before = code_hash(evaluation)
    own_module("any_file", text.replace("0.5", "0.4"))
    assert before != code_hash(evaluation)
    del sys.modules["any_file"]


# ---- hashes ----


def test_every_process_finds_the_same_hash(own_module, tmp_path):
    own_module("mine", MINE)
    own_module("shapes", SHAPES)
    code = """
from runtime.source import Definition, source_hash
roots = Definition("mine", "tent"), Definition("attention", "VARIANTS", "lssar")
print(source_hash(roots))
"""
    hashes = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        hashes.add(done.stdout.decode().strip())
    roots = Definition("mine", "tent"), Definition("attention", "VARIANTS", "lssar")
    assert hashes == {source_hash(roots)}


def test_every_shared_formula_is_defined():
    """One that is renamed would fall out of all hashes."""
    for definition in SHARED_FORMULAS:
        assert nodes_of(definition)
    for name in VARIANTS:
        assert nodes_of(Definition("attention", "VARIANTS", name))


def test_where_a_function_is_defined():
    here = Definition(__name__)
    assert definition_of(forget_sources) == here._replace(name="forget_sources")
    assert definition_of(partial(forget_sources)) == here._replace(name="forget_sources")
    # all of a module for what has no name at its top, as an object and a lambda of a script
    assert definition_of(torch.nn.Softplus()).name is None
    assert definition_of(eval("lambda z: z")) == here
