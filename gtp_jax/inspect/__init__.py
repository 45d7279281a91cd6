"""Reports what a training step costs and does, compiled from shapes alone or read from a trace."""

from ._breakdown import EXPOSED as EXPOSED
from ._breakdown import IDLE as IDLE
from ._breakdown import Breakdown as Breakdown
from ._breakdown import breakdown as breakdown
from ._fault_text import fault_text as fault_text
from ._faults import FaultOptions as FaultOptions
from ._faults import FaultReport as FaultReport
from ._faults import inspect_faults as inspect_faults
from ._inspection import Inspection as Inspection
from ._inspection import InspectOptions as InspectOptions
from ._inspection import inspect as inspect
from ._report import as_json as as_json
from ._report import as_text as as_text
from ._timeline import draw as draw
from ._trace import KINDS as KINDS
from ._trace import Op as Op
from ._trace import kind_of as kind_of
from ._trace import parse_trace as parse_trace
from ._trace import read_trace as read_trace
from ._trace_picture import draw_trace as draw_trace
from ._trace_picture import sentence as sentence
from ._trace_picture import write_page as write_page
