"""Sharded checkpoints that any mesh can read: logical arrays in plain nested dicts, and a manifest."""

from ._checkpoints import CODES as CODES
from ._checkpoints import Checkpoints as Checkpoints
from ._checksums import CHECKSUM_EVENT as CHECKSUM_EVENT
from ._checksums import DamagedCheckpoint as DamagedCheckpoint
from ._foreign_json import MAX_FILE_BYTES as MAX_FILE_BYTES
from ._place import check_encodes as check_encodes
from ._place import checkpoints_in as checkpoints_in
from ._place import real_path as real_path
from ._steps import whole_step as whole_step
from ._stored import StoredArray as StoredArray
from ._stored import check_values as check_values
from ._streamed import StreamedArray as StreamedArray
from ._whole import WITHOUT_SUM as WITHOUT_SUM
