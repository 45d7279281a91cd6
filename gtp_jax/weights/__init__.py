"""What becomes of a model's weights: how each is gathered, quantized and multiplied, and how its gradient is reduced.

No Flax here: `nn` extracts a `Structure` from a model, and puts the values made here into its variables.
"""

from ._frozen import FrozenAs as FrozenAs
from ._frozen import bundle_frozen as bundle_frozen
from ._frozen import quantize_frozen as quantize_frozen
from ._frozen import refuse_gradient as refuse_gradient
from ._frozen import sent_of_frozen as sent_of_frozen
from ._grad_reduce import GRAD_REDUCE as GRAD_REDUCE
from ._grad_reduce import GradReduce as GradReduce
from ._grad_reduce import Reduction as Reduction
from ._grad_reduce import reduction_of as reduction_of
from ._group import WeightGroup as WeightGroup
from ._group import gather as gather
from ._group import gather_members as gather_members
from ._group import in_param_dtypes as in_param_dtypes
from ._group import prepare as prepare
from ._group import reduce_gradients as reduce_gradients
from ._group import scatter as scatter
from ._group import stored_gradients as stored_gradients
from ._quantize import Quantized as Quantized
from ._quantize import check_pregathered_layers as check_pregathered_layers
from ._quantize import quantize as quantize
from ._resolve import Groups as Groups
from ._resolve import Layers as Layers
from ._resolve import Path as Path
from ._resolve import Structure as Structure
from ._resolve import check_ends as check_ends
from ._resolve import of_layers as of_layers
from ._resolve import resolve as resolve
from ._rounding import CallKeys as CallKeys
from ._rounding import key_for as key_for
from ._stored import Joined as Joined
from ._stored import join_stored as join_stored
from ._stored import of_shards as of_shards
from ._straight_through import gather_through as gather_through
from ._straight_through import straight_through as straight_through
from ._value import Beside as Beside
from ._value import Gathered as Gathered
from ._value import Stored as Stored
from ._value import forget_after as forget_after
