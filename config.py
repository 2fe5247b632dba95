"""Settings: one frozen dataclass, overridden by config files and --key=value, and every check.

Nothing here imports torch before a command line has passed every check that needs no table of
variants: help and a refusal must not wait for it.
"""

import ast
import difflib
import json
import math
import os
import runpy
import sys
import types
import typing
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from errors import UserError

ROOT = Path(__file__).parent
# The token ids of each tokenizer that is built in, end-of-text included.
VOCABULARY = {
    "gpt2": 50257, "bytes": 257, "r50k_base": 50257, "p50k_base": 50281, "p50k_edit": 50284,
}  # fmt: skip

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    choices: Collection[str] | None = None,
    may_change_on_resume: bool = False,
) -> T:
    """A field of Config: its default, its line of --help and the values allowed.

    `may_change_on_resume`: a resumed run may change it without becoming a different run.
    """
    limits = {"at_least": at_least, "choices": choices}
    return field(
        default=default,
        metadata={"help": help, "may_change_on_resume": may_change_on_resume, **limits},
    )


@dataclass(frozen=True)
class Config:
    """Every setting of a run.

    The defaults are llm.c's 124M recipe, run_gpt2_124M.sh. The LSSAR paper trains for the same
    number of steps, and gives no learning rate, batch size or schedule.
    """

    # attention
    attention: str = setting("softmax", "name in attention.VARIANTS")
    p: float | None = setting(
        None, "power of the re-weighting stage, >= 1; None: no such stage", at_least=1
    )
    p_law: str = setting(
        "constant",
        "'constant' p, 'learned' for each head from p on, or 'log_n': p log n / log block_size",
        choices=("constant", "learned", "log_n"),
    )
    softcap: float | None = setting(
        None, "scores become c tanh(score / c), c = 50 in Gemma 2; None: they do not"
    )
    sink: str = setting(
        "none",
        "a key of value 0 and score 0 ('one': softmax off by one) or of a 'learned' score per head",
        choices=("none", "one", "learned"),
    )
    forget: bool = setting(False, "scores decay by forget gates from the layer's input (FoX)")
    qk_norm: bool = setting(False, "RMSNorm, with gains, of q and k before RoPE (Qwen3)")
    gate: str = setting(
        "none",
        "sigmoid gate on attention's output: one per 'head' or per 'element' (Qiu et al. 2025)",
        choices=("none", "head", "element"),
    )
    attention_impl: str = setting(
        "auto",
        "'auto', or one path only: 'triton' (kernels.py), 'blocked' or 'reference'",
        choices=("auto", "triton", "blocked", "reference"),
        may_change_on_resume=True,
    )
    attention_length: str = setting(
        "train",
        "L in -log L and 1/L: 'train' (block_size at any length) or 'current'",
        choices=("train", "current"),
    )
    s_init: float = setting(1.0, "initial value of SSMax's s; 0.1685 for its variants (e), (f)")
    b_init: float = setting(0.0, "initial value of b in SSMax (d) and Eq. 3")
    gamma: float = setting(1.0, "gamma of ReLU attention by Shen et al.")
    window: int | None = setting(
        None, "keys that each row sees, its own the last; None: all", at_least=1
    )
    positions: str = setting(
        "rope",
        "'rope', 'alibi', 'none', or 'learned' (GPT-2's own, which end at block_size)",
        choices=("rope", "alibi", "none", "learned"),
    )
    nope_every: int = setting(
        0, "every Nth layer has no RoPE (SmolLM3, Llama 4: 4); 0: all have it", at_least=0
    )
    nope_share: float = setting(
        0.0, "share of each layer's heads, the first ones, without RoPE or ALiBi", at_least=0
    )
    local_window: int | None = setting(
        None, "the other heads are softmax over this many keys; None: like the first", at_least=1
    )
    rope_theta: float = setting(10000.0, "base of the rotary position embedding", at_least=1)
    # model
    n_layer: int = setting(12, "transformer blocks", at_least=1)
    n_head: int = setting(12, "attention heads per block", at_least=1)
    n_kv_head: int | None = setting(
        None,
        "heads of keys and values, each for n_head / n_kv_head queries; None: n_head",
        at_least=1,
    )
    head_size: int | None = setting(None, "width of a head; None: n_embd / n_head", at_least=1)
    n_embd: int = setting(768, "width of the residual stream", at_least=1)
    projections: str = setting(
        "linear",
        "how q, k and v come from the input: 'linear', or 'tpa' (Tensor Product Attention, T6)",
        choices=("linear", "tpa"),
    )
    q_rank: int | None = setting(6, "rank of q in 'tpa'; None: q is linear (KVonly)", at_least=1)
    kv_rank: int = setting(2, "rank of k and of v in 'tpa'", at_least=1)
    block_size: int = setting(1024, "training length in tokens", at_least=1)
    tokenizer: str = setting(
        "gpt2",
        "'gpt2' (50,257 ids), 'bytes' (257), tiktoken's 'r50k_base', 'p50k_base' or 'p50k_edit', "
        "or the path of a tokenizer.json",
    )
    vocab_size: int | None = setting(None, "token ids; None: the tokenizer's", at_least=1)
    norm: str = setting("layernorm", "'layernorm' or 'rmsnorm'", choices=("layernorm", "rmsnorm"))
    mlp: str = setting("gelu", "'gelu' or 'swiglu'", choices=("gelu", "swiglu"))
    mlp_hidden: int | None = setting(None, "hidden width of the MLP; None: 4 n_embd", at_least=1)
    bias: bool = setting(True, "biases in linear layers and LayerNorm")
    tie_embeddings: bool = setting(True, "the head shares the token embedding's weights")
    # data
    task: str = setting(
        "language",
        "'language', or 'orbits': simulated planets, see data/orbits.py",
        choices=("language", "orbits"),
    )
    systems: int = setting(10_000_000, "orbits: simulated systems for training", at_least=1)
    planets: int = setting(10, "orbits: planets of a system, at most", at_least=1)
    bins: int = setting(7000, "orbits: bins of a coordinate", at_least=1)
    data_dir: str = setting(
        "data/fineweb10B",
        "folder of shards (python -m data.fineweb, data.text)",
        may_change_on_resume=True,
    )
    first_batch: int = setting(
        0, "batch of the data order that the first step takes; SSMax (f) goes on in it", at_least=0
    )
    # optimisation
    optimizer: str = setting(
        "adamw",
        "'adamw', or 'muon' for hidden matrices and AdamW for the rest",
        choices=("adamw", "muon"),
    )
    total_batch_size: int = setting(
        524288, "global batch: tokens per step, over all ranks and micro-batches", at_least=1
    )
    batch_size: int = setting(
        64, "sequences per micro-batch on each rank", at_least=1, may_change_on_resume=True
    )
    max_iters: int = setting(18865, "optimizer steps", at_least=0, may_change_on_resume=True)
    learning_rate: float = setting(6e-4, "peak learning rate", at_least=0)
    schedule: str = setting(
        "cosine",
        "'cosine', 'constant' or 'trapezoidal', each after the warm-up",
        choices=("cosine", "constant", "trapezoidal"),
    )
    warmup_iters: int = setting(700, "steps of linear warm-up", at_least=0)
    cooldown_iters: int = setting(
        0,
        "last steps of 'trapezoidal', linear to min_lr",
        at_least=0,
        may_change_on_resume=True,
    )
    min_lr: float = setting(0.0, "learning rate that the schedule decays to", at_least=0)
    weight_decay: float = setting(0.1, "on tensors of 2 or more dimensions", at_least=0)
    beta1: float = setting(0.9, "AdamW", at_least=0)
    beta2: float = setting(0.95, "AdamW", at_least=0)
    adam_eps: float = setting(1e-8, "AdamW", at_least=0)
    grad_clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", at_least=0)
    on_nonfinite: str = setting(
        "stop",
        "if a loss or gradient is not finite: 'stop', or 'skip' the step's update",
        choices=("stop", "skip"),
        may_change_on_resume=True,
    )
    # validation, checkpoints, logs
    eval_interval: int = setting(
        250,
        "steps between validations; also before the first step and at the end",
        at_least=1,
        may_change_on_resume=True,
    )
    val_tokens: int = setting(
        10485760, "validation tokens, in order from the first (llm.c's number)", at_least=1
    )
    checkpoint_interval: int = setting(
        1000,
        "steps between checkpoints; also at the start and the end",
        at_least=1,
        may_change_on_resume=True,
    )
    keep_last: int = setting(
        2, "number of newest checkpoints to keep", at_least=1, may_change_on_resume=True
    )
    keep_every: int = setting(
        0,
        "also keep checkpoints at multiples of this many steps; 0: none",
        at_least=0,
        may_change_on_resume=True,
    )
    log_interval: int = setting(
        1,
        "steps between printed lines; metrics.jsonl has every step",
        at_least=1,
        may_change_on_resume=True,
    )
    wandb_mode: str = setting(
        "auto",
        "'auto' (online if a key is set, else offline), 'online', 'offline' or 'disabled'",
        choices=("auto", "online", "offline", "disabled"),
        may_change_on_resume=True,
    )
    wandb_project: str = setting("sharp-attention", "project in wandb", may_change_on_resume=True)
    # the run
    out_dir: str = setting(
        "",
        "the run's folder, may contain settings in braces; empty: out/<config name>",
        may_change_on_resume=True,
    )
    seed: int = setting(1337, "random seed of the initial weights and the data order", at_least=0)
    resume: bool = setting(
        False, "continue the run in out_dir from its latest checkpoint", may_change_on_resume=True
    )
    dry_run: bool = setting(
        False,
        "check everything, say what the run will take, and end; nothing is written",
        may_change_on_resume=True,
    )
    init_from: str = setting(
        "",
        "a run's folder, a checkpoint's file, or hf:gpt2, to take the initial weights from",
        may_change_on_resume=True,
    )
    device: str = setting(
        "auto",
        "'auto' (cuda, else mps, else cpu), 'cuda', 'cuda:1', 'mps', 'cpu'",
        may_change_on_resume=True,
    )
    dtype: str = setting(
        "auto",
        "'auto' (on CUDA bfloat16, or float16 without it), 'float32', 'bfloat16', 'float16'",
        choices=("auto", "float32", "bfloat16", "float16"),
        may_change_on_resume=True,
    )
    compile: bool | None = setting(
        None, "torch.compile; None: on CUDA only", may_change_on_resume=True
    )
    timeout: float = setting(
        600.0,
        "seconds that ranks wait for a dead or stuck one",
        at_least=5,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        check_each_setting(self)
        check_sizes(self)
        check_training(self)
        check_attention(self)  # last, because it imports torch

    @cached_property
    def n_vocab(self) -> int:
        """The number of token ids, end-of-text included; for orbits, per coordinate."""
        if self.task == "orbits":
            # with two time-step tokens, and one that the published vocabulary leaves unused
            return self.bins + 3
        if self.vocab_size is not None:
            return self.vocab_size
        return VOCABULARY.get(self.tokenizer) or count_ids(self.tokenizer)

    @property
    def d_head(self) -> int:
        """The width of a head."""
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def nope_heads(self) -> int:
        """The number of heads without positions, in a layer where others have them."""
        return round(self.n_head * self.nope_share)

    @property
    def variant_name(self) -> str:
        """The attention variant with its p, such as lssar_p15."""
        return self.attention + ("" if self.p is None else f"_p{self.p:g}")

    @property
    def position_shape(self) -> tuple[int, ...]:
        """The shape of what is at a position: of a token, or of a pair of coordinates."""
        return (2,) if self.task == "orbits" else ()

    def replace(self, **changes: Any) -> "Config":
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS = {f.name: f.metadata for f in fields(Config)}
# The types that each setting may have: (float, NoneType) for `float | None`.
TYPES: dict[str, tuple[type, ...]] = {
    name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(Config).items()
}
MAY_CHANGE_ON_RESUME = {name for name, meta in SETTINGS.items() if meta["may_change_on_resume"]}


def choices(name: str) -> Collection[str]:
    """The values that a setting with a fixed set of them may take."""
    return SETTINGS[name]["choices"]


def command_line() -> Config:
    """The Config of this process's command line; --help prints the settings and ends it."""
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text(), flush=True)
        sys.exit()
    return load_config(sys.argv[1:])


