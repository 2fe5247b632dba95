"""A hash of the formulas of a layer's attention, to recognise results of other formulas."""

from attention import VARIANTS
from attention_paths.module import Attention
from config import Config
from layers.heads import build_hybrid_attention
from runtime.source import Definition, definition_of, source_hash

# The formulas that all variants share.
SHARED_FORMULAS = (
    Definition("attention", "attention_weights"),
    Definition("attention_paths.reference", "ReferenceAttention.normalise_q_and_k"),
    Definition("attention_paths.reference", "ReferenceAttention.rows"),
    Definition("layers.heads", "alibi_heads"),
    Definition("config", "Config.nope_heads"),
)
# A variant's script may import these: they have no formulas, so formulas_hash leaves them out.
MODULES_WITHOUT_FORMULAS = (
    "train",
    "model",
    "optim",
    "generation",
    "evaluation",
    "data",
    "scripts",
)


def formulas_hash(config: Config) -> str:
    """A hash of the source of the formulas of a layer's attention; runtime.source describes it.

    Of an entry that a script has added to VARIANTS, it covers the functions alone. A subclass of
    Attention counts with all code that it reaches.
    """
    names = [config.attention]
    if config.local_window is not None:
        names.append("softmax")
    roots = list(SHARED_FORMULAS)
    for name in names:
        roots.append(Definition("attention", "VARIANTS", name))
        variant = VARIANTS[name]
        for value in (*vars(variant).values(), *vars(variant.phi).values()):
            if callable(value) and definition_of(value).module != "attention":
                roots.append(definition_of(value))
    for layer in range(config.n_layer):
        for module in build_hybrid_attention(config, layer):
            if type(module) is not Attention:
                roots.append(definition_of(type(module)))
    return source_hash(tuple(roots), MODULES_WITHOUT_FORMULAS)
