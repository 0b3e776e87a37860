#!/bin/sh
# Makes .venv in this directory and installs reforward into it, pinned by constraints.txt; run again, it changes nothing.
# Usage: sh install.sh [EXTRA]   with an extra of pyproject.toml: plot (the default), test or dev.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ -x .venv/bin/python ] || "$python" -m venv .venv

install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }

# torch alone and first: so spelled, pip takes that very build and doesn't weigh it against the rest.
install torch==2.13.0
# The build backend is pinned as well, which pip's isolated builds wouldn't be.
install hatchling editables
install --no-build-isolation --editable ".[${1:-plot}]"
