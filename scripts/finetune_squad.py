"""Fine-tune a run on the answerable questions of SQuAD 2.0: SSMax, section 3.3 and Table 3.

python -m scripts.finetune_squad RUN --out_dir TUNED --squad train-v2.0.json

10 epochs of 128 examples a step, AdamW (0.9, 0.999) without weight decay, gradients clipped at 1,
2e-5 after one epoch of linear warm-up, cosine to 0. TUNED is a run like any other; its squad.json
describes its training data. A run is never overwritten: --resume continues it from its last
checkpoint, with the same batches. Exit codes are train.py's: a signal ends it after a step, which
is saved.

Choices that the paper leaves open:
- an example reads: end-of-text, context, "\\nQuestion: ...\\nAnswer:", a space, the first answer;
- the loss is summed over the answer's tokens and averaged over the step's examples. An
  end-of-text that may follow is not trained: it is not part of the answer span;
- a context that is too long keeps as many tokens before the answer as after it; an example without
  room for its answer is left out;
- each epoch takes all examples in its own order, ending with a smaller batch;
- the schedule spans all steps, its warm-up is the first epoch, and it ends at 0.

One process, not compiled. Right padding, only up to the longest example of a micro-batch, changes
nothing under a causal mask.
"""

import hashlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, choices
from data.loader import shuffled
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError, command
from layers.selfcheck import check_kernels
from model import GPT
from runtime import checkpoint
from runtime.device import open_device, pick_dtype
from runtime.distributed import EXIT_STOPPED
from runtime.files import lock_folder, read_json, write_json
from runtime.log import say
from scripts.common.retrieval import ASK
from scripts.common.runner import Options, Parser, add_options, from_arguments, option
from train import Batch, Objective, begin, fit

SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v2.0.json"
# Steps between checkpoints.
CHECKPOINT_INTERVAL = 100
IGNORED = -100


@dataclass(frozen=True)
class Question:
    context: str
    question: str
    answer: str
    start: int  # of the answer in the context, in characters


@dataclass(frozen=True)
class Example:
    tokens: np.ndarray  # uint16 [n], end-of-text first, the answer last
    answer: int  # tokens of the answer
    cut: bool = False  # whether a part of the context is left out


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Fine-tune a run on the answerable questions of SQuAD 2.0."""

    out_dir: str | None = option(None, "the new run's folder; without it, RUN_squad")
    squad: str = option("train-v2.0.json", f"the file {SQUAD}")
    epochs: int = option(10, "over all examples", at_least=1)
    learning_rate: float = option(2e-5, "peak")
    sequences: int = option(128, "examples a step", at_least=1)
    batch_size: int = option(8, "examples a micro-batch", at_least=1)
    checkpoint: str = option("latest", "of the run", choices=("latest", "best"))
    resume: bool = option(False, "continue the run in --out_dir from its last checkpoint")
    device: str = option("auto", "'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    dtype: str = option("auto", "of matrix products", choices=tuple(choices("dtype")))


@command
def main() -> None:
    parser = Parser(description=FineTuning.__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's .pt")
    add_options(parser, FineTuning)
    arguments = parser.parse_args()
    options = from_arguments(FineTuning, arguments)
    out = Path(options.out_dir or f"{checkpoint.folder_of(arguments.run)}_squad")
    with lock_folder(out, "training this run"):
        checkpoint.resumes(out, options.resume)
        stopped = finetune(arguments.run, out, options)
    if stopped:
        sys.exit(EXIT_STOPPED)


def finetune(run: str, out: Path, options: FineTuning) -> bool:
    """Fine-tune until the last step or a signal; returns whether a signal stopped it."""
    # ---- config: its errors come before the examples are read ----
    device = open_device(options.device)
    base = Options().applied(checkpoint.read_config(run))
    config = base.replace(
        **recipe(base, 1, options), keep_every=0, batch_size=options.batch_size,
        checkpoint_interval=CHECKPOINT_INTERVAL, out_dir=str(out), init_from=run, resume=False,
        device=options.device, dtype=options.dtype,
    )  # fmt: skip

    # ---- model, then data ----
    model = GPT(base).to(device)
    kernels = check_kernels(model, base, pick_dtype(options.dtype, device), say=say)
    weights = checkpoint.load_weights(model, run, options.checkpoint)
    questions = read_squad(options.squad)
    examples = encode_all(questions, base)
    config = config.replace(**recipe(base, len(examples), options))
    facts = {
        "examples": len(examples), "contexts_cut": sum(example.cut for example in examples),
        "sha256": hashlib.sha256(b"".join(e.tokens.tobytes() for e in examples)).hexdigest(),
        "left_out": len(questions) - len(examples), "began_with": weights.id,
    }  # fmt: skip

    # ---- optimizer ----
    state = None
    if options.resume:
        state = checkpoint.load_to_resume(out, config, quiet=False)
        before = read_json(out / "squad.json")
        if before != facts:
            raise UserError(
                f"{out} was fine-tuned on {before}, now {facts}: give the same run and --squad, or "
                "another --out_dir"
            )
    training = begin(config, model, state)
    del state

    # ---- loop ----
    checkpoint.write_header(out, config, kernels)
    write_json(out / "squad.json", facts)
    say(
        f"{config.variant_name}: {len(examples):,} examples ({facts['contexts_cut']:,} contexts "
        f"cut, {facts['left_out']:,} questions left out), {options.sequences} a step, "
        f"{config.max_iters:,} steps on {device.type}; run folder {out}"
    )

    def batch(step: int) -> Batch:
        chosen = batch_of(step, examples, options.sequences, config.seed)
        size = options.batch_size
        parts = [tensors(chosen[i : i + size], device) for i in range(0, len(chosen), size)]
        return Batch(parts, len(chosen), tokens=sum(len(example.tokens) for example in chosen))

    objective = Objective(
        batch=batch,
        batch_location=lambda step: f"in epoch {step // config.warmup_iters + 1}",
        loss=lambda x, y: answer_loss(model, x, y),
    )
    return fit(config, training, objective)


def recipe(base: Config, examples: int, options: FineTuning) -> dict[str, Any]:
    """The settings of fine-tuning; all others are the base run's."""
    steps = math.ceil(examples / options.sequences)  # per epoch
    return {
        "optimizer": "adamw", "learning_rate": options.learning_rate, "schedule": "cosine",
        "warmup_iters": steps, "max_iters": steps * options.epochs, "cooldown_iters": 0,
        "min_lr": 0.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "grad_clip": 1.0,
        "total_batch_size": options.sequences * base.block_size,
    }  # fmt: skip


