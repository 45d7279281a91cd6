"""Number formats: their definitions, and how their arrays are laid out in memory."""

from ._array import QuantizedArray as QuantizedArray
from ._array import codes_shape as codes_shape
from ._array import scales_shape as scales_shape
from ._array import validate as validate
from ._operands import Operands as Operands
from ._pack import SECTION_BYTES as SECTION_BYTES
from ._pack import PackPlan as PackPlan
from ._pack import Piece as Piece
from ._pack import Section as Section
from ._spec import E2M1 as E2M1
from ._spec import E4M3 as E4M3
from ._spec import E5M2 as E5M2
from ._spec import ELEMENTS as ELEMENTS
from ._spec import FORMATS as FORMATS
from ._spec import FP8_BLOCKS as FP8_BLOCKS
from ._spec import FP8_BLOCKS_1D as FP8_BLOCKS_1D
from ._spec import FP8_E4M3 as FP8_E4M3
from ._spec import FP8_E5M2 as FP8_E5M2
from ._spec import MXFP8 as MXFP8
from ._spec import NVFP4 as NVFP4
from ._spec import NVFP4_1D as NVFP4_1D
from ._spec import RUN as RUN
from ._spec import Element as Element
from ._spec import Format as Format
from ._spec import Tiled as Tiled
from ._spec import WireFormat as WireFormat
