#!/bin/sh
# make_venv.sh DIRECTORY [PYTHON]: a virtual environment of the first fitting Python.
set -eu
directory=$1
given=${2:-}
for python in ${given:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
    then
        echo "making $directory with $("$python" --version)"
        exec "$python" -m venv "$directory"
    fi
done
echo "no usable Python: ${given:-python3} is missing, older than 3.10, or lacks venv" >&2
echo "name one with: make PYTHON=/path/to/python3" >&2
exit 1
