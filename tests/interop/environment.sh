#!/bin/sh
# Makes an environment with transformers, torch and peft, in which the tests of this folder run; gtp_jax itself comes from
# PYTHONPATH, so that its kernels need not be built:
#
#     tests/interop/environment.sh /tmp/interop
#     PYTHONPATH=. /tmp/interop/bin/python -m pytest tests/interop
#
# The default build of torch brings CUDA's libraries along, which no test needs; where there is an index of CPU builds,
# name it in PIP_EXTRA_INDEX_URL.
set -eu
if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY: the directory of the new environment" >&2
    exit 2
fi
project=$(dirname "$0")/../../pyproject.toml
python3 -m venv "$1"
"$1/bin/python" - "$project" >"$1/requirements.txt" <<'END_OF_PROGRAM'
import sys
import tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["test"], sep="\n")
END_OF_PROGRAM
"$1/bin/pip" install --quiet --requirement "$1/requirements.txt" "transformers==5.24.0" torch "peft==0.21.2" "compressed-tensors>=0.17"