def load_config(arguments: list[str]) -> Config:
    """The Config of a command line: config files from left to right, then --key=value.

    Takes `["configs/lssar_p15.py", "configs/scales/tiny.py", "--p=3"]`; `--key value` works too,
    and `--key` alone for a bool. A run's folder or its config.json stands for the run's settings,
    and `--resume` with an out_dir needs no file at all. Raises UserError for a missing file, an
    unknown setting (naming the nearest one), a wrong type, and values that contradict each other.
    """
    values: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    names: list[str] = []
    arguments = list(arguments)
    while arguments:
        argument = arguments.pop(0)
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            require_known_setting(key, "the command line")
            if not equals:
                text = pop_value(key, arguments)
            overrides[key] = parse(key, text)
        else:
            values |= read_file(argument)
            names.append(Path(argument).stem)
    if overrides.get("resume") is True:
        run = os.path.join(overrides.get("out_dir", ""), "config.json")
        if not names and os.path.isfile(run):
            values = read_run(run)
        values.pop("init_from", None)  # it was for the run's beginning
    values |= overrides
    config = Config(**values)
    out_dir = filled_out_dir(config) or "out/" + ("_".join(names) or config.variant_name)
    return config.replace(out_dir=out_dir, data_dir=find_data(config.data_dir))


