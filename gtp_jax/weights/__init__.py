"""Quantizes and gathers weights, and reduces their gradients.

[Note: life of a weight]
Functions here take arrays and the decisions about them (`WeightGroup`, static, compared by value), never modules. This
package does not use Flax: `nn` extracts a `Structure` from a model (`nn.groups_of`), and puts the values made here into
the model's variables.

| state | type | made by | when |
|---|---|---|---|
| stored | an array, possibly padded, sharded as its `Layout` says, over dp too (ZeRO) | a constructor | between steps |
| decided | `WeightGroup`, by path and `Layers` | `resolve(structure, recipe)` | per trace |
| prepared | `Stretch`es of `Wire`s, next to the array (`Stored`) | `prepare(groups, stored)` | per step |
| on the wire | a `Wire`: `Kernels`, `Packed` (from `prepare`), `StoredCodes` (frozen) | `wires_of` | per call |
| cast and joined | `Part`, made from `Kernels` only | `Wire.ready(groups)` | forward; may be kept for backward |
| gathered | the fused weight or its codes; in a chain `Gathered` | `Wire.gather(groups)` | before its layer |
| gradient | that of the gathered weight, or of its slot | the layer's backward | |
| reduced | `Reduced`: this rank's part of the sum | `reduce_gradients(groups, gradients)` | a layer later |
| divided | `Reduced`: shards summed over dp too (ZeRO) | `divide_gradients(groups, reduced)` | after `reduced` |
| gradient of shards | `Shards` | `stored_gradients(groups, reduced)`, `in_param_dtypes` | after its layer |

A `WeightGroup` extends a `WireSpec`, which holds the decisions that wires depend on. For the weights that
`gtp_jax.shard` has sharded, there are only `WireSpec`s, which `gtp_jax.hook` makes.

`straight_through` makes the result of a gather differentiable with respect to the shards, whatever is gathered instead
of them. `gathered` does everything from the wire to the gradient of the shards, for a layer outside a chain.

Less common states:

- *In a format of your own*: a recipe's `wire` is an `OwnFormat`, which makes a `Wire` of its own instead of a `Packed`;
  see [Note: a wire of your own] and `examples/07_wire_of_your_own.py`.
- *Scaled by earlier amaxes* (`Scaling`): with delayed scaling, the state of a step holds the amax that sets the scale
  of the codes. The module's products also get the amaxes for input and gradient, and a slot, whose gradient is the
  amaxes that they find in this step.
- *In tiles*: codes whose tiles shards may cut are `Tiles` (frozen: `StoredTiles`), and every rank knows the scales of
  all tiles that it gathers; see [Note: cut tiles].
- *Frozen*: ranks store codes, or arrays in the dtype of the wire, and no masters. `frozen_wires` returns what is sent.
  Frozen weights have no gradient (`refuse_gradient`).
- *Gathered once per step* (`pregathered_layers`): a `Packed` with all ranks' shards, whose `gather` does not
  communicate.
- *Placeholder* (`Holds.PLACEHOLDER`, with `reduce_over_dp="last"`): if dp divides a weight's shards, gradients are
  taken with respect to an array of NaN with the shape of a whole shard, and what was prepared is gathered. These
  gradients are summed over dp after the last microbatch.
- *Rounded* (`Holds.ROUNDED`, for unequal replicas): the values of the stored array are rounded to the dtype of the
  wire.
- *Replaced* (`Holds.REPLACED`): user code put another array into the variable, such as a noisy weight or the one inside
  `nnx.remat`. What was prepared belongs to the old array. The new one is prepared where it is used, with the same keys
  of stochastic rounding.
- *Of any shape* (`WireSpec.array`): an array that is a matrix on the wire, whose rows the ranks divide. No recipe
  quantizes it.
- *In global view*, values that differ from rank to rank form a global array (`ranks_spec`). `in_view` and `on_ranks`
  call functions written for local view there. The `specs` of a wire, or of a `Stored`, returns its partitions.

Other types of this package that other packages hold: `Shards`, one array per kernel, and `FusedWeights`, fused weights
by name (aliases); `Beside`, a `Stored` as metadata of its variable; `CallKeys`, a module's keys of stochastic rounding;
`FrozenAs`, the formats decided when a weight was frozen; `Apart`, stacked codes with one array per layer; `Reduction`,
the dtypes that a name of `GradReduce` stands for.

Types of other packages that are used with these:

- `layout.Layout`: how a kernel is divided, stored and used; `layout.ArrayLayout`: the same for an array of any shape;
  `layout.Split`: which part of a dimension each tensor rank owns, in a `Layout`.
- `mesh.Roles`: the purpose of each axis of the mesh, from which layouts are made.
- `recipes.Recipe`: the formats in which weights travel and are multiplied, by path.
- `formats.WireFormat` and `Format`: the formats of codes; `formats.Operands`: the formats of a matmul.
- `formats.QuantizedArray`: a matrix as codes. `formats.PackPlan`, with its `Piece`s and `Section`s: the positions of
  codes in a `Packed`.
- `ops.SlottedWeight`: a gathered weight with zeros that receive its gradient in another dtype.
- `chain.Stage`: a layer's weights and these transitions as arrays and functions, run by a `chain.Schedule`;
  `chain.Outputs`: what a layer returns besides its activation.
"""

