"""Trains the same Llama in plain JAX. XLA's partitioner shards and gathers weights as annotations say (FSDP and tp).

Run it with `python partitioner.py --gtp 8 --sequences 8 --combine`; `--keep-gathered` gathers weights only once. With
`--num-experts`, blocks have experts (partitioned_experts.py), and the ranks of ep act as further ranks of gtp.

`--grad-norm` makes the step do the same work as gtp_jax's: it also computes the norm of all gradients, and leaves the
state as it is if the loss or the norm is not finite. `--gtp-options` compiles with the XLA options that gtp_jax sets.
`--te current` multiplies in FP8 with TransformerEngine (engine.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import engine
import jax
import jax.numpy as jnp
import optax
import partitioned_experts as experts
from deviceless import add_target, compile_only, devices_of
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timed import time_and_report
from workload import LEARNING_RATE, REDUCE_DTYPE, WEIGHT_DECAY, Workload, parser, workload

from gtp_jax.train import compile_options

Tree = Any
Guard = Literal["where", "cond"]
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
WEIGHT = "gathered weight"

# The sharding of weights, before and after the gather. Query, key and value are grouped by key-value head, and gate and
# up are side by side, so that sharding over tp keeps heads whole, and divides gate and up in the same way.
LAYER = {
    "qkv": (P("gtp", "tp", None), P(None, "tp", None)),
    "out": (P("tp", "gtp"), P("tp", None)),
    "up": (P("gtp", None, "tp"), P(None, None, "tp")),
    "down": (P("tp", "gtp"), P("tp", None)),
}
MLP = ("up", "down")
SHARED = {f"shared_{name}": LAYER[name] for name in MLP}
EMBED = (P("gtp", None), P())
HEAD = (P("gtp", "tp"), P(None, "tp"))
BETWEEN, INSIDE = P("gtp", "tp", None), P("gtp", None, "tp")  # activations: the sequence sharded over tp, then features
HEADS = P("gtp", None, "tp", None)
BATCH = P(None, "gtp", None)  # microbatch, sequence, token


def shapes(work: Workload) -> Tree:
    """Returns the shapes of the parameters, with layers stacked."""
    layer = {
        "qkv": (work.hidden_size, work.num_kv_heads, (work.num_heads // work.num_kv_heads + 2) * work.head_dim),
        "out": (work.num_heads * work.head_dim, work.hidden_size),
        "norm1": (work.hidden_size,),
        "norm2": (work.hidden_size,),
    }
    if work.has_experts:
        layer |= experts.shapes(work)
    else:
        layer["up"] = (work.hidden_size, 2, work.intermediate_size)
        layer["down"] = (work.intermediate_size, work.hidden_size)
    if work.qk_norm:
        layer |= {"norm_q": (work.head_dim,), "norm_k": (work.head_dim,)}
    stacked = {name: (work.num_layers, *shape) for name, shape in layer.items()}
    return {
        "layers": stacked,
        "embed": (work.vocab_size, work.hidden_size),
        "norm": (work.hidden_size,),
        "head": (work.hidden_size, work.vocab_size),
    }


def gathers(work: Workload) -> dict[str, tuple[P, P]]:
    """Returns the shardings of the layer weights that the partitioner gathers, before and after the gather."""
    if not work.has_experts:
        return LAYER
    return {name: how for name, how in (LAYER | SHARED).items() if name in shapes(work)["layers"] and name not in MLP}


def specs(work: Workload) -> Tree:
    """Returns the partition specs of the weights."""
    sharded = {name: sharded for name, (sharded, _) in gathers(work).items()}
    if work.has_experts:
        sharded |= experts.SHARDED
    layers = {name: P(None, *sharded[name]) if name in sharded else P() for name in shapes(work)["layers"]}
    return {"layers": layers, "embed": EMBED[0], "norm": P(), "head": HEAD[0]}


def abstract(work: Workload) -> Tree:
    """Returns the parameters' shapes and dtypes."""
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes(work), is_leaf=is_shape)


