"""Counts the sizes of a training step's parts on one device, from its options alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from .. import hlo
from .._words import CP, TP
from ..mesh import Roles
from ..models import LlamaConfig
from ._share import BYTES_OF_STATE

VALUE = 2  # the bytes of a bfloat16
_WIDE = 4  # the bytes of a float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A training step of a Llama. Sizes are those of one device, microbatch and layer, in elements.

    Attributes:
        config: the model.
        chip: a key of `hlo.CHIPS`.
        degrees: the degrees of the mesh axes, outermost first.
        roles: the roles of the axes.
        seq: the number of tokens per sequence.
        batch: the number of sequences per step, over all devices.
        microbatches: the number of parts into which a rank's sequences are divided.
        gpus_per_host: the number of GPUs that NVLink joins.
        gradient_bytes: the bytes of an element of a weight gradient as it is reduced.
    """

    config: LlamaConfig
    chip: str
    degrees: Mapping[str, int]
    roles: Roles
    seq: int
    batch: int
    microbatches: int
    gpus_per_host: int
    gradient_bytes: int

    def ranks(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along some axes."""
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    @property
    def tp(self) -> int:
        """The degree of tp."""
        return self.degrees.get(TP, 1)

    @property
    def cp(self) -> int:
        """The degree of cp."""
        return self.degrees.get(CP, 1)

    @property
    def ep(self) -> int:
        """The number of ranks that divide the experts."""
        return self.ranks((self.roles.experts,)) if self.roles.experts and self.config.num_experts else 1

    @property
    def dense_ranks(self) -> int:
        """The number of ranks over which dense weights are gathered."""
        return self.ranks(self.roles.weights)

    @property
    def expert_ranks(self) -> int:
        """The number of ranks over which experts are gathered."""
        return self.ranks(self.roles.over_experts)

    @functools.cached_property
    def t(self) -> int:
        """The tokens, before tp divides them."""
        return self.batch * self.seq // (self.ranks(self.roles.tokens) * self.microbatches)

    @property
    def own(self) -> float:
        """The tokens between layers, which tp divides."""
        return self.t / self.tp

    @property
    def d(self) -> int:
        """The width of the residual stream."""
        return self.config.hidden_size

    @property
    def q(self) -> float:
        """The features of queries."""
        return self.config.num_heads * self.config.head_dim / self.tp

    @property
    def kv(self) -> float:
        """The features of keys, and of values; a rank of cp gets at least one head."""
        return max(self.config.num_kv_heads / self.tp, self.cp) * self.config.head_dim

    @property
    def f(self) -> float:
        """The hidden features of an MLP or expert."""
        return self.config.intermediate_size / self.tp

    @property
    def vocab(self) -> float:
        """The rows of the head."""
        return self.config.vocab_size / self.tp

    @property
    def rows(self) -> int:
        """The rows that experts multiply; 0 without experts."""
        return self.t * self.config.top_k if self.config.num_experts else 0

    @functools.cached_property
    def dense(self) -> float:
        """The dense weights after they were gathered."""
        config = self.config
        attention = self.d * (2 * self.q + 2 * config.num_kv_heads * config.head_dim / self.tp)
        return attention + 3 * self.d * (config.shared_hidden / self.tp if config.num_experts else self.f)

    @functools.cached_property
    def experts(self) -> float:
        """The experts after they were gathered."""
        return self.config.num_experts * 3 * self.d * self.f / self.ep

    @property
    def shard(self) -> float:
        """The shard that a rank prepares for sending, gathered over dp."""
        return self.dense / self.dense_ranks + self.experts / self.expert_ranks

    @property
    def table(self) -> float:
        """The head after it was gathered, or the embedding."""
        return self.vocab * self.d

    @property
    def tables(self) -> int:
        """How many tables there are: one if the head uses the embedding's."""
        return 1 if self.config.tie_embeddings else 2

    @property
    def by_rows(self) -> bool:
        """Whether ranks exchange rows of the embedding, and not the table; see `Embed.group_for`."""
        return self.dense_ranks > 1 and self.dense_ranks * self.t < self.vocab

    @functools.cached_property
    def stored(self) -> tuple[float, float]:
        """The dense weights and the experts of all layers, in stored elements."""
        layers, optimizer = self.config.num_layers, self.ranks(self.roles.over_optimizer)
        dense = (layers * self.dense + self.tables * self.table) / self.dense_ranks / optimizer
        return dense, layers * self.experts / self.expert_ranks / optimizer

    @functools.cached_property
    def keys(self) -> float:
        """The keys that a token attends to: the mean over tokens and layers."""
        widths = [min(self.seq, reach.window or self.seq) for reach in self.config.reaches]
        return sum(width - width * width / self.seq / 2 for width in widths) / len(widths)

    @property
    def state_bytes(self) -> float:
        """The memory of weights and AdamW's state, without norms, biases and padding."""
        return BYTES_OF_STATE * sum(self.stored)

    @property
    def flops(self) -> int:
        """The operations of a step over all devices, without recomputation and masked scores."""
        config = self.config
        return hlo.step_flops(
            matmul_params=config.matmul_params(),
            tokens=self.batch * self.seq,
            layers=config.num_layers,
            seq=int(2 * self.keys),
            heads=config.num_heads,
            head_dim=config.head_dim,
        )

    @property
    def working_bytes(self) -> float:
        """The memory of a step beyond its state, with `remat` "matmuls": what layers save for backward, shards in
        bfloat16, the gathered weights of two layers, logits and their gradients, and gradients that are added up."""
        saved = 3 * self.own * self.d + 2 * self.t * (self.q + self.kv)
        saved += self.rows * (2 * self.f + self.d) if self.config.num_experts else 2 * self.t * self.f
        layers = self.config.num_layers
        prepared = layers * self.shard + self.tables * self.table / self.dense_ranks
        gathered = 2 * (self.dense + self.experts) if self.dense_ranks * self.expert_ranks > 1 else 0
        sums = _WIDE * sum(self.stored) if self.microbatches > 1 else 0
        sums += 2 * _WIDE * (self.dense + self.table) if self.tp > 2 else 0  # see `collectives.gather_linear`
        forward = VALUE * (layers * saved + prepared + gathered + 2 * self.t * self.vocab)
        return max(forward, VALUE * gathered + self.gradient_bytes * sum(self.stored)) + sums
