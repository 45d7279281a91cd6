"""Sharded checkpoints that any mesh can read: logical arrays, plain nested dicts, a manifest beside them."""

from ._checkpoints import Checkpoints as Checkpoints
