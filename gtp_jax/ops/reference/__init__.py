"""The operations in plain jnp. Native kernels must be equal to them bit for bit, except in the sums of products."""

from ._amax import multi_amax as multi_amax
from ._blocked import block_tops as block_tops
from ._blocked import blocked_product as blocked_product
from ._blocked import decode_blocked as decode_blocked
from ._blocked import encode_elements as encode_elements
from ._blocked import inverses as inverses
from ._blocked import power_of_two_scales as power_of_two_scales
from ._blocked import quantize_blocked as quantize_blocked
from ._dequantize import dequantize as dequantize
from ._hadamard import hadamard as hadamard
from ._hadamard import hadamard_amax as hadamard_amax
from ._pack import pack as pack
from ._pack import pack_apart as pack_apart
from ._pack import unpack as unpack
from ._quantize import quantize as quantize
