"""Generalized Tensor Parallelism for JAX: weights are sharded, and gathered just in time."""

from . import formats as formats
from .chain import Schedule as Schedule
from .formats import PackPlan as PackPlan
from .formats import QuantizedArray as QuantizedArray
from .mesh import Roles as Roles
from .mesh import make_mesh as make_mesh
from .mesh import use_roles as use_roles
from .nn import MLP as MLP
from .nn import Attention as Attention
from .nn import AuxLoss as AuxLoss
from .nn import Conv as Conv
from .nn import Dense as Dense
from .nn import Einsum as Einsum
from .nn import Embed as Embed
from .nn import GroupedDense as GroupedDense
from .nn import LayerNormDense as LayerNormDense
from .nn import Metric as Metric
from .nn import MoE as MoE
from .nn import Param as Param
from .nn import Stack as Stack
from .nn import TiedHead as TiedHead
from .nn import cross_entropy as cross_entropy
from .nn import explain as explain
from .nn import init as init
from .nn import run_chain as run_chain
from .ops import dequantize as dequantize
from .ops import hadamard as hadamard
from .ops import hadamard_amax as hadamard_amax
from .ops import multi_amax as multi_amax
from .ops import pack as pack
from .ops import quantize as quantize
from .ops import unpack as unpack
from .recipes import BF16 as BF16
from .recipes import FP8 as FP8
from .recipes import MXFP8 as MXFP8
from .recipes import NVFP4 as NVFP4
from .recipes import use_recipe as use_recipe
from .train import TrainState as TrainState
from .train import eval_step as eval_step
from .train import loss_and_gradients as loss_and_gradients
from .train import train_step as train_step

__version__ = "0.1.0"
