#!/usr/bin/env bash
# Training and evaluation at tiny scale, on any machine: text -> shards -> two trained models -> their
# losses at 1 to 32 times the training length. A few minutes on two cores; finished work is
# reused.
# usage: bash scripts/quickstart.sh [--setting=value ...]    settings are passed to train.py
set -euo pipefail
source "$(dirname "$0")/common/setup.sh"
setup requirements.txt

python -m data.text --tokenizer bytes

for name in softmax lssar_p15; do
    run=out/quickstart/$name
    python train.py configs/scales/tiny.py "configs/$name.py" --wandb_mode=disabled \
        --out_dir="$run" --resume=auto "$@"
done

python -m scripts.eval_length out/quickstart/softmax out/quickstart/lssar_p15 \
    --lengths 128,256,512,1024,2048,4096 --tokens 65536
