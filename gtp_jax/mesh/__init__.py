"""Who owns what: mesh axes and the layout of a weight."""

from ._axes import AXES as AXES
from ._axes import BATCH_AXES as BATCH_AXES
from ._axes import DP as DP
from ._axes import GTP as GTP
from ._axes import TP as TP
from ._axes import View as View
from ._axes import current_view as current_view
from ._axes import degree as degree
from ._axes import degrees as degrees
from ._axes import make_mesh as make_mesh
from ._companions import differs_in_memory as differs_in_memory
from ._companions import in_memory as in_memory
from ._companions import on_disk as on_disk
from ._hardware import multiplies_blocks as multiplies_blocks
from ._hardware import multiplies_fp8 as multiplies_fp8
from ._hardware import platform as platform
from ._hardware import runs_kernels as runs_kernels
from ._layout import ALIGNMENT as ALIGNMENT
from ._layout import Layout as Layout
from ._layout import cut_axes as cut_axes
from ._layout import stacked_spec as stacked_spec
from ._paths import Path as Path
from ._paths import of_parameter as of_parameter
from ._paths import with_paths as with_paths
