"""Provides Flax NNX modules, which hold parameters and configuration, and call the packages below.

[Note: words of nn]
- *gtp* and *tp*: in docstrings, the mesh axes with the roles `weights` and `tensor`, or their degrees; see
  `gtp_jax.mesh.Roles`.
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

from .._names_above import look_up
from ._public import *  # noqa: F403

# see [Note: names above]
ABOVE = {
    "gtp_jax.experts": ("AuxLossOf", "ExpertParallel", "GroupedDense", "MoE", "Routing", "Score"),
    "gtp_jax.inspect": ("AttentionFact", "Explanation", "WireFact", "explain"),
}
__getattr__ = look_up(__name__, ABOVE)
