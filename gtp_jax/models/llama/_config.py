"""Sizes and choices of a Llama."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

from ..._foreign import brief
from ...chain import KeepGathered, Remat, Schedule
from ...experts import ExpertParallel, Routing, Transport, check_chunks, check_moe, check_transport
from ...nn import GradReduce, check_heads, reduction_of
from ...ops import MOST, RopeScaling, check_rotary

_ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "tie_embeddings",
    "rope_theta",
    "epsilon",
)
_OF_EXPERTS = ("num_experts", "top_k")
# What a router chooses, and whether it has a bias; its terms and the bias's rate say how it is trained.
OF_ROUTING = ("score", "normalize", "scale", "num_groups", "top_groups", "bias_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and choices of a Llama.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        qk_norm: normalise each head of queries and keys by RMSNorm, as Qwen3 does.
        qkv_bias: add biases to queries, keys and values, as Qwen2 does.
        window: how many tokens a token attends to, itself included, as in Mistral; `None` for all before it.
        intermediate_size: hidden width of the MLP, or of each expert.
        num_experts: how many stand in place of each MLP; 0 for an MLP.
        top_k: experts a token.
        aux_loss_coeff: weight of the term that keeps experts evenly loaded; see `MoE`.
        expert_parallel: what tp does to experts; see `MoE`.
        expert_axes: mesh axes over which experts are gathered, those of dense layers by default; see `GroupedDense`.
        routing: how a token's experts are chosen, by default as in Mixtral; a `Routing`, or a dict of its fields.
        shared_hidden: hidden width of an MLP that every token goes through as well, DeepSeek's shared experts; 0 for
            none.
        transport, round_size, exchange_chunks: how tokens travel over ep, how many rows experts multiply at once, and
            in how many parts tokens travel; see `MoE`.
        tie_embeddings: whether the head uses the embedding's table.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: of the rotary frequencies, as Llama 3.1 or YaRN has it; a `RopeScaling`, or a dict of its fields.
        epsilon: of the norms.
        dtype: compute dtype, by name.
        grad_reduce: how weight gradients are summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `gtp_jax.nn.reduction_of`.
        sequence_parallel: shard the sequence over tp between layers.
        remat: what blocks keep for backward.
        prefetch, unroll, keep_gathered: the chain's schedule; see `Schedule`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0
    top_k: int = 2
    aux_loss_coeff: float = 0.01
    expert_parallel: ExpertParallel = "features"
    expert_axes: tuple[str, ...] | None = None
    routing: Routing = Routing()
    shared_hidden: int = 0
    transport: Transport | None = None
    round_size: float = 1.25
    exchange_chunks: int = 1
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int | None = None
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    epsilon: float = 1e-5
    dtype: str = "bfloat16"
    grad_reduce: GradReduce = "float32"
    sequence_parallel: bool = True
    remat: Remat = "matmuls"
    prefetch: bool = True
    unroll: int | Literal["full"] = "full"
    keep_gathered: KeepGathered = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # as checkpoints have it
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.routing, dict):
            object.__setattr__(self, "routing", Routing(**self.routing))
        for field in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        ):
            if not _is_size(getattr(self, field), least=1):
                raise ValueError(
                    f"`{field}` is {brief(getattr(self, field))}; it must be a whole number of at least 1, below 2**31."
                )
        for field in ("qk_norm", "qkv_bias", "tie_embeddings", "sequence_parallel"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` is {getattr(self, field)!r}; it must be True or False.")
        for field, allowed in (("rope_theta", "above 0"), ("epsilon", "of at least 0")):
            value = getattr(self, field)
            if not _is_number(value) or not 0 <= value <= MOST or (value == 0 and field == "rope_theta"):
                raise ValueError(f"`{field}` is {brief(value)}; it must be a number {allowed}, at most {MOST:.7g}.")
            object.__setattr__(self, field, float(value))  # JAX takes no int of more than 32 bits
        check_rotary(self.head_dim, None, self.rope_theta, self.rope_scaling)
        if self.window is not None and not _is_size(self.window, least=1):
            raise ValueError(
                f"`window` is {brief(self.window)}; it must be a number of tokens, at least 1 and below 2**31, or None "
                "for all."
            )
        check_heads(self.num_heads, self.num_kv_heads, 1)
        if not _is_size(self.num_experts):
            raise ValueError(
                f"`num_experts` is {brief(self.num_experts)}; it must be a whole number, 0 for an MLP, below 2**31."
            )
        self._check_experts()
        reduction_of(self.grad_reduce, self.dtype)
        self.schedule  # noqa: B018  validates its three fields

    def _check_experts(self) -> None:
        if not _is_size(self.shared_hidden):
            raise ValueError(
                f"`shared_hidden` is {brief(self.shared_hidden)}; it must be a whole number, 0 for none, below 2**31."
            )
        if not isinstance(self.routing, Routing):
            raise ValueError(f"`routing` is {self.routing!r}; it must be a `gtp_jax.Routing`, or a dict of its fields.")
        if self.routing.jitter:
            raise ValueError(
                f"`jitter` is {self.routing.jitter}; a Llama passes no keys to its layers, so that there would be no "
                "jitter. Leave it 0, or call `gtp_jax.MoE` with `key=` in a model of your own."
            )
        if self.num_experts:
            check_moe(self.num_experts, self.top_k, self.aux_loss_coeff)
            self.routing.check(self.num_experts, self.top_k)
            check_transport(self.transport)
            check_chunks(self.exchange_chunks)
        elif self.shared_hidden:
            raise ValueError(f"`shared_hidden` is {self.shared_hidden}, but `num_experts` is 0: it goes with experts.")

    @property
    def schedule(self) -> Schedule:
        """The chain's schedule."""
        return Schedule(prefetch=self.prefetch, unroll=self.unroll, keep_gathered=self.keep_gathered)

    def check_mesh(self, *, tp: int, seq: int) -> None:
        """Checks that the model and its sequences can be divided over tp.

        Raises:
            ValueError: if tp does not divide the heads or the sequence.
        """
        check_heads(self.num_heads, self.num_kv_heads, tp)
        if self.sequence_parallel and seq % tp:
            raise ValueError(f"`seq` is {seq}, which tp {tp} does not divide; the sequence is sharded over tp.")

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that say which model the weights are of; the others say how it is computed."""
        fields = {name: getattr(self, name) for name in (*_ARCHITECTURE, *(_OF_EXPERTS if self.num_experts else ()))}
        fields |= {name: True for name in ("qk_norm", "qkv_bias") if getattr(self, name)}
        if self.window is not None:
            fields["window"] = self.window
        if self.shared_hidden:
            fields["shared_hidden"] = self.shared_hidden
        usual = Routing()
        routing = {name: getattr(self.routing, name) for name in OF_ROUTING}
        if routing["bias_rate"] is not None:
            routing["bias_rate"] = 0.0  # there is a bias; how fast it moves says how it is trained
        if routing := {name: value for name, value in routing.items() if value != getattr(usual, name)}:
            fields["routing"] = routing
        scaling = self.rope_scaling
        return fields if scaling is None else {**fields, "rope_scaling": dataclasses.asdict(scaling)}

    def matmul_params(self) -> int:
        """Parameters that a token is multiplied with: not the norms', an untied embedding's, or other experts'."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts:
            mlp = self.top_k * mlp + self.hidden_size * self.num_experts  # and the router's
            mlp += 3 * self.hidden_size * self.shared_hidden
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    def param_count(self) -> int:
        """Returns all parameters."""
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        idle = (
            self.num_layers * (self.num_experts - self.top_k) * 3 * self.hidden_size * self.intermediate_size
            if self.num_experts
            else 0
        )
        biases = self.num_layers * self.num_experts if self.routing.bias_rate is not None else 0
        if self.qkv_bias:
            biases += self.num_layers * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.matmul_params() + idle + embedding + biases + self._norms()

    def _norms(self) -> int:
        """Returns the parameters of norms."""
        heads = 2 * self.num_layers * self.head_dim if self.qk_norm else 0
        return (2 * self.num_layers + 1) * self.hidden_size + heads


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_size(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) < 1 << 31