def read_squad(path: str) -> list[Question]:
    """The questions of SQuAD's JSON that have a context, a question and an answer."""
    content = read_json(path)
    if content is None:
        raise UserError(f"{path}: no such file; --squad takes {SQUAD}")
    try:
        found = [
            Question(p["context"], qa["question"].strip(), a["text"].strip(), a["answer_start"])
            for article in content["data"]
            for p in article["paragraphs"]
            for qa in p["qas"]
            for a in qa["answers"][:1]
        ]
        return [q for q in found if q.context.strip() and q.question and q.answer]
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error!r}: this is not the file {SQUAD}") from error


def encode_all(questions: list[Question], config: Config) -> list[Example]:
    """Examples of at most block_size + 1 tokens. Raises UserError where no question fits."""
    tokenizer = get_tokenizer(config.tokenizer)
    encoded = (encode(tokenizer, q, config.block_size) for q in tqdm(questions, "tokenising"))
    examples = [example for example in encoded if example is not None]
    if not examples:
        raise UserError(
            f"{len(questions)} answerable questions, but none whose answer and question fit "
            f"{config.block_size} tokens with a context"
        )
    return examples


def encode(tokenizer: Tokenizer, q: Question, block_size: int) -> Example | None:
    """A question's tokens; None where there is no room for a part of its context."""
    question = tokenizer.encode(ASK.format(question=q.question))
    answer = tokenizer.encode(f" {q.answer}")
    context = tokenizer.encode(q.context)
    room = block_size - len(question) - len(answer)  # the last token is a target only
    cut = len(context) > room
    if cut:
        if room < 2 * len(answer):
            return None
        head = q.context[: q.start].rstrip()
        before, rest = tokenizer.encode(head), tokenizer.encode(q.context[len(head) :])
        rest = rest[: max(room - len(before), room - room // 2)]
        context = before[max(0, len(before) + len(rest) - room) :] + rest
    tokens = np.array([tokenizer.eot, *context, *question, *answer], dtype=np.uint16)
    return Example(tokens, len(answer), cut)


def batch_of(step: int, examples: list[Example], sequences: int, seed: int) -> list[Example]:
    """The examples of a step, a pure function of (seed, step); the longest last."""
    epoch, i = divmod(step, math.ceil(len(examples) / sequences))
    positions = np.arange(i * sequences, min(len(examples), (i + 1) * sequences))
    order = shuffled(positions, len(examples), seed, epoch)
    return sorted((examples[k] for k in order), key=lambda example: len(example.tokens))


def tensors(batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, L], padded on the right; targets are the answers' tokens."""
    length = max(len(example.tokens) for example in batch) - 1
    x = torch.zeros(len(batch), length, dtype=torch.long)
    y = torch.full_like(x, IGNORED)
    for i, example in enumerate(batch):
        tokens, n = torch.from_numpy(example.tokens.astype(np.int64)), len(example.tokens) - 1
        x[i, :n] = tokens[:-1]
        y[i, n - example.answer : n] = tokens[-example.answer :]
    return x.to(device), y.to(device)


def answer_loss(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Sum of the losses of the answers' tokens, in nats; no other logits are computed."""
    inside = y != IGNORED
    logits = model.logits(model.trunk(model.wte(x))[inside])
    return F.cross_entropy(logits.float(), y[inside], reduction="sum")


if __name__ == "__main__":
    main()
