"""Generate text with a trained model.

python -m scripts.sample RUN --prompt "The meaning of" --max_new_tokens 100
python -m scripts.sample RUN --prompt "A text" --prompt "Another one" --prompt FILE:prompt.txt

Several prompts are continued in one batch.
"""

from dataclasses import dataclass

import torch

from config import NonNegativeFloat, NonNegativeInt, PositiveInt
from data.tokenizer import get_tokenizer
from errors import UserError, command
from generation import generate
from layers.selfcheck import check_kernels
from scripts.common.command_line import RUNS, option, parse
from scripts.common.labels import label_runs
from scripts.common.options import Options
from scripts.common.runs import Run, load_run


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """Generate text with a trained model."""

    prompt: list[str] | None = option(
        None,
        "text to continue, or FILE:PATH; may be repeated (default: the start of a document)",
        type=str,
        action="append",
    )
    num_samples: PositiveInt = option(1, "texts to generate from each prompt")
    max_new_tokens: PositiveInt = option(200, "tokens of each text")
    temperature: NonNegativeFloat = option(0.8, "sampling temperature; 0 takes the likeliest token")
    top_k: PositiveInt = option(200, "sample from this many of the likeliest tokens")
    seed: NonNegativeInt = option(1337, "seed of the sampling")


@command
def main() -> None:
    options, arguments = parse(Sampling, arguments={"runs": RUNS["runs"]})
    prompts = [read_prompt(prompt) for prompt in options.prompt or [""]]
    # raises UserError for a missing run before the first is loaded
    runs = label_runs(arguments.runs).values()
    for path in runs:
        run = load_run(path, options)
        if len(runs) > 1:
            print(f"{path}:\n")
        for text in sample(run, prompts, options):
            print(text)
            print("-" * 80)


def read_prompt(prompt: str) -> str:
    """The prompt, or the content of the file for FILE:PATH, as in nanoGPT."""
    if not prompt.startswith("FILE:"):
        return prompt
    path = prompt.removeprefix("FILE:")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # as data.text reads
            return file.read()
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt {prompt}: the file cannot be read: {error}") from error


def sample(run: Run, prompts: list[str], options: Sampling) -> list[str]:
    """Generate `num_samples` texts from each prompt, each up to its end-of-text token."""
    tokenizer = get_tokenizer(run.config.tokenizer)
    # every document of the training data begins with end-of-text, if the model has it
    start = [tokenizer.eot] if tokenizer.eot < run.config.text_ids else []
    rows = []
    for prompt in prompts:
        ids = [*start, *tokenizer.encode(prompt)]
        if not ids:
            raise UserError(f"{run.path} has no end-of-text token to begin with: give --prompt")
        rows += [torch.tensor(ids, device=run.device)] * options.num_samples
    is_padded = len({len(row) for row in rows}) > 1
    if is_padded and not run.config.document_mask:  # the padding is a document of its own
        check_kernels(run.model, run.config, run.dtype, within_documents=True)
    with run.autocast():
        out = generate(
            run.model,
            rows,
            options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            generator=torch.Generator(run.device).manual_seed(options.seed),
        )
    texts = []
    for row in out:
        ids = row[len(start) :].tolist()
        if tokenizer.eot in ids:
            ids = ids[: ids.index(tokenizer.eot)]
        texts.append(tokenizer.decode(ids))
    return texts


if __name__ == "__main__":
    main()
