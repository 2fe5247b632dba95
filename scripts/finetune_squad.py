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
- a question whose example has more than T + 1 tokens is left out;
- each epoch reshuffles all examples, and ends with a smaller batch;
- the schedule spans all steps.

The command runs in one process, without torch.compile. It pads on the right, which changes nothing
under a causal mask, and only up to the longest example of a micro-batch.
"""

import hashlib
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from config import Config, NonNegativeInt, PositiveInt
from data.loader import shuffled
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError, command
from layers.build import build_model
from layers.selfcheck import check_kernels
from model import GPT
from optim import build_optimizers, build_scaler
from runtime import checkpoint, metadata, resuming, run_folder
from runtime.checkpoint import Training
from runtime.device import open_device
from runtime.distributed import EXIT_STOPPED, rank
from runtime.files import lock_folder, read_json, write_json
from runtime.log import say, wandb_settings
from scripts.common.command_line import RUN, option, parse
from scripts.common.options import LoadingOptions, Options
from scripts.common.retrieval import ASK
from train import StepBatch, train

SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v2.0.json"
# Steps between checkpoints.
CHECKPOINT_INTERVAL = 100
# The target of a token whose loss does not count.
IGNORED = -100


class Question(NamedTuple):
    context: str
    question: str
    answer: str


class Example(NamedTuple):
    x: Tensor  # int64 [n], end-of-text first
    y: Tensor  # int64 [n], the answer last, IGNORED before it


@dataclass(frozen=True, kw_only=True)
class FineTuning(LoadingOptions):
    """Fine-tune a run on the answerable questions of SQuAD 2.0."""

    out_dir: str | None = option(None, "the new run's folder (default: RUN_squad)")
    squad: str = option("train-v2.0.json", f"the file {SQUAD}")
    epochs: PositiveInt = option(10, "passes over all examples")
    learning_rate: float = option(2e-5, "peak learning rate")
    sequences: PositiveInt = option(128, "examples a step")
    batch_size: PositiveInt = option(8, "examples a micro-batch")
    first_batch: NonNegativeInt = option(0, "batch of the first step, to skip batches that diverge")
    resume: bool = option(False, "continue the run in --out_dir from its last checkpoint")


@command
def main() -> None:
    options, arguments = parse(FineTuning, arguments={"run": RUN})
    if rank() > 0:  # of torchrun or a scheduler; only rank 0 logs and saves
        raise UserError(
            f"RANK = {rank()}: fine-tuning takes one process, of rank 0: leave out torchrun, "
            "or unset RANK"
        )
    folder = run_folder.folder_of(arguments.run)
    if folder.name in ("", ".."):  # the current folder, or one above it: without a name
        folder = folder.resolve()
    out = Path(options.out_dir or f"{folder}_squad")
    with lock_folder(out, "training this run"):
        resuming.should_resume(out, options.resume)
        stopped = finetune(arguments.run, out, options)
    if stopped:
        sys.exit(EXIT_STOPPED)


def finetune(run: str, out: Path, options: FineTuning) -> bool:
    """Fine-tune until the last step or a signal; returns whether a signal stopped it."""
    # ---- config and questions: their errors come before the model is built ----
    device = open_device(options.device)
    base = Options().apply_to(run_folder.read_config(run))
    config = recipe(run, base, out, options)
    wandb_settings(config)  # raises UserError
    questions = read_squad(options.squad)

    # ---- model ----
    model = build_model(base).to(device)
    kernels = check_kernels(model, base, options.torch_dtype, say=say)
    began_with = checkpoint.load_weights(model, checkpoint.find(run))

    # ---- data ----
    examples = encode_all(questions, base)
    digest = hash_of(examples)
    data = {
        "examples": len(examples),
        "left_out": len(questions) - len(examples),
        "sha256": digest,
        "epochs": options.epochs,
        "began_with": began_with,
    }
    steps_per_epoch = math.ceil(len(examples) / options.sequences)
    config = config.replace(
        warmup_iters=steps_per_epoch,
        max_iters=steps_per_epoch * options.epochs,
    )

    # ---- optimizer ----
    state = None
    if options.resume:
        data_before = read_json(out / "squad.json")
        if data_before != data:
            raise UserError(
                f"{out} was fine-tuned on {data_before}, not {data}: repeat its options, or give "
                "another --out_dir"
            )
        state = resuming.load_to_resume(config)
    optimizers = build_optimizers(model, config)
    scaler = build_scaler(device, options.torch_dtype)
    # so that train.py does not continue this run on its shards
    fingerprint = {"training shards": digest}
    training = Training(model, options.torch_dtype, optimizers, scaler, data=fingerprint)
    if state is not None:
        training.restore(state, config)

    # ---- loop ----
    metadata.write_run_metadata(config, kernels, training)
    write_json(out / "squad.json", data)
    say(
        f"{config.label}: {len(examples):,} examples "
        f"({data['left_out']:,} questions left out), "
        f"{config.max_iters:,} steps on {device.type}, in {out}"
    )

    def fetch(step: int) -> StepBatch:
        return fetch_batch(config.first_batch + step, examples, options, config.seed, device)

    return train(config, training, fetch, partial(answer_loss, model))


def recipe(run: str, base: Config, out: Path, options: FineTuning) -> Config:
    """Return the settings of the fine-tuned run, without its steps, which depend on the data."""
    return base.replace(
        init_from=run,
        out_dir=str(out),
        resume=options.resume,
        total_batch_size=options.sequences * base.block_size,
        batch_size=options.batch_size,
        first_batch=options.first_batch,
        optimizer="adamw",
        learning_rate=options.learning_rate,
        min_lr=0.0,
        schedule="cosine",
        cooldown_iters=0,
        weight_decay=0.0,
        beta1=0.9,
        beta2=0.999,
        grad_clip=1.0,
        checkpoint_interval=CHECKPOINT_INTERVAL,
        keep_every=0,
        device=options.device,
        dtype=options.dtype,
    )


# ---- data ----


def read_squad(path: str) -> list[Question]:
    """Read the questions of SQuAD's JSON that have an answer, each with its first answer.

    Raises UserError if there is no such file, or it has another format.
    """
    content = read_json(path)
    if content is None:
        raise UserError(f"{path}: no such file; --squad takes {SQUAD}")
    questions = []
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    question = qa["question"].strip()
                    answers = qa["answers"]
                    if question and answers:
                        answer = answers[0]["text"].strip()
                        questions.append(Question(paragraph["context"], question, answer))
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error!r}: this is not the file {SQUAD}") from error
    return questions


def encode_all(questions: list[Question], config: Config) -> list[Example]:
    """Encode the questions whose example has at most block_size + 1 tokens.

    Raises UserError if there is none.
    """
    tokenizer = get_tokenizer(config.tokenizer)
    examples = []
    for question in tqdm(questions, "tokenising"):
        example = encode(tokenizer, question)
        if len(example.x) <= config.block_size:
            examples.append(example)
    if not examples:
        raise UserError(
            f"none of {len(questions)} answerable questions fits {config.block_size} tokens with "
            "its context and answer"
        )
    return examples


def encode(tokenizer: Tokenizer, question: Question) -> Example:
    """Encode a context, its question and the answer."""
    context = tokenizer.encode(question.context)
    ask = tokenizer.encode(ASK.format(question=question.question))
    answer = tokenizer.encode(f" {question.answer}")
    tokens = torch.tensor([tokenizer.eot, *context, *ask, *answer])
    y = tokens[1:].clone()
    y[: -len(answer)] = IGNORED
    return Example(tokens[:-1], y)


def hash_of(examples: list[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.x.numpy().tobytes())
        digest.update(example.y.numpy().tobytes())
    return digest.hexdigest()


def examples_of_batch(
    number: int, examples: list[Example], sequences: int, seed: int
) -> list[Example]:
    """Return the examples of a batch, a pure function of (seed, number); the longest last."""
    epoch, batch_of_epoch = divmod(number, math.ceil(len(examples) / sequences))
    begin = batch_of_epoch * sequences
    end = min(len(examples), begin + sequences)
    order = shuffled(np.arange(begin, end), len(examples), seed, epoch)
    return sorted((examples[i] for i in order), key=lambda example: len(example.x))


def fetch_batch(
    number: int, examples: list[Example], options: FineTuning, seed: int, device: torch.device
) -> StepBatch:
    """Return the micro-batches of a step, whose loss is averaged over the batch's examples."""
    chosen = examples_of_batch(number, examples, options.sequences, seed)
    micro_batches = []
    for begin in range(0, len(chosen), options.batch_size):
        micro_batches.append(tensors(chosen[begin : begin + options.batch_size], device))
    tokens = sum(len(example.x) for example in chosen)
    return StepBatch(micro_batches, divisor=len(chosen), tokens=tokens)


def tensors(batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [B, L], padded on the right; targets are the answers' tokens."""
    text_id = batch[0].x[-1].item()  # unlike end-of-text, it begins no document in the padding
    x = pad_sequence([example.x for example in batch], batch_first=True, padding_value=text_id)
    y = pad_sequence([example.y for example in batch], batch_first=True, padding_value=IGNORED)
    return x.to(device), y.to(device)


def answer_loss(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the answers' losses in nats; logits of other tokens are not computed."""
    is_answer = y != IGNORED
    logits = model.logits(model.hidden(x)[is_answer])
    return F.cross_entropy(logits.float(), y[is_answer], reduction="sum")


if __name__ == "__main__":
    main()
