"""Arrays to codes, and codes to arrays."""

from ._amax import hadamard as hadamard
from ._amax import hadamard_amax as hadamard_amax
from ._amax import multi_amax as multi_amax
from ._amax import power_of_two_amax as power_of_two_amax
from ._blocked import RUN as RUN
from ._blocked import blocked_product as blocked_product
from ._blocked import lacks_blocked_product as lacks_blocked_product
from ._blocked import quantize_blocked as quantize_blocked
from ._blocked import transposed as transposed
from ._fused import amax_fused as amax_fused
from ._fused import quantize_fused as quantize_fused
from ._pack import pack as pack
from ._pack import pack_apart as pack_apart
from ._pack import unpack as unpack
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._swiglu import quantize_swiglu as quantize_swiglu
from ._swiglu import quantize_swiglu_gradient as quantize_swiglu_gradient
from ._swiglu import swiglu as swiglu
from ._swiglu import swiglu_amax as swiglu_amax
