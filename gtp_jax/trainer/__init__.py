"""A training run: its configuration, directory, loop, log and report, and the watch over its processes."""

from ._config import VIRTUAL_DEVICES as VIRTUAL_DEVICES
from ._config import TrainConfig as TrainConfig
from ._config import default_lr as default_lr
from ._directory import RunDirectory as RunDirectory
from ._directory import checkpoints_in as checkpoints_in
from ._distributed import LAUNCH_GROUP as LAUNCH_GROUP
from ._distributed import Launch as Launch
from ._distributed import LaunchOptions as LaunchOptions
from ._distributed import NoCoordinator as NoCoordinator
from ._distributed import find_launch as find_launch
from ._lock import Lock as Lock
from ._lock import LostLock as LostLock
from ._lock import Ownership as Ownership
from ._log import read_log as read_log
from ._progress import Diverged as Diverged
from ._run import resolve as resolve
from ._run import start as start
from ._watch import Activity as Activity
from ._watch import Supervision as Supervision
from ._watch import Watch as Watch
