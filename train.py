"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
settings of the global batch and the seed, not on the number of processes or micro-batches.
"""

import contextlib
import json
import math
import netrc
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from config import Config, accumulation_steps, help_text, load_config
from data.loader import TrainLoader, validation_batches
from data.shards import check_shards, list_shards, read_meta
from errors import UserError, command
from evaluate import autocast, mean_loss, pick_device, pick_dtype
from model import GPT

# Dense bfloat16 (V100: float16) peaks in FLOP/s, from NVIDIA's data sheets; first match wins.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "V100": 125e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip

# Settings that may change when a run is resumed; any other would make it another run.
FREE_ON_RESUME = {
    "resume", "init_from", "device", "dtype", "compile", "attention_impl", "batch_size",
    "max_iters", "eval_interval", "checkpoint_interval", "log_interval", "wandb_mode",
    "wandb_project", "out_dir", "data_dir",
}  # fmt: skip


@command
def main() -> None:
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text())
        return
    config = load_config(sys.argv[1:])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    accumulation_steps(config, world_size)  # refuses a batch that does not divide
    device = pick_device(config.device)
    if world_size > 1 and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    with process_group(world_size, device):
        train(config, rank, world_size, device)


@contextlib.contextmanager
def process_group(world_size: int, device: torch.device):
    """The processes that torchrun started, connected while the block runs."""
    if world_size == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    try:
        yield
    finally:
        # A gloo thread takes the GIL to drop the last collective's tensors. Let it: closing the
        # group joins that thread with the GIL held, and would wait for ever.
        time.sleep(0.1)
        dist.destroy_process_group()


def train(config: Config, rank: int, world_size: int, device: torch.device) -> None:
    dtype = pick_dtype(config.dtype, device)
    micro_batches = accumulation_steps(config, world_size)
    run = Path(config.out_dir)
    state = resumed_state(run, config) if config.resume else None
    if state is None and (run / "latest.pt").exists():
        raise UserError(f"{run} holds a run; --resume continues it, another --out_dir starts one")

    # ---- data ----
    sequences = config.total_batch_size // config.block_size
    meta = read_meta(config.data_dir)
    if meta is not None and meta["tokenizer"] != config.tokenizer:
        raise UserError(
            f"{config.data_dir} was made with tokenizer {meta['tokenizer']!r}, "
            f"but tokenizer = {config.tokenizer!r}"
        )
    shards = list_shards(config.data_dir, "train") + list_shards(config.data_dir, "val")
    check_shards(shards[rank::world_size], config.n_vocab)
    loader = TrainLoader(
        config.data_dir, config.block_size, sequences, config.seed, rank, world_size, device
    )

    def validation():
        return validation_batches(
            config.data_dir, config.block_size, config.val_tokens, config.batch_size,
            rank, world_size, device,
        )  # fmt: skip

    validation()  # refuses too few tokens now, not after the first steps

    # ---- model ----
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = GPT(config)
    if config.init_from:
        checkpoint.load_weights(model, config.init_from)
    if state is not None:
        model.load_state_dict(state["model"])
    model.to(device)
    trained = torch.compile(model) if use_compile(config, device) else model
    if world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        trained = DistributedDataParallel(trained, device_ids=ids, broadcast_buffers=False)

    # ---- optimizers ----
    optimizers = build_optimizers(model, config)
    # float16 has no room for small gradients: the loss is scaled up, the gradients back down
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    step, best, wandb_id, resumed_at = 0, math.inf, None, None
    if state is not None:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        scaler.load_state_dict(state["scaler"])
        step, best, wandb_id = state["step"], state["best_val_loss"], state["wandb_id"]
        resumed_at = step
        del state

    # ---- logs ----
    log = Log(run, config, step, wandb_id, quiet=rank != 0)
    log.say(
        f"{config.variant_name}: {model.count_parameters():,} parameters, "
        f"{loader.tokens:,} training tokens in {config.data_dir}, {loader.n_windows:,} windows; "
        f"{world_size} x {micro_batches} x {config.batch_size} x {config.block_size} tokens a step "
        f"on {device.type} in {str(dtype).removeprefix('torch.')}; run folder {run}"
    )
    peak = peak_flops(device)

    def save(name: str, **more) -> None:
        if rank == 0:
            weights = {"model": model.state_dict(), "step": step, "config": config.as_dict()}
            checkpoint.save(run / name, weights | more)

    def save_latest() -> None:
        save(
            "latest.pt",
            optimizers=[optimizer.state_dict() for optimizer in optimizers],
            scaler=scaler.state_dict(),
            best_val_loss=best,
            wandb_id=log.wandb_id,
        )

    # ---- loop ----
    seconds_a_step = None
    while True:
        last = step >= config.max_iters
        validated = step == resumed_at  # before the checkpoint that was just loaded
        if (step % config.eval_interval == 0 or last) and not validated:
            val_loss, _ = mean_loss(model.eval(), validation(), device, dtype)
            model.train()
            log.validation(step, val_loss)
            if val_loss < best:
                best = val_loss
                save("best.pt", val_loss=val_loss)
        if (last or (step % config.checkpoint_interval == 0 and step > 0)) and not validated:
            if not all(parameter.isfinite().all() for parameter in model.parameters()):
                stop_diverged(config, step, "its update left weights that are not finite", loader)
            save_latest()
        if last:
            break

        started = time.perf_counter()
        lr = learning_rate(step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        x, y = loader.batch(step)
        loss = torch.zeros((), device=device)
        micro = zip(x.split(config.batch_size), y.split(config.batch_size), strict=True)
        for i, (xs, ys) in enumerate(micro):
            # DDP decides in the forward pass whether this backward will synchronise gradients
            final = i == micro_batches - 1
            hold = trained.no_sync() if world_size > 1 and not final else contextlib.nullcontext()
            with hold:
                with autocast(device, dtype):
                    part = trained(xs, ys) / micro_batches
                scaler.scale(part).backward()
            loss += part.detach()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip = config.grad_clip if config.grad_clip > 0 else math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        if world_size > 1:
            dist.all_reduce(loss, dist.ReduceOp.SUM)
        loss = loss.item() / world_size
        # with float16 the scaler itself skips a step whose gradients overflow
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or scaler.is_enabled()):
            what = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
            stop_diverged(config, step + 1, what, loader)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()
        step += 1

        seconds = time.perf_counter() - started
        # the first step compiles and allocates: it says nothing about the rest
        if seconds_a_step is None or step <= 2:
            seconds_a_step = seconds
        seconds_a_step += 0.1 * (seconds - seconds_a_step)
        tokens_per_s = config.total_batch_size / seconds
        log.step(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            ms=1000 * seconds,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * model.flops_per_token() / (world_size * peak) if peak else None,
            memory_mb=memory_mb(device),
            left_s=seconds_a_step * (config.max_iters - step),
        )
    log.close()


def resumed_state(run: Path, config: Config) -> dict:
    """The latest checkpoint of a run that this config continues."""
    state = checkpoint.load(run / "latest.pt")
    for key, saved in state["config"].items():
        if key not in FREE_ON_RESUME and getattr(config, key) != saved:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{getattr(config, key)!r}; --init_from={run} starts a new run from its weights"
            )
    return state


def use_compile(config: Config, device: torch.device) -> bool:
    return device.type == "cuda" if config.compile is None else config.compile


def build_optimizers(model: GPT, config: Config) -> list[torch.optim.Optimizer]:
    """AdamW over all parameters, or Muon over the trunk's matrices and AdamW over the rest."""
    groups = model.parameter_groups()
    optimizers = []
    if config.optimizer == "muon":
        matrices = [p for p in model.trunk.parameters() if p.dim() == 2]
        ids = {id(p) for p in matrices}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in ids]
        # match_rms_adamw: updates as large as AdamW's, so that one learning rate serves both
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    optimizers.append(
        torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    )
    covered = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())
    return optimizers


