"""The life of a weight: how each is gathered, quantized and multiplied, and how its gradient is reduced.

[Note: life of a weight]
Functions take what is decided (`WeightGroup`, static, compared by value) and arrays, never modules. No Flax here: `nn`
extracts a `Structure` from a model (`nn.groups_of`), and puts the values made here into its variables.

| state | type | the transition to it | when |
|---|---|---|---|
| stored | an array of logical shape, sharded as its `Layout` says, over dp too (ZeRO) | a constructor | between steps |
| decided | `WeightGroup`, by path and `Layers` | `resolve(structure, recipe)` | per trace |
| prepared | `Stretch`es of `Wire`s, beside the array (`Stored`) | `prepare(groups, stored)` | per step |
| on the wire | a `Wire`: `Kernels`, `Packed` (of `prepare`), `StoredCodes` (frozen) | `wires_of` | per layer |
| cast and joined | `Part`, of `Kernels` alone | `Wire.ready(groups)` | forward; a chain keeps it for backward |
| gathered | the fused weight or its codes; in a chain `Gathered` | `Wire.gather(groups)` | per pass, before its layer |
| gradient | of the gathered weight, or in its slot | the layer's backward | |
| reduced | `Reduced`: this rank's part of the sum, or shards | `reduce_gradients(groups, gradients)` | one layer late |
| gradient of shards | `Shards` | `stored_gradients(groups, reduced)`, `in_param_dtypes` | after its layer |

`straight_through` makes of a gather a function of the shards, whatever is gathered in their place; `gathered` is the
whole way for a layer outside a chain.

Less usual states:

- *In a format of your own*: a recipe's `wire` is an `OwnFormat`, which makes a `Wire` of its own in place of a
  `Packed`; see [Note: a wire of your own] and `examples/07_wire_of_your_own.py`.
- *Frozen*: ranks store codes, or arrays in the dtype in which they travel, and no master. `frozen_wires` sends them;
  they have no gradient (`refuse_gradient`).
- *Gathered before the step* (`pregathered_layers`): a `Packed` with all ranks' shards, whose `gather` moves nothing.
- *Placeholder* (`Holds.PLACEHOLDER`, of `reduce_over_dp="last"`): gradients are taken of arrays of NaN that have the
  shapes of whole shards, and what was joined before is gathered. They are summed over dp after the last microbatch.
- *Rounded* (`Holds.ROUNDED`, of unequal replicas): the stored array has values of the dtype in which it travels.
- *Replaced* (`Holds.REPLACED`): user code put another array into the variable, such as a noisy weight or the one inside
  `nnx.remat`. What was prepared is of the old one; the new one is prepared where it is used, and keeps its keys.
- *Of any shape* (`WeightGroup.array`): a matrix on the wire, whose rows the ranks divide; no recipe quantizes it.
- *In global view* what is every rank's own is a global array (`ranks_spec`). One wrapper, `in_view`, calls what is
  written for a rank there, with the partitions that `specs` of a wire, or of `Stored`, tells.

Further types of this room that others hold: `Shards`, one array a kernel, and `FusedWeights`, by name (aliases);
`Beside`, a `Stored` as metadata of its variable; `CallKeys`, a module's keys of stochastic rounding; `FrozenAs`, what
was decided when a weight was frozen; `Apart`, stacked codes of which each layer's is an array of its own; `Reduction`,
what a name of `GradReduce` means.

Types of other rooms on the way:

- `layout.Layout`: how a kernel is divided, stored and used; `layout.ArrayLayout`: the same of an array of any shape;
  `layout.Split`: what tensor ranks own of a dimension, in a `Layout`.
- `mesh.Roles`: what each axis of the mesh is for, of which a layout is made.
- `recipes.Recipe`: what travels and is multiplied in which format, by path.
- `formats.WireFormat` and `Format`: what codes are written in; `formats.Operands`: the formats of a matmul.
- `formats.QuantizedArray`: a matrix as codes. `formats.PackPlan`, of `Piece`s and `Section`s: where codes lie in a
  `Packed`, below the wire.
- `ops.SlottedWeight`: a gathered weight with zeros, where its gradient goes in another dtype.
- `chain.Stage`: a layer's weights and these transitions as arrays and functions, run by a `chain.Schedule`;
  `chain.Outputs`: what a layer returns beside its activation.
"""

from ._codes import StoredCodes as StoredCodes
from ._codes import codes_specs as codes_specs
from ._exchange import exchange_gradients as exchange_gradients
from ._frozen import FrozenAs as FrozenAs
from ._frozen import frozen_wires as frozen_wires
from ._frozen import quantize_frozen as quantize_frozen
from ._frozen import refuse_gradient as refuse_gradient
from ._fused import Shards as Shards
from ._fused import bytes_of as bytes_of
from ._fused import fuse as fuse
from ._fused import in_order as in_order
from ._fused import part_of as part_of
from ._fused import split_features as split_features
from ._fused import use_rows as use_rows
from ._gather import gathered as gathered
from ._gather import moved_weight as moved_weight
from ._gather import straight_through as straight_through
from ._grad_reduce import GRAD_REDUCE as GRAD_REDUCE
from ._grad_reduce import GradReduce as GradReduce
from ._grad_reduce import Reduction as Reduction
from ._grad_reduce import reduction_of as reduction_of
from ._group import ModulePath as ModulePath
from ._group import WeightGroup as WeightGroup
from ._optimizer_axes import scatter_stored as scatter_stored
from ._packed import Packed as Packed
from ._plan import cut as cut
from ._plan import cuts_blocks as cuts_blocks
from ._plan import shards_fit as shards_fit
from ._prepare import Prepared as Prepared
from ._prepare import bytes_on_wire as bytes_on_wire
from ._prepare import prepare as prepare
from ._prepare import quantize as quantize
from ._prepare import quantize_together as quantize_together
from ._quantize import Bundle as Bundle
from ._quantize import pack_all as pack_all
from ._ranks import in_view as in_view
from ._ranks import on_ranks as on_ranks
from ._ranks import ranks_spec as ranks_spec
from ._reduce import Reduced as Reduced
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
from ._stretch import Apart as Apart
from ._stretch import Stretch as Stretch
from ._stretch import wires_of as wires_of
from ._value import Beside as Beside
from ._value import Gathered as Gathered
from ._value import Holds as Holds
from ._value import Stored as Stored
from ._value import forget_after as forget_after
from ._wire import FusedWeights as FusedWeights
from ._wire import Kernels as Kernels
from ._wire import OwnFormat as OwnFormat
from ._wire import Part as Part
from ._wire import Wire as Wire
