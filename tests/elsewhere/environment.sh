#!/bin/sh
# Makes an environment with Tunix, datasets and grain, in which the tests of this folder run; gtp_jax itself comes from PYTHONPATH, so that
# its kernels need not be built:
#
#     tests/elsewhere/environment.sh /tmp/tunix
#     PYTHONPATH=. /tmp/tunix/bin/python -m pytest tests/elsewhere
set -eu
if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY: the directory of the new environment" >&2
    exit 2
fi
python3 -m venv "$1"
"$1/bin/pip" install --quiet google-tunix==0.1.7 "pytest>=8" "pytest-xdist>=3.6" "beartype>=0.20" "datasets>=4.0" "grain>=0.2.10"
