"""Where documents begin in the sequences of a batch, for attention within documents."""

import torch
from torch import Tensor

from layers.cache import KVCache, RaggedCache


def positions_in_documents(is_start: Tensor, cache: KVCache | RaggedCache | None = None) -> Tensor:
    """Return the position of each token in its document, int32 [B, L], from 0 where it `is_start`.

    A sequence begins within a document: the last one of the cache, whose length is updated, or one
    that begins with the sequence.
    """
    token = torch.arange(is_start.shape[1], dtype=torch.int32, device=is_start.device)
    begins_at = torch.zeros((), dtype=torch.int32, device=is_start.device)
    if cache is not None:
        begins_at = -cache.document_length.to(is_start.device)
    first = torch.where(is_start, token, begins_at).cummax(dim=1).values
    positions = token - first
    if cache is not None:
        cache.document_length = positions[:, -1:] + 1
    return positions
