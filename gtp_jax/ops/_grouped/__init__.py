"""The matmul of a layer of experts, for each kind of operands; its kernels; and the rows that it multiplies."""

from ._expand import Window as Window
from ._expand import expand as expand
from ._expand import shares_of_places as shares_of_places
from ._expand import sum_of_places as sum_of_places
from ._expand import window_of as window_of
from ._fp8 import grouped_fp8 as grouped_fp8
from ._hopper import multiplies_fp8_groups as multiplies_fp8_groups
from ._hopper import multiplies_tiles as multiplies_tiles
from ._matmul import grouped_matmul as grouped_matmul
from ._quantized import grouped_quantized as grouped_quantized
from ._row_codes import rows_in_codes as rows_in_codes
from ._row_codes import with_rows as with_rows
