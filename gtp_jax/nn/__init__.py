"""Provides Flax NNX modules, which hold parameters and configuration, and call the packages below.

[Note: words of nn]
- *gtp* and *tp*: in docstrings, the mesh axes with the roles `weights` and `tensor`, or their degrees; see
  `gtp_jax.Roles`.
- *view*: how the traced code sees arrays: without a mesh, as global arrays, or as one rank's parts inside a
  `shard_map`; see `gtp_jax.mesh.current_view`.
- *weight*: a parameter that is sharded over gtp and gathered where it is used. Its *owner* gathers it: a module
  (`WeightOwner`), or an `ArrayWeight` for a weight of any shape.
- *kernel*: a weight that is a matrix, or several matrices (experts). The kernels of one owner are gathered together
  into one *fused weight*.
- *shard*: the part of a weight that a rank sends in a gather. The optimizer's axes may divide a shard further in
  storage; a *whole shard* is then one that has been joined over these axes.
- *whole*: of anything other than a shard, not sharded; every rank has the entire array.
- *unit*: features that must stay on one tp rank, such as those of an attention head. (A unit of `gtp_jax.shard` is a
  module whose weights are gathered together.)
- *wire*: what a rank sends in a gather. To *travel* means to be sent.
- *codes*: the elements of a quantized array, to which scales belong.
- *amax*: the largest absolute value in an array, from which a scale is computed.
- *prepared*: quantized, or joined over the optimizer's axes, once per step; see `gtp_jax.weights.prepare`.
- *master*: the stored value of a trained weight, which the optimizer updates. A frozen weight has none.
- *weight group*: the decisions about the kernels that are gathered together, such as dtypes and formats; see
  `gtp_jax.weights.WeightGroup`.
- *chain*: layers that run in sequence. By default, each layer's weights are gathered while the previous layer
  computes; see `Stack` and `run_chain`.
- *slot*: an array whose value is never read, and whose gradient returns a value from backward. (The slots of a
  `Cache` are unrelated.)
- *path*: the keys that lead from the model to a module or variable, such as `("blocks", "layers", "mlp", "up")`.
"""

from typing import TYPE_CHECKING

from .._names_above import look_up
from ..weights import GRAD_REDUCE as GRAD_REDUCE
from ..weights import GradReduce as GradReduce
from ..weights import reduction_of as reduction_of
from ._adapter import Adapter as Adapter
from ._adapter import drops as drops
from ._adapter import with_dropout as with_dropout
from ._array import Param as Param
from ._attention import Attention as Attention
from ._attention import CrossAttention as CrossAttention
from ._attention import check_heads as check_heads
from ._attention_core import AttentionCore as AttentionCore
from ._cache import Cache as Cache
from ._conv import Conv as Conv
from ._dense import Dense as Dense
from ._dense import LayerNormDense as LayerNormDense
from ._einsum import Einsum as Einsum
from ._embed import Embed as Embed
from ._embed import TiedHead as TiedHead
from ._frozen import Frozen as Frozen
from ._frozen import freeze as freeze
from ._frozen import padded_codes as padded_codes
from ._init import abstract_model as abstract_model
from ._init import init as init
from ._layer import Layer as Layer
from ._layer import layout_of as layout_of
from ._layer import partition_of as partition_of
from ._lora import lora as lora
from ._loss import cross_entropy as cross_entropy
from ._maxima import maximum_gradient as maximum_gradient
from ._mlp import MLP as MLP
from ._model_def import ModelDef as ModelDef
from ._model_def import Split as Split
from ._model_def import split_model as split_model
from ._outputs import AuxLoss as AuxLoss
from ._outputs import Metric as Metric
from ._owners import groups_of as groups_of
from ._owners import layer_counts as layer_counts
from ._owners import stacks_of as stacks_of
from ._owners import weight_owners as weight_owners
from ._quantized import keys_of as keys_of
from ._quantized import shards_of as shards_of
from ._quantized import with_groups as with_groups
from ._stack import Stack as Stack
from ._stack import run_chain as run_chain
from ._stages import TRACED_AS as TRACED_AS
from ._unstacked import with_gathered_weights as with_gathered_weights
from ._update_rule import UpdateRule as UpdateRule
from ._update_rule import set_update_rule as set_update_rule
from ._weight import Initializer as Initializer
from ._weight import StackedLayers as StackedLayers
from ._weight import Weight as Weight
from ._weight import WeightOwner as WeightOwner
from ._weight import apply_gathered as apply_gathered
from ._weight import make_vector as make_vector
from ._weight import make_weight as make_weight
from ._weight import make_whole as make_whole

# see [Note: names above]
if TYPE_CHECKING:
    from ..experts import AuxLossOf as AuxLossOf
    from ..experts import ExpertParallel as ExpertParallel
    from ..experts import GroupedDense as GroupedDense
    from ..experts import MoE as MoE
    from ..experts import Routing as Routing
    from ..experts import Score as Score
    from ..inspect import AttentionFact as AttentionFact
    from ..inspect import Explanation as Explanation
    from ..inspect import WireFact as WireFact
    from ..inspect import explain as explain

ABOVE = {
    "gtp_jax.experts": ("AuxLossOf", "ExpertParallel", "GroupedDense", "MoE", "Routing", "Score"),
    "gtp_jax.inspect": ("AttentionFact", "Explanation", "WireFact", "explain"),
}
if not TYPE_CHECKING:  # type checkers use the imports above, so that they report unknown names
    __getattr__ = look_up(__name__, ABOVE)
