"""Replicas of unequal tensor-parallel degree: plans them after failures, moves weights and gradients, and runs the
step."""

from ._batches import Batches as Batches
from ._batches import is_here as is_here
from ._best_core import with_best_core as with_best_core
from ._boxes import Box as Box
from ._boxes import box_of as box_of
from ._boxes import elements as elements
from ._faults import FaultPlan as FaultPlan
from ._faults import Grid as Grid
from ._faults import Replica as Replica
from ._faults import plan_faults as plan_faults
from ._frozen_weights import FrozenWeights as FrozenWeights
from ._gradient_codes import coded_leaves as coded_leaves
from ._gradient_codes import sent_back as sent_back
from ._layouts import LeafSpecs as LeafSpecs
from ._layouts import plan_fold as plan_fold
from ._layouts import plan_unfold as plan_unfold
from ._layouts import without_replicas as without_replicas
from ._models import lay_out as lay_out
from ._models import leaf_specs as leaf_specs
from ._models import with_whole_sequences as with_whole_sequences
from ._moves import LeafBoxes as LeafBoxes
from ._moves import Moves as Moves
from ._moves import plan_moves as plan_moves
from ._replica_dtypes import ReplicaDtypes as ReplicaDtypes
from ._replica_dtypes import replica_dtypes_of as replica_dtypes_of
from ._replicas import Replicas as Replicas
from ._step import NonuniformStep as NonuniformStep
from ._transfer import Transfer as Transfer
from ._transferred import Transferred as Transferred
from ._transferred import transferred as transferred
