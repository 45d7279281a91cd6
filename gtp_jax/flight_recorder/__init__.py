"""Records where the devices of each process are in their programs, and says who waits for whom if a step hangs."""

from ._memory import own_stamps as own_stamps
from ._places import PLACES as PLACES
from ._places import Place as Place
from ._places import stamp as stamp
from ._recorder import Recorder as Recorder
from ._recorder import active as active
from ._recorder import recorder as recorder
from ._recorder import step_recorded as step_recorded
from ._report import Report as Report
from ._report import sentence as sentence
from ._steps import Steps as Steps
