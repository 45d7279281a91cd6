"""Generalized Tensor Parallelism for JAX: weights are sharded and gathered just in time."""

from typing import TYPE_CHECKING

from . import formats as formats
from ._names_above import look_up
from .chain import Schedule as Schedule
from .experts import GroupedDense as GroupedDense
from .experts import MoE as MoE
from .experts import Routing as Routing
from .formats import PackPlan as PackPlan
from .formats import QuantizedArray as QuantizedArray
from .generation import Generated as Generated
from .generation import generate as generate
from .generation import generate_stream as generate_stream
from .hook import shard as shard
from .hook import without_hook as without_hook
from .mesh import Roles as Roles
from .mesh import make_mesh as make_mesh
from .mesh import use_roles as use_roles
from .nn import MLP as MLP
from .nn import Attention as Attention
from .nn import AuxLoss as AuxLoss
from .nn import Conv as Conv
from .nn import CrossAttention as CrossAttention
from .nn import Dense as Dense
from .nn import Einsum as Einsum
from .nn import Embed as Embed
from .nn import Frozen as Frozen
from .nn import LayerNormDense as LayerNormDense
from .nn import Metric as Metric
from .nn import Param as Param
from .nn import Stack as Stack
from .nn import TiedHead as TiedHead
from .nn import cross_entropy as cross_entropy
from .nn import freeze as freeze
from .nn import init as init
from .nn import lora as lora
from .nn import run_chain as run_chain
from .nonuniform import FaultPlan as FaultPlan
from .nonuniform import Replicas as Replicas
from .nonuniform import plan_faults as plan_faults
from .ops import RopeScaling as RopeScaling
from .ops import check_ids as check_ids
from .ops import dequantize as dequantize
from .ops import hadamard as hadamard
from .ops import hadamard_amax as hadamard_amax
from .ops import multi_amax as multi_amax
from .ops import pack as pack
from .ops import positions_of as positions_of
from .ops import quantize as quantize
from .ops import unpack as unpack
from .recipes import BF16 as BF16
from .recipes import FP8 as FP8
from .recipes import MXFP8 as MXFP8
from .recipes import NVFP4 as NVFP4
from .recipes import use_recipe as use_recipe
from .train import TrainState as TrainState
from .train import check as check
from .train import check_finite as check_finite
from .train import diagnose as diagnose
from .train import eval_step as eval_step
from .train import loss_and_gradients as loss_and_gradients
from .train import per_layer as per_layer
from .train import train_step as train_step

# see [Note: names above]: `inspect` is imported only when `explain` is first used
if TYPE_CHECKING:
    from .inspect import explain as explain

ABOVE = {"gtp_jax.inspect": ("explain",)}
if not TYPE_CHECKING:  # type checkers would otherwise accept any name
    __getattr__ = look_up(__name__, ABOVE)

__version__ = "0.1.0"
