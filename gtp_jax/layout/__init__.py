"""Layouts: how a weight is stored and used, as plain data, with the data movements that need no communication."""

from ._array import ArrayLayout as ArrayLayout
from ._array import layout_of_array as layout_of_array
from ._choice import BLOCK as BLOCK
from ._choice import layouts_of_kernels as layouts_of_kernels
from ._codes import layouts_in_blocks as layouts_in_blocks
from ._codes import layouts_of_codes as layouts_of_codes
from ._even_shares import even_shares as even_shares
from ._even_shares import shares_are_even as shares_are_even
from ._layout import Layout as Layout
from ._layout import axes_in_use as axes_in_use
from ._layout import listed as listed
from ._matrix import Matrix as Matrix
from ._matrix import seen_as_matrix as seen_as_matrix
from ._padding import AnyLayout as AnyLayout
from ._padding import cut as cut
from ._padding import pad as pad
from ._place import place as place
from ._place import placed as placed
from ._placement import Placement as Placement
from ._placement import shards_of as shards_of
from ._split import Split as Split
from ._storage import UNDIVIDED as UNDIVIDED
from ._storage import UNPADDED as UNPADDED
from ._storage import Division as Division
from ._storage import Padding as Padding
from ._storage import Storage as Storage
