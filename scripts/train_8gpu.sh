#!/usr/bin/env bash
# Train on all GPUs of this machine, or on $GPUS of them. If the run's folder has a checkpoint, the
# run continues from it. If a process dies, the job restarts up to $RESTARTS times.
# usage: bash scripts/train_8gpu.sh configs/lssar_p15.py [CONFIG.py ...] [--setting=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
GPUS=${GPUS:-$(python -c "import torch; print(torch.cuda.device_count())")}
if [ "$GPUS" = 0 ]; then
    echo "error: no GPU on this machine; python train.py trains without one" >&2
    exit 2
fi
# a dry run reports mistakes once, not once per process; a scheduler may have set a RANK of its own
checks=$(env -u RANK WORLD_SIZE=$GPUS python train.py --resume=auto "$@" --dry_run)
if missing=$(grep "does not exist yet" <<<"$checks"); then
    echo "error: $missing" >&2
    exit 2
fi
# torchrun, but where a signal has stopped the run, without a traceback of its own
TORCHRUN="
import signal
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
# ignored: SIGHUP under nohup, SIGINT in a script's background job; torchrun would handle them
names = 'SIGTERM SIGINT SIGHUP SIGQUIT SIGUSR1'.split()
heard = [name for name in names if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
try:
    main(['--signals_to_handle=' + ','.join(heard), *sys.argv[1:]])
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
"
# Each attempt gets its own store, so that new processes do not find the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun forwards these signals to the processes, and kills those still running after the shutdown
# timeout, which must be longer than a step, a validation and a save (torch 2.11: always 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
exec python -c "$TORCHRUN" --standalone --nproc_per_node="$GPUS" --max_restarts="${RESTARTS:-3}" \
    train.py --resume=auto "$@"
