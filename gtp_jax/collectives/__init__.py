"""Collectives, and the order in which they run. All functions are called inside a `shard_map`."""

from ._bits import in_bits as in_bits
from ._bits import moved_in_bits as moved_in_bits
from ._heads import parts_of_sequences as parts_of_sequences
from ._heads import whole_sequences_of as whole_sequences_of
from ._over_gloo import all_gather as all_gather
from ._over_gloo import reduce_scatter as reduce_scatter
from ._replicas import replica_axes as replica_axes
from ._replicas import sum_over_replicas as sum_over_replicas
from ._ring import Parts as Parts
from ._ring import gather_linear as gather_linear
from ._ring import join_parts as join_parts
from ._ring import linear_scatter as linear_scatter
from ._ring import split_parts as split_parts
from ._ring_fp8 import gather_linear_fp8 as gather_linear_fp8
from ._ring_fp8 import linear_scatter_fp8 as linear_scatter_fp8
from ._sequence import gather_sequence as gather_sequence
from ._sequence import reduce_scatter_sequence as reduce_scatter_sequence
from ._split import join_split as join_split
from ._turns import Turn as Turn
from ._turns import in_turn as in_turn
from ._turns import no_turn as no_turn
from ._turns import tied as tied
from ._turns import turn_after as turn_after
from ._turns import turn_in_scope as turn_in_scope
from ._turns import use_turn as use_turn
