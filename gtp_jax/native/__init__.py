"""The Python half of `ffi/`: calls of its C++ and CUDA handlers.

The functions of `_calls` have the signatures of those in `gtp_jax.ops.reference`, and are equal to them bit for bit.
Those of `_blocked_calls` and `_swiglu_calls` have references with other arguments, and those of `_grouped_calls` and
`_host_calls` have none; all of these run on GPUs only. None of them checks its arguments: call them through
`gtp_jax.ops`, which does.
"""

from ._blocked_calls import blocked_product as blocked_product
from ._blocked_calls import quantize_runs as quantize_runs
from ._calls import dequantize as dequantize
from ._calls import hadamard_amax as hadamard_amax
from ._calls import multi_amax as multi_amax
from ._calls import pack as pack
from ._calls import pack_apart as pack_apart
from ._calls import quantize as quantize
from ._calls import stamp as stamp
from ._calls import unpack as unpack
from ._grouped_calls import grouped_blocked_outer as grouped_blocked_outer
from ._grouped_calls import grouped_blocked_product as grouped_blocked_product
from ._grouped_calls import grouped_outer as grouped_outer
from ._grouped_calls import grouped_product as grouped_product
from ._grouped_calls import take as take
from ._grouped_calls import transpose as transpose
from ._host_calls import arrive as arrive
from ._host_calls import leave as leave
from ._host_calls import read as read
from ._host_calls import write as write
from ._library import REBUILD as REBUILD
from ._library import code_for as code_for
from ._library import cublaslt_version as cublaslt_version
from ._library import describe as describe
from ._library import has as has
from ._library import is_built as is_built
from ._library import rebuild_for as rebuild_for
from ._library import record_sizes as record_sizes
from ._library import record_to as record_to
from ._swiglu_calls import swiglu_amax as swiglu_amax
from ._swiglu_calls import swiglu_quantize as swiglu_quantize
from ._swiglu_calls import swiglu_quantize_gradient as swiglu_quantize_gradient
