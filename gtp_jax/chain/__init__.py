"""Layers in a row, their weights gathered ahead of use and their gradients scattered behind it."""

from ._chain import Link as Link
from ._chain import run as run
from ._policy import REMAT as REMAT
from ._policy import Remat as Remat
from ._policy import with_remat as with_remat
from ._schedule import Schedule as Schedule