def init(work: Workload, key: jax.Array) -> Tree:
    """Returns random float32 parameters; norms are ones."""

    def make(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if "norm" in name:
            return jnp.ones(like.shape, like.dtype)
        of_experts = work.has_experts and name in MLP  # the contracted dimension is the last one
        fan_in = like.shape[-1 if of_experts else 1] if path[0].key == "layers" else work.hidden_size
        own = jax.random.fold_in(key, sum(name.encode()))
        return jax.random.normal(own, like.shape, like.dtype) * fan_in**-0.5

    return jax.tree_util.tree_map_with_path(make, abstract(work))


def loss(
    work: Workload,
    params: Tree,
    tokens: jax.Array,
    targets: jax.Array,
    *,
    unroll: int,
    keep_gathered: bool,
    dtype: Any,
    attention: Literal["cudnn", "xla"],
    matmuls: engine.Matmuls | None = None,
) -> jax.Array:
    """Returns the mean loss of `(sequence, token)` arrays.

    Args:
        work: the sizes.
        params: the parameters, as returned by `init`.
        tokens: the input tokens.
        targets: the next token of each input token.
        unroll: the number of layers per loop body; 0 for no loop.
        keep_gathered: whether backward uses the gathered weights of forward instead of gathering them again.
        dtype: the compute dtype.
        attention: the implementation of attention.
        matmuls: how the linear layers of blocks multiply; by default, XLA's products in the compute dtype.
    """

    def saves(primitive: Any, *operands: Any, **known: Any) -> bool:
        if matmuls and matmuls.saves(primitive, *operands, **known):
            return True
        if primitive.name == "name":
            return known["name"] in experts.KEPT or (keep_gathered and known["name"] == WEIGHT)
        if primitive.name == "dot_general":
            return not any(known["dimension_numbers"][1])  # a product with batch dimensions is part of attention
        return "dot_product_attention_fwd" in primitive.name

    def layer(x: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        return _constrained(_layer(work, attention, multiply, x, weights), BETWEEN), None

    multiply = matmuls.multiply if matmuls else _multiplied
    # without a loop, only a barrier keeps XLA from reusing the gathers of forward in backward
    layer = jax.checkpoint(layer, policy=saves, prevent_cse=not unroll)
    table: Any = _gathered(EMBED, params["embed"].astype(dtype))
    x = _constrained(table[tokens], BETWEEN)
    whole = ("router", "norm1", "norm2", "norm_q", "norm_k")
    cast = {name: w if name in whole else w.astype(dtype) for name, w in params["layers"].items()}
    if unroll:
        x, _ = lax.scan(layer, x, cast, unroll=unroll)
    else:
        for i in range(work.num_layers):
            x, _ = layer(x, {name: w[i] for name, w in cast.items()})
    head: Any = _gathered(HEAD, params["head"].astype(dtype))
    logits = _norm(x, params["norm"], work.epsilon) @ head
    logits = _constrained(logits, INSIDE).astype(jnp.promote_types(dtype, jnp.float32))
    # compares instead of indexing, because the vocabulary may be sharded
    is_target = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0), axis=-1))


def _layer(
    work: Workload, attention: Literal["cudnn", "xla"], multiply: Multiply, x: jax.Array, weights: Tree
) -> jax.Array:
    w = {name: checkpoint_name(_gathered(how, weights[name]), WEIGHT) for name, how in gathers(work).items()}
    batch, seq, _ = x.shape
    group = work.num_heads // work.num_kv_heads
    h = _norm(x, weights["norm1"], work.epsilon)
    fused = multiply(h, w["qkv"])
    q, k, v = jnp.split(fused, [group * work.head_dim, (group + 1) * work.head_dim], axis=-1)
    q = jnp.reshape(q, (batch, seq, work.num_heads, work.head_dim))
    if work.qk_norm:
        q, k = _norm(q, weights["norm_q"], work.epsilon), _norm(k, weights["norm_k"], work.epsilon)
    q, k = _rope(q, work.rope_theta), _rope(k, work.rope_theta)
    q, k, v = (_constrained(part, HEADS) for part in (q, k, v))  # attention needs whole sequences
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + _constrained(multiply(jnp.reshape(mixed, (batch, seq, -1)), w["out"]), BETWEEN)
    h = _norm(x, weights["norm2"], work.epsilon)
    if not work.has_experts:
        return x + _mlp(multiply, h, w["up"], w["down"])
    y = x + experts.mixture(work, h, weights, WEIGHT)
    return y + _mlp(multiply, h, w["shared_up"], w["shared_down"]) if work.shared_hidden else y


