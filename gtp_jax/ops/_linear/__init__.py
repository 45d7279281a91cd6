"""The matmul of a dense layer, for each kind of operands: forward, dgrad and wgrad."""

from ._blocks import BlockProducts as BlockProducts
from ._blocks import linear_blocks as linear_blocks
from ._fp8 import Fp8Products as Fp8Products
from ._fp8 import codes_for_wgrad as codes_for_wgrad
from ._fp8 import codes_of_gradient as codes_of_gradient
from ._fp8 import codes_of_input as codes_of_input
from ._fp8 import fp8_codes_and_slot as fp8_codes_and_slot
from ._fp8 import fp8_product as fp8_product
from ._fp8 import fp8_transposed as fp8_transposed
from ._fp8 import fp8_values as fp8_values
from ._fp8 import linear_fp8 as linear_fp8
from ._fp8_blocks import TileProducts as TileProducts
from ._fp8_blocks import linear_fp8_blocks as linear_fp8_blocks
from ._fp8_delayed import linear_fp8_delayed as linear_fp8_delayed
from ._fp8_swiglu import swiglu_fp8 as swiglu_fp8
from ._linear import linear as linear
from ._linear import to_input as to_input
from ._linear import to_weight as to_weight
from ._products import Products as Products
from ._products import linear_rounded as linear_rounded
from ._products import under as under
