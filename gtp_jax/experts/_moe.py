"""A mixture of experts as the feed-forward half of a transformer block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, TypedDict, Unpack, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from .._foreign import brief
from ..collectives import gather_sequence, reduce_scatter_sequence
from ..mesh import current_view, degree, degrees, loss_copies, sequence_axis
from ..nn import MLP, GradReduce, Initializer, Layer, make_vector, make_whole
from ..ops import (
    MOST,
    Window,
    rms_norm,
    save_activation,
    save_routing,
    shares_of_places,
    weighted_glu,
    with_aux_loss,
    with_load_as_gradient,
)
from ._balance import make_router_bias
from ._exchange import check_chunks, exchange
from ._grouped import GroupedDense
from ._routing import Routing
from ._transports import Transport, check_transport

ExpertParallel = Literal["features", "expert"] | None
LossReduction = Literal["sum", "mean"]

# How tp divides the first and the second layer of every expert.
_PARALLEL = {"features": ("column", "row"), "expert": ("expert", "expert"), None: (None, None)}

# For each call of a `MoE` whose terms are sums over tokens: the numbers of this rank's examples, and of their tokens.
_ROUTED: ContextVar[list[tuple[int, int]] | None] = ContextVar("routed", default=None)

router_init = initializers.variance_scaling(1.0, "fan_in", "normal")


class ExpertOptions(TypedDict, total=False):
    """The arguments of `GroupedDense` that `MoE` passes on; `GroupedDense` describes them."""

    dtype: jax.typing.DTypeLike
    grad_reduce: GradReduce
    kernel_init: Initializer


class MoE(Layer):
    """Sends each token through its `top_k` likeliest experts, and returns the weighted sum of their outputs.

    Each expert is an `MLP` with SwiGLU. By default it works as in Mixtral (arXiv 2401.04088): RMSNorm, a softmax over
    all experts, and the `top_k` largest probabilities scaled to a sum of 1. No token is dropped. The router is computed
    in at least float32, and is neither sharded nor quantized. `Routing` offers other routers, such as DeepSeek-V3's.

    Args:
        features: the size of the input and of the output.
        hidden: the hidden size of each expert.
        num_experts: the number of experts.
        top_k: the number of experts per token.
        parallel: what tp divides: `features` divides every expert's hidden features, `expert` divides the experts among
            the ranks, and `None` leaves each rank its own part of the sequence.
        aux_loss_coeff: the weight of the load-balancing term: the sum over experts of their load (1 if it is even)
            times their mean probability. By default load and mean are taken over each sequence (DeepSeek-V3, arXiv
            2412.19437, equations 17 to 20), so that they depend neither on the mesh nor on microbatches; see `Routing`.
            The term is added to the gradient, not to the reported loss.
        loss_reduction: `"sum"` if the loss that is differentiated is a sum over tokens, as `cross_entropy` returns it;
            `"mean"` if it is a mean over tokens. For a mean, the load-balancing term and the router's z-loss are
            divided by the number of tokens. A train step refuses a mismatch, and a sum that is divided by a number of
            examples; a custom step cannot detect either.
        activation: the elementwise function applied to the gate, in at least float32.
        biases: whether the router and both layers of every expert have biases, as in gpt-oss.
        limit: if given, gates are at most this, and what they multiply is between `-limit` and `limit`, plus 1, as in
            gpt-oss.
        epsilon: the epsilon of the norm.
        sequence_parallel: whether input and output are sharded along the sequence over tp.
        axes: the mesh axes over which kernels are gathered, as in `GroupedDense`.
        routing: how experts are chosen; by default as in Mixtral.
        shared_hidden: the hidden size of an MLP that every token also goes through (DeepSeek's shared experts); 0 for
            none.
        transport: how tokens travel to experts of other ranks: `"gather"`, `"padded"` or `"ragged"`; by default
            `gtp_jax.experts.choose_transport` decides.
        round_size: how many rows a rank's experts multiply at once, as a multiple of an even share of all rows. If
            they have more rows, they run further rounds, and the layer takes longer. A smaller size needs less memory.
        exchange_chunks: the number of chunks in which tokens travel to experts of other ranks, so that one chunk is in
            transit while experts multiply another.
        param_dtype: the dtype of the stored parameters.
        rngs: the random streams, of which `params` is used.
        options: further arguments of both `GroupedDense` layers.

    If the mesh has an axis for experts (`Roles.experts`, ep), its ranks divide the experts, and tokens travel to the
    ranks of their experts and back; `parallel` and `axes` then define how each rank's own experts are further sharded.

    Raises:
        ValueError: if `top_k` is not between 1 and `num_experts`; if ep does not divide `num_experts`; or if there are
            ep and `biases` or a `limit`, which travelling tokens do not get.
    """

    fewest_dims = 2
    context_parallel = True

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        num_experts: int,
        top_k: int = 2,
        parallel: ExpertParallel = "features",
        aux_loss_coeff: float = 0.01,
        loss_reduction: LossReduction = "sum",
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        biases: bool = False,
        limit: float | None = None,
        epsilon: float = 1e-6,
        sequence_parallel: bool = True,
        axes: tuple[str, ...] | None = None,
        routing: Routing | None = None,
        shared_hidden: int = 0,
        transport: Transport | None = None,
        round_size: float = 1.25,
        exchange_chunks: int = 1,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Unpack[ExpertOptions],
    ) -> None:
        super().__init__()
        check_moe(num_experts, top_k, aux_loss_coeff)
        routing = Routing() if routing is None else routing
        routing.check(num_experts, top_k)
        if parallel not in _PARALLEL:
            raise ValueError(f"`parallel` is {parallel!r}; it must be 'features', 'expert' or None.")
        if loss_reduction not in get_args(LossReduction):
            raise ValueError(f"`loss_reduction` is {loss_reduction!r}; it must be 'sum' or 'mean'.")
        check_transport(transport)
        if not 0 < round_size <= MOST:
            raise ValueError(f"`round_size` is {brief(round_size)}; it must be a finite number above 0, such as 1.25.")
        check_chunks(exchange_chunks)
        if (biases or limit is not None) and degree(self.roles.experts) > 1:
            raise ValueError(
                f"`biases` is {biases} and `limit` is {limit}, but {self.roles.experts} = {degree(self.roles.experts)} "
                "divides the experts among ranks, whose tokens get neither. Choose a degree of 1: kernels are then "
                "gathered over gtp, and tp may divide them."
            )
        first, second = _PARALLEL[parallel]
        of_ranks: dict[str, Any] = {"axes": axes, "experts_axis": self.roles.experts}
        shared: dict[str, Any] = {**of_ranks, "param_dtype": param_dtype, "summed": False, "rngs": rngs, **options}
        self.scale = make_vector(features, initializers.ones, rngs.params(), param_dtype)
        self.router = make_whole((features, num_experts), router_init, rngs.params(), param_dtype)
        rate = routing.bias_rate
        self.router_bias: Any = nnx.data(None) if rate is None else make_router_bias(num_experts, rate)
        self.up = GroupedDense(num_experts, features, {"gate": hidden, "up": hidden}, parallel=first, **shared)
        self.down = GroupedDense(num_experts, hidden, features, parallel=second, **shared)
        self.router_shift: Any = nnx.data(None)
        self.up_bias: Any = nnx.data(None)
        self.down_bias: Any = nnx.data(None)
        if biases:
            zeros = initializers.zeros
            self.router_shift = make_vector(num_experts, zeros, rngs.params(), param_dtype)
            self.up_bias = nnx.Dict(
                {name: make_whole((num_experts, hidden), zeros, rngs.params(), param_dtype) for name in self.up.names}
            )
            self.down_bias = make_whole((num_experts, features), zeros, rngs.params(), param_dtype)
        of_shared: dict[str, Any] = {name: x for name, x in options.items() if name in ("dtype", "grad_reduce")}
        self.shared: Any = nnx.data(None)
        if shared_hidden:
            self.shared = MLP(
                features,
                shared_hidden,
                activation=activation,
                norm=None,
                sequence_parallel=sequence_parallel,
                param_dtype=param_dtype,
                rngs=rngs,
                **of_shared,
            )
        self.routing = routing
        self.num_experts = num_experts
        self.top_k = top_k
        self.parallel = parallel
        self.aux_loss_coeff = aux_loss_coeff
        self.loss_reduction = loss_reduction
        self.transport: Transport | None = transport
        self.round_size = round_size
        self.exchange_chunks = exchange_chunks
        self.activation = activation
        self.limit = limit
        self.epsilon = epsilon
        self.sequence_parallel = sequence_parallel

    def local(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Maps `(batch, ..., features)` to the same shape.

        Args:
            x: the activations. The dimensions between the batch and the features form the sequence of an example; if
                there are none, each example is one token.
            key: the key of the router's jitter, the same on every rank; `None` for no jitter.
        """
        if x.ndim < 2:
            raise ValueError(f"MoE takes (batch, ..., features), such as (batch, sequence, features); got {x.shape}.")
        x = rms_norm(x, self.scale.get_value(), epsilon=self.epsilon)
        y = self._mixture(x, key)
        return y if self.shared is None else y + self.shared(x)

    def _mixture(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        sharded = self.shards_sequence(x.ndim)
        if self.parallel is not None:
            x = gather_sequence(x, self.roles.tensor, sequence_parallel=sharded)
        tokens = jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))
        chosen, combine_weights = self._route(tokens, key, self._axes_of_sequence(x.ndim))
        experts = self._on_their_ranks if degree(self.roles.experts) > 1 else self._gathered
        y = jnp.reshape(experts(tokens.astype(self.up.dtype), chosen, combine_weights), x.shape)
        if self.down_bias is not None:
            y = y + jnp.reshape(self._sum_of_biases(chosen, combine_weights), x.shape).astype(y.dtype)
        if self.parallel is None:
            return y
        return reduce_scatter_sequence(y, self.roles.tensor, sequence_parallel=sharded)

    def _on_their_ranks(self, x: jax.Array, chosen: jax.Array, combine_weights: jax.Array) -> jax.Array:
        """Returns the weighted sums of the experts' outputs, with experts divided among ranks."""
        rows, chosen, shares = (jnp.reshape(a, (-1, a.shape[-1])) for a in (x, chosen, combine_weights))
        axis = self.roles.experts
        assert axis is not None
        y = exchange(
            rows,
            chosen,
            shares,
            self.up,
            self.down,
            self.activation,
            axis=axis,
            most_ranks=self.most_ranks,
            transport=self.transport,
            round_size=self.round_size,
            chunks=self.exchange_chunks,
        )
        return jnp.reshape(y, x.shape)

    def _gathered(self, x: jax.Array, chosen: jax.Array, combine_weights: jax.Array) -> jax.Array:
        """Returns the weighted sums of the experts' outputs. Tokens stay on their ranks, and kernels are gathered."""
        rows, shares = jnp.reshape(x, (-1, x.shape[-1])), jnp.reshape(combine_weights, (-1, self.top_k))
        expert_of = jnp.reshape(chosen, -1)  # the expert of each choice, token after token
        order = save_routing(jnp.argsort(expert_of, stable=True).astype(jnp.int32))
        places = jnp.reshape(jnp.argsort(order).astype(jnp.int32), shares.shape)
        window = Window(order, places, jnp.int32(order.size))
        sizes = jnp.bincount(expert_of, length=self.num_experts).astype(jnp.int32)
        hidden = self.up.with_weight(self.up.product_of, rows, sizes, None, window)
        if self.up_bias is not None:
            hidden = self._with_biases(hidden, expert_of[order])
        gate, up = hidden["gate"], hidden["up"]
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit) + 1
        weighted = weighted_glu(gate, up, shares_of_places(shares, window), self.activation)
        y = self.down.with_weight(self.down.product_of, save_activation(weighted), sizes, None, None, window)
        return jnp.reshape(y, x.shape)

    def _with_biases(self, hidden: dict[str, jax.Array], expert_of: jax.Array) -> dict[str, jax.Array]:
        """Adds to each row the biases of its expert, given the experts `(rows,)`.

        A product with ones and zeros selects them, because its gradient is a product too, and no scatter.
        """
        found = {}
        for (name, y), layout in zip(hidden.items(), self.up.layouts, strict=True):
            bias = self.up_bias[name].get_value().astype(y.dtype)
            if self.parallel == "features" and layout.split is not None:
                bias = layout.split.take(bias, -1)
            ones = jax.nn.one_hot(expert_of, self.num_experts, dtype=y.dtype)
            found[name] = y + jnp.matmul(ones, bias, precision=lax.Precision.HIGHEST)
        return found

    def _sum_of_biases(self, chosen: jax.Array, combine_weights: jax.Array) -> jax.Array:
        """Returns the weighted sums of the biases of each token's experts, in at least float32. Of tp ranks whose
        outputs are summed, only the first returns them, and the others zeros."""
        wide, tensor = combine_weights.dtype, self.roles.tensor
        shares = jnp.sum(jax.nn.one_hot(chosen, self.num_experts, dtype=wide) * combine_weights[..., None], axis=-2)
        if self.parallel is not None and tensor is not None and degree(tensor) > 1:
            shares = shares * (lax.axis_index(tensor) == 0)
        return jnp.matmul(shares, self.down_bias.get_value().astype(wide), precision=lax.Precision.HIGHEST)

    def _route(self, x: jax.Array, key: jax.Array | None, along: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns each token's experts and their shares, in at least float32.

        Args:
            x: `(batch, sequence, features)`.
            key: the key of the jitter; `None` for no jitter.
            along: the axes that divide the sequence, of which `x` is this rank's part.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        inputs = x.astype(wide)
        if self.routing.jitter and key is not None:
            inputs = inputs * self._jitter(key, x.shape, wide, along)
        # on GPUs, float32 matmuls use TF32 by default, which has only 10 bits of mantissa
        logits = jnp.matmul(inputs, self.router.get_value().astype(wide), precision=lax.Precision.HIGHEST)
        if self.router_shift is not None:
            logits = logits + self.router_shift.get_value().astype(wide)
        scores = self.routing.scores(logits)
        bias = None if self.router_bias is None else self.router_bias.get_value()
        chosen = self.routing.choose(scores, bias, self.top_k)
        load = jnp.sum(jax.nn.one_hot(chosen, self.num_experts, dtype=wide), axis=(1, 2))  # (batch, experts)
        shares = self.routing.shares(scores, chosen)
        if self.added_terms:
            shares = with_aux_loss(shares, self._terms(logits, scores, load, along))
        if bias is not None:
            shares = with_load_as_gradient(shares, bias, jnp.sum(load, axis=0))
        return chosen, shares

    def _terms(self, logits: jax.Array, scores: jax.Array, load: jax.Array, along: tuple[str, ...]) -> jax.Array:
        """Returns the sum of the terms whose gradient is added to the loss's: sums over tokens, or means over all
        tokens."""
        length, weight, tensor = logits.shape[1], 1.0, self.roles.tensor
        if along:
            load, length = lax.psum(load, along), length * degrees(along)
        if tensor in along:
            # each rank adds the terms of its part of the sequence, but the loss of the whole one, which counts tp times
            weight = float(degree(tensor))
        batch, tokens = self._batch_axes, length
        if self.routing.aux_loss == "microbatch":
            load, tokens = jnp.sum(load, axis=0, keepdims=True), logits.shape[0] * degrees(batch) * length
            load = lax.psum(load, batch) if batch else load
        weight /= loss_copies(self.roles)
        if self.loss_reduction == "mean":
            weight /= logits.shape[0] * degrees(batch) * length
        elif (routed := _ROUTED.get()) is not None:
            routed.append((logits.shape[0], length))
        share = load * (self.num_experts / (self.top_k * tokens))  # 1 for an expert with an even share
        of = {
            "aux_loss_coeff": lambda: jnp.sum(share[:, None] * self.routing.probs(scores)),
            "routing.z_loss_coeff": lambda: jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2),
        }
        first, *others = (coefficient * of[name]() for name, coefficient in self.added_terms.items())
        return weight * sum(others, start=first)

    def _jitter(
        self, key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, along: tuple[str, ...]
    ) -> jax.Array:
        """Returns random factors for the router's inputs. They depend on the key and on an example's place in the
        microbatch of all ranks, not on the mesh."""
        length = shape[1] * degrees(along)
        first = lax.axis_index(self._batch_axes) * shape[0] if self._batch_axes else 0

        def of_example(number: jax.Array) -> jax.Array:
            low, high = 1 - self.routing.jitter, 1 + self.routing.jitter
            return jax.random.uniform(jax.random.fold_in(key, number), (length, *shape[2:]), dtype, low, high)

        whole = jax.vmap(of_example)(first + jnp.arange(shape[0]))
        if not along:
            return whole
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(along) * shape[1], shape[1], axis=1)

    @property
    def added_terms(self) -> dict[str, float]:
        """The nonzero coefficients of the terms that a call adds to the gradient, by their arguments' names.

        The terms are scaled for a loss of the kind `loss_reduction`; see `check_loss_reduction`.
        """
        terms = {"aux_loss_coeff": self.aux_loss_coeff, "routing.z_loss_coeff": self.routing.z_loss_coeff}
        return {name: coefficient for name, coefficient in terms.items() if coefficient}

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank that shard the batch."""
        return tuple(axis for axis in self.roles.batch if degree(axis) > 1)

    @property
    def most_ranks(self) -> int:
        """The most ranks that a single token's experts can be on."""
        return self.routing.most_ranks(self.num_experts, self.top_k, self.up.own_experts)

    def _axes_of_sequence(self, ndim: int) -> tuple[str, ...]:
        """Returns the axes that divide the sequence of which a rank routes its part, outermost first."""
        sequence = sequence_axis(self.roles, ndim) if current_view() == "local" else None
        tensor = self.roles.tensor if self.divides_sequence(ndim) else None
        return tuple(axis for axis in (sequence, tensor) if axis is not None)

    def divides_sequence(self, ndim: int) -> bool:
        """Returns whether tensor ranks route their own parts of the sequence of an input of `ndim` dimensions."""
        return self.parallel is None and self.shards_sequence(ndim) and degree(self.roles.tensor) > 1


