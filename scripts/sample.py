"""Generate text with a trained model.

python -m scripts.sample RUN --prompt "The meaning of" --max_new_tokens 100
"""

import argparse
import sys
from pathlib import Path

import torch

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from data.tokenizer import get_tokenizer
from errors import UserError, command
from model import KVCache
from runtime.device import autocast
from scripts.common.arguments import AtLeast
from scripts.common.runs import RunOptions, add_options, open_run


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's .pt")
    parser.add_argument("--prompt", default="", help="empty: the start of a document")
    parser.add_argument("--num_samples", action=AtLeast, at_least=1, default=1)
    parser.add_argument("--max_new_tokens", action=AtLeast, at_least=1, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token")
    parser.add_argument("--top_k", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1337)
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.temperature and not 1e-4 <= arguments.temperature <= 1e4:
        raise UserError(f"--temperature {arguments.temperature} must be 0, or 0.0001 to 10000")
    if not 0 <= arguments.seed < 2**63:
        raise UserError(f"--seed {arguments.seed} must be at least 0 and below 2**63")
    run = open_run(arguments.run, RunOptions.parse(arguments))
    tokenizer = get_tokenizer(run.config.tokenizer)
    # every document of the training data begins with end-of-text
    prompt = [tokenizer.eot, *tokenizer.encode(arguments.prompt)]
    idx = torch.tensor([prompt] * arguments.num_samples, device=run.device)
    generator = torch.Generator(run.device).manual_seed(arguments.seed)
    cache = KVCache(idx.shape[1] + arguments.max_new_tokens)
    with autocast(run.device, run.dtype):
        out = run.model.generate(
            idx,
            arguments.max_new_tokens,
            arguments.temperature,
            arguments.top_k,
            generator,
            cache=cache,
        )
    for row in out[:, 1:].tolist():
        end = row.index(tokenizer.eot) if tokenizer.eot in row else len(row)
        print(tokenizer.decode(row[:end]))
        print("-" * 80)
    print(f"cache: {cache.nbytes:,} bytes for {len(idx)} x {cache.size:,} positions")


if __name__ == "__main__":
    main()
