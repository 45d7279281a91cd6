"""The configuration of a Llama."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

from ..._foreign import brief
from ...chain import KeepGathered, Remat, Schedule
from ...collectives import SequenceExchange, check_sequence_exchange
from ...experts import ExpertParallel, Routing, Transport, check_chunks, check_moe, check_transport
from ...nn import GradReduce, Reach, check_heads, reduction_of
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
# Fields of the architecture that are left out of checkpoints if they have their default.
_PARTS = (
    "qk_norm",
    "qkv_bias",
    "window",
    "full_every",
    "window_rope_theta",
    "query_pre_attn_scalar",
    "rotary_dim",
    "norm",
    "branch_norms",
    "activation",
    "scale_embedding",
    "out_bias",
    "sinks",
    "expert_biases",
    "swiglu_limit",
    "swiglu_alpha",
)
_FLAGS = ("qk_norm", "qkv_bias", "branch_norms", "scale_embedding", "out_bias", "sinks", "expert_biases")
_OF_EXPERTS = ("num_experts", "top_k")
# The fields of `Routing` that determine which experts are chosen, and with which weights. `bias_rate` is one of them
# only because it tells whether there is a bias. The rate itself and the remaining fields matter only in training.
OF_ROUTING = ("score", "normalize", "scale", "num_groups", "top_groups", "bias_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The configuration of a Llama.

    Attributes:
        vocab_size: the number of tokens in the vocabulary.
        hidden_size: the width of the residual stream.
        num_layers: the number of blocks.
        num_heads: the number of query heads.
        num_kv_heads: the number of key-value heads.
        head_dim: the width of a head.
        qk_norm: whether each head of queries and keys is normalized with RMSNorm, like in Qwen3.
        qkv_bias: whether queries, keys and values have biases, like in Qwen2.
        window: the number of tokens that a token attends to, including itself, like in Mistral; `None` for itself and
            all before it.
        full_every: if n, layers n, 2 n, ... have no window, like in Gemma 3; `None` if the window is that of all
            layers.
        window_rope_theta: the base of the rotary wavelengths of layers with a window, whose frequencies are then not
            scaled, like in Gemma 3; `None` if they are rotated like the others.
        rotary_dim: the number of leading dimensions of each head that are rotated; all by default.
        query_pre_attn_scalar: the number by whose square root scores are divided; `head_dim` by default.
        norm: the kind of all norms, `"rms"` or, like in Gemma, `"zero_centered_rms"`; see `LayerNormDense`.
        branch_norms: whether the outputs of attention and MLP are normalized before they are added, like in Gemma.
        activation: the function of the MLP's gate, `"silu"` or `"gelu_tanh"`.
        out_bias: whether the output of attention has a bias, like in gpt-oss.
        sinks: whether each head has a logit without a value, like in gpt-oss; see `Attention`.
        expert_biases: whether routers and experts have biases, like in gpt-oss.
        swiglu_limit: if given, the limit of the experts' gates and of what they multiply; see `MoE`.
        swiglu_alpha: the slope of the experts' gates if there is a `swiglu_limit`: a gate becomes
            `gate * sigmoid(swiglu_alpha * gate)`.
        scale_embedding: whether embeddings are multiplied by the square root of `hidden_size`, like in Gemma.
        intermediate_size: the hidden width of the MLP, or of each expert.
        num_experts: the number of experts that replace each MLP; 0 for an MLP.
        top_k: the number of experts per token.
        aux_loss_coeff: the weight of the load-balancing loss; see `MoE`.
        expert_parallel: how tp shards experts; see `MoE`.
        expert_axes: the mesh axes over which experts are gathered, by default those of dense layers; see
            `GroupedDense`.
        routing: how a token's experts are chosen, by default as in Mixtral; a `Routing`, or a dict of its fields.
        shared_hidden: the hidden width of a shared MLP that every token also uses (DeepSeek's shared experts); 0 for
            none.
        transport, round_size, exchange_chunks: how tokens are sent over ep, the number of rows that experts multiply
            per round, and the number of parts in which tokens are sent; see `MoE`.
        tie_embeddings: whether the head uses the embedding's table.
        rope_theta: the base of the rotary wavelengths.
        rope_scaling: the scaling of the rotary frequencies, as in Llama 3.1 or YaRN; a `RopeScaling`, or a dict of its
            fields.
        epsilon: the epsilon of all norms.
        dtype: the name of the compute dtype.
        grad_reduce: how weight gradients are summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `gtp_jax.nn.reduction_of`.
        sequence_parallel: whether the sequence is sharded over tp between layers.
        sequence_exchange: what ranks that divide sequences exchange, `"heads"` or `"keys"`; see `Attention`.
        remat: what blocks keep for backward.
        prefetch, unroll, keep_gathered: the chain's schedule; see `Schedule`.
        loss_chunk: the fewest tokens whose logits `next_token_loss` computes at once; 0 for the logits of all tokens.
            See `gtp_jax.nn.linear_cross_entropy`.
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
    full_every: int | None = None
    window_rope_theta: float | None = None
    rotary_dim: int | None = None
    query_pre_attn_scalar: int | None = None
    norm: Literal["rms", "zero_centered_rms"] = "rms"
    branch_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scale_embedding: bool = False
    out_bias: bool = False
    sinks: bool = False
    expert_biases: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    epsilon: float = 1e-5
    dtype: str = "bfloat16"
    grad_reduce: GradReduce = "float32"
    sequence_parallel: bool = True
    sequence_exchange: SequenceExchange | None = None
    remat: Remat = "matmuls"
    prefetch: bool = True
    unroll: int | Literal["full"] = "full"
    keep_gathered: KeepGathered = "auto"
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # from a checkpoint
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
        for field in (*_FLAGS, "tie_embeddings", "sequence_parallel"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` is {getattr(self, field)!r}; it must be True or False.")
        for field, allowed in (("norm", ("rms", "zero_centered_rms")), ("activation", ("silu", "gelu_tanh"))):
            if getattr(self, field) not in allowed:
                raise ValueError(f"`{field}` is {getattr(self, field)!r}; it must be one of {', '.join(allowed)}.")
        for field, allowed in (
            ("rope_theta", "above 0"),
            ("epsilon", "of at least 0"),
            ("swiglu_alpha", "above 0"),
            *((name, "above 0") for name in ("window_rope_theta", "swiglu_limit") if getattr(self, name) is not None),
        ):
            value = getattr(self, field)
            if not _is_number(value) or not 0 <= value <= MOST or (value == 0 and field != "epsilon"):
                raise ValueError(f"`{field}` is {brief(value)}; it must be a number {allowed}, at most {MOST:.7g}.")
            object.__setattr__(self, field, float(value))  # JAX does not accept an int of more than 32 bits
        if self.window is not None and not _is_size(self.window, least=1):
            raise ValueError(
                f"`window` is {brief(self.window)}; it must be a number of tokens, at least 1 and below 2**31, or None "
                "for all."
            )
        self._check_layers()
        check_heads(self.num_heads, self.num_kv_heads, 1)
        if not _is_size(self.num_experts):
            raise ValueError(
                f"`num_experts` is {brief(self.num_experts)}; it must be a whole number, 0 for an MLP, below 2**31."
            )
        if not _is_size(self.loss_chunk):
            raise ValueError(
                f"`loss_chunk` is {brief(self.loss_chunk)}; it must be a whole number of tokens, 0 for all, below "
                "2**31."
            )
        self._check_experts()
        check_sequence_exchange(self.sequence_exchange)
        reduction_of(self.grad_reduce, self.dtype)
        self.schedule  # noqa: B018  validates its three fields

    def _check_layers(self) -> None:
        for field in ("full_every", "query_pre_attn_scalar", "rotary_dim"):
            value = getattr(self, field)
            if value is not None and not _is_size(value, least=1):
                raise ValueError(
                    f"`{field}` is {brief(value)}; it must be a whole number of at least 1, below 2**31, or None."
                )
        for field in ("full_every", "window_rope_theta"):
            if self.window is None and getattr(self, field) is not None:
                raise ValueError(f"`{field}` is {getattr(self, field)}, but there is no `window`. Set it too.")
        check_rotary(self.head_dim, self.rotary_dim, self.rope_theta, self.rope_scaling)

    def _check_experts(self) -> None:
        if not _is_size(self.shared_hidden):
            raise ValueError(
                f"`shared_hidden` is {brief(self.shared_hidden)}; it must be a whole number, 0 for none, below 2**31."
            )
        if not isinstance(self.routing, Routing):
            raise ValueError(
                f"`routing` is {self.routing!r}; it must be a `gtp_jax.nn.Routing`, or a dict of its fields."
            )
        if self.routing.jitter:
            raise ValueError(
                f"`jitter` is {self.routing.jitter}, but a Llama passes no keys to its layers, so there would be no "
                "jitter. Leave it at 0, or call `gtp_jax.nn.MoE` with `key=` in your own model."
            )
        if self.num_experts:
            check_moe(self.num_experts, self.top_k, self.aux_loss_coeff)
            self.routing.check(self.num_experts, self.top_k)
            check_transport(self.transport)
            check_chunks(self.exchange_chunks)
            for field in ("norm", "activation"):
                if getattr(self, field) != getattr(type(self), field):
                    raise ValueError(
                        f"`{field}` is {getattr(self, field)!r}, which experts do not have. Leave it at "
                        f"{getattr(type(self), field)!r}, or set `num_experts` to 0."
                    )
        elif self.expert_biases or self.swiglu_limit is not None:
            name = "expert_biases" if self.expert_biases else "swiglu_limit"
            raise ValueError(f"`{name}` is {getattr(self, name)}, but `num_experts` is 0. Set `num_experts` too.")
        elif self.shared_hidden:
            raise ValueError(
                f"`shared_hidden` is {self.shared_hidden}, but `num_experts` is 0. Set `num_experts`, or leave "
                "`shared_hidden` at 0."
            )

    @property
    def schedule(self) -> Schedule:
        """The chain's schedule."""
        return Schedule(prefetch=self.prefetch, unroll=self.unroll, keep_gathered=self.keep_gathered)

    @property
    def reaches(self) -> list[Reach]:
        """The reach of each layer's attention."""
        full = Reach(rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)
        own = dataclasses.replace(full, window=self.window)
        if self.window_rope_theta is not None:
            own = dataclasses.replace(own, rope_theta=self.window_rope_theta, rope_scaling=None)
        every = self.full_every
        return [full if every and layer % every == 0 else own for layer in range(1, self.num_layers + 1)]

    def check_mesh(self, *, tp: int, seq: int, cp: int = 1) -> None:
        """Checks that the model and its sequences can be divided over tp and cp.

        Raises:
            ValueError: if a tp rank would have no key-value head, if ranks of cp exchange heads and cp does not divide
                the query heads of a tp rank, or if an axis that shards the sequence does not divide it.
        """
        check_heads(self.num_heads, self.num_kv_heads, tp)
        if cp > 1 and self.sequence_exchange == "heads" and self.num_heads % (tp * cp):
            raise ValueError(
                f"`num_heads` is {self.num_heads}, which tp {tp} x cp {cp} do not divide; with `sequence_exchange` "
                "'heads', the ranks of cp divide the query heads of a tp rank for attention. Choose 'keys'."
            )
        if cp > 1 and seq % (cp * (tp if self.sequence_parallel else 1)):
            raise ValueError(f"`seq` is {seq}, which cp {cp} x tp {tp} do not divide; both shard the sequence.")
        if self.sequence_parallel and seq % tp:
            raise ValueError(f"`seq` is {seq}, which tp {tp} does not divide; the sequence is sharded over tp.")

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that determine which model the weights belong to; the others only affect how it is
        computed and trained."""
        fields = {name: getattr(self, name) for name in (*_ARCHITECTURE, *(_OF_EXPERTS if self.num_experts else ()))}
        fields |= {name: getattr(self, name) for name in _PARTS if getattr(self, name) != getattr(type(self), name)}
        if self.shared_hidden:
            fields["shared_hidden"] = self.shared_hidden
        usual = Routing()
        routing = {name: getattr(self.routing, name) for name in OF_ROUTING}
        if routing["bias_rate"] is not None:
            routing["bias_rate"] = 0.0  # means that there is a bias; its rate only matters in training
        if routing := {name: value for name, value in routing.items() if value != getattr(usual, name)}:
            fields["routing"] = routing
        scaling = self.rope_scaling
        return fields if scaling is None else {**fields, "rope_scaling": dataclasses.asdict(scaling)}

    def matmul_params(self) -> int:
        """Returns the number of parameters that each token is multiplied with.

        Excludes norms, an untied embedding, and the experts that a token does not use.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts:
            mlp = self.top_k * mlp + self.hidden_size * self.num_experts  # the latter are the router's
            mlp += 3 * self.hidden_size * self.shared_hidden
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    def param_count(self) -> int:
        """Returns the number of all parameters."""
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        idle = (
            self.num_layers * (self.num_experts - self.top_k) * 3 * self.hidden_size * self.intermediate_size
            if self.num_experts
            else 0
        )
        biases = self.num_layers * self.num_experts if self.routing.bias_rate is not None else 0
        if self.qkv_bias:
            biases += self.num_layers * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        biases += self.num_layers * (self.hidden_size * self.out_bias + self.num_heads * self.sinks)
        if self.expert_biases:
            biases += self.num_layers * self.num_experts * (2 * self.intermediate_size + self.hidden_size + 1)
        return self.matmul_params() + idle + embedding + biases + self._norms()

    def _norms(self) -> int:
        """Returns the number of parameters of norms."""
        heads = 2 * self.num_layers * self.head_dim if self.qk_norm else 0
        of_layer = 4 if self.branch_norms else 2
        return (of_layer * self.num_layers + 1) * self.hidden_size + heads


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_size(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) < 1 << 31
