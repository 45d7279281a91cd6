"""Layouts: how a weight is stored and used, as plain data, with the data movements that need no communication."""

from ._array import ArrayLayout as ArrayLayout
from ._array import layout_of_array as layout_of_array
from ._choice import BLOCK as BLOCK
from ._choice import BLOCK_ROWS as BLOCK_ROWS
from ._choice import layouts_of_kernels as layouts_of_kernels
from ._codes import layouts_in_blocks as layouts_in_blocks
from ._codes import layouts_of_codes as layouts_of_codes
from ._even_shares import even_shares as even_shares
from ._even_shares import shares_are_even as shares_are_even
from ._layout import Layout as Layout
from ._layout import axes_in_use as axes_in_use
from ._layout import listed as listed
from ._pad_choice import Target as Target
from ._pad_choice import choose_padding as choose_padding
from ._padding import AnyLayout as AnyLayout
from ._padding import PaddedLayout as PaddedLayout
from ._padding import cut as cut
from ._padding import pad as pad
from ._split import Split as Split
from ._storage import UNDIVIDED as UNDIVIDED
from ._storage import UNPADDED as UNPADDED
from ._storage import Division as Division
from ._storage import Padding as Padding
from ._storage import Storage as Storage
