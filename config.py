"""Settings: one frozen dataclass, set by config files and --key=value, and checked when built.

Nothing here imports torch: help and refusals come at once. What depends on the table of variants is
checked by layers.heads.
"""

import ast
import hashlib
import json
import math
import operator
import os
import runpy
import sys
import types
import typing
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from errors import UserError, check_choice, did_you_mean, first_line

ROOT = Path(__file__).parent
# Before the name or the folder of a Hugging Face GPT-2 in init_from, and what it must be.
PRETRAINED = "hf:"
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}  # fmt: skip
# The number of token ids of each built-in tokenizer, end-of-text included.
VOCABULARY = {"gpt2": 50257, "bytes": 257}
# The name of the copy of a tokenizer's file in the folders of shards, runs and exports.
TOKENIZER = "tokenizer.json"
# The number of token ids of all recall tasks.
RECALL_IDS = 256

# What some settings need from others to have an effect: see `setting`.
ANY: dict[str, tuple] = {}
ROPE = {"positions": ("rope",)}
LINEAR, TPA = {"projections": ("linear",)}, {"projections": ("tpa",)}
HYBRID = {"positions": ("rope", "alibi"), **LINEAR}
ORBITS = {"task": ("orbits",)}
LANGUAGE = {"task": ("language", "language+recall")}
RECALL = {"task": ("recall", "language+recall")}

T = TypeVar("T")


