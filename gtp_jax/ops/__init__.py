"""Numeric operations on plain arrays, and on quantized ones."""

from ._amax import hadamard as hadamard
from ._amax import hadamard_amax as hadamard_amax
from ._amax import multi_amax as multi_amax
from ._amax import power_of_two_amax as power_of_two_amax
from ._attention import causal_attention as causal_attention
from ._cross_entropy import token_cross_entropy as token_cross_entropy
from ._grouped_matmul import grouped_matmul as grouped_matmul
from ._grouped_quantized import grouped_quantized as grouped_quantized
from ._implementation import Implementation as Implementation
from ._keep import KEPT as KEPT
from ._keep import keep as keep
from ._keep import row_major as row_major
from ._linear import linear as linear
from ._linear_blocks import linear_blocks as linear_blocks
from ._linear_fp8 import linear_fp8 as linear_fp8
from ._norm import layer_norm as layer_norm
from ._norm import rms_norm as rms_norm
from ._operand import quantizable as quantizable
from ._pack import pack as pack
from ._pack import unpack as unpack
from ._permute import permute as permute
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._rope import rope as rope
from ._route import balanced as balanced
from ._route import route as route
