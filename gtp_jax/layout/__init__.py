"""Layouts: how a weight is stored and how it is used, as plain data, with the movements that need no communication."""

from ._array import ArrayLayout as ArrayLayout
from ._array import layout_of_array as layout_of_array
from ._layout import BLOCK as BLOCK
from ._layout import Layout as Layout
from ._layout import axes_in_use as axes_in_use
from ._layout import layouts_of_kernels as layouts_of_kernels
from ._split import Split as Split
