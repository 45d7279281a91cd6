"""Defines settings as dataclasses, whose fields are flags of commands and keys of a saved configuration."""

from ._adapter_options import AdapterOptions as AdapterOptions
from ._execution import Execution as Execution
from ._expert_options import ExpertOptions as ExpertOptions
from ._fault_options import FaultOptions as FaultOptions
from ._faults import Faults as Faults
from ._free_degrees import FreeDegrees as FreeDegrees
from ._inspect_options import InspectOptions as InspectOptions
from ._knobs import add_flags as add_flags
from ._knobs import as_tuple as as_tuple
from ._knobs import check_knobs as check_knobs
from ._knobs import flag_of as flag_of
from ._knobs import from_settings as from_settings
from ._knobs import given as given
from ._knobs import knob as knob
from ._knobs import knobs as knobs
from ._knobs import piece as piece
from ._knobs import settings_of as settings_of
from ._model_sizes import ModelSizes as ModelSizes
from ._model_sizes import sizes_of as sizes_of
from ._parallelism import Parallelism as Parallelism
from ._plan_options import PlanOptions as PlanOptions
from ._quantization import Quantization as Quantization
from ._quantization import begin_of_phase as begin_of_phase
from ._settings_file import VERSION_KEY as VERSION_KEY
from ._settings_file import read_settings as read_settings
from ._settings_file import write_settings as write_settings