def setting(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Collection[Any] | None = None,
    needs: dict[str, tuple] = ANY,
) -> T:
    """A field of Config: its default, its line of --help and the values allowed.

    `needs` names other settings, and the values of each with which this one has an effect: with
    other values anything but the default is refused.
    """
    limits = {"at_least": at_least, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": help, "needs": needs, **limits})


@dataclass(frozen=True)
class Config:
    """Every setting of a run.

    The defaults are llm.c's 124M recipe, run_gpt2_124M.sh. The LSSAR paper trains for the same
    number of steps, and gives no learning rate, batch size or schedule.
    """

    # fmt: off
    # ---- attention: what a layer computes ----
    attention: str = setting("softmax", "name in attention.VARIANTS")
    p: float | None = setting(None, "power of the re-weighting; None: no re-weighting", at_least=1)
    block_size: int = setting(1024, "training length in tokens", at_least=1)
    window: int | None = setting(None, "each query sees its last keys only: how many", at_least=1)
    positions: str = setting("rope", "'learned' positions are GPT-2's own, and end at block_size",
                             choices=("rope", "alibi", "none", "learned"))
    rope_theta: float = setting(10000.0, "base of RoPE", at_least=1, needs=ROPE)
    nope_every: int = setting(0, "every Nth layer has no RoPE, or with nope_share such a share of "
                              "heads (SmolLM3, Llama 4: 4)", at_least=0, needs=ROPE)
    nope_share: float = setting(0.0, "share of heads, the first, without RoPE or ALiBi",
                                at_least=0, below=1, needs=HYBRID)
    local_window: int | None = setting(
        None, "hybrid: heads with positions are softmax over this many keys; None: they compute "
        "`attention` too", at_least=1)
    softcap: float | None = setting(None, "scores become c tanh(score / c); Gemma 2: 50", above=0)
    sink: str = setting(
        "none", "a key of value 0 and score 0 ('one': softmax off by one) or of a 'learned' score "
        "per head", choices=("none", "one", "learned"))
    forget: bool = setting(False, "forget gates (FoX) lower the scores")
    s_init: float = setting(1.0, "initial s of SSMax; (e) and (f): 0.1685")
    b_init: float = setting(0.0, "initial b of SSMax (d) and Eq. 3")
    gamma: float = setting(1.0, "gamma of ReLU attention by Shen et al.", above=0)
    # ---- model: the weights, and the layers around attention ----
    n_layer: int = setting(12, "transformer blocks", at_least=1)
    n_head: int = setting(12, "attention heads per block", at_least=1)
    n_kv_head: int | None = setting(None, "heads of keys and values; None: n_head",
                                    at_least=1, needs=LINEAR)
    head_size: int | None = setting(None, "width of a head; None: n_embd / n_head", at_least=1)
    n_embd: int = setting(768, "width of the residual stream", at_least=1)
    qk_norm: bool = setting(False, "RMSNorm of q and k before RoPE (Qwen3)", needs=LINEAR)
    gate: str = setting(
        "none", "sigmoid gate on attention's output, per 'head' or 'element' (Qiu et al. 2025)",
        choices=("none", "head", "element"))
    projections: str = setting(
        "linear", "q, k and v are 'linear' in the input, or 'tpa': Tensor Product Attention (T6)",
        choices=("linear", "tpa"))
    q_rank: int | None = setting(6, "rank of q in 'tpa'; None: linear", at_least=1, needs=TPA)
    kv_rank: int = setting(2, "rank of k and of v in 'tpa'", at_least=1, needs=TPA)
    norm: str = setting("layernorm", "of the residual stream", choices=("layernorm", "rmsnorm"))
    mlp: str = setting("gelu", "activation", choices=("gelu", "swiglu"))
    mlp_hidden: int | None = setting(None, "hidden width of the MLP; None: 4 n_embd", at_least=1)
    bias: bool = setting(True, "biases in linear layers and LayerNorm")
    tie_embeddings: bool = setting(True, "the head shares the token embedding's weights")
    vocab_size: int | None = setting(None, "token ids; None: the tokenizer's",
                                     at_least=1, needs=LANGUAGE)
    # ---- data: what the loss is measured on ----
    task: str = setting(
        "language", "'orbits' are simulated planets, 'recall' asks what lies far away: data/*.py",
        choices=("language", "orbits", "recall", "language+recall"))
    data_dir: str = setting("data/fineweb10B", "folder of shards (data.fineweb, data.text)")
    tokenizer: str = setting("gpt2", "'gpt2', 'bytes' or the path of a tokenizer.json")
    val_tokens: int = setting(10485760, "validation tokens, from the first on (llm.c)", at_least=1)
    planets: int = setting(10, "orbits: most planets of a system", at_least=1, needs=ORBITS)
    bins: int = setting(7000, "orbits: bins of a coordinate", at_least=1, needs=ORBITS)
    recall: str = setting("lookup", "task of recall", needs=RECALL,
                          choices=("lookup", "mqar", "latest", "latest_2", "sort"))
    # ---- optimisation ----
    systems: int = setting(10_000_000, "orbits: systems to train on", at_least=1, needs=ORBITS)
    first_batch: int = setting(0, "the first step takes this batch; for SSMax (f)", at_least=0)
    total_batch_size: int = setting(524288, "tokens per step, over all processes", at_least=1)
    max_iters: int = setting(18865, "optimizer steps", at_least=0)
    optimizer: str = setting("adamw", "'muon' for hidden matrices and AdamW for the rest",
                             choices=("adamw", "muon"))
    learning_rate: float = setting(6e-4, "peak learning rate", at_least=0)
    schedule: str = setting("cosine", "of the learning rate after the warm-up",
                            choices=("cosine", "constant", "trapezoidal"))
    warmup_iters: int = setting(700, "steps of linear warm-up", at_least=0)
    cooldown_iters: int = setting(0, "last steps of 'trapezoidal', linear to min_lr",
                                  at_least=0, needs={"schedule": ("trapezoidal",)})
    min_lr: float = setting(0.0, "final learning rate",
                            at_least=0, needs={"schedule": ("cosine", "trapezoidal")})
    weight_decay: float = setting(0.1, "on tensors of 2 or more dimensions", at_least=0)
    beta1: float = setting(0.9, "AdamW", at_least=0, below=1)
    beta2: float = setting(0.95, "AdamW", at_least=0, below=1)
    adam_eps: float = setting(1e-8, "AdamW", at_least=0)
    grad_clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", at_least=0)
    seed: int = setting(1337, "of the initial weights and the data order", at_least=0)
    # ---- machine: the losses are the same up to rounding ----
    device: str = setting("auto", "'auto' (cuda, else mps, else cpu), 'cuda:1', ..")
    dtype: str = setting(
        "auto", "'auto': on CUDA bfloat16, or float16 where the GPU has none; else float32. "
        "Training with 'float32' on CUDA multiplies matrices in TF32",
        choices=("auto", "float32", "bfloat16", "float16"))
    compile: bool | None = setting(None, "torch.compile; None: on CUDA, except recall by blocks")
    batch_size: int = setting(64, "sequences per micro-batch and process", at_least=1)
    attention_impl: str = setting(
        "auto", "how attention is computed; 'auto': the fastest that works here",
        choices=("auto", "triton", "blocked", "reference"))
    # ---- logs: validation, checkpoints, printed lines ----
    eval_interval: int = setting(250, "steps between validations; also first and last", at_least=1)
    checkpoint_interval: int = setting(1000, "steps between checkpoints", at_least=1)
    keep_last: int = setting(2, "number of newest checkpoints to keep", at_least=1)
    keep_every: int = setting(0, "also keep checkpoints of every Nth step", at_least=0)
    log_interval: int = setting(1, "steps between printed lines", at_least=1)
    wandb_mode: str = setting(
        "auto", "'auto': online where you are logged in to wandb, else disabled",
        choices=("auto", "online", "offline", "disabled"))
    wandb_project: str = setting("sharp-attention", "project in wandb")
    # ---- run: where and how it starts ----
    out_dir: str = setting(
        "", "the run's folder, may name settings in braces; empty: out/<config name>")
    resume: bool | str = setting(
        False, "continue the run in out_dir; 'auto': if it has a checkpoint, else start it",
        choices=(False, True, "auto"))
    init_from: str = setting("", "initial weights: a run, its .pt, or hf:gpt2 with its sizes")
    dry_run: bool = setting(False, "check everything, print what it takes, write nothing")
    timeout: float = setting(600.0, "seconds to wait for a dead process", at_least=5)
    # fmt: on

    def __post_init__(self) -> None:
        check_each_setting(self)
        check_effect(self)
        check_model(self)
        check_training(self)

    @cached_property
    def n_vocab(self) -> int:
        """The number of token ids, end-of-text included; of orbits, per coordinate."""
        if self.task == "orbits":
            # with two time-step tokens, and one that the published vocabulary leaves unused
            return self.bins + 3
        return self.text_ids + (RECALL_IDS if "recall" in self.tasks else 0)

    @cached_property
    def text_ids(self) -> int:
        """The number of token ids of text, end-of-text included; ids of recall follow them."""
        if "language" not in self.tasks:
            return 0
        if self.vocab_size is not None:
            return self.vocab_size
        return VOCABULARY.get(self.tokenizer) or count_ids(self.tokenizer)

    @property
    def tasks(self) -> list[str]:
        """What the batches are of: of "language+recall" in turn."""
        return self.task.split("+")

    @cached_property
    def tokenizer_id(self) -> str:
        """What a checkpoint records of the tokenizer: its name, or its file's sha256."""
        return identify(self.tokenizer)

    @property
    def d_head(self) -> int:
        """The width of a head."""
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    def nope_heads(self, layer: int = 0) -> int:
        """The number of heads of a layer without positions, where other heads have them."""
        if self.nope_every and (layer + 1) % self.nope_every:
            return 0
        return round(self.n_head * (self.nope_share or bool(self.nope_every)))

    @property
    def variant_name(self) -> str:
        """The attention variant with its p, such as lssar_p15."""
        return self.attention + ("" if self.p is None else f"_p{self.p:g}")

    def replace(self, **changes: Any) -> "Config":
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS = {f.name: f.metadata for f in fields(Config)}
# The first setting of each group, and the group's name.
GROUPS = {
    "attention": "attention",
    "n_layer": "model",
    "task": "data",
    "systems": "optimisation",
    "device": "machine",
    "eval_interval": "logs",
    "out_dir": "run",
}
# The types that each setting may have: (float, NoneType) for `float | None`.
TYPES: dict[str, tuple[type, ...]] = {
    name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(Config).items()
}


def names(*groups: str) -> tuple[str, ...]:
    """The settings of these groups."""
    found, group = [], ""
    for name in SETTINGS:
        group = GROUPS.get(name, group)
        if group in groups:
            found.append(name)
    return tuple(found)


# What may change when a run is resumed.
MAY_CHANGE = {"data_dir", "max_iters", "cooldown_iters", *names("machine", "logs", "run")}


def choices(name: str) -> Collection[Any]:
    """The values that a setting with a fixed set of values may take."""
    return SETTINGS[name]["choices"]


# ---- config files and the command line ----


def command_line() -> Config:
    """The Config of this process's command line; --help prints the settings and ends it."""
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text(), flush=True)
        sys.exit()
    return load_config(sys.argv[1:])


