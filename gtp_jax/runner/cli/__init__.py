"""The command line: `gtp-jax train`, `gtp-jax inspect`, `gtp-jax doctor`."""

from ._main import main as main
from ._main import parser as parser
