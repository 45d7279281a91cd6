"""Shards the weights of NNX models, and gathers them block by block.

[Note: words of the hook]
- unit: a module, such as a block of a transformer, that gathers its weights when it is called.
- holder: a module that contains units. It gathers only the weights that it holds itself.
- placement: how a weight is partitioned in storage, and after its gather; see [Note: where weights live].
- number of a weight: its index among the weights that one call gathers or quantizes.
- wire: what ranks send instead of the shards of quantized weights, such as their codes.
- slot: an array of zeros that accompanies a weight. A product that the hook computes can return the weight's gradient
  as the gradient of the slot, whose dtype and shape may differ from those of the weight. The slots of delayed scaling
  (`weights.Scaling`) are others: their gradients are amaxes.
- walk: the sequence of calls of units in one trace, within one call of a model.

[Note: a model as a chain]
`shard` changes the class of a unit to a subclass. In this subclass, the methods named by the argument `methods` call
this package (`_call`). A call that must gather or quantize weights traces the unit's code to a jaxpr once (`_trace`),
on copies of the unit and of its arguments' nodes, under the caller's context managers (`_copies`); what the code writes
to the copies (`_writes`) is written to the originals afterwards.

In traced code, the outermost call of a model is recorded (`_record`): its code is traced to a jaxpr, in which each call
of a unit is one operation. The jaxpr is split at these operations (`_split`), and they run as the stages (`_stage`) of
a chain, as the layers of a `Stack` do: forward gathers the next unit's weights while a unit computes, and saves the
shards; backward gathers the weights again, and reduces the gradients one unit later. Other calls (inside a scan or
another transformation, or in code that is not traced) run as chains of one stage, which gather when they run.

The weights that a recipe quantizes are quantized once per call (`_codes`), or once per step of `train_step`
(`_quantized`; `_made` hands the codes to the calls, and the amaxes of delayed scaling). Ranks gather the codes
(`_weights`). The hook finds products with weights (`_products`), and may compute them in the recipe's formats
(`_multiply`). A product that the hook computes can return the gradient of a weight through a slot. Slots serve
gradients that are to be summed in float32, and, in global view, gradients that ranks exchange (`_exchange`).
"""

from ._codes import Coded as Coded
from ._codes import coded as coded
from ._codes import decide as decide
from ._codes import encode as encode
from ._even import evenly_stored as evenly_stored
from ._exchange import exchange as exchange
from ._facts import OffloadingUnit as OffloadingUnit
from ._facts import ShardedWeight as ShardedWeight
from ._facts import UnitCall as UnitCall
from ._facts import UnitFact as UnitFact
from ._facts import WeightFact as WeightFact
from ._facts import calls_of as calls_of
from ._facts import largest_unit as largest_unit
from ._facts import offloading_units as offloading_units
from ._facts import roles_of as roles_of
from ._facts import sharded_weights as sharded_weights
from ._facts import unit_facts as unit_facts
from ._facts import weight_facts as weight_facts
from ._float_ids import float_ids_explained as float_ids_explained
from ._float_ids import ids_refused_by as ids_refused_by
from ._jaxprs import is_reference as is_reference
from ._jaxprs import scan_counts as scan_counts
from ._made import with_made as with_made
from ._maxima import maximum_gradient as maximum_gradient
from ._maxima import with_maxima as with_maxima
from ._maxima import without_maxima as without_maxima
from ._movement import scatter as scatter
from ._path import paths_of as paths_of
from ._path import weight_paths as weight_paths
from ._placement import Placement as Placement
from ._placement import placement_of as placement_of
from ._quantized import delayed as delayed
from ._quantized import quantized as quantized
from ._quantized import to_trace as to_trace
from ._scope import recipe_of_step as recipe_of_step
from ._scope import without_hook as without_hook
from ._shard import has_weights_to_shard as has_weights_to_shard
from ._shard import shard as shard
from ._sources import inputs_returned as inputs_returned
from ._unit import call_with_weights as call_with_weights
from ._walk import INSIDE_TRANSFORMATION as INSIDE_TRANSFORMATION
from ._weights import Weights as Weights
