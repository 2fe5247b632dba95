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
# One thread a worker: small matrices gain nothing from two. Files in the order of their names: by
# the number of tests the last one would be the quickstart, a single long test.
OMP_NUM_THREADS=1 python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder "$@"
wait "$types"
