"""A model from a config: GPT-2 with the attention layer that its settings ask for."""

from config import Config
from layers.hybrid import HybridAttention
from layers.pairs import PairGPT
from layers.tpa import TensorProductAttention
from model import GPT, SelfAttention


def build_model(config: Config) -> GPT:
    """Build the model of a config, with initial weights.

    Raises UserError if settings contradict the attention variant.
    """
    model_class = PairGPT if config.task == "orbits" else GPT
    return model_class(config, attention_layer(config))


def attention_layer(config: Config) -> type[SelfAttention]:
    if config.projections == "tpa":
        return TensorProductAttention
    if config.nope_share or config.nope_every:
        return HybridAttention
    return SelfAttention
