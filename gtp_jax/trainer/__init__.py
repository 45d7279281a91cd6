"""A training run: its configuration, directory, loop, log and report, and the watch over its processes."""

from ._config import VIRTUAL_DEVICES as VIRTUAL_DEVICES
from ._config import TrainConfig as TrainConfig
from ._curve import draw_curve as draw_curve
from ._directory import RunDirectory as RunDirectory
from ._directory import checkpoints_in as checkpoints_in
from ._distributed import Launch as Launch
from ._distributed import add_arguments as add_arguments
from ._distributed import barrier as barrier
from ._distributed import check_same as check_same
from ._distributed import find_launch as find_launch
from ._distributed import together as together
from ._job import prepare as prepare
from ._log import read_log as read_log
from ._loop import run_loop as run_loop
from ._progress import Diverged as Diverged
from ._progress import Progress as Progress
from ._report import heading as heading
from ._report import report as report
from ._start import check_recipe_fits as check_recipe_fits
from ._start import check_start as check_start
from ._watch import Watch as Watch
