"""Where documents begin in the sequences of a batch, for attention within documents."""

import torch
import torch.nn.functional as F
from torch import Tensor


def positions_in_documents(is_start: Tensor, earlier: Tensor | int = 0) -> Tensor:
    """Return the position of each token in its document, int32 [B, L]: 0 where `is_start` is True.

    `earlier`, an int or [B, 1], is the number of earlier tokens, such as cached ones, of the
    document in which a sequence begins.
    """
    token = torch.arange(is_start.shape[1], dtype=torch.int32, device=is_start.device)
    first = torch.where(is_start, token, -earlier).cummax(dim=1).values
    return token - first


def document_lengths(positions: Tensor, following: int) -> Tensor:
    """Return the length of each token's document, int32 [B, L], from the token's position in it.

    `following` is the number of tokens of a sequence's last document that come after the sequence.
    """
    L = positions.shape[1]
    token = torch.arange(L, dtype=torch.int32, device=positions.device)
    start = torch.where(positions == 0, token, L + following)
    next_start = start.flip(1).cummin(dim=1).values.flip(1)  # at a token or after it
    end = F.pad(next_start[:, 1:], (0, 1), value=L + following)
    return end - token + positions
