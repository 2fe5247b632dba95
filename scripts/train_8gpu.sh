#!/usr/bin/env bash
# One machine, all its GPUs, or GPUS of them. Add --resume to go on from the run's last checkpoint.
# A job whose process dies is started again up to RESTARTS times, each time from there.
# usage: bash scripts/train_8gpu.sh configs/lssar_p15.py [CONFIG.py ...] [--setting=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
# What asks torchrun to stop it passes on to the processes, and kills them if they still run after
# the shutdown timeout: longer than a step, a validation and a save.
exec torchrun --standalone --nproc_per_node="$GPUS" --max_restarts="${RESTARTS:-3}" \
    --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown_timeout=120 train.py "$@"
