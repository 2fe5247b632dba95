#!/usr/bin/env bash
# Train on all GPUs of one machine, or on $GPUS of them; --resume continues from the last checkpoint.
# If a process dies, the job restarts up to $RESTARTS times, each time from that checkpoint.
# usage: bash scripts/train_8gpu.sh configs/lssar_p15.py [CONFIG.py ...] [--setting=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
# torchrun forwards these signals to the processes, and kills those still running after the
# shutdown timeout, which must be longer than a step, a validation and a save.
exec torchrun --standalone --nproc_per_node="$GPUS" --max_restarts="${RESTARTS:-3}" \
    --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown_timeout=120 train.py "$@"