def read_file(path: str) -> dict[str, Any]:
    """The settings that a config file assigns, or those of a run.

    Names with a leading underscore and modules are the config file's own.
    """
    run = os.path.join(path, "config.json")
    if path.endswith(".json") or os.path.isfile(run):
        return read_run(run if os.path.isfile(run) else path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder without config.json: no run of train.py")
    if not os.path.isfile(path):
        hint = nearest_file(Path(path), (ROOT / "configs").rglob("*.py"))
        raise UserError(
            f"config file or run {path} does not exist; {hint}settings are written --key=value"
        )
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"config file {path} fails: {type(error).__name__}: {error}") from error
    values = {}
    for key, value in names.items():
        if not key.startswith("_") and not isinstance(value, types.ModuleType):
            require_known_setting(key, path)
            values[key] = value
    return values


def nearest_file(missing: Path, others: Iterable[Path] = ()) -> str:
    """A question that names the file nearest to a missing one, there or among others, if any."""
    files = list(others)
    with suppress(OSError, ValueError):
        files += missing.parent.iterdir()
    by_name = {file.stem: file for file in files if not file.name.startswith(".")}
    near = difflib.get_close_matches(missing.stem, by_name, n=1)
    return f"did you mean {os.path.relpath(by_name[near[0]])}? " if near else ""


