"""Where documents begin in the sequences of a batch, for attention within documents."""

import torch
import torch.nn.functional as F
from torch import Tensor


def positions_in_documents(is_start: Tensor, read: Tensor | None = None) -> Tensor:
    """Return the position of each token in its document, int32 [B, L], from 0 where it `is_start`.

    A sequence begins within a document of which `read` [B, 1] tokens came before; None: 0.
    """
    token = torch.arange(is_start.shape[1], dtype=torch.int32, device=is_start.device)
    begins_at = token[:1] if read is None else -read
    first = torch.where(is_start, token, begins_at).cummax(dim=1).values
    return token - first


def document_lengths(positions: Tensor, following: int) -> Tensor:
    """Return the length of each token's document, int32 [B, L], from its position there.

    So many tokens are still to follow a sequence, in its last document.
    """
    L = positions.shape[1]
    token = torch.arange(L, dtype=torch.int32, device=positions.device)
    start = torch.where(positions == 0, token, L + following)
    next_start = start.flip(1).cummin(dim=1).values.flip(1)  # at a token or after it
    end = F.pad(next_start[:, 1:], (0, 1), value=L + following)
    return end - token + positions
