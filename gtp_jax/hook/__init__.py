"""Shards the weights of any NNX model, and gathers them block by block.

[Note: tokens carry order, never values]
`shard` turns chosen modules into units: instances of a subclass of their class, whose call is implemented here. Each
call of a unit traces the unit's code once, in its caller's contexts, to a jaxpr, which one `custom_vjp` evaluates.
Forward gathers the unit's weights and keeps their shards; backward gathers them again.

A token of two zeros passes from unit to unit. A unit's gather waits for the first zero, which is available once the
previous unit has its input and its weights, so that the gather runs while the previous unit computes. In backward, the
token's cotangent does the same: its first zero is available once the next unit has its weights and the gradient of its
output, and its second zero once the next unit's gradients are reduced. If a token is lost, used twice or stale, a
gather starts late or early, but no value changes.

Under a recipe, a unit's matrices are quantized once per call (`_codes`), or once per step of `train_step` (`_made`).
Both passes gather the codes (`_weights`), and products with weights may be computed in the recipe's formats
(`_products`). If gradients of weights are to be summed in float32, or exchanged by ranks (`_exchange`), the products
that `_products` finds add them to slots: arrays of zeros in the wanted dtype and shape.
"""

from ._codes import Coded as Coded
from ._codes import encode as encode
from ._exchange import exchange as exchange
from ._facts import ShardedWeight as ShardedWeight
from ._facts import UnitCall as UnitCall
from ._facts import UnitFact as UnitFact
from ._facts import WeightFact as WeightFact
from ._facts import calls_of as calls_of
from ._facts import largest_unit as largest_unit
from ._facts import roles_of as roles_of
from ._facts import sharded_weights as sharded_weights
from ._facts import unit_facts as unit_facts
from ._facts import weight_facts as weight_facts
from ._made import with_made as with_made
from ._movement import scatter as scatter
from ._path import weight_paths as weight_paths
from ._placement import Placement as Placement
from ._placement import placement_of as placement_of
from ._quantized import quantized as quantized
from ._scope import recipe_of_step as recipe_of_step
from ._scope import without_hook as without_hook
from ._shard import shard as shard
from ._walk import INSIDE_TRANSFORMATION as INSIDE_TRANSFORMATION
from ._weights import Weights as Weights
