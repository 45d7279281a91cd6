"""Replicas of unequal tensor-parallel degree: which devices go on after failures, and what moves between layouts."""

from ._boxes import Box as Box
from ._boxes import box_of as box_of
from ._boxes import elements as elements
from ._exchange import Exchange as Exchange
from ._exchange import Parts as Parts
from ._exchanged import Exchanged as Exchanged
from ._exchanged import exchanged as exchanged
from ._faults import FaultPlan as FaultPlan
from ._faults import Grid as Grid
from ._faults import Replica as Replica
from ._faults import plan_faults as plan_faults
from ._layouts import LeafSpecs as LeafSpecs
from ._layouts import plan_fold as plan_fold
from ._layouts import plan_unfold as plan_unfold
from ._layouts import without_replicas as without_replicas
from ._moves import LeafBoxes as LeafBoxes
from ._moves import Moves as Moves
from ._moves import plan_moves as plan_moves
from ._settings import Faults as Faults