def learning_rate(step: int, config: Config) -> float:
    """The rate of the update that follows `step` updates."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "trapezoidal":
        left = (config.max_iters - step) / config.cooldown_iters if config.cooldown_iters else 1.0
        share = min(1.0, left)
    else:
        done = (step - config.warmup_iters) / max(1, config.max_iters - config.warmup_iters)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.min_lr + share * (config.learning_rate - config.min_lr)


def stop_diverged(config: Config, step: int, what: str, loader: TrainLoader) -> None:
    """End the run without a save, so that the newest checkpoint is a good one."""
    path, offset = loader.where(step - 1)[0]
    print(
        f"error: step {step}: {what}; the batch begins in {path} at token {offset}. "
        f"The last good checkpoint, if one was saved, is {Path(config.out_dir) / 'latest.pt'}. "
        f"Try a lower learning_rate (now {learning_rate(step - 1, config):.2e}), a longer "
        "warmup_iters, a lower grad_clip or dtype = float32.",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(1)


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def memory_mb(device: torch.device) -> float:
    """Peak memory so far: the GPU's allocations, elsewhere the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


class Log:
    """Printed lines, metrics.jsonl and wandb; on processes other than the first it does nothing."""

    def __init__(self, run: Path, config: Config, step: int, wandb_id: str | None, quiet: bool):
        self.config, self.quiet, self.wandb, self.wandb_id = config, quiet, None, wandb_id
        if quiet:
            return
        checkpoint.write_header(run, config)
        checkpoint.start_metrics(run / "metrics.jsonl", step)
        self.file = open(run / "metrics.jsonl", "a")
        self.wandb = start_wandb(run, config, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else None

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def write(self, values: dict) -> None:
        if self.quiet:
            return
        # what is unknown, or no number that JSON has, is left out
        values = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(values, step=values["step"])

    def validation(self, step: int, val_loss: float) -> None:
        self.say(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(self, *, left_s: float, **values) -> None:
        self.write(values)
        if values["step"] % self.config.log_interval == 0:
            mfu = f", MFU {100 * values['mfu']:.1f}%" if values["mfu"] else ""
            self.say(
                f"step {values['step']}/{self.config.max_iters}: loss {values['loss']:.4f}, "
                f"lr {values['lr']:.2e}, gradient {values['grad_norm']:.2f}, "
                f"{values['ms']:.0f} ms, {values['tokens_per_s']:,.0f} tokens/s{mfu}, "
                f"{values['memory_mb']:,.0f} MB, {timedelta(seconds=round(left_s))} left"
            )

    def close(self) -> None:
        if not self.quiet:
            self.file.close()
            if self.wandb:
                self.wandb.finish()


def wandb_key(url: str) -> bool:
    """Whether a key is set, in the environment or by `wandb login`; asks no network."""
    try:
        stored = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname)
    except (OSError, netrc.NetrcParseError):
        stored = None
    return bool(os.environ.get("WANDB_API_KEY") or stored)


def start_wandb(run: Path, config: Config, wandb_id: str | None):
    """A wandb run, or None where it is disabled or not installed; waits 8 s for a network."""
    if config.wandb_mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        if config.wandb_mode != "auto":
            raise UserError(
                f"wandb_mode = {config.wandb_mode!r}, but wandb is not installed: pip install wandb"
            ) from None
        print("wandb is not installed: this run is logged in metrics.jsonl only")
        return None
    mode = config.wandb_mode
    if mode == "auto":
        mode = "online" if wandb_key(wandb.Settings().base_url) else "offline"
    settings = wandb.Settings(init_timeout=8, silent=True)
    arguments = dict(
        project=config.wandb_project, name=run.name, dir=run, id=wandb_id, resume="allow",
        config=config.as_dict(), settings=settings,
    )  # fmt: skip
    try:
        started = wandb.init(mode=mode, **arguments)
    except wandb.errors.Error as error:
        print(f"wandb does not answer ({checkpoint.first_line(error)}): this run is kept offline")
        mode, started = "offline", wandb.init(mode="offline", **arguments)
    if mode == "offline":
        print(
            f"wandb keeps this run offline; upload it with: wandb sync {Path(started.dir).parent}"
        )
    return started


if __name__ == "__main__":
    main()
