#!/usr/bin/env bash
# Lint, formatting, types and every test. usage: bash scripts/test.sh [PYTEST_ARGUMENT ...]
set -euo pipefail
source "$(dirname "$0")/common/setup.sh"
unset PYTHONDONTWRITEBYTECODE # the tests start many processes, which share what one has compiled
setup requirements-dev.txt

ruff check .
ruff format --check .
mypy & # beside the tests: it takes one core most of a minute
types=$!
# one thread a worker: small matrices gain nothing from two
OMP_NUM_THREADS=1 python -m pytest --numprocesses=auto --dist=loadfile "$@"
wait "$types"