def load_config(arguments: list[str]) -> Config:
    """The Config of a command line: config files from left to right, then --key=value.

    Takes `["configs/lssar_p15.py", "configs/scales/tiny.py", "--p=3"]`, and `--key` alone for a
    bool. A run's folder or its config.json stands for the run's settings, and `--resume` with an
    out_dir needs no file at all. With --init_from=hf:NAME the sizes that are not set come from
    there. Raises UserError for a missing file, an unknown setting (naming the nearest one), a wrong
    type, and values that contradict each other.
    """
    values: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    files: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            require_known_setting(key, "the command line")
            if not equals and bool not in TYPES[key]:
                raise UserError(f"--{key} needs a value: --{key}=VALUE")
            overrides[key] = parse(key, text if equals else "True")
        else:
            values |= read_file(argument)
            files.append(Path(argument).stem)
    if overrides.get("resume") is True:
        run = overrides.get("out_dir", "")
        if not files and os.path.isfile(os.path.join(run, "config.json")):
            values = read_run(run)
        values.pop("init_from", None)  # the run has begun
    values |= overrides
    config = Config(**values | pretrained_settings(values))
    out_dir = filled_out_dir(config) or "out/" + ("_".join(files) or config.variant_name)
    return config.replace(out_dir=out_dir, data_dir=find_data(config.data_dir))


