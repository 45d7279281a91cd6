"""Movements between ranks, with their sums: one file for each. All run inside a `shard_map`."""

from ._exchange import exchange_gradients as exchange_gradients
from ._packed import Bundle as Bundle
from ._packed import Packed as Packed
from ._packed import fits_blocks as fits_blocks
from ._packed import gather_codes as gather_codes
from ._packed import gather_packed as gather_packed
from ._packed import pack_all as pack_all
from ._packed import plan_of as plan_of
from ._packed import pregather_layers as pregather_layers
from ._packed import wire_bytes as wire_bytes
from ._replicas import sum_over_replicas as sum_over_replicas
from ._ring import Parts as Parts
from ._ring import gather_linear as gather_linear
from ._ring import join_parts as join_parts
from ._ring import linear_scatter as linear_scatter
from ._ring import split_parts as split_parts
from ._sequence import gather_sequence as gather_sequence
from ._sequence import reduce_scatter_sequence as reduce_scatter_sequence
from ._weight import Shards as Shards
from ._weight import bytes_of as bytes_of
from ._weight import gather_weight as gather_weight
from ._weight import gathered as gathered
from ._weight import in_order as in_order
from ._weight import scatter_gradient as scatter_gradient
from ._weight import split_features as split_features
from ._weight import use_rows as use_rows
