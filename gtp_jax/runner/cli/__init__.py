"""The command line: `gtp-jax train`, `gtp-jax inspect`, `gtp-jax doctor`."""

from ._arguments import check_files as check_files
from ._arguments import positive as positive
from ._arguments import whole as whole
from ._main import main as main
from ._main import parser as parser