def read_run(path: str) -> dict[str, Any]:
    """The settings in a run's config.json, its folder being the one where it is found."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    values = saved_settings(values, path)
    folder = os.path.dirname(path) or "."
    return values | {"resume": False, "out_dir": folder.replace("{", "{{").replace("}", "}}")}


def saved_config(values: Any, source: str | Path) -> Config:
    """The Config with these settings, which `source`, a file of a run, holds.

    Raises UserError where they are not, or no longer, valid.
    """
    try:
        config = Config(**saved_settings(values, source))
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return config.replace(data_dir=find_data(config.data_dir))


def saved_settings(values: Any, source: str | Path) -> dict[str, Any]:
    """The settings in a file of a run, with the run's own copy of its tokenizer.

    Raises UserError where they are none.
    """
    if not isinstance(values, dict) or "attention" not in values:
        raise UserError(f"{source}: it does not hold the settings of a run")
    for key in values:
        if key not in SETTINGS:
            raise UserError(
                f"{source} has {key!r}, which is not a setting here: another version of this "
                "repository wrote it; the run's environment.json names the commit"
            )
    kept = Path(source).parent / "tokenizer.json"
    if values.get("tokenizer", "gpt2") in VOCABULARY or not kept.is_file():
        return values
    return values | {"tokenizer": str(kept)}


def find_data(data_dir: str) -> str:
    """The folder of shards; the repository's own where the current folder has none of that name."""
    own = os.path.join(ROOT, data_dir)
    return own if os.path.isdir(own) and not os.path.exists(data_dir) else data_dir


