"""Generalized Tensor Parallelism for JAX: weights kept as slices, gathered just in time."""

from .chain import Schedule as Schedule
from .mesh import make_mesh as make_mesh
from .nn import MLP as MLP
from .nn import Attention as Attention
from .nn import Dense as Dense
from .nn import Embed as Embed
from .nn import LayerNormDense as LayerNormDense
from .nn import Stack as Stack
from .nn import TiedHead as TiedHead
from .nn import cross_entropy as cross_entropy
from .nn import init as init
from .nn import run_chain as run_chain
from .train import TrainState as TrainState
from .train import eval_step as eval_step
from .train import loss_and_gradients as loss_and_gradients
from .train import train_step as train_step

__version__ = "0.1.0"
