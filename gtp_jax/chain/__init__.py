"""Runs layers in sequence. By default, weights are gathered and gradients are reduced while other layers compute."""

from ._backward import Gradients as Gradients
from ._backward import backward as backward
from ._effects import effects_explained as effects_explained
from ._events import Barrier as Barrier
from ._events import Compute as Compute
from ._events import Event as Event
from ._events import Fetch as Fetch
from ._events import Gather as Gather
from ._events import Loop as Loop
from ._events import Offload as Offload
from ._events import Plan as Plan
from ._events import Reduce as Reduce
from ._forward import Forward as Forward
from ._forward import forward as forward
from ._offloads import Moved as Moved
from ._offloads import offloads_recorded as offloads_recorded
from ._plan import plan as plan
from ._policy import OFFLOADED as OFFLOADED
from ._policy import REMAT as REMAT
from ._policy import Remat as Remat
from ._policy import with_remat as with_remat
from ._run import run as run
from ._schedule import KeepGathered as KeepGathered
from ._schedule import Schedule as Schedule
from ._stage import Outputs as Outputs
from ._stage import Stage as Stage
