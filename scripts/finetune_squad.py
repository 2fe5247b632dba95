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
- each epoch takes all examples in its own order, ending with a smaller batch;
- the schedule spans all steps.

The command runs in one process, without torch.compile. It pads on the right, which changes nothing
under a causal mask, and only up to the longest example of a micro-batch.
"""

import hashlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config, choices
from data.loader import shuffled
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError, command
from layers.selfcheck import check_kernels
from model import GPT
from runtime import checkpoint
from runtime.checkpoint import Training
from runtime.device import open_device, pick_dtype
from runtime.distributed import EXIT_STOPPED
from runtime.files import lock_folder, read_json, write_json
from runtime.log import say
from scripts.common.retrieval import ASK
from scripts.common.runner import RUN, Options, option, parse
from train import Batch, Objective, fit

SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v2.0.json"
# Steps between checkpoints.
CHECKPOINT_INTERVAL = 100
IGNORED = -100


class Question(NamedTuple):
    context: str
    question: str
    answer: str


class Example(NamedTuple):
    tokens: np.ndarray  # uint16 [n], end-of-text first, the answer last
    answer: int  # tokens of the answer


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
    dtype: str = option("auto", "of matrix products", choices=choices("dtype"))


@command
def main() -> None:
    options, arguments = parse(FineTuning, others={"run": RUN})
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
        learning_rate=options.learning_rate, total_batch_size=options.sequences * base.block_size,
        batch_size=math.gcd(options.sequences, options.batch_size), optimizer="adamw", min_lr=0.0,
        weight_decay=0.0, beta1=0.9, beta2=0.999, grad_clip=1.0, schedule="cosine", keep_every=0,
        cooldown_iters=0, checkpoint_interval=CHECKPOINT_INTERVAL, out_dir=str(out), init_from=run,
        resume=options.resume, device=options.device, dtype=options.dtype,
    )  # fmt: skip

    # ---- model, then data ----
    model = GPT(base).to(device)
    dtype = pick_dtype(options.dtype, device)
    kernels = check_kernels(model, base, dtype, say=say)
    weights = checkpoint.load_weights(model, run, options.checkpoint)
    questions = read_squad(options.squad)
    examples = encode_all(questions, base)
    steps = math.ceil(len(examples) / options.sequences)  # per epoch
    config = config.replace(warmup_iters=steps, max_iters=steps * options.epochs)
    data = {
        "examples": len(examples), "left_out": len(questions) - len(examples),
        "sha256": hashlib.sha256(b"".join(e.tokens.tobytes() for e in examples)).hexdigest(),
        "began_with": weights.id,
    }  # fmt: skip

    # ---- optimizer ----
    state = checkpoint.load_to_resume(out, config, quiet=False) if options.resume else None
    if state is not None and (before := read_json(out / "squad.json")) != data:
        raise UserError(f"{out} was fine-tuned on {before}, not {data}: give another --out_dir")
    training = Training.begin(model, config, dtype, state)
    del state

    # ---- loop ----
    checkpoint.write_header(out, config, kernels, training.resumed_at)
    write_json(out / "squad.json", data)
    taken = f"{len(examples):,} examples ({data['left_out']:,} questions left out)"
    say(f"{config.variant_name}: {taken}, {config.max_iters:,} steps on {device.type}, in {out}")

    def batch(step: int) -> Batch:
        chosen = batch_of(step, examples, options.sequences, config.seed)
        size = options.batch_size
        parts = [tensors(chosen[i : i + size], device) for i in range(0, len(chosen), size)]
        return Batch(parts, len(chosen), tokens=sum(len(example.tokens) for example in chosen))

    return fit(config, training, Objective(lambda x, y: answer_loss(model, x, y), batch))


def read_squad(path: str) -> list[Question]:
    """The questions of SQuAD's JSON that have an answer, and its first answer."""
    content = read_json(path)
    if content is None:
        raise UserError(f"{path}: no such file; --squad takes {SQUAD}")
    try:
        return [
            Question(paragraph["context"], qa["question"].strip(), answer["text"].strip())
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
            for answer in qa["answers"][:1]
            if qa["question"].strip()
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error!r}: this is not the file {SQUAD}") from error


def encode_all(questions: list[Question], config: Config) -> list[Example]:
    """The examples of at most block_size + 1 tokens. Raises UserError where there is none."""
    tokenizer = get_tokenizer(config.tokenizer)
    encoded = [encode(tokenizer, question) for question in tqdm(questions, "tokenising")]
    examples = [example for example in encoded if len(example.tokens) <= config.block_size + 1]
    if not examples:
        fits = f"fits {config.block_size} tokens with its context and answer"
        raise UserError(f"none of {len(questions)} answerable questions {fits}")
    return examples


def encode(tokenizer: Tokenizer, q: Question) -> Example:
    """The tokens of a question, its context and its answer."""
    asked = tokenizer.encode(q.context) + tokenizer.encode(ASK.format(question=q.question))
    answer = tokenizer.encode(f" {q.answer}")
    return Example(np.array([tokenizer.eot, *asked, *answer], dtype=np.uint16), len(answer))


def batch_of(step: int, examples: list[Example], sequences: int, seed: int) -> list[Example]:
    """The examples of a step, a pure function of (seed, step); the longest last."""
    epoch, i = divmod(step, math.ceil(len(examples) / sequences))
    positions = np.arange(i * sequences, min(len(examples), (i + 1) * sequences))
    order = shuffled(positions, len(examples), seed, epoch)
    return sorted((examples[k] for k in order), key=lambda example: len(example.tokens))


def tensors(batch: list[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, L], padded on the right; targets are the answers' tokens."""
    texts = [torch.from_numpy(example.tokens.astype(np.int64)) for example in batch]
    x = pad_sequence([text[:-1] for text in texts], batch_first=True)
    y = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    for targets, text, example in zip(y, texts, batch, strict=True):
        targets[: len(text) - 1 - example.answer] = IGNORED
    return x.to(device), y.to(device)


def answer_loss(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Sum of the losses of the answers' tokens, in nats; no other logits are computed."""
    inside = y != IGNORED
    logits = model.logits(model.trunk(model.wte(x))[inside])
    return F.cross_entropy(logits.float(), y[inside], reduction="sum")


if __name__ == "__main__":
    main()
