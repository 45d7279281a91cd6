"""Measurements that `gtp-jax bench` prints: fair, in one run, as ratios."""

from ._checkpoint import CheckpointTimes as CheckpointTimes
from ._checkpoint import float32_bytes as float32_bytes
from ._checkpoint import measure_checkpoints as measure_checkpoints
from ._checkpoint import state_shapes as state_shapes
from ._checkpoint import steps_of as steps_of
from ._kernels import KERNELS as KERNELS
from ._kernels import Kernel as Kernel
from ._kernels import Measurement as Measurement
from ._kernels import kernels as kernels
from ._kernels import measure as measure
from ._picture import draw_ratios as draw_ratios
from ._timing import seconds_a_call as seconds_a_call
from ._timing import seconds_on_device as seconds_on_device
from ._torch_dcp import has_torch as has_torch
from ._torch_dcp import measure_torch as measure_torch
