"""Training on plain pytrees: state, step, evaluation."""

from ._check import check as check
from ._execution import Execution as Execution
from ._nccl import COLLECTIVE_KERNELS as COLLECTIVE_KERNELS
from ._nccl import OLDEST_NCCL as OLDEST_NCCL
from ._nccl import Nccl as Nccl
from ._nccl import all_reduce_with_nccl as all_reduce_with_nccl
from ._nccl import decides_collective_kernels as decides_collective_kernels
from ._nccl import find_nccl as find_nccl
from ._nccl import flags_in_environment as flags_in_environment
from ._nccl import nccl_is_too_old as nccl_is_too_old
from ._options import GPU_OPTIONS as GPU_OPTIONS
from ._options import GPU_OPTIONS_WITH_FP8 as GPU_OPTIONS_WITH_FP8
from ._options import GPU_OPTIONS_WITH_OLD_NCCL as GPU_OPTIONS_WITH_OLD_NCCL
from ._options import GPU_OPTIONS_WITH_TP as GPU_OPTIONS_WITH_TP
from ._options import Option as Option
from ._options import accepts as accepts
from ._options import compile_options as compile_options
from ._replicas import Batches as Batches
from ._replicas import Replicas as Replicas
from ._state import TrainState as TrainState
from ._step import eval_step as eval_step
from ._step import loss_and_gradients as loss_and_gradients
from ._step import train_step as train_step
