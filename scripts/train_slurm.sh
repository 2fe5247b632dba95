#!/usr/bin/env bash
# Several nodes under Slurm, one torchrun a node, that meet at the first node.
# usage: sbatch --nodes=2 scripts/train_slurm.sh configs/lssar_p15.py [--setting=value ...]
# Submitted again after a time limit or a failure, add --resume to go on from the checkpoint.
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=out/slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the repository}"
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$first:${PORT:-29500}" \
    train.py "$@"
