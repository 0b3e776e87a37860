#!/bin/sh
# Makes .venv in this directory and installs reforward into it, pinned by constraints.txt; run again, it changes nothing.
# Usage: sh install.sh [EXTRA]   with an extra of pyproject.toml: plot (the default), test or dev.
set -eu
cd "$(dirname "$0")"

find_python() {
    for python in "${PYTHON:-python3.11}" python3; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    echo "install.sh: needs Python 3.11; name one with PYTHON=/path/to/python3.11" >&2
    exit 1
}

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

if [ ! -x .venv/bin/pip ]; then
    find_python
    "$python" -m venv .venv
fi

# torch alone and first: so spelled, pip takes that very build and doesn't weigh it against the rest.
install torch==2.13.0
# The build backend is pinned as well, which pip's isolated builds wouldn't be.
install hatchling editables
install --no-build-isolation --editable ".[${1:-plot}]"
