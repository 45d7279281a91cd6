"""Makes `python -m gtp_jax` the same as `gtp-jax`."""

import sys

from .runner.cli import main

if __name__ == "__main__":
    sys.exit(main())
