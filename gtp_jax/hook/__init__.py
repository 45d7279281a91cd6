"""Shards the weights of any NNX model, and gathers them block by block.

[Note: order travels, numbers never do]
`shard` makes chosen modules units: instances of a subclass of their class, whose call is this room's. A unit's code is
traced once per call, in its caller's contexts, to a jaxpr, which one `custom_vjp` evaluates. Forward gathers the unit's
weights and keeps their shards; backward gathers them again. A token of two zeros passes from unit to unit. A unit's
gather waits for the first zero, which is available once the unit before has its input and its weights; so the gather
travels while the unit before computes. In backward the token's cotangent does the same with the gradient of the next
unit's output; its second zero is available once the next unit's gradients are reduced. If a token is lost, used twice
or old, a gather is late or early, and no number changes.
"""

from ._facts import UnitCall as UnitCall
from ._facts import UnitFact as UnitFact
from ._facts import calls_of as calls_of
from ._facts import unit_facts as unit_facts
from ._placement import Placement as Placement
from ._placement import placement_of as placement_of
from ._scope import without_hook as without_hook
from ._shard import shard as shard
