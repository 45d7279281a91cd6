"""Measurements that `gtp-jax bench` prints: fair, in one run, as ratios."""

from ._contender import CONTENDERS as CONTENDERS
from ._contender import Contender as Contender
from ._contender import chosen_contenders as chosen_contenders
from ._kernels import KERNELS as KERNELS
from ._kernels import Kernel as Kernel
from ._kernels import Measurement as Measurement
from ._kernels import kernels as kernels
from ._kernels import measure as measure
from ._picture import draw_ratios as draw_ratios
from ._step import Row as Row
from ._step import measure_steps as measure_steps
from ._step import ratio as ratio
from ._step import workload_flops as workload_flops
from ._step_picture import draw_steps as draw_steps
from ._step_record import TOLERANCE as TOLERANCE
from ._step_record import Change as Change
from ._step_record import changes as changes
from ._step_record import record as record
from ._timing import seconds_a_call as seconds_a_call
from .contenders.workload import Workload as Workload
