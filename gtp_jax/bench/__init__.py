"""Measurements that `gtp-jax bench` prints: fair, in one run, as ratios."""

from ._kernels import KERNELS as KERNELS
from ._kernels import Kernel as Kernel
from ._kernels import Measurement as Measurement
from ._kernels import kernels as kernels
from ._kernels import measure as measure
from ._picture import draw_ratios as draw_ratios
from ._timing import seconds_a_call as seconds_a_call
from ._timing import seconds_on_device as seconds_on_device
