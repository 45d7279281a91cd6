"""Layouts: how a weight is stored and used, as plain data, with the data movements that need no communication.

[Note: where weights live]
- `Layout`: a kernel of gtp_jax's own layers. Names the axes by what they do, and covers experts and uneven tp.
- `ArrayLayout`: a `gtp_jax.Param` of any shape, with the `Layout` of the matrix as which it travels.
- `Placement`: an array of any shape that any axes may divide: a weight of a module that gtp_jax did not write, or the
  codes or scales of a frozen weight. Names the partitions before and after the gather.
- `Matrix`: a `Placement` seen as a matrix, with the `Layout` of that matrix.

The first three (`AnyLayout`) have a logical shape, the shape of the stored array, which may be padded, and its
partition spec. `pad`, `cut` and the functions of shapes beside them convert between the two.
"""

from ._array import ArrayLayout as ArrayLayout
from ._array import layout_of_array as layout_of_array
from ._choice import BLOCK as BLOCK
from ._choice import SMALL as SMALL
from ._choice import layouts_of_kernels as layouts_of_kernels
from ._codes import layouts_in_blocks as layouts_in_blocks
from ._codes import layouts_of_codes as layouts_of_codes
from ._even_shares import even_shares as even_shares
from ._even_shares import shares_may_be_even as shares_may_be_even
from ._layout import Layout as Layout
from ._layout import axes_in_use as axes_in_use
from ._layout import listed as listed
from ._matrix import Matrix as Matrix
from ._matrix import seen_as_matrix as seen_as_matrix
from ._padding import AnyLayout as AnyLayout
from ._padding import cut as cut
from ._padding import cut_shape as cut_shape
from ._padding import is_padded as is_padded
from ._padding import pad as pad
from ._padding import padded_shape as padded_shape
from ._place import place as place
from ._place import placed as placed
from ._placement import Placement as Placement
from ._placement import shards_of as shards_of
from ._row_blocks import ROW_BLOCK as ROW_BLOCK
from ._row_blocks import row_blocks_layout as row_blocks_layout
from ._row_blocks import row_blocks_shape as row_blocks_shape
from ._row_blocks import row_blocks_spec as row_blocks_spec
from ._split import Split as Split
from ._storage import UNDIVIDED as UNDIVIDED
from ._storage import UNPADDED as UNPADDED
from ._storage import Division as Division
from ._storage import Padding as Padding
from ._storage import Storage as Storage