def read_file(path: str) -> dict[str, Any]:
    """The settings that a config file assigns, or the settings of a run.

    Names with a leading underscore and modules are the config file's own.
    """
    if os.path.isdir(path) or os.path.basename(path) == "config.json":
        return read_run(path.removesuffix("config.json"))
    if not os.path.isfile(path):
        files = [*(ROOT / "configs").rglob("*.py"), *Path(path).parent.glob("*.py")]
        hint = did_you_mean(path, (os.path.relpath(file) for file in files))
        raise UserError(
            f"config file or run {path} does not exist; {hint}settings are written --key=value"
        )
    if not path.endswith(".py"):  # runpy would run code in a zip file, which a checkpoint is
        raise UserError(f"{path} is no config file (.py); give a run by its folder")
    try:
        assigned = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"config file {path} fails: {type(error).__name__}: {error}") from error
    values = {}
    for key, value in assigned.items():
        if not key.startswith("_") and not isinstance(value, types.ModuleType):
            require_known_setting(key, path)
            values[key] = value
    return values


def read_run(folder: str) -> dict[str, Any]:
    """The settings in the config.json of a run; out_dir is the folder where it is found."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise UserError(f"{path.parent} is a folder without config.json: no run of train.py")
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    out_dir = str(path.parent).replace("{", "{{").replace("}", "}}")
    return saved_settings(values, path) | {"resume": False, "out_dir": out_dir}


def pretrained_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The sizes and positions of the Hugging Face GPT-2 in values["init_from"], if there is one.

    Raises UserError where its config cannot be read, it has another architecture than OpenAI's, or
    `values` contradict it.
    """
    source = str(values.get("init_from"))
    if not source.startswith(PRETRAINED):
        return {}
    try:
        from transformers import AutoConfig

        gpt2 = AutoConfig.from_pretrained(source.removeprefix(PRETRAINED))
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{source} cannot be loaded: {first_line(error)}") from error
    for key, value in GPT2.items():
        if (found := getattr(gpt2, key, value)) != value:
            raise UserError(f"{source} has {key} = {found!r}, which this model cannot compute")
    sizes = {
        "n_layer": gpt2.n_layer, "n_head": gpt2.n_head, "n_embd": gpt2.n_embd,
        "mlp_hidden": gpt2.n_inner, "vocab_size": gpt2.vocab_size,
        "block_size": gpt2.n_positions, "positions": "learned",
    }  # fmt: skip
    own = {key: values[key] for key in sizes if values.get(key) is not None}
    if own.get("block_size") in range(1, gpt2.n_positions):
        sizes["block_size"] = own["block_size"]  # the first positions suffice
    if wrong := [f"{key} = {sizes[key]!r}" for key in own if own[key] != sizes[key]]:
        raise UserError(f"{source} has {', '.join(wrong)}: leave these settings out")
    return sizes


