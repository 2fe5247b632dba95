# Sourced by quickstart.sh and test.sh: enters the repository and puts a .venv on PATH, with
# everything that a requirements file pins.
# usage: setup REQUIREMENTS_FILE

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

setup() {
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: Python 3.11 or newer is needed, and $python is $("$python" -V 2>&1)." >&2
        echo "       Choose another one with: PYTHON=python3.12 bash $0" >&2
        exit 1
    fi
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "error: $python has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    local done=".venv/.installed-$1"
    if ! cmp -s <(cat requirements*.txt) "$done"; then
        echo "installing $1 into .venv ..."
        # a .venv that was interrupted, or made by uv, has no pip; before pip 24 choosing the wheels
        # takes half a minute
        .venv/bin/python -m pip --version >/dev/null 2>&1 ||
            "$python" -m venv --upgrade-deps .venv || exit 1
        # most modules are never imported: bytecode waits for those that are, if Python may write it
        local bytecode=--no-compile
        [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || bytecode=--compile
        .venv/bin/python -m pip install --quiet --disable-pip-version-check $bytecode -r "$1" ||
            exit 1
        cat requirements*.txt >"$done"
    fi
    PATH="$PWD/.venv/bin:$PATH"
}
