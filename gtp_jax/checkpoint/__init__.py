"""Sharded checkpoints that any mesh can read: logical arrays, plain nested dicts, a manifest beside them."""

from ._checkpoints import Checkpoints as Checkpoints
from ._digest import Digest as Digest
from ._stored import StoredArray as StoredArray
from ._streamed import StreamedArray as StreamedArray