def _mlp(multiply: Multiply, h: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = multiply(h, up)
    return multiply(jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down)


def _multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(sharded: tuple[P, P], w: jax.Array) -> jax.Array:
    """Returns the gathered weight. Its gradient is reduce-scattered instead of all-reduced.

    The sharding before the gather is constrained, too. Otherwise, propagation would move the gather before the barrier
    of rematerialization, where the gathers of forward and backward are merged.
    """
    return _constrained(_constrained(w, sharded[0]), sharded[1])


_gathered.defvjp(
    lambda sharded, w: (_gathered(sharded, w), None), lambda sharded, _, gradient: (_constrained(gradient, sharded[0]),)
)


def _constrained(x: jax.Array, spec: P) -> jax.Array:
    return lax.with_sharding_constraint(x, spec)


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def _rope(x: jax.Array, theta: float) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def make_step(
    work: Workload,
    mesh: Mesh,
    *,
    unroll: int,
    keep_gathered: bool,
    grad_norm: Guard | None = None,
    dtype: Any = jnp.bfloat16,
    xla: dict[str, Any] | None = None,
    matmuls: engine.Matmuls | None = None,
) -> tuple[Callable[..., Any], Callable[[jax.Array], Tree], Tree]:
    """Returns the jitted step `(state, tokens, targets) -> (state, loss)`, a function that makes the state from a key,
    and the shardings of the state.

    The state is `(params, optimizer state)`, and is donated. Tokens are `(microbatch, sequence, token)`.

    With `grad_norm`, the step also computes the norm of all gradients, and returns the state unchanged if the loss or
    the norm is not finite: `"where"` selects between the old and the new value of each array of the state, `"cond"`
    branches around the optimizer.
    """
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    sharded = jax.tree.map(lambda s: NamedSharding(mesh, s), specs(work), is_leaf=lambda s: isinstance(s, P))

    def make_state(key: jax.Array) -> Tree:
        params = init(work, key)
        return params, optimizer.init(params)

    adam = jax.eval_shape(optimizer.init, abstract(work))
    whole = NamedSharding(mesh, P())
    moments = optax.tree.map_params(optimizer, lambda _, s: s, adam, sharded, transform_non_params=lambda _: whole)
    shardings = (sharded, moments)
    attention = "xla" if mesh.devices.flat[0].platform == "cpu" else "cudnn"
    value_and_grad = jax.value_and_grad(
        functools.partial(
            loss,
            work,
            unroll=unroll,
            keep_gathered=keep_gathered,
            dtype=dtype,
            attention=attention,
            matmuls=matmuls,
        )
    )

    def step(state: Tree, tokens: jax.Array, targets: jax.Array) -> tuple[Tree, jax.Array]:
        params, moments = state
        if work.microbatches == 1:
            mean, gradient = value_and_grad(params, tokens[0], targets[0])
        else:

            def add(sums: Tree, part: Tree) -> tuple[Tree, None]:
                return jax.tree.map(jnp.add, sums, value_and_grad(params, *part)), None

            zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
            sums, _ = lax.scan(add, zeros, (tokens, targets))
            mean, gradient = jax.tree.map(lambda s: s / work.microbatches, sums)

        def updated() -> Tree:
            updates, after = optimizer.update(gradient, moments, params)
            return optax.apply_updates(params, updates), after

        if grad_norm is None:
            return updated(), mean
        finite = jnp.isfinite(mean) & jnp.isfinite(optax.tree.norm(gradient))
        if grad_norm == "cond":
            return lax.cond(finite, updated, lambda: state), mean
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated(), state), mean

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole), compiler_options=xla)
    return jitted, jax.jit(make_state, out_shardings=shardings), shardings


