"""Generate text with a trained model.

python -m scripts.sample RUN --prompt "The meaning of" --max_new_tokens 100
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from data.tokenizer import get_tokenizer
from errors import command
from generation import generate
from scripts.common.options import RUNS, Options, option, parse
from scripts.common.runner import load_run


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """Generate text with a trained model."""

    prompt: str = option("", "empty: the start of a document")
    num_samples: int = option(1, "texts to generate", at_least=1)
    max_new_tokens: int = option(200, "tokens of each text", at_least=1)
    temperature: float = option(0.8, "0: the most likely token", at_least=0)
    top_k: int = option(200, "sample from so many of the likeliest tokens", at_least=1)
    seed: int = option(1337, "of the sampling", at_least=0)


@command
def main() -> None:
    options, arguments = parse(Sampling, arguments={"runs": RUNS["runs"]})
    for run in (load_run(path, options) for path in arguments.runs):
        tokenizer = get_tokenizer(run.config.tokenizer)
        # every document of the training data begins with end-of-text
        prompt = [tokenizer.eot, *tokenizer.encode(options.prompt)]
        idx = torch.tensor([prompt] * options.num_samples, device=run.device)
        generator = torch.Generator(run.device).manual_seed(options.seed)
        with run.autocast():
            out = generate(
                run.model, idx, options.max_new_tokens, temperature=options.temperature,
                top_k=options.top_k, generator=generator,
            )  # fmt: skip
        for ids in out[:, 1:].tolist():
            print(tokenizer.decode(ids[: [*ids, tokenizer.eot].index(tokenizer.eot)]))
            print("-" * 80)


if __name__ == "__main__":
    main()
