"""Rotary position embedding (RoPE, Su et al. 2021), and its scaling beyond the training length."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from errors import UserError, check_choice
from layers.documents import document_lengths


@dataclass(frozen=True)
class Rope:
    """The settings of RoPE: its base theta, its scaling, and the share of pairs that rotate."""

    head_size: int
    trained_length: int
    theta: float = 10000.0
    scaling: str = "none"
    # s in 'linear', 'ntk', 'yarn' (None: length / trained_length); alpha in 'dynamic_ntk' (None: 1)
    factor: float | None = None
    # the share of pairs, the fastest, that rotate: p-RoPE (Barbero et al. 2024, arXiv 2410.06205)
    share: float = 1.0

    SCALINGS = ("none", "linear", "ntk", "dynamic_ntk", "yarn")

    def __post_init__(self) -> None:
        check_choice("rope scaling", self.scaling, self.SCALINGS)
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise UserError(f"rope factor = {self.factor} must be at least 1 and finite")
        if self.factor is not None and self.scaling == "none":
            raise UserError(f"rope factor = {self.factor} needs a scaling other than 'none'")
        if not 1 < self.theta < math.inf:
            raise UserError(f"rope theta = {self.theta} must be above 1 and finite")

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """Radians per position [d/2] in float64, and the factor on every score, at this length.

        With p-RoPE, the pairs that rotate have the same frequencies as if all pairs rotated.
        """
        d = self.head_size
        s = max(1.0, length / self.trained_length)
        factor = s if self.factor is None else self.factor
        theta_factor = 1.0
        score_scale = 1.0
        if self.scaling == "ntk":  # bloc97: the slowest pair interpolated by s, the fastest kept
            theta_factor = factor
        elif self.scaling == "dynamic_ntk" and s > 1:  # emozilla: with the s of the current length
            alpha = 1.0 if self.factor is None else self.factor
            theta_factor = alpha * s - (alpha - 1)
        power = d / max(d - 2, 1)  # with a single pair any base is the same
        pairs = torch.arange(0, d, 2, dtype=torch.float64) / d
        frequencies = (self.theta * theta_factor**power) ** -pairs
        if self.scaling == "linear":  # positions interpolated (Chen et al. 2023)
            frequencies /= factor
        elif self.scaling == "yarn":  # 0.1 ln s + 1 on q and k is squared on the scores
            frequencies = self._ntk_by_parts(frequencies, factor)
            score_scale = (0.1 * math.log(factor) + 1) ** 2
        rotated_pairs = round(self.share * len(frequencies))
        frequencies[rotated_pairs:] = 0
        return frequencies, score_scale

    def _ntk_by_parts(self, frequencies: Tensor, s: float) -> Tensor:
        """Return YaRN's frequencies, "NTK-by-parts" (Peng et al. 2023, arXiv 2309.00071).

        Over the training length, pairs that turn more than 32 times (beta_fast) keep their
        frequency, pairs that turn less than once (beta_slow) are interpolated, and a ramp lies
        between.
        """

        def pair_that_turns(times: int) -> float:
            turn = self.trained_length / (times * 2 * math.pi)
            return self.head_size * math.log(turn) / (2 * math.log(self.theta))

        low = max(math.floor(pair_that_turns(32)), 0)
        high = min(math.ceil(pair_that_turns(1)), self.head_size - 1)
        index = torch.arange(len(frequencies), dtype=torch.float64)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / s * ramp


@dataclass(frozen=True)
class Rotation:
    """The rotations of consecutive positions, and their factor on every score."""

    cos: Tensor  # [L, d/2], or [B, L, d/2] where RoPE is scaled for each document
    sin: Tensor
    score_scale: float | Tensor  # a tensor has a factor for each query, [B, 1, L, 1]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every pair (x_i, x_{i + d/2}) of x [B, H, L, d] by its angle.

    Pairs are made of the halves of a head, as in GPT-NeoX and transformers (`rotate_half`), not of
    neighbours, as in the paper.

    The result lies in memory as [B, L, H, d], as the projections do: a copy in another order would
    cost the forward and the backward pass of attention a transposition each.
    """
    x = x.transpose(1, 2)  # [B, L, H, d]
    cos = rotation.cos.unsqueeze(-2)  # [L, 1, d/2] or [B, L, 1, d/2]
    sin = rotation.sin.unsqueeze(-2)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return rotated.to(x.dtype).transpose(1, 2)


class RopeTable(nn.Module):
    """The rotations of all positions up to a length, at first the training length.

    They are recomputed for another length.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.set(rope, rope.trained_length)

    def set(self, rope: Rope, length: int) -> None:
        """Compute the rotations of positions 0 to length - 1, scaled for this length."""
        frequencies, self.score_scale = rope.frequencies(length)
        dtype = torch.promote_types(self.cos.dtype, torch.float32)
        device = self.cos.device
        with torch.inference_mode(False):  # a later backward pass may need them
            positions = torch.arange(length, dtype=torch.float64)
            angles = positions[:, None] * frequencies  # [length, d/2]
            self.cos = angles.cos().to(device, dtype)
            self.sin = angles.sin().to(device, dtype)
        self.rope = rope
        self.length = length

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RopeTable":
        # called by .to(): rotations are computed again in the new dtype, not cast from the old one
        super()._apply(fn, recurse)
        self.set(self.rope, self.length)
        return self

    def forward(
        self,
        start: int,
        end: int,
        length: int,
        document_positions: Tensor | None = None,
    ) -> Rotation:
        """Return the rotations of positions start to end - 1 of a text of this length.

        With `document_positions` [B, L], a scaled RoPE is scaled for the length of each document,
        as if it were a text by itself.
        """
        is_scaled = self.rope.scaling != "none"
        if is_scaled and document_positions is not None:
            return self.rotation_by_document(document_positions, following=length - end)
        # without scaling, a longer table works too, and torch.compile need not recompile the model
        if length > self.length or (is_scaled and length != self.length):
            self.set(self.rope, length)
        return Rotation(self.cos[start:end], self.sin[start:end], self.score_scale)

    def rotation_by_document(self, positions: Tensor, following: int) -> Rotation:
        """Return the rotations of tokens at positions [B, L], scaled for their documents' lengths.

        `following` is the number of tokens of the last document that come after the sequence.
        """
        positions = positions.cpu()  # for float64
        lengths = document_lengths(positions, following)
        # all lengths up to the trained one are scaled alike
        distinct, index = lengths.clamp_min(self.rope.trained_length).unique(return_inverse=True)
        scaled = [self.rope.frequencies(length) for length in distinct.tolist()]
        frequencies, score_scales = zip(*scaled, strict=True)
        by_length = torch.stack(frequencies)  # [lengths, d/2]
        angles = positions[..., None] * by_length[index]  # [B, L, d/2]
        score_scale = torch.tensor(score_scales, dtype=torch.float64)[index]  # [B, L]
        return Rotation(
            angles.cos().to(self.cos),
            angles.sin().to(self.cos),
            score_scale[:, None, :, None].to(self.cos),
        )