def require_known_setting(key: str, where: str) -> None:
    if key not in SETTINGS:
        near = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; python train.py --help lists them"
        raise UserError(f"{where} sets {key!r}, which is not a setting{hint}")


def pop_value(key: str, arguments: list[str]) -> str:
    """The value of a `--key` without `=`.

    It is the next argument, or True for a bool not followed by one.
    """
    words = ("True", "False", "None") if bool in TYPES[key] else ()
    if words and (not arguments or arguments[0].capitalize() not in words):
        return "True"
    if not arguments:
        raise UserError(f"--{key} needs a value: --{key}={getattr(Config, key)}")
    return arguments.pop(0)


def parse(key: str, text: str) -> Any:
    """The value that an argument's text stands for.

    Text that cannot be parsed is returned as it is, for the type check to refuse.
    """
    if str in TYPES[key]:
        return text
    try:
        return ast.literal_eval(text.capitalize() if bool in TYPES[key] else text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def filled_out_dir(config: Config) -> str:
    """out_dir with the settings that it names in braces filled in: {p} is 7 for 7.0."""
    values = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in config.as_dict().items()
    }
    try:
        return config.out_dir.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"out_dir = {config.out_dir!r} may name settings in braces, as in out/p{{p}}, but "
            f"this fails: {error}"
        ) from error


def check_each_setting(config: Config) -> None:
    """Raise UserError where a value has the wrong type or is out of range.

    A whole number is stored as the setting's type: 3 for a float as 3.0, 1e3 for an int as 1000.
    """
    for key in SETTINGS:
        value = getattr(config, key)
        if type(value) is int and float in TYPES[key] and abs(value) < 2**53:
            object.__setattr__(config, key, value := float(value))
        elif type(value) is float and int in TYPES[key] and value.is_integer():
            object.__setattr__(config, key, value := int(value))
        if type(value) not in TYPES[key]:
            names = ["None" if t is types.NoneType else t.__name__ for t in TYPES[key]]
            raise UserError(
                f"{key} = {value!r} is {type(value).__name__}; it must be {' or '.join(names)}"
            )
        if type(value) is int and abs(value) >= 2**63:
            raise UserError(f"{key} = {value} must be below 2**63")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} = {value} must be a finite number")
        least, allowed = SETTINGS[key]["at_least"], SETTINGS[key]["choices"]
        if value is not None and least is not None and value < least:
            raise UserError(f"{key} = {value} must be at least {least}")
        if allowed:
            check_choice(key, value, allowed)


