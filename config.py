"""Settings: one frozen dataclass, checked when it is built.

runtime.config_files makes it from config files and --key=value. What depends on the table of
variants is checked by layers.heads.
"""

import math
import operator
import types
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from data.vocabulary import RECALL_IDS, count_ids, end_of_text, identify
from errors import UserError, check_choice

ROOT = Path(__file__).parent
# Values of `needs`: settings, and their values, under which another setting has an effect.
ROPE = {"positions": ("rope",)}
LINEAR = {"projections": ("linear",)}
TPA = {"projections": ("tpa",)}
ORBITS = {"task": ("orbits",)}
LANGUAGE = {"task": ("language", "language+recall")}
RECALL = {"task": ("recall", "language+recall")}

# Largest micro-batch, in sequences, if batch_size is 0: larger ones are hardly faster.
LARGEST_BATCH = 64

# Numbers within limits, which the error message names in these words.
PositiveInt = Annotated[int, ("at least", 1)]
NonNegativeInt = Annotated[int, ("at least", 0)]
PositiveFloat = Annotated[float, ("above", 0)]
NonNegativeFloat = Annotated[float, ("at least", 0)]
FloatFromOne = Annotated[float, ("at least", 1)]
FractionBelowOne = Annotated[float, ("at least", 0), ("below", 1)]

Value = TypeVar("Value")


def setting(default: Value, help: str, needs: dict[str, tuple] | None = None) -> Value:
    """Declare a field of Config: its default and its line of --help. Its type limits its values.

    `needs` maps other settings to the values under which this setting has an effect. Otherwise only
    its default is accepted.
    """
    return field(default=default, metadata={"help": help, "needs": needs or {}})