def saved_config(values: Any, source: str | Path) -> Config:
    """The Config with the settings that `source`, a file of a run, holds.

    Raises UserError where they are not, or no longer, valid.
    """
    try:
        config = Config(**saved_settings(values, source))
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    return config.replace(data_dir=find_data(config.data_dir))


def saved_settings(values: Any, source: str | Path) -> dict[str, Any]:
    """The settings in a file of a run, with the run's own copy of its tokenizer."""
    if not isinstance(values, dict) or "attention" not in values:
        raise UserError(f"{source}: it does not hold the settings of a run")
    for key in values:
        if key not in SETTINGS:
            raise UserError(
                f"{source} has {key!r}, which is not a setting here: the run's environment.json "
                "names the commit that wrote it"
            )
    copy = Path(source).parent / TOKENIZER
    if values.get("tokenizer", "gpt2") in VOCABULARY or not copy.is_file():
        return values
    return values | {"tokenizer": str(copy)}


def find_data(data_dir: str) -> str:
    """The folder of shards: the repository's, where the current folder has none of this name."""
    own = os.path.join(ROOT, data_dir)
    return own if os.path.isdir(own) and not os.path.exists(data_dir) else data_dir


def require_known_setting(key: str, where: str) -> None:
    if key not in SETTINGS:
        hint = did_you_mean(key, SETTINGS)
        raise UserError(
            f"{where} sets {key!r}, which is not a setting; {hint}python train.py --help lists them"
        )


def parse(key: str, text: str) -> Any:
    """The value of an argument's text; text that cannot be parsed is left to the type check."""
    if bool in TYPES[key] and text.capitalize() in ("True", "False", "None"):
        text = text.capitalize()
    elif str in TYPES[key]:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def filled_out_dir(config: Config) -> str:
    """out_dir with the settings that it names in braces filled in: {p} is 7 for 7.0."""
    values = {k: f"{v:g}" if isinstance(v, float) else v for k, v in config.as_dict().items()}
    try:
        return config.out_dir.format(**values)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        words = "may name settings in braces, as in out/p{p}, but this fails"
        raise UserError(f"out_dir = {config.out_dir!r} {words}: {error}") from error


def help_text() -> str:
    """The text that `python train.py --help` prints."""
    lines = [
        "usage: train.py [CONFIG.py ...] [--key=value ...]",
        "       train.py --resume RUN [--key=value ...]",
        "",
        "Config files apply left to right, then the command line, over these defaults:",
    ]
    for group in GROUPS.values():
        lines += ["", f"{group}:"]
        for name in names(group):
            line = f"  --{name}={getattr(Config, name)!r}".ljust(36) + " " + SETTINGS[name]["help"]
            allowed = choices(name)
            lines.append(line + (f" ({', '.join(map(str, allowed))})" if allowed else ""))
    return "\n".join(lines)


# ---- checks ----

# What may be wrong with a number, in the words of the refusal.
LIMITS = {"at least": operator.lt, "above": operator.le, "below": operator.ge}


def check_each_setting(config: Config) -> None:
    """Raise UserError where a value has the wrong type or is out of range.

    A whole number is stored as the setting's type: 3 for a float as 3.0, 1e3 for an int as 1000.
    """
    for key, meta in SETTINGS.items():
        value = getattr(config, key)
        if isinstance(value, int | float) and not abs(value) < 2**63:  # nan, too
            raise UserError(f"{key} = {value} must be a number below 2**63")
        if type(value) is int and float in TYPES[key]:
            object.__setattr__(config, key, value := float(value))
        elif type(value) is float and int in TYPES[key] and value.is_integer():
            object.__setattr__(config, key, value := int(value))
        if type(value) not in TYPES[key]:
            kinds = ["None" if t is types.NoneType else t.__name__ for t in TYPES[key]]
            raise UserError(
                f"{key} = {value!r} is {type(value).__name__}; it must be {' or '.join(kinds)}"
            )
        for words, wrong in LIMITS.items():
            limit = meta[words.replace(" ", "_")]
            if value is not None and limit is not None and wrong(value, limit):
                raise UserError(f"{key} = {value} must be {words} {limit}")
        if meta["choices"]:
            check_choice(key, value, meta["choices"])


