"""Fine-tune a run on the answerable questions of SQuAD 2.0: SSMax, section 3.3 and Table 3.

python -m scripts.finetune_squad RUN --out_dir TUNED --squad train-v2.0.json

10 epochs of 128 examples a step, AdamW (0.9, 0.999) without weight decay, gradients clipped at 1,
2e-5 after one epoch of linear warm-up, cosine to 0. Without --squad the `datasets` library fetches
the data. TUNED is a run like any other; its squad.json describes its training data. A run is never
overwritten: --resume continues it from its last checkpoint, with the same batches. Exit codes are
those of train.py: a signal ends it after a step, which is saved.

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

import argparse
import hashlib
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
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
from errors import UserError, command, first_line
from model import GPT
from runtime import checkpoint
from runtime.device import environment, open_device
from runtime.distributed import EXIT_STOPPED
from runtime.files import lock_folder, read_json, write_json
from runtime.log import best_effort_output
from scripts.common.retrieval import ASK
from scripts.common.runner import Options, add_options, from_arguments, option
from train import Batch, Objective, begin, fit

DATASET = "rajpurkar/squad_v2"
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


# ---- the parts of SQuAD's JSON that are read ----


class Answer(msgspec.Struct):
    text: str
    answer_start: int


class QA(msgspec.Struct):
    question: str
    answers: list[Answer]


class Paragraph(msgspec.Struct):
    context: str
    qas: list[QA]


class Article(msgspec.Struct):
    paragraphs: list[Paragraph]


class Squad(msgspec.Struct):
    data: list[Article]


# ---- the command ----


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Fine-tune a run on the answerable questions of SQuAD 2.0."""

    out_dir: str = option(None, "the new run's folder")
    squad: str | None = option(None, "SQuAD's train-v2.0.json; without it, it is downloaded")
    epochs: int = option(10, "over all examples", at_least=1)
    learning_rate: float = option(2e-5, "peak")
    sequences: int = option(128, "examples a step", at_least=1)
    batch_size: int = option(8, "examples a micro-batch", at_least=1)
    checkpoint: str = option("latest", "of the run", choices=("latest", "best"))
    device: str = option("auto", "'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    dtype: str = option("auto", "of matrix products", choices=tuple(choices("dtype")))


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=FineTuning.__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's .pt")
    parser.add_argument(
        "--resume", nargs="?", const="yes", default=False, choices=("yes", "auto"),
        help="continue the run in --out_dir; auto: if it has a checkpoint, else start it",
    )  # fmt: skip
    add_options(parser, FineTuning)
    given = parser.parse_args()
    options = from_arguments(FineTuning, given)
    if options.out_dir is None:
        raise UserError("--out_dir FOLDER is missing: where the new run goes")
    out = Path(options.out_dir)
    resume = checkpoint.resumes(out, True if given.resume == "yes" else given.resume)
    with best_effort_output(), lock_folder(out, "training this run"):
        stopped = finetune(given.run, options, resume)
    if stopped:
        sys.exit(EXIT_STOPPED)


def finetune(run: str, options: FineTuning, resume: bool) -> bool:
    """Fine-tune until the last step or a signal; returns whether a signal stopped it."""
    # ---- config: errors come before the examples are read ----
    out, device = Path(options.out_dir), open_device(options.device)
    base = Options().applied(checkpoint.read_config(run))
    config = base.replace(
        **recipe(base, 1, options), keep_every=0, batch_size=options.batch_size,
        checkpoint_interval=CHECKPOINT_INTERVAL, out_dir=str(out), init_from=run, resume=False,
        device=options.device, dtype=options.dtype,
    )  # fmt: skip

    # ---- model, then data ----
    model = GPT(base)
    weights = checkpoint.load_weights(model, run, options.checkpoint)
    source = options.squad or DATASET
    questions = read_squad(source) if options.squad else download()
    examples, cut = encode_all(questions, base, source)
    config = config.replace(**recipe(base, len(examples), options))
    facts = {
        "squad": source, "examples": len(examples), "contexts_cut": cut,
        "left_out": len(questions) - len(examples), "sha256": digest(examples),
        "began_with": weights.id,
    }  # fmt: skip

    # ---- optimizer ----
    state = load_to_resume(out, config, facts) if resume else None
    training = begin(config, model.to(device).train(), state)
    del state

    # ---- loop ----
    checkpoint.write_header(out, config)
    write_json(out / "squad.json", facts | {"environment": environment()})
    print(
        f"{config.variant_name}: {len(examples):,} examples ({cut:,} contexts cut, "
        f"{facts['left_out']:,} questions left out), {options.sequences} a step, "
        f"{config.max_iters:,} steps on {device.type}; run folder {out}",
        flush=True,
    )

    def batch(step: int) -> Batch:
        chosen = batch_of(step, examples, options.sequences, config.seed)
        size = options.batch_size
        parts = [tensors(chosen[i : i + size], device) for i in range(0, len(chosen), size)]
        return Batch(parts, len(chosen), tokens=sum(len(example.tokens) for example in chosen))

    objective = Objective(
        batch=batch,
        batch_location=lambda step: f"in epoch {step // config.warmup_iters + 1} of {source}",
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
    """The questions of SQuAD's official JSON that have a context, a question and an answer."""
    content = read_json(path, Squad)
    if content is None:
        raise UserError(f"{path}: no such file; --squad takes SQuAD's official train-v2.0.json")
    return answerable(
        (paragraph.context, qa.question, answer.text, answer.answer_start)
        for article in content.data
        for paragraph in article.paragraphs
        for qa in paragraph.qas
        for answer in qa.answers[:1]
    )


def download() -> list[Question]:
    """The same questions, from the `datasets` library."""
    try:
        from datasets import load_dataset

        entries = load_dataset(DATASET, split="train")
    except Exception as error:  # from one of several HTTP libraries, or without `datasets`
        raise UserError(
            f"{DATASET} cannot be downloaded: {first_line(error)}; pip install datasets and try "
            "again, or give the official train-v2.0.json with --squad"
        ) from error
    return answerable(
        (entry["context"], entry["question"], text, start)
        for entry in entries
        for text, start in zip(
            entry["answers"]["text"][:1], entry["answers"]["answer_start"][:1], strict=True
        )
    )


def answerable(found: Iterable[tuple[str, str, str, int]]) -> list[Question]:
    """Questions from contexts, questions, answers and their starts, without any empty text."""
    return [
        Question(context, question.strip(), answer.strip(), start)
        for context, question, answer, start in found
        if context.strip() and question.strip() and answer.strip()
    ]


def encode_all(questions: list[Question], config: Config, source: str) -> tuple[list[Example], int]:
    """Examples of at most block_size + 1 tokens, and the number of contexts that were cut."""
    tokenizer = get_tokenizer(config.tokenizer)
    examples: list[Example] = []
    cut = 0
    for question in tqdm(questions, desc="tokenising", unit="question"):
        example, shortened = encode(tokenizer, question, config.block_size)
        if example is not None:
            examples.append(example)
            cut += shortened
    if not examples:
        raise UserError(
            f"{source}: {len(questions)} answerable questions, but none whose answer and question "
            f"fit {config.block_size} tokens with a context"
        )
    return examples, cut


def encode(tokenizer: Tokenizer, q: Question, block_size: int) -> tuple[Example | None, bool]:
    """A question's tokens, None where there is no room, and whether its context was cut."""
    question = tokenizer.encode(ASK.format(question=q.question))
    answer = tokenizer.encode(f" {q.answer}")
    context = tokenizer.encode(q.context)
    room = block_size - len(question) - len(answer)  # the last token is a target only
    cut = len(context) > room
    if cut:
        if room < 2 * len(answer):
            return None, cut
        head = q.context[: q.start].rstrip()
        before, rest = tokenizer.encode(head), tokenizer.encode(q.context[len(head) :])
        rest = rest[: max(room - len(before), room - room // 2)]
        context = before[max(0, len(before) + len(rest) - room) :] + rest
    tokens = np.array([tokenizer.eot, *context, *question, *answer], dtype=np.uint16)
    return Example(tokens, len(answer)), cut


def digest(examples: list[Example]) -> str:
    return hashlib.sha256(b"".join(example.tokens.tobytes() for example in examples)).hexdigest()


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


def load_to_resume(out: Path, config: Config, facts: dict[str, Any]) -> checkpoint.State:
    """The latest checkpoint of the fine-tuning in a folder.

    Raises UserError where it had other steps, examples or initial weights.
    """
    state = checkpoint.load_to_resume(out, config, quiet=False)
    before = read_json(out / "squad.json", dict[str, Any]) or {}
    before |= {"steps": state.config.get("max_iters")}
    for key, now in (facts | {"steps": config.max_iters}).items():
        if key in ("steps", "sha256", "began_with") and before.get(key) != now:
            raise UserError(
                f"{out} was begun with {key} = {before.get(key)}, now {now}: give the same run, "
                "--squad and --epochs, or another --out_dir"
            )
    return state


if __name__ == "__main__":
    main()
