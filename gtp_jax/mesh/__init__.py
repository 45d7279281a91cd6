"""Mesh axes, their roles, and what the devices can do."""

from ._axes import AXES as AXES
from ._axes import DP as DP
from ._axes import GTP as GTP
from ._axes import TP as TP
from ._axes import View as View
from ._axes import current_view as current_view
from ._axes import degree as degree
from ._axes import degrees as degrees
from ._axes import make_mesh as make_mesh
from ._hardware import multiplies_blocks as multiplies_blocks
from ._hardware import multiplies_fp8 as multiplies_fp8
from ._hardware import platform as platform
from ._hardware import runs_kernels as runs_kernels
from ._paths import Path as Path
from ._paths import of_parameter as of_parameter
from ._paths import with_paths as with_paths
from ._roles import Roles as Roles
from ._roles import current_roles as current_roles
from ._roles import use_roles as use_roles
from ._specs import axes_of as axes_of
from ._specs import stacked_spec as stacked_spec