def check_choice(key: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{key} = {value!r}; {hint}it is one of {', '.join(allowed)}")


def check_sizes(config: Config) -> None:
    """Raise UserError where the model's sizes do not fit each other."""
    if config.head_size is None and config.n_embd % config.n_head:
        raise UserError(f"n_embd = {config.n_embd} is not divisible by n_head = {config.n_head}")
    if config.d_head % 2 and config.positions == "rope":
        name = "n_embd / n_head" if config.head_size is None else "head_size"
        raise UserError(f"{name} = {config.d_head} must be even: RoPE rotates pairs")
    if config.n_head % config.kv_heads:
        raise UserError(
            f"n_head = {config.n_head} is not divisible by n_kv_head = {config.kv_heads}"
        )
    for key in ("n_kv_head", "qk_norm", "nope_share"):
        if config.projections == "tpa" and getattr(config, key):
            raise UserError(
                f"{key} = {getattr(config, key)} is for projections = 'linear': with 'tpa' all "
                "heads share the factors that RoPE turns"
            )
    if config.nope_every and config.positions != "rope":
        raise UserError(f"nope_every is for positions = 'rope', not {config.positions!r}")
    if config.nope_share and config.positions not in ("rope", "alibi"):
        raise UserError(
            f"nope_share is for positions = 'rope' or 'alibi', not {config.positions!r}"
        )
    group = config.n_head // config.kv_heads
    heads = config.nope_share * config.n_head
    whole = math.isclose(heads, config.nope_heads, abs_tol=1e-9)
    if config.nope_share >= 1 or not whole or config.nope_heads % group:
        raise UserError(
            f"nope_share = {config.nope_share:g} of n_head = {config.n_head} is {heads:g} heads; "
            f"it must be below 1 and a multiple of n_head / n_kv_head = {group} heads"
        )
    if config.local_window is not None and not config.nope_heads:
        raise UserError("local_window is for the heads beyond nope_share, which is 0")
    if config.gamma <= 0:
        raise UserError(f"gamma = {config.gamma} must be above 0: it divides the weights")


def check_attention(config: Config) -> None:
    """Raise UserError where the settings of attention contradict the table of variants."""
    # imports torch, which takes a second or more
    from attention import VARIANTS, check_variant, kernel_obstacle

    check_choice("attention", config.attention, VARIANTS)
    variant = VARIANTS[config.attention]
    check_variant(variant)
    if variant.needs_p and config.p is None:
        raise UserError(
            f"attention = {config.attention!r} needs p, the power of its re-weighting: "
            "--p=3 and --p=15 are the paper's"
        )
    if config.p is not None and not variant.takes_p:
        able = ", ".join(name for name, row in VARIANTS.items() if row.takes_p)
        raise UserError(
            f"attention = {config.attention!r} takes no p (p = {config.p:g}): re-weighting needs "
            f"l1 and weights that are never negative, as in {able}"
        )
    if config.p_law != "constant" and config.p is None:
        raise UserError(f"p_law = {config.p_law!r} needs p, the power that it changes")
    if config.softcap is not None and config.softcap <= 0:
        raise UserError(f"softcap = {config.softcap:g} must be above 0: no score is beyond it")
    if config.sink != "none" and not variant.takes_sink:
        able = ", ".join(name for name, row in VARIANTS.items() if row.takes_sink)
        raise UserError(
            f"attention = {config.attention!r} takes no sink: a sink shares l1 with keys whose "
            f"weights are never 0, as in {able}"
        )
    obstacle = kernel_obstacle(variant, config.d_head)
    if config.attention_impl == "triton" and obstacle:
        raise UserError(
            f"attention_impl = 'triton' cannot compute {config.attention!r}: {obstacle}; "
            "'auto' picks a path that can"
        )


def check_training(config: Config) -> None:
    """Raise UserError where the settings of the training run contradict each other."""
    for key in ("systems", "planets", "bins"):
        if config.task != "orbits" and getattr(config, key) != getattr(Config, key):
            raise UserError(f"{key} = {getattr(config, key)} is for task = 'orbits'")
    if config.task == "orbits" and config.tie_embeddings:
        raise UserError("task = 'orbits' has no head to tie: add tie_embeddings = False")
    if config.task == "orbits" and config.vocab_size is not None:
        raise UserError(f"vocab_size = {config.vocab_size}: task = 'orbits' takes bins instead")
    if config.bins > 65533:
        raise UserError(f"bins = {config.bins} must be at most 65533: a token is a uint16")
    least = VOCABULARY.get(config.tokenizer, 0)
    if config.task == "language" and config.n_vocab < least:
        raise UserError(
            f"vocab_size = {config.vocab_size} is below the {least} ids of "
            f"tokenizer = {config.tokenizer!r}"
        )
    if config.n_vocab > 65536:
        raise UserError(f"vocab_size = {config.n_vocab} does not fit the shards' uint16 tokens")
    for key in ("beta1", "beta2"):
        if getattr(config, key) >= 1:
            raise UserError(f"{key} = {getattr(config, key)} must be below 1")
    if config.min_lr > config.learning_rate:
        raise UserError(f"min_lr = {config.min_lr} is above learning_rate = {config.learning_rate}")
    if config.schedule != "trapezoidal" and config.cooldown_iters:
        raise UserError(f"cooldown_iters is for schedule = 'trapezoidal', not {config.schedule!r}")
    if config.first_batch * config.total_batch_size >= 2**63:
        raise UserError(
            f"first_batch = {config.first_batch} of {config.total_batch_size} tokens must be below "
            "2**63 tokens"
        )
    if config.resume and config.init_from:
        raise UserError(
            "resume and init_from exclude each other: a resumed run has its own weights"
        )
    if config.timeout > 7 * 86400:
        raise UserError(f"timeout = {config.timeout:g} must be at most a week, 604800 seconds")
    if config.keep_every % config.checkpoint_interval:
        raise UserError(
            f"keep_every = {config.keep_every} must be a multiple of checkpoint_interval = "
            f"{config.checkpoint_interval}: only what is saved can be kept"
        )
    accumulation_steps(config, world_size=1)


def count_ids(tokenizer: str) -> int:
    """The number of token ids of a tokenizer.json. Raises UserError where it cannot be read."""
    if not Path(tokenizer).is_file():
        near = difflib.get_close_matches(tokenizer, VOCABULARY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"tokenizer = {tokenizer!r}; {hint}it is one of {', '.join(VOCABULARY)}, or the path "
            "of a tokenizer.json; tiktoken's other encodings have more than 65,536 ids"
        )
    try:
        content = json.loads(Path(tokenizer).read_bytes())
        vocabulary = content["model"]["vocab"]  # a list of Unigram, a dict of the other models
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*ids, *(token["id"] for token in content["added_tokens"])]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"tokenizer = {tokenizer!r} is not a tokenizer.json: {reason}") from error


