"""The operations in plain jnp, with the signatures of the native kernels, which must be equal to them bit for bit."""

from ._amax import multi_amax as multi_amax
from ._dequantize import dequantize as dequantize
from ._hadamard import hadamard as hadamard
from ._hadamard import hadamard_amax as hadamard_amax
from ._pack import pack as pack
from ._pack import pack_apart as pack_apart
from ._pack import unpack as unpack
from ._quantize import quantize as quantize
