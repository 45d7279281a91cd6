"""Flax NNX modules: they hold parameters and configuration, and call the layers below."""

from ._attention import Attention as Attention
from ._attention import check_heads as check_heads
from ._dense import Dense as Dense
from ._dense import LayerNormDense as LayerNormDense
from ._embed import Embed as Embed
from ._embed import TiedHead as TiedHead
from ._explain import Explanation as Explanation
from ._explain import WireFact as WireFact
from ._explain import explain as explain
from ._grouped import GroupedDense as GroupedDense
from ._init import abstract_model as abstract_model
from ._init import init as init
from ._layer import Layer as Layer
from ._loss import cross_entropy as cross_entropy
from ._mlp import MLP as MLP
from ._moe import ExpertParallel as ExpertParallel
from ._moe import MoE as MoE
from ._moe import check_experts as check_experts
from ._quantized import put_quantized as put_quantized
from ._quantized import quantize_weights as quantize_weights
from ._skeleton import Skeleton as Skeleton
from ._skeleton import take_apart as take_apart
from ._stack import Stack as Stack
from ._stack import run_chain as run_chain
from ._weight import scatter as scatter
from ._weight import weight_owners as weight_owners