@dataclass(frozen=True)
class Config:
    """Every setting of a run.

    The group that a setting stands in (the banners, GROUPS) decides whether it may change on
    resume, and whether runs that differ in it may be compared.

    The defaults are llm.c's 124M recipe, run_gpt2_124M.sh, with RoPE instead of learned positions.
    The LSSAR paper trains for the same number of steps, and gives no learning rate, batch size or
    schedule.
    """

    # ---- attention: what a layer computes ----
    attention: str = setting("softmax", "The variant, a name in attention.VARIANTS.")
    p: FloatFromOne | None = setting(
        None, "Power of the re-weighting. None: weights are not re-weighted."
    )
    block_size: PositiveInt = setting(1024, "Training length in tokens.")
    window: PositiveInt | None = setting(
        None,
        "Number of keys that a query sees, counting back from its own; below 1, as a share of "
        "block_size. None: all.",
    )
    window_pattern: str = setting(
        "",
        "Layers with the window (S) and without (L), such as SSSL, repeated over the layers; the "
        "last layer is always L (nanochat). Empty: all layers have the window.",
    )
    positions: Literal["rope", "alibi", "none", "learned"] = setting(
        "rope", "How positions enter. 'learned' positions are GPT-2's, and end at block_size."
    )
    rope_theta: Annotated[float, ("above", 1)] = setting(10000.0, "Base of RoPE.", needs=ROPE)
    rope_share: float = setting(
        1.0,
        "Fraction of a head's frequency pairs, highest frequencies first, that RoPE rotates "
        "(p-RoPE).",
        needs=ROPE,
    )
    nope_every: NonNegativeInt = setting(
        0,
        "Every Nth layer has no RoPE; with nope_share, only that share of its heads has none "
        "(SmolLM3, Llama 4: 4). 0: every layer has RoPE.",
        needs=ROPE,
    )
    nope_share: FractionBelowOne = setting(
        0.0,
        "Share of heads, the first ones, without RoPE or ALiBi.",
        needs={"positions": ("rope", "alibi"), **LINEAR},
    )
    local_window: PositiveInt | None = setting(
        None,
        "Makes a hybrid: heads with positions compute softmax over this many last keys (below 1: "
        "this share of block_size), the other heads compute `attention`. None: all heads compute "
        "`attention`.",
    )
    softcap: PositiveFloat | None = setting(
        None, "c, which makes scores c tanh(score / c). Gemma 2: 50."
    )
    sink: Literal["none", "one", "learned"] = setting(
        "none",
        "Adds a key with value 0. Its score is 0 ('one': softmax off by one) or learned per head "
        "('learned').",
    )
    forget: bool = setting(False, "Forget gates lower the scores of earlier keys (FoX).")
    s_init: float = setting(1.0, "Initial s of SSMax (its paper: 0.1685 from softmax's weights).")
    # ---- model: the weights, and the layers around attention ----
    n_layer: PositiveInt = setting(12, "Number of transformer blocks.")
    n_head: PositiveInt = setting(12, "Attention heads per block.")
    n_kv_head: PositiveInt | None = setting(
        None, "Heads of keys and values (GQA; 1: MQA). None: n_head.", needs=LINEAR
    )
    head_size: PositiveInt | None = setting(None, "Width of a head. None: n_embd / n_head.")
    n_embd: PositiveInt = setting(768, "Width of the residual stream.")
    qk_norm: bool = setting(False, "q and k pass RMSNorm before RoPE (Qwen3).", needs=LINEAR)
    gate: Literal["none", "head", "element"] = setting(
        "none",
        "A sigmoid gate multiplies attention's output, one per 'head' or 'element' (Qiu et al. "
        "2025).",
    )
    projections: Literal["linear", "tpa"] = setting(
        "linear",
        "How q, k and v come from the input: 'linear', or 'tpa', Tensor Product Attention (T6).",
    )
    q_rank: PositiveInt | None = setting(
        6, "Rank of q in 'tpa'. None: q is linear in the input.", needs=TPA
    )
    kv_rank: PositiveInt = setting(2, "Rank of k and of v in 'tpa'.", needs=TPA)
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "Norm of the residual stream.")
    mlp: Literal["gelu", "gelu_erf", "swiglu"] = setting(
        "gelu",
        "Activation of the MLP: 'gelu' with GPT-2's tanh approximation, 'gelu_erf' exact "
        "(nanoGPT), or 'swiglu'.",
    )
    mlp_hidden: PositiveInt | None = setting(None, "Hidden width of the MLP. None: 4 n_embd.")
    bias: bool = setting(True, "Linear layers and LayerNorm have biases.")
    tie_embeddings: bool = setting(True, "lm_head shares the token embedding's weights.")
    vocab_size: PositiveInt | None = setting(
        None, "Number of token ids. None: the tokenizer's.", needs=LANGUAGE
    )
    # ---- data: what the loss is measured on ----
    task: Literal["language", "orbits", "recall", "language+recall"] = setting(
        "language",
        "What the model learns: text, simulated planets ('orbits'), or recall of distant tokens "
        "('recall'); see data/tasks.py.",
    )
    data_dir: str = setting(
        "data/fineweb10B", "Folder of shards, made by data.fineweb or data.text."
    )
    tokenizer: str = setting("gpt2", "'gpt2', 'bytes' or the path of a tokenizer.json.")
    document_mask: bool = setting(
        False,
        "Attention stays within documents, which begin with end-of-text, and n counts the keys "
        "that a row sees of its document.",
        needs=LANGUAGE,
    )
    val_tokens: PositiveInt = setting(
        10485760, "Tokens to validate on, the first of the validation split (llm.c)."
    )
    planets: PositiveInt = setting(
        10, "Largest number of planets in a system of 'orbits'.", needs=ORBITS
    )
    bins: PositiveInt = setting(7000, "Bins of a coordinate of 'orbits'.", needs=ORBITS)
    recall: Literal["lookup", "mqar", "latest", "latest_2", "sort"] = setting(
        "lookup", "Which task of 'recall'.", needs=RECALL
    )
    # ---- optimisation: on which training data, and how, the weights are trained ----
    systems: PositiveInt = setting(10_000_000, "Systems of 'orbits' to train on.", needs=ORBITS)
    align_documents: bool = setting(
        False,
        "Training windows begin at a document, packed by best fit; what does not fit is cropped "
        "(nanochat).",
        needs=LANGUAGE,
    )
    first_batch: NonNegativeInt = setting(
        0, "Batches to skip, so that a run from the weights of another reads new data."
    )
    total_batch_size: PositiveInt = setting(524288, "Tokens per step, over all processes.")
    max_iters: Annotated[int, ("at least", 0), ("below", 10**12)] = setting(
        18865, "Number of optimizer steps."
    )
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "'adamw', or 'muon' for hidden matrices with AdamW for the rest."
    )
    learning_rate: NonNegativeFloat = setting(6e-4, "Peak learning rate.")
    schedule: Literal["cosine", "constant", "trapezoidal"] = setting(
        "cosine",
        "Learning rate after the warm-up: a cosine, constant, or constant with a linear decay at "
        "the end ('trapezoidal', also called WSD).",
    )
    warmup_iters: NonNegativeInt = setting(700, "Steps of linear warm-up.")
    cooldown_iters: NonNegativeInt = setting(
        0,
        "Last steps of 'trapezoidal', in which the rate falls linearly to min_lr.",
        needs={"schedule": ("trapezoidal",)},
    )
    min_lr: NonNegativeFloat = setting(
        0.0, "Final learning rate.", needs={"schedule": ("cosine", "trapezoidal")}
    )
    weight_decay: NonNegativeFloat = setting(
        0.1, "Weight decay of tensors of 2 or more dimensions."
    )
    beta1: FractionBelowOne = setting(0.9, "beta1 of AdamW.")
    beta2: FractionBelowOne = setting(0.95, "beta2 of AdamW.")
    adam_eps: PositiveFloat = setting(1e-8, "epsilon of AdamW.")
    grad_clip: NonNegativeFloat = setting(1.0, "Largest gradient norm. 0: no clipping.")
    seed: NonNegativeInt = setting(1337, "Seed of the initial weights and the data order.")
    # ---- machine: the losses are the same up to rounding ----
    device: str = setting("auto", "'auto' (cuda, else mps, else cpu), 'cuda:1', ..")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "dtype of matrix products. 'auto': bfloat16 on CUDA, or float16 where the GPU has none; "
        "else float32. Training with 'float32' on CUDA multiplies matrices in TF32. At p = 15 "
        "bfloat16 changes the first gradients (docs/training.md). On a CPU with AMX or AVX512-BF16 "
        "'bfloat16' is faster.",
    )
    compile: bool | None = setting(
        None,
        "Use torch.compile. None: on CUDA, except for recall on the blocked path or by SDPA with a "
        "mask.",
    )
    batch_size: NonNegativeInt = setting(
        0,
        "Largest micro-batch, in sequences. The largest divisor of a process's sequences per step "
        "within it is used. 0: at most 64, and what the memory is estimated to hold.",
    )
    attention_impl: Literal["auto", "triton", "blocked", "reference"] = setting(
        "auto", "How attention is computed. 'auto': the fastest way that works here."
    )
    # ---- logs: validation, checkpoints, printed lines ----
    eval_interval: PositiveInt = setting(
        250,
        "Steps between validations, also before the first step and after the last.",
    )
    checkpoint_interval: PositiveInt = setting(1000, "Steps between checkpoints.")
    keep_last: PositiveInt = setting(2, "Number of newest checkpoints to keep.")
    keep_every: NonNegativeInt = setting(
        0, "Keep the checkpoints of every Nth step as well. 0: none."
    )
    log_interval: PositiveInt = setting(1, "Steps between printed lines.")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = setting(
        "auto", "'auto': what WANDB_MODE says, else online where you are logged in to wandb."
    )
    wandb_project: str = setting(
        "", "Project in wandb. Empty: WANDB_PROJECT or, without it, sharp-attention."
    )
    wandb_entity: str = setting(
        "", "Team or user in wandb. Empty: WANDB_ENTITY or, without it, your default."
    )
    # ---- run: where and how it starts ----
    out_dir: str = setting(
        "",
        "The run's folder. Empty: out/ and the config files' names and the settings of the "
        "command line.",
    )
    name: str = setting(
        "", "Name of the run in logs, tables and pictures. Empty: its config file's name."
    )
    resume: Literal[False, True, "auto"] = setting(
        False, "Continue the run in out_dir. 'auto': if it has a checkpoint, else start it."
    )
    init_from: str = setting(
        "",
        "Start from the weights of a run's folder or .pt, or of hf:gpt2 or nanogpt:ckpt.pt, which "
        "also set the model's sizes.",
    )
    dry_run: bool = setting(False, "Check everything, print what it takes, write nothing.")
    timeout: Annotated[float, ("at least", 5), ("below", 10**9)] = setting(
        600.0, "Seconds that a process waits for the others before it fails."
    )

    def __post_init__(self) -> None:
        check_each_setting(self)
        check_effect(self)
        check_model(self)
        check_training(self)

    @cached_property
    def n_vocab(self) -> int:
        """The number of token ids, including end-of-text; for orbits, per coordinate."""
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
        return count_ids(self.tokenizer)

    @cached_property
    def end_of_text(self) -> int:
        """The id of the token that documents begin with."""
        _, token_id = end_of_text(self.tokenizer)
        return token_id

    @property
    def tasks(self) -> list[str]:
        """The tasks that batches alternate between: language and recall for "language+recall"."""
        return self.task.split("+")

    @property
    def varied_lengths(self) -> bool:
        """Whether batches are shorter than block_size in some steps."""
        return "recall" in self.tasks

    @cached_property
    def tokenizer_id(self) -> str:
        """What a checkpoint records of the tokenizer: its name, or its file's sha256."""
        return identify(self.tokenizer)

    @property
    def d_head(self) -> int:
        """The width of a head."""
        return self.n_embd // self.n_head if self.head_size is None else self.head_size

    @property
    def longest(self) -> int | None:
        """The most tokens that the model can read; None: any number."""
        return self.block_size if self.positions == "learned" else None

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    def nope_heads(self, layer: int) -> int:
        """Return how many heads of a layer nope_share and nope_every leave without RoPE or ALiBi.

        With positions = "none" or "learned" both settings are 0, and so is the result.
        """
        if self.nope_every and (layer + 1) % self.nope_every:
            return 0
        if self.nope_share:
            return round(self.n_head * self.nope_share)
        return self.n_head if self.nope_every else 0

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer, or None; in a hybrid, of its heads without positions."""
        if not self.window_pattern:
            return self.window
        letter = self.window_pattern[layer % len(self.window_pattern)]
        is_last = layer == self.n_layer - 1
        return self.window if letter == "S" and not is_last else None

    @property
    def variant_name(self) -> str:
        """The attention variant with its p, such as lssar_p15."""
        return self.attention + ("" if self.p is None else f"_p{self.p:g}")

    @property
    def label(self) -> str:
        """What log, tables and pictures call the run."""
        return self.name or self.variant_name

    def replace(self, **changes: Any) -> "Config":
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SETTINGS = {f.name: f.metadata for f in fields(Config)}
# The first setting of each group, and the group's name; a group ends where the next begins. LEARNED
# and FREE_ON_RESUME are made of groups, so a setting's place in Config decides whether runs that
# differ in it may be compared, and whether it may change on resume.
GROUPS = {
    "attention": "attention",
    "n_layer": "model",
    "task": "data",
    "systems": "optimisation",
    "device": "machine",
    "eval_interval": "logs",
    "out_dir": "run",
}
HINTS = typing.get_type_hints(Config, include_extras=True)


def types_of(hint: Any) -> tuple[type, ...]:
    """The types of values: (float, NoneType) for `float | None`, (str,) for Literal["a", "b"]."""
    if typing.get_origin(hint) is Literal:
        return tuple(dict.fromkeys(map(type, typing.get_args(hint))))
    return typing.get_args(hint) or (hint,)


# The types that each setting may have, without the limits of numbers.
TYPES = {name: types_of(hint) for name, hint in typing.get_type_hints(Config).items()}


def settings_in(*groups: str) -> tuple[str, ...]:
    """Return the names of the settings of these groups."""
    selected = []
    group = ""
    for name in SETTINGS:
        group = GROUPS.get(name, group)
        if group in groups:
            selected.append(name)
    return tuple(selected)


# The settings that decide what a run learns.
LEARNED = settings_in("attention", "model", "data", "optimisation")
# Settings that may change on resume.
FREE_ON_RESUME = {"data_dir", "max_iters", "cooldown_iters", *settings_in("machine", "logs", "run")}
# Settings that determine the learning rate of each step.
SCHEDULE = ("learning_rate", "schedule", "warmup_iters", "cooldown_iters", "min_lr", "max_iters")
# Settings that may change on resume too; environment.json records the changes.
RECORDED_ON_RESUME = (*SCHEDULE, "first_batch")


def choices(name: str) -> tuple[Any, ...]:
    """The values of a setting that has a fixed set of values; none for other settings."""
    hint = HINTS[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


# ---- checks ----

# For each kind of limit, the comparison that is true for an invalid number.
IS_WRONG = {"at least": operator.lt, "above": operator.le, "below": operator.ge}


def check_each_setting(config: Config) -> None:
    """Raise UserError if a value has the wrong type or is out of range.

    A whole number is stored as the setting's type: 3 for a float as 3.0, 1e3 for an int as 1000. A
    window that is a share of block_size is stored as its number of tokens; no other window may have
    a decimal point or an exponent.
    """
    for key, hint in HINTS.items():
        value = getattr(config, key)
        if key in ("window", "local_window") and isinstance(value, float):
            if not 0 < value < 1:  # 1.0 is all of block_size to one reader, one token to another
                raise UserError(
                    f"{key} = {value} must be a share of block_size below 1, such as 0.25, or a "
                    "whole number of tokens, such as 64"
                )
            value = max(1, round(value * config.block_size))  # block_size has been checked
        check_limits(key, value, hint)
        if type(value) is int and float in TYPES[key]:
            value = float(value)
        elif type(value) is float and int in TYPES[key] and value.is_integer():
            value = int(value)
        object.__setattr__(config, key, value)
        if type(value) not in TYPES[key]:
            kinds = ["None" if t is types.NoneType else t.__name__ for t in TYPES[key]]
            raise UserError(
                f"{key} = {value!r} is {type(value).__name__}; it must be {' or '.join(kinds)}"
            )
        if choices(key):
            check_choice(key, value, choices(key))
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            raise UserError(f"{key} = {value!a} is not UTF-8: torch cannot open such a path")


def check_limits(key: str, value: Any, hint: Any) -> None:
    """Raise UserError for a number beyond the limits of its type, such as PositiveInt."""
    if not isinstance(value, int | float):
        return
    if not abs(value) < 2**63:  # nan, too
        raise UserError(f"{key} = {value} must be a number between -2**63 and 2**63")
    for part in (hint, *typing.get_args(hint)):  # the limits of `PositiveInt | None`, too
        for words, limit in getattr(part, "__metadata__", ()):
            if IS_WRONG[words](value, limit):
                raise UserError(f"{key} = {value} must be {words} {limit}")


def check_effect(config: Config) -> None:
    """Raise UserError for a setting that other settings leave without effect."""
    for key, meta in SETTINGS.items():
        value = getattr(config, key)
        is_default = value == getattr(Config, key)
        for other, allowed in meta["needs"].items():
            if not is_default and getattr(config, other) not in allowed:
                able = " or ".join(map(repr, allowed))
                raise UserError(
                    f"{key} = {value!r} has an effect with {other} = {able} only, not with "
                    f"{getattr(config, other)!r}"
                )


def check_model(config: Config) -> None:
    """Raise UserError if settings of the model contradict each other."""
    if config.head_size is None and config.n_embd % config.n_head:
        raise UserError(f"n_embd = {config.n_embd} is not divisible by n_head = {config.n_head}")
    if config.d_head % 2 and config.positions == "rope":
        raise UserError(
            f"head_size (by default n_embd / n_head) = {config.d_head} must be even: RoPE rotates "
            "pairs"
        )
    pairs = config.d_head / 2
    rotated_pairs = config.rope_share * pairs
    is_whole = math.isclose(rotated_pairs, round(rotated_pairs))
    if config.positions == "rope" and not (is_whole and 1 <= round(rotated_pairs) <= pairs):
        raise UserError(
            f"rope_share = {config.rope_share:g} of the {pairs:g} pairs of a head is "
            f"{rotated_pairs:g} pairs; it must be a whole number from 1 to {pairs:g}"
        )
    if config.n_head % config.kv_heads:
        raise UserError(
            f"n_head = {config.n_head} is not a multiple of n_kv_head = {config.kv_heads}"
        )
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
        raise UserError(
            f"local_window = {config.local_window} needs heads without positions: set nope_share "
            "or nope_every"
        )
    pattern = config.window_pattern
    if not set(pattern) <= {"S", "L"}:
        raise UserError(f"window_pattern = {pattern!r} may contain only S and L, such as SSSL")
    if pattern and not any(map(config.layer_window, range(config.n_layer))):
        raise UserError(
            f"window_pattern = {pattern!r} gives none of n_layer = {config.n_layer} layers a "
            f"window: window = {config.window}, and the last layer is always L"
        )


def check_training(config: Config) -> None:
    """Raise UserError if settings of the data and the training contradict each other."""
    if config.task == "orbits" and config.tie_embeddings:
        raise UserError(
            "task = 'orbits' cannot tie its head to its embedding: add tie_embeddings = False"
        )
    if config.n_vocab > 65536:  # n_vocab raises for a tokenizer that does not exist
        raise UserError(
            f"{config.n_vocab} token ids, from tokenizer, vocab_size or bins, are more than the "
            "65536 of a uint16"
        )
    for key in ("document_mask", "align_documents"):
        if getattr(config, key) and config.end_of_text >= config.text_ids:
            raise UserError(
                f"{key} needs end-of-text, id {config.end_of_text} of tokenizer = "
                f"{config.tokenizer!r}, but vocab_size = {config.vocab_size} leaves it out"
            )
    if config.min_lr > config.learning_rate:
        raise UserError(f"min_lr = {config.min_lr} is above learning_rate = {config.learning_rate}")
    ramps = config.warmup_iters + config.cooldown_iters
    if config.schedule == "trapezoidal" and 0 < config.max_iters < ramps:
        raise UserError(
            f"max_iters = {config.max_iters} must be at least "
            f"warmup_iters + cooldown_iters = {ramps}"
        )
    if config.keep_every % config.checkpoint_interval:
        raise UserError(
            f"keep_every = {config.keep_every} must be a multiple of checkpoint_interval = "
            f"{config.checkpoint_interval}: only what is saved can be kept"
        )
    micro_batch_size(config, world_size=1)  # raises where a step would not have whole sequences


def micro_batch_size(config: Config, world_size: int) -> int:
    """Return the sequences per micro-batch and process: the largest divisor within batch_size.

    Raises UserError if the sequences of a step cannot be shared equally by this many processes.
    """
    sequences, rest = divmod(config.total_batch_size, config.block_size)
    if rest:
        raise UserError(
            f"total_batch_size = {config.total_batch_size} is not a multiple of block_size = "
            f"{config.block_size}: a step has whole sequences"
        )
    if sequences % world_size:
        works = largest_divisor(sequences, world_size)
        raise UserError(
            f"{world_size} processes cannot share the {sequences} sequences of a step "
            f"(total_batch_size / block_size) equally; {works} would work"
        )
    return largest_divisor(sequences // world_size, config.batch_size or LARGEST_BATCH)


def largest_divisor(n: int, at_most: int) -> int:
    return next(d for d in range(min(n, at_most), 0, -1) if n % d == 0)
