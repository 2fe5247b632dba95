#!/usr/bin/env bash
# Train on several nodes under Slurm: one torchrun per node, with the first node as rendezvous.
# usage: sbatch --nodes=2 scripts/train_slurm.sh configs/lssar_p15.py [--setting=value ...]
# To continue a run with other settings, give its folder: train_slurm.sh out/RUN --setting=value
# Five minutes before its time limit the run saves and the job is requeued. When Slurm restarts it,
# then or after a node failure, the run continues from its last checkpoint.
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# What your cluster asks for, without one of the two # signs:
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the repository}"
# module load cuda                       # where the driver or Python come from a module
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # where the network is wrong: `ip address`
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
# a mistake is said once, not by every process; a scheduler may have set a RANK of its own
processes=$((SLURM_JOB_NUM_NODES * ${SLURM_GPUS_ON_NODE:-8}))
checks=$(env -u RANK WORLD_SIZE=$processes python train.py --resume=auto "$@" --dry_run)
if missing=$(grep "does not exist yet" <<<"$checks"); then
    echo "error: $missing" >&2
    exit 2
fi
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_ON_NODE:-8} # otherwise srun binds a task to one CPU
# Each attempt gets its own store, so that new processes do not find the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Only this script receives Slurm's signal. It forwards it to srun, srun to torchrun, and torchrun to
# its processes, for which it waits until the shutdown timeout (torch 2.11: always 30 seconds).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_id="$SLURM_JOB_ID" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$head_node:${PORT:-29500}" \
    --max_restarts="${RESTARTS:-3}" \
    --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train.py --resume=auto "$@" &
step=$!
stopping=
trap 'stopping=yes; trap "" USR1; kill -USR1 "$step" || true' USR1
status=0
wait "$step" || status=$?
if [ "$stopping" ]; then
    status=0 # the signal ended the first wait, not the step
    wait "$step" || status=$?
    [ "$status" = 0 ] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
