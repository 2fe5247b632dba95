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
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, choices
from data.fineweb import reach_hub
from data.loader import shuffled
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError, command, first_line
from model import GPT
from optim import build_optimizers, learning_rate
from runtime import checkpoint
from runtime.device import environment, memory_mb, pick_device, pick_dtype
from runtime.distributed import EXIT_STOPPED, Stop
from runtime.divergence import check_weights, finite_step, stop_diverged
from runtime.files import lock_folder, read_json, write_json
from runtime.log import Log, best_effort_output
from scripts.common.arguments import AtLeast
from scripts.common.retrieval import ASK
from scripts.common.runs import RunOptions
from train import train_step

DATASET = "rajpurkar/squad_v2"
EPOCHS, LEARNING_RATE, SEQUENCES = 10, 2e-5, 128
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


class Facts(TypedDict):
    """What squad.json says of a run's training data."""

    squad: str
    examples: int
    contexts_cut: int
    left_out: int
    sha256: str  # of the examples
    began_with: dict[str, Any]  # step and sha256 of the checkpoint


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's .pt")
    parser.add_argument("--out_dir", required=True, help="the new run's folder")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD's train-v2.0.json")
    parser.add_argument("--epochs", action=AtLeast, at_least=1, default=EPOCHS)
    parser.add_argument("--learning_rate", type=float, default=LEARNING_RATE, help="peak")
    parser.add_argument(
        "--sequences", action=AtLeast, at_least=1, default=SEQUENCES, help="examples a step"
    )
    parser.add_argument(
        "--batch_size", action=AtLeast, at_least=1, default=8, help="examples a micro-batch"
    )
    parser.add_argument("--checkpoint", default="latest", choices=("latest", "best"))
    parser.add_argument(
        "--resume", nargs="?", const=True, default=False, choices=(True, "auto"),
        help="continue the run in --out_dir; auto: where it has a checkpoint",
    )  # fmt: skip
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=choices("dtype"))
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("fine-tuning runs in one process: start it without torchrun")
    if arguments.sequences % arguments.batch_size:
        raise UserError(
            f"--sequences {arguments.sequences} must be a multiple of --batch_size "
            f"{arguments.batch_size}"
        )
    out, device = Path(arguments.out_dir), pick_device(arguments.device)
    with best_effort_output(), lock_folder(out, "training this run"):
        stopped = prepare_and_finetune(out, device, arguments)
    if stopped:
        sys.exit(EXIT_STOPPED)


def prepare_and_finetune(out: Path, device: torch.device, arguments: argparse.Namespace) -> bool:
    """Read the run and the examples, and fine-tune; returns whether a signal stopped it."""
    if arguments.resume == "auto":
        arguments.resume = checkpoint.exists(out)
    if not arguments.resume:
        checkpoint.require_unused_folder(out)
    elif not checkpoint.exists(out):
        raise UserError(f"{out} holds no checkpoint to resume from; start it without --resume")
    base = checkpoint.read_config(arguments.run)
    RunOptions().require_task(base)
    options = (arguments.epochs, arguments.learning_rate, arguments.sequences)
    config = base.replace(
        **recipe(base, 1, *options),  # for one example: errors come before all are read
        keep_every=0,
        batch_size=arguments.batch_size,
        checkpoint_interval=CHECKPOINT_INTERVAL,
        out_dir=str(out),
        init_from=arguments.run,
        resume=False,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    model = GPT(base)
    weights = checkpoint.load_weights(model, arguments.run, arguments.checkpoint)
    source = arguments.squad or DATASET
    questions = read_squad(source) if arguments.squad else download()
    examples, cut = encode_all(questions, base, source)
    config = config.replace(**recipe(base, len(examples), *options))
    facts = Facts(
        squad=source,
        examples=len(examples),
        contexts_cut=cut,
        left_out=len(questions) - len(examples),
        sha256=digest(examples),
        began_with=weights.id,
    )
    return finetune(config, model, examples, facts, device, arguments.resume)


def read_facts(run: Path) -> Facts | None:
    """The content of a fine-tuned run's squad.json; None where there is none."""
    return read_json(run / "squad.json", Facts)


def recipe(
    base: Config,
    examples: int,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    sequences: int = SEQUENCES,
) -> dict[str, Any]:
    """The settings of fine-tuning; all others are the base run's."""
    steps = math.ceil(examples / sequences)  # per epoch
    return {
        "optimizer": "adamw", "learning_rate": learning_rate, "schedule": "cosine",
        "warmup_iters": steps, "max_iters": steps * epochs, "cooldown_iters": 0, "min_lr": 0.0,
        "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "grad_clip": 1.0,
        "total_batch_size": sequences * base.block_size,
    }  # fmt: skip


def read_squad(path: str) -> list[Question]:
    """The questions of SQuAD's official JSON that have a context, a question and an answer."""
    content = read_json(path)
    if content is None:
        raise UserError(f"{path}: no such file; --squad takes SQuAD's official train-v2.0.json")
    questions: list[Question] = []
    where = "data"
    try:
        for i, article in enumerate(content["data"]):
            for j, paragraph in enumerate(article["paragraphs"]):
                where = f"data[{i}].paragraphs[{j}]"
                for qa in paragraph["qas"]:
                    for answer in qa["answers"][:1]:
                        add_question(
                            questions,
                            paragraph["context"],
                            qa["question"],
                            answer["text"],
                            answer["answer_start"],
                        )
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: not in SQuAD's format: {where}: {error!r}") from error
    return questions


def download() -> list[Question]:
    """The same questions, from the `datasets` library."""
    other = "or give the official train-v2.0.json with --squad"
    try:
        from datasets import load_dataset
        from huggingface_hub import constants
    except ImportError:
        raise UserError(f"SQuAD needs a library: pip install datasets, {other}") from None
    try:
        reach_hub()
    except UserError:
        constants.HF_HUB_OFFLINE = True  # a copy on disk will do, and nothing is tried again
    try:
        rows = load_dataset(DATASET, split="train")
    except Exception as error:  # from one of several HTTP libraries
        reason = first_line(error)
        raise UserError(f"{DATASET} cannot be downloaded: {reason}; try again, {other}") from error
    questions: list[Question] = []
    for row in rows:
        answers = row["answers"]
        for text, start in zip(answers["text"][:1], answers["answer_start"][:1], strict=True):
            add_question(questions, row["context"], row["question"], text, start)
    return questions


def add_question(
    questions: list[Question], context: Any, question: Any, answer: Any, start: Any
) -> None:
    """Append a question unless its context, question or answer is empty.

    Raises TypeError where one of them is not text, or the start not a number.
    """
    for value, kind in ((context, str), (question, str), (answer, str), (start, int)):
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} should be {kind.__name__}")
    if context.strip() and question.strip() and answer.strip():
        questions.append(Question(context, question.strip(), answer.strip(), start))


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
    question, answer = (
        tokenizer.encode(ASK.format(question=q.question)),
        tokenizer.encode(f" {q.answer}"),
    )
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
    sha = hashlib.sha256()
    for example in examples:
        sha.update(example.tokens.tobytes())
    return sha.hexdigest()


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


