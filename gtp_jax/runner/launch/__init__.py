"""Finds the processes of a run, as flags or the environment of a launcher describe them, and connects them."""

from ._distributed import distributed as distributed
from ._launch import LAUNCH_GROUP as LAUNCH_GROUP
from ._launch import Launch as Launch
from ._launch import LaunchOptions as LaunchOptions
from ._launch import NoCoordinator as NoCoordinator
from ._launch import find_launch as find_launch
from ._launch import host_of_first as host_of_first
