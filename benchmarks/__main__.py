"""Makes `python -m benchmarks step ...` run `gtp-jax bench step ...`."""

import sys

from gtp_jax.runner.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