@contextlib.contextmanager
def routed_into(found: list[tuple[int, int]]) -> Iterator[None]:
    """Adds to a list, for each call of a `MoE` that is traced in the context and adds to the gradient sums over tokens:
    the number of examples of one rank, and the number of tokens of an example."""
    token = _ROUTED.set(found)
    try:
        yield
    finally:
        _ROUTED.reset(token)


def check_loss_reduction(model: nnx.Module, reduction: LossReduction) -> None:
    """Refuses mixtures of experts whose terms in the gradient are scaled for another kind of loss.

    Args:
        model: the model that computed the loss.
        reduction: the kind of the loss that is differentiated.

    Raises:
        ValueError: if there is such a mixture; the message names the first one, its terms and the remedy.
    """
    returned = {"sum": "(sum of token losses, number of tokens)", "mean": "a scalar, which is assumed to be a mean"}
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, MoE) or module.loss_reduction == reduction or not module.added_terms:
            continue
        terms = " and ".join(f"`{name}`" for name in module.added_terms)
        raise ValueError(
            f"the loss returns {returned[reduction]}, but the MoE at {'.'.join(map(str, path)) or 'the top'} scales "
            f"the gradient of its terms ({terms}) as if it were a {module.loss_reduction}. Build the MoE with "
            f"`loss_reduction={reduction!r}`, or with {terms} of 0."
        )


def check_moe(num_experts: int, top_k: int, aux_loss_coeff: float) -> None:
    """Refuses invalid numbers of experts and an invalid coefficient.

    Raises:
        ValueError: if a number is out of range; the message names it and what is allowed.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"`top_k` is {top_k} of {num_experts} experts; it must be at least 1 and at most all of them.")
    if not 0 <= aux_loss_coeff <= MOST:
        raise ValueError(
            f"`aux_loss_coeff` is {brief(aux_loss_coeff)}; it must be a number of at least 0, at most {MOST:.7g}."
        )