def options(work: Workload, *, platform: str, combine: bool, of_gtp: bool) -> dict[str, Any]:
    """Returns the XLA options of a step.

    Args:
        work: the sizes.
        platform: the platform of the compiled step.
        combine: whether to combine the collectives of a layer.
        of_gtp: whether to use the options that gtp_jax sets, except those for combining collectives: `combine` decides
            about these. gtp_jax lets XLA combine as many collectives as possible, because it keeps those of different
            layers apart itself.
    """
    ours = compile_options(platform, tp=work.tp) if of_gtp else {}
    return {
        **{name: value for name, value in ours.items() if name not in combined(work)},
        **(combined(work) if combine else {}),
    }


def combined(work: Workload) -> dict[str, Any]:
    """Returns XLA options that combine collectives up to the size of a layer."""
    numbers = sum(math.prod(shape) for shape in shapes(work)["layers"].values()) // work.num_layers // work.tp
    names = ("all_gather", "reduce_scatter")
    return {f"xla_gpu_{name}_combine_threshold_bytes": numbers * jnp.dtype(jnp.bfloat16).itemsize for name in names}


def parsed(option: str) -> tuple[str, Any]:
    """Returns the name and the value of an XLA option `name=value`."""
    name, _, value = option.partition("=")
    return name, {"true": True, "false": False}.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--unroll", type=int, default=0, help="number of layers in one loop body; 0 for no loop")
    flags.add_argument("--keep-gathered", action="store_true", help="keep gathered weights for backward")
    flags.add_argument("--combine", action="store_true", help="combine the gathers of a layer, and its reduce-scatters")
    flags.add_argument(
        "--grad-norm",
        choices=("where", "cond"),
        help="also compute the norm of all gradients, and leave the state unchanged unless the norm and the loss are "
        "finite: `where` selects between old and new values, `cond` branches around the optimizer",
    )
    flags.add_argument("--gtp-options", action="store_true", help="compile with the XLA options that gtp_jax sets")
    flags.add_argument("--te", choices=engine.SCALINGS, help="multiply in FP8 with TransformerEngine; only at tp 1")
    flags.add_argument(
        "--xla", action="append", default=[], metavar="NAME=VALUE", help="XLA option of the step; may be repeated"
    )
    flags.add_argument("--trace", metavar="DIR", help="write a trace of one more step to this directory")
    add_target(flags)
    args = flags.parse_args()
    work = workload(args)
    devices = devices_of(args.target, work)
    mesh = jax.make_mesh((work.gtp * work.ep, work.tp), ("gtp", "tp"), devices=devices, axis_types=(AxisType.Auto,) * 2)
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    engine.check(args.te, tp=work.tp, experts=work.has_experts, cuda=platform == "gpu")
    matmuls = engine.matmuls(args.te, keep_weights=args.keep_gathered) if args.te else None
    xla = options(work, platform=platform, combine=args.combine, of_gtp=args.gtp_options)
    step, make_state, shardings = make_step(
        work,
        mesh,
        unroll=args.unroll,
        keep_gathered=args.keep_gathered,
        grad_norm=args.grad_norm,
        xla={**xla, **dict(map(parsed, args.xla))} or None,
        matmuls=matmuls,
    )
    with jax.set_mesh(mesh), matmuls.context if matmuls else contextlib.nullcontext():
        shape = (work.microbatches, work.sequences // work.microbatches, work.seq)
        if args.target:
            sharded = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                jax.eval_shape(lambda: make_state(jax.random.key(0))),
                shardings,
            )
            like = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH))
            return compile_only(step.lower(sharded, like, like), args.target)  # pyright: ignore[reportFunctionMemberAccess]
        state = make_state(jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), shape, 0, work.vocab_size)
        tokens = jax.device_put(tokens, NamedSharding(mesh, BATCH))
        targets = jax.device_put(jnp.roll(tokens, -1, axis=-1), NamedSharding(mesh, BATCH))
        lowered = step.lower(state, tokens, targets)  # pyright: ignore[reportFunctionMemberAccess]
        time_and_report(
            lowered,
            state,
            (tokens, targets),
            work,
            loss_of=lambda mean: mean,
            trace=args.trace,
            parameters=sum(p.size for p in jax.tree.leaves(state[0])),
            reduce_dtype=REDUCE_DTYPE,  # the compute dtype, because the gradient is scattered before it is cast
            versions={engine.PACKAGE: engine.version()} if matmuls else None,
        )


if __name__ == "__main__":
    main()