def accumulation_steps(config: Config, world_size: int) -> int:
    """Micro-batches per step on each rank.

    Raises UserError, naming values that work, where no number of them makes up total_batch_size.
    """
    micro = config.batch_size * config.block_size * world_size
    steps, rest = divmod(config.total_batch_size, micro)
    if rest or not steps:
        raise UserError(
            f"total_batch_size = {config.total_batch_size} is not a multiple of batch_size x "
            f"block_size x processes = {config.batch_size} x {config.block_size} x {world_size} = "
            f"{micro}; {batches_that_work(config, world_size)}"
        )
    return steps


def batches_that_work(config: Config, world_size: int) -> str:
    """The nearest values of batch_size that divide the total, or else the nearest totals."""
    sequences, rest = divmod(config.total_batch_size, config.block_size * world_size)
    if sequences and not rest:
        most = min(sequences, 2 * config.batch_size + 1000)
        sizes = [n for n in range(1, most + 1) if sequences % n == 0]
        near = sorted(sizes, key=lambda n: abs(math.log(n / config.batch_size)))[:4]
        return f"batch_size = {', '.join(map(str, sorted(near)))} would work"
    micro = config.batch_size * config.block_size * world_size
    steps = max(1, round(config.total_batch_size / micro))
    return f"total_batch_size = {steps * micro} or {(steps + 1) * micro} would work"


HEADINGS = {  # in the help, above these settings
    "attention": "attention",
    "n_layer": "model",
    "task": "data",
    "optimizer": "optimisation",
    "eval_interval": "validation, checkpoints, logs",
    "out_dir": "the run",
}


def help_text() -> str:
    """The text that `python train.py --help` prints."""
    lines = [
        "usage: train.py [CONFIG.py ...] [--key=value ...]",
        "       train.py --resume RUN [--key=value ...]",
        "",
        "Config files apply left to right, then the command line, over these defaults:",
    ]
    for f in fields(Config):
        if f.name in HEADINGS:
            lines += ["", f"{HEADINGS[f.name]}:"]
        default = repr(f.default)
        lines.append(f"  --{f.name}={default}".ljust(36) + " " + f.metadata["help"])
    return "\n".join(lines)