from .._words import GradReduce as GradReduce
from ._blocks import cuts_blocks as cuts_blocks
from ._blocks import fills_blocks as fills_blocks
from ._blocks import shards_fit as shards_fit
from ._blocks import tensor_cuts as tensor_cuts
from ._codes import StoredCodes as StoredCodes
from ._codes import codes_specs as codes_specs
from ._exchange import exchange_gradients as exchange_gradients
from ._frozen import FrozenAs as FrozenAs
from ._frozen import frozen_wires as frozen_wires
from ._frozen import quantize_frozen as quantize_frozen
from ._frozen import refuse_gradient as refuse_gradient
from ._fused import Shards as Shards
from ._fused import bytes_of as bytes_of
from ._fused import cut_fused as cut_fused
from ._fused import fuse as fuse
from ._fused import fused_parts as fused_parts
from ._fused import in_order as in_order
from ._fused import part_of as part_of
from ._fused import split_features as split_features
from ._fused import use_rows as use_rows
from ._gather import gathered as gathered
from ._gather import moved_weight as moved_weight
from ._gather import straight_through as straight_through
from ._grad_reduce import GRAD_REDUCE as GRAD_REDUCE
from ._grad_reduce import Reduction as Reduction
from ._grad_reduce import reduction_of as reduction_of
from ._group import WeightGroup as WeightGroup
from ._optimizer_axes import scatter_stored as scatter_stored
from ._packed import Packed as Packed
from ._prepare import Prepared as Prepared
from ._prepare import amaxes_of_weights as amaxes_of_weights
from ._prepare import bytes_on_wire as bytes_on_wire
from ._prepare import prepare as prepare
from ._prepare import quantize as quantize
from ._prepare import quantize_together as quantize_together
from ._prepare import scaling_of_replaced as scaling_of_replaced
from ._quantize import Bundle as Bundle
from ._quantize import pack_all as pack_all
from ._ranks import in_view as in_view
from ._ranks import on_ranks as on_ranks
from ._ranks import ranks_spec as ranks_spec
from ._reduce import Reduced as Reduced
from ._reduce import divide_gradients as divide_gradients
from ._reduce import in_param_dtypes as in_param_dtypes
from ._reduce import reduce_gradients as reduce_gradients
from ._reduce import scatter as scatter
from ._reduce import stored_gradients as stored_gradients
from ._resolve import Groups as Groups
from ._resolve import Layers as Layers
from ._resolve import Structure as Structure
from ._resolve import check_ends as check_ends
from ._resolve import of_layers as of_layers
from ._resolve import resolve as resolve
from ._rounding import CallKeys as CallKeys
from ._rounding import key_for as key_for
from ._stored_tiles import StoredTiles as StoredTiles
from ._stretch import Apart as Apart
from ._stretch import Stretch as Stretch
from ._stretch import wires_of as wires_of
from ._tiles import Tiles as Tiles
from ._value import Beside as Beside
from ._value import Gathered as Gathered
from ._value import Holds as Holds
from ._value import Scaling as Scaling
from ._value import Stored as Stored
from ._value import forget_after as forget_after
from ._wire import FusedWeights as FusedWeights
from ._wire import Kernels as Kernels
from ._wire import OwnFormat as OwnFormat
from ._wire import Part as Part
from ._wire import Wire as Wire
from ._wire_spec import ModulePath as ModulePath
from ._wire_spec import WireSpec as WireSpec
