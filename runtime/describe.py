"""What a run prints about itself before its first step."""

from config import Config, settings_in
from data.loader import Documents, Loader
from model import GPT
from runtime.checkpoint import Training
from runtime.distributed import world_size
from runtime.hf_config import PRETRAINED
from runtime.nanogpt import NANOGPT
from runtime.run_folder import read_config

# Repeated tokens are worth less after about four epochs (Muennighoff et al. 2023, "Scaling
# Data-Constrained Language Models").
MANY_EPOCHS = 4


def describe(config: Config, training: Training, loader: Loader | None) -> str:
    """Describe a run that is about to start or continue; without data there is no loader."""
    step_tokens = config.total_batch_size
    micro_batches = step_tokens // (world_size() * config.batch_size * config.block_size)
    run_tokens = config.max_iters * step_tokens
    tokens_left = run_tokens - training.step * step_tokens
    flops = tokens_left * training.model.flops_per_token()
    dtype = str(training.dtype).removeprefix("torch.")
    at_most = "at most " if config.varied_lengths else ""
    lines = [
        f"{config.label}: {training.model.count_parameters():,} parameters on "
        f"{training.device.type} in {dtype}; run folder {config.out_dir}",
        describe_data(config, loader, run_tokens),
        f"{at_most}{run_tokens:,} tokens in steps of {at_most}{step_tokens:,} (processes x "
        f"micro-batches x batch_size x block_size = {world_size()} x {micro_batches} x "
        f"{config.batch_size} x {config.block_size}), {at_most}{flops:.1e} FLOP to do, step "
        f"{training.step} of {config.max_iters}",
    ]
    by_layer = windows_by_layer(training.model)
    if len(set(by_layer)) > 1:
        lines.append(f"attention windows by layer: {', '.join(by_layer)}")
    if loader is not None and config.align_documents:
        lines.append(
            f"training sequences begin at a document: {loader.cropped:.1%} of the tokens "
            "are cropped"
        )
    if loader is not None and loader.documents is not None:
        lines += describe_documents(loader.documents, has_windows=set(by_layer) != {"all"})
    for key, (before, now) in training.changes.items():
        lines.append(f"from step {training.step} on, {key} = {now!r} (before: {before!r})")
    lines += describe_initial(config)
    for key in ("window", "local_window"):
        keys = getattr(config, key)
        if keys is not None and keys >= config.block_size:
            lines.append(
                f"warning: {key} = {keys} hides nothing at block_size = {config.block_size}"
            )
    lines += describe_warm_up(config)
    if config.dry_run:
        checks = "all checks passed" if loader else "all checks passed except on the data"
        lines.append(f"dry run: {checks}; nothing was written")
    return "\n".join(lines)


def describe_warm_up(config: Config) -> list[str]:
    """A warning where the warm-up is as long as the run."""
    if not 0 < config.max_iters <= config.warmup_iters:
        return []
    return [
        f"warning: warmup_iters = {config.warmup_iters} of max_iters = {config.max_iters} steps: "
        "the learning rate only rises"
    ]


def describe_initial(config: Config) -> list[str]:
    """Return a line for each setting of the model that differs from the run of init_from."""
    if not config.init_from or config.init_from.startswith((PRETRAINED, NANOGPT)):
        return []
    before = read_config(config.init_from)
    lines = []
    for key in settings_in("attention", "model"):
        if getattr(config, key) != getattr(before, key):
            lines.append(
                f"{key} = {getattr(config, key)!r}; {config.init_from} was trained with "
                f"{getattr(before, key)!r}"
            )
    return lines


def describe_documents(documents: Documents, has_windows: bool) -> list[str]:
    low, median, high = documents.n_quartiles
    limit = ", where no attention window limits it" if has_windows else ""
    lines = [
        f"a training sequence has {documents.per_sequence:.1f} documents on average; n, the keys "
        f"that a query sees in its document, has quartiles {low:,}, {median:,} and {high:,}{limit}"
    ]
    for name in documents.shards_without:
        lines.append(
            f"warning: no document begins in {name}: each of its sequences is one document"
        )
    return lines


def windows_by_layer(model: GPT) -> list[str]:
    """Return each layer's window: "256", "all" or, of a hybrid layer, "all and 256"."""
    by_layer = []
    for layer in model.attention_layers():
        windows = [str(attention.window or "all") for attention in layer.attentions()]
        by_layer.append(" and ".join(windows))
    return by_layer


def describe_data(config: Config, loader: Loader | None, run_tokens: int) -> str:
    if loader is None:
        return f"{config.data_dir} does not exist yet; create it with data.fineweb or data.text"
    val_tokens = loader.validation_sequences(config.val_tokens) * config.block_size
    text = f"{loader.source}: {loader.tokens:,} tokens, {val_tokens:,} for validation"
    epochs = run_tokens / (loader.n_sequences * config.block_size)
    if epochs > MANY_EPOCHS:
        text += f"; the run goes through them {epochs:,.0f} times"
    return text
