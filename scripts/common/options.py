"""How commands open finished runs: dataclasses whose fields are options of the command line."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from attention import VARIANTS
from config import Config, PositiveInt, choices
from errors import UserError
from layers.rope import Rope
from runtime.device import pick_device, pick_dtype
from scripts.common.command_line import option


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """What computes with a run's weights."""

    device: str = option("auto", "'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    dtype: str = option("auto", "dtype of matrix products", choices=choices("dtype"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return pick_dtype(self.dtype, pick_device(self.device))


@dataclass(frozen=True, kw_only=True)
class Options(LoadingOptions):
    """How to open a finished run."""

    task: ClassVar[str] = "language"  # only runs of this task can be opened

    rope: str | None = option(
        None,
        f"RoPE scaling: {', '.join(Rope.SCALINGS)} (default: dynamic_ntk, but none if windows "
        "keep every head with RoPE within the training length; for hf: models, the model's)",
    )
    rope_factor: float | None = option(None, "factor of --rope's scaling: see layers.rope.Rope")
    rope_theta: float | None = option(None, "another base of RoPE (SSMax: 500000)")
    log_base: Annotated[float, ("above", 1)] | None = option(
        None, "base a: scores times log_a(a + n), n keys in view (SWAN)"
    )
    window: PositiveInt | None = option(
        None, "a query sees at most this many last keys, in any layer"
    )
    attention: str | None = option(
        None,
        "evaluate with another variant, re-weighted with --p; a variant that needs p takes the "
        "run's by default",
    )
    p: float | None = option(None, "another power of the re-weighting")
    attention_impl: str = option("auto", "attention path", choices=choices("attention_impl"))

    def apply_to(self, config: Config) -> Config:
        """A run's config with the attention path, the variant and the p of the options.

        The path is always the options': the run's own was chosen for the machine that trained it.
        Another variant re-weights with --p, or with the run's p if it needs p. Raises UserError for
        a run of another task.
        """
        if self.task not in config.tasks:
            raise UserError(
                f"{config.out_dir} has task = {config.task!r}, but this command is for "
                f"task = {self.task!r}"
            )
        changes: dict[str, Any] = {"attention_impl": self.attention_impl}
        if self.attention is not None:
            changes["attention"] = self.attention
            variant = VARIANTS.get(self.attention)
            if variant is not None and not variant.needs_p:
                changes["p"] = None
            if self.attention != config.attention:
                changes["s_init"] = Config.s_init  # the run's was for its own variant
        if self.p is not None:
            changes["p"] = self.p
        return config.replace(**changes)

    def check_rope(self, config: Config) -> None:
        """Raise UserError if the RoPE of a run with this config cannot be scaled in this way."""
        if self.rope_factor is not None and self.rope is None:
            raise UserError(f"--rope_factor {self.rope_factor:g} needs --rope, the scaling")
        scaling = self.rope or "none"
        theta = {} if self.rope_theta is None else {"theta": self.rope_theta}
        Rope(2, 1, scaling=scaling, factor=self.rope_factor, **theta)
        if config.positions != "rope" and (scaling != "none" or theta):
            name = "--rope_theta" if scaling == "none" else "--rope"
            raise UserError(
                f"{name}: {config.out_dir} has positions = {config.positions!r}: no RoPE"
            )