def load_to_resume(out: Path, config: Config, facts: Facts) -> checkpoint.TrainingState:
    """The latest checkpoint of the fine-tuning in a folder.

    Raises UserError where it had other steps, examples or initial weights.
    """
    state, before = checkpoint.load_to_resume(out, config, quiet=False), read_facts(out)
    if (steps := state.config.get("max_iters")) != config.max_iters:
        raise UserError(
            f"{out} was begun with {steps} steps, and these --epochs take {config.max_iters}, "
            "with another learning rate: give the same --epochs, or another --out_dir"
        )
    if before is None or before["sha256"] != facts["sha256"]:
        raise UserError(f"{out} was trained on examples other than those of {facts['squad']}")
    if before["began_with"] != facts["began_with"]:
        raise UserError(
            f"{out} was fine-tuned from another checkpoint, of step "
            f"{before['began_with'].get('step')}: give that one, or another --out_dir"
        )
    return state


def finetune(
    config: Config,
    model: GPT,
    examples: list[Example],
    facts: Facts,
    device: torch.device,
    resume: bool,
) -> bool:
    """Train until the last step or a signal; returns whether a signal stopped it."""
    out, dtype = Path(config.out_dir), pick_dtype(config.dtype, device)
    sequences = config.total_batch_size // config.block_size
    state = load_to_resume(out, config, facts) if resume else None

    # ---- model and optimizer ----
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # as in training
    model.to(device).train()
    optimizers = build_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run_id, step, resumed_at = checkpoint.new_run_id(), 0, None
    if state is not None:
        checkpoint.restore(state, model, optimizers, scaler)
        run_id, step = state.run_id, state.step
        resumed_at = step
        del state

    # ---- logs and checkpoints ----
    checkpoint.write_header(out, config)
    write_json(out / "squad.json", {**facts, "environment": environment()})

    batch: list[Example] = []  # of the step in progress

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return answer_loss(model, x, y) / len(batch)

    def batch_location(step: int) -> str:
        return f"in epoch {(step - 1) // config.warmup_iters + 1} of {facts['squad']}"

    with (
        Stop(quiet=False) as stop,
        Log(out, run_id, config, resumed_at, batch_location, quiet=False) as log,
        checkpoint.Saver(out, config.keep_last, config.keep_every) as saver,
    ):
        log.print(
            f"{config.variant_name}: {len(examples):,} examples ({facts['contexts_cut']:,} "
            f"contexts cut, {facts['left_out']:,} questions left out), {sequences} a step, "
            f"{config.max_iters:,} steps on {device.type}; run folder {out}"
        )

        # ---- loop ----
        while True:
            last = step >= config.max_iters
            stopped = bool(stop.received)
            due = last or stopped or step % config.checkpoint_interval == 0
            if due and step != resumed_at:
                check_weights(model, config, step, batch_location)
                log.sync()
                saver.save(
                    checkpoint.training_state(run_id, model, optimizers, scaler, step, config)
                )
            if last or stopped:
                return not last

            started, lr = time.perf_counter(), learning_rate(step, config)
            batch = batch_of(step, examples, sequences, config.seed)
            parts = range(0, len(batch), config.batch_size)
            loss, grad_norm = train_step(
                loss_fn,
                [tensors(batch[i : i + config.batch_size], device) for i in parts],
                len(parts), model, optimizers, scaler, lr, config.grad_clip, dtype,
            )  # fmt: skip
            step += 1
            if not finite_step(loss, grad_norm, scaler):
                error = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
                stop_diverged(config, step, error, batch_location(step))
            log.step(
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=grad_norm,
                seconds=time.perf_counter() - started,
                tokens=sum(len(example.tokens) for example in batch),
                mfu=None,
                memory_mb=memory_mb(device),
            )


if __name__ == "__main__":
    main()
