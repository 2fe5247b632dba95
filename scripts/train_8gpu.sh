#!/usr/bin/env bash
# One machine, all its GPUs, or GPUS of them. Add --resume to go on from the run's checkpoint.
# usage: bash scripts/train_8gpu.sh configs/lssar_p15.py [CONFIG.py ...] [--setting=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun --standalone --nproc_per_node="$GPUS" train.py "$@"
