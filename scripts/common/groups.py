"""Groups of distances, or of positions, that double in size, and NaN in JSON."""

import numpy as np
import torch
from torch import Tensor


def distances(length: int) -> list[int]:
    """The greatest distance of each group: 0, 1, 3, 7, ..., length - 1."""
    groups = (length - 1).bit_length() + 1
    return [min(length, 2**i) - 1 for i in range(groups)]


def sum_groups(values: Tensor) -> Tensor:
    """Sum values at each distance, [..., L], over each group of `distances`: [..., groups]."""
    last = distances(values.shape[-1])
    sizes = np.diff(last, prepend=-1).tolist()
    sums = [group.sum(-1) for group in values.split(sizes, -1)]
    return torch.stack(sums, dim=-1)


def without_nan(values: Tensor) -> list:
    """Nested lists with None instead of NaN, which JSON lacks."""
    array = values.numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


def with_nan(values: list) -> Tensor:
    """Nested lists as a tensor, with NaN instead of None."""
    return torch.from_numpy(np.array(values, dtype=np.float64))
