"""A model's optimizers, and the learning rate of each step."""

import math

import torch

from config import Config
from model import GPT


def build_optimizers(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """AdamW over all parameters, or Muon over the blocks' matrices and AdamW over the rest."""
    groups = model.parameter_groups()
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        # c_attn is one matrix: q, k and v side by side or, with projections = 'tpa', their factors
        matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
        ids = {id(p) for p in matrices}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in ids]
        # match_rms_adamw: updates of AdamW's size, so that one learning rate serves both
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    optimizers.append(
        torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    )
    covered = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())
    return optimizers


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of the update that follows `step` updates."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "trapezoidal":
        left = (config.max_iters - step) / config.cooldown_iters if config.cooldown_iters else 1.0
        coeff = min(1.0, left)
    else:
        progress = (step - config.warmup_iters) / max(1, config.max_iters - config.warmup_iters)
        coeff = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + coeff * (config.learning_rate - config.min_lr)