def check_effect(config: Config) -> None:
    """Raise UserError for a setting that other settings leave without effect."""
    for key, meta in SETTINGS.items():
        value = getattr(config, key)
        for other, allowed in meta["needs"].items():
            if value != getattr(Config, key) and getattr(config, other) not in allowed:
                able = " or ".join(map(repr, allowed))
                raise UserError(
                    f"{key} = {value!r} has an effect with {other} = {able} only, not with "
                    f"{getattr(config, other)!r}"
                )


def check_model(config: Config) -> None:
    """Raise UserError where settings of the model contradict each other."""
    if config.head_size is None and config.n_embd % config.n_head:
        raise UserError(f"n_embd = {config.n_embd} is not divisible by n_head = {config.n_head}")
    if config.d_head % 2 and config.positions == "rope":
        raise UserError(f"heads of width {config.d_head} must be even: RoPE rotates pairs")
    if config.n_head % config.kv_heads:
        raise UserError(f"n_head = {config.n_head} is no multiple of n_kv_head = {config.kv_heads}")
    if config.nope_every and not 2 <= config.nope_every <= config.n_layer:
        raise UserError(
            f"nope_every = {config.nope_every} must be 0 or from 2 to n_layer = {config.n_layer}"
        )
    group = config.n_head // config.kv_heads
    heads = config.nope_share * config.n_head
    if not math.isclose(heads, round(heads), abs_tol=1e-9) or round(heads) % group:
        raise UserError(
            f"nope_share = {config.nope_share:g} of n_head = {config.n_head} is {heads:g} heads; "
            f"it must be a multiple of n_head / n_kv_head = {group} heads"
        )
    if config.local_window is not None and not (config.nope_share or config.nope_every):
        raise UserError("local_window needs heads without positions: set nope_share or nope_every")


def check_training(config: Config) -> None:
    """Raise UserError where settings of the data and the training contradict each other."""
    if config.task == "orbits" and config.tie_embeddings:
        raise UserError("task = 'orbits' has no head to tie: add tie_embeddings = False")
    if config.n_vocab > 65536:  # n_vocab raises for a tokenizer that does not exist
        raise UserError(f"{config.n_vocab} token ids are more than the 65536 of a uint16")
    if config.min_lr > config.learning_rate:
        raise UserError(f"min_lr = {config.min_lr} is above learning_rate = {config.learning_rate}")
    ramps = config.warmup_iters + config.cooldown_iters
    if config.schedule == "trapezoidal" and 0 < config.max_iters < ramps:
        raise UserError(f"max_iters = {config.max_iters} < warmup_iters + cooldown_iters = {ramps}")
    if config.keep_every % config.checkpoint_interval:
        raise UserError(
            f"keep_every = {config.keep_every} must be a multiple of checkpoint_interval = "
            f"{config.checkpoint_interval}: only what is saved can be kept"
        )
    accumulation_steps(config, world_size=1)


def identify(tokenizer: str) -> str:
    """A tokenizer in meta.json and checkpoints: its built-in name, or its file's checksum."""
    if tokenizer in VOCABULARY:
        return tokenizer
    return f"sha256:{hashlib.sha256(tokenizer_file(tokenizer).read_bytes()).hexdigest()}"


def tokenizer_file(tokenizer: str) -> Path:
    """The path of a tokenizer.json. Raises UserError where there is no file."""
    if not Path(tokenizer).is_file():
        check_choice("tokenizer", tokenizer, (*VOCABULARY, "the path of a tokenizer.json"))
    return Path(tokenizer)


def count_ids(tokenizer: str) -> int:
    """The number of token ids of a tokenizer.json. Raises UserError where it cannot be read."""
    file = tokenizer_file(tokenizer)
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]  # a list of Unigram, a dict of the other models
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*ids, *(token["id"] for token in content["added_tokens"])]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"tokenizer = {tokenizer!r} is not a tokenizer.json: {error!r}") from error


def accumulation_steps(config: Config, world_size: int) -> int:
    """Micro-batches per step on each rank.

    Raises UserError, naming a value that works, where no number of them makes up total_batch_size.
    """
    micro = config.batch_size * config.block_size * world_size
    steps, rest = divmod(config.total_batch_size, micro)
    if rest:
        raise UserError(
            f"total_batch_size = {config.total_batch_size} is not a multiple of batch_size x "
            f"block_size x processes = {config.batch_size} x {config.block_size} x {world_size} = "
            f"{micro}; {(steps + 1) * micro} would work"
        )
    return steps
