"""A model's optimizers, and the learning rate of each step."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from config import Config
from model import GPT


def build_optimizers(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """Build AdamW over all parameters; or Muon over the blocks' matrices, AdamW over the rest."""
    muon_matrices = []
    if config.optimizer == "muon":
        # Muon orthogonalises c_attn as one matrix: q, k and v side by side or, in T6, their factors
        muon_matrices = [p for p in model.trunk.blocks.parameters() if p.dim() == 2]
    by_muon = set(muon_matrices)
    by_adamw = [p for p in model.parameters() if p not in by_muon]
    decayed = [p for p in by_adamw if p.dim() >= 2]
    not_decayed = [p for p in by_adamw if p.dim() < 2]

    optimizers: list[torch.optim.Optimizer] = []
    if muon_matrices:
        # match_rms_adamw: updates of AdamW's size, so that one learning rate serves both. Else
        # torch's defaults: Nesterov momentum of 0.95, 5 Newton-Schulz steps.
        muon = ShardedMuon(
            muon_matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
    groups: list[dict] = [{"params": decayed}, {"params": not_decayed, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    optimizers.append(adamw)
    return optimizers


class InFloat32(TorchFunctionMode):
    """Makes torch's Muon orthogonalise in float32 instead of bfloat16."""

    def __torch_function__(
        self,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        if function is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # a copy: Muon changes it in place
        return function(*args, **(kwargs or {}))


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, sharded across ranks as in modded-nanogpt and nanochat.

    Each rank orthogonalises its share of the matrices and broadcasts them. Every rank has the
    momentum of all matrices, so that checkpoints do not depend on the number of ranks.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if not dist.is_initialized():
            self.update()
            return
        owners: dict[Tensor, int] = {}
        for group in self.param_groups:
            # by size, so that all shares take about as long
            by_size = sorted(group["params"], key=torch.numel, reverse=True)
            for i, p in enumerate(by_size):
                owners[p] = i % dist.get_world_size()
                if owners[p] != dist.get_rank():
                    self.update_momentum(p, group["momentum"])
                    p.grad = None  # so that torch's step skips it
        self.update()
        sent = []
        for p, owner in owners.items():
            sent.append(dist.broadcast(p.detach(), owner, async_op=True))
        for work in sent:
            work.wait()

    def update(self) -> None:
        """Update the matrices that have a gradient."""
        device = self.param_groups[0]["params"][0].device
        # without AVX-512 a CPU took several times as long for products in bfloat16 (AMD EPYC)
        with InFloat32() if device.type == "cpu" else nullcontext():
            super().step()

    def update_momentum(self, p: Tensor, momentum: float) -> None:
        """Update the momentum of a matrix as torch's step does."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)


def build_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Build the loss scaler, which does nothing except in float16.

    Small gradients underflow in float16: the loss is scaled up, the gradients are scaled down.
    """
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def step_if_finite(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """In float16, update the weights unless `found_inf`, a float32 tensor, is 1.

    GradScaler.step looks at the gradients of one optimizer alone, so Muon might skip a step that
    AdamW takes. A fused optimizer reads the tensor on the device; for another optimizer, such as
    Muon, the host waits for its value.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    elif found_inf.item():
        return
    optimizer.step()


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of the 0-based step `step`."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "trapezoidal":
        coeff = min(1.0, (config.max_iters - step) / max(1, config.cooldown_iters))
    else:
        progress = (step - config.warmup_iters) / max(1, config.max_iters - config.warmup_iters)
        coeff = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + coeff * (config.learning_rate - config.min_lr)
