"""Drawn models of gtp_jax's modules, and what the library computes of them."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp

from .grammar import GROUP, Draw, Layer, Loss
from .operations import INSIDE, OPERATIONS
from .oracle import EXPERTS, TOP_K

RECIPES = {"FP8": gtp.FP8, "MXFP8": gtp.MXFP8, "NVFP4": gtp.NVFP4}


class Options:
    """Arguments of modules: none that name a dtype, where the library's defaults are drawn."""

    def __init__(self, draw: Draw) -> None:
        named = draw.model.dtype is not None
        self.dtype: Any = jnp.dtype(draw.model.dtype or "bfloat16")
        self.wide = jnp.promote_types(self.dtype, jnp.float32)
        self.dtypes: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.wide) if named else {}
        self.stored: dict[str, Any] = dict(param_dtype=self.wide) if named else {}
        self.flax: dict[str, Any] = dict(dtype=self.wide, param_dtype=self.wide)
        self.parallel: dict[str, Any] = {} if draw.sequence_parallel else dict(sequence_parallel=False)
        self.heads = 6 if draw.degree("tp") == 3 else 4


class Pair(nnx.Module):
    """A column- and a row-parallel layer, with an operation between them."""

    def __init__(self, layer: Layer, width: int, options: Options, rngs: nnx.Rngs):
        shared = dict(use_bias=layer.bias, rngs=rngs, **options.dtypes, **options.parallel)
        self.operation = layer.operation
        self.up = gtp.nn.LayerNormDense(width, 2 * width, norm=layer.norm, **shared)
        self.down = gtp.Dense(2 * width, width, parallel="row", **shared)

    def __call__(self, x):
        return self.down(INSIDE[self.operation](self.up(x)))


class Balanced(nnx.Module):
    """A layer with an auxiliary loss."""

    def __init__(self, layer: Layer, width: int, options: Options, rngs: nnx.Rngs):
        self.dense = gtp.Dense(width, width, use_bias=layer.bias, rngs=rngs, **options.dtypes)
        self.balance = gtp.nn.AuxLoss(jnp.zeros((), options.wide))

    def __call__(self, x):
        y = jnp.tanh(self.dense(x))
        self.balance.set_value(0.5 * jnp.mean(y.astype(self.balance.get_value().dtype) ** 2))
        return y


class Matrix(nnx.Module):
    """A product with a weight of its own."""

    def __init__(self, width: int, options: Options, rngs: nnx.Rngs):
        self.matrix = gtp.Param(nnx.initializers.normal(0.3)(rngs.params(), (width, width), options.wide))

    def __call__(self, x):
        return (jnp.tanh(x) @ self.matrix.gather()).astype(x.dtype)


class InDtype(nnx.Module):
    """A layer of Flax, whose output has its input's dtype."""

    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x).astype(x.dtype)


class Operation(nnx.Module):
    """An operation on activations."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, x):
        return OPERATIONS[self.name](x).astype(x.dtype)


def build_layer(layer: Layer, width: int, options: Options, rngs: nnx.Rngs) -> nnx.Module:
    """Makes a layer."""
    own, parallel = options.dtypes, options.parallel
    match layer.kind:
        case "dense":
            return gtp.Dense(width, width, use_bias=layer.bias, rngs=rngs, **own)
        case "pair":
            return Pair(layer, width, options, rngs)
        case "mlp":
            norm, bias = layer.norm, layer.bias
            return gtp.MLP(width, 2 * width, gated=layer.gated, norm=norm, use_bias=bias, rngs=rngs, **own, **parallel)
        case "attention":
            heads: Any = dict(num_heads=options.heads, num_kv_heads=options.heads // 2, head_dim=4)
            return gtp.Attention(width, **heads, norm=layer.norm, rngs=rngs, **own, **parallel)
        case "moe":
            routing = gtp.nn.Routing(z_loss_coeff=layer.z, aux_loss=layer.load_of)  # pyright: ignore
            balance: dict[str, Any] = dict(aux_loss_coeff=layer.aux, routing=routing)
            balance |= {} if layer.reduction is None else dict(loss_reduction=layer.reduction)
            return gtp.nn.MoE(
                width,
                width,
                num_experts=EXPERTS,
                top_k=TOP_K,
                parallel=layer.parallel,  # pyright: ignore
                rngs=rngs,
                **balance,
                **own,
                **parallel,
            )
        case "aux":
            return Balanced(layer, width, options, rngs)
        case "param":
            return Matrix(width, options, rngs)
        case "plain":
            return InDtype(nnx.Linear(width, width, use_bias=layer.bias, rngs=rngs, **options.flax))
        case "norm":
            return InDtype(nnx.BatchNorm(width, rngs=rngs, **options.flax))
        case "dropout":
            return nnx.Dropout(0.2, rngs=rngs)
        case "operation":
            return Operation(layer.operation)
    raise AssertionError(layer.kind)


class Residual(nnx.Module):
    """Layers, each on a residual branch."""

    def __init__(self, layers: list[nnx.Module]):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Drawn(nnx.Module):
    """A drawn model."""

    def __init__(self, draw: Draw, rngs: nnx.Rngs):
        model, options = draw.model, Options(draw)
        width, own, parallel = model.width, options.dtypes, options.parallel

        def block(rngs: nnx.Rngs) -> nnx.Module:
            layers = [build_layer(layer, width, options, rngs) for layer in model.block]
            return Residual(layers) if model.residual else layers[0]

        if model.entry == "embed":
            self.embed = gtp.Embed(model.classes, width, rngs=rngs, **own, **parallel)
        if model.entry == "dense":
            self.entry = gtp.Dense(width, width, rngs=rngs, **own)
        if draw.stacked:
            remat: Any = {} if draw.remat is None else dict(remat=draw.remat)
            self.body = gtp.Stack(block, model.length, rngs=rngs, **parallel, **remat)
        else:
            self.body = nnx.List([block(rngs) for _ in range(model.length)])
        match model.head:
            case "tied":
                self.head = gtp.nn.TiedHead(self.embed, rngs=rngs, **options.stored)
            case "normed":
                self.head = gtp.nn.LayerNormDense(width, model.classes, rngs=rngs, **own, **parallel)
            case "column":
                self.head = gtp.Dense(width, model.classes, parallel="column", rngs=rngs, **own, **parallel)
            case "dense":
                self.head = gtp.Dense(width, model.classes, use_bias=True, rngs=rngs, **own)
            case "plain":
                self.head = nnx.Linear(width, model.classes, rngs=rngs, **options.flax)
        self.dtype, self.pool, self.tokens = options.dtype, model.pool, model.tokens

    def __call__(self, x):
        x = self.embed(x) if self.tokens else self.entry(x) if hasattr(self, "entry") else x.astype(self.dtype)
        if isinstance(self.body, gtp.Stack):
            x = self.body(x)
        else:
            for block in self.body:
                x = block(x)
        if self.pool is not None:
            x = {"mean": lambda x: x.mean(1), "last": lambda x: x[:, -1], "flatten": flattened}[self.pool](x)
        return self.head(x) if hasattr(self, "head") else x


def copied(state: nnx.State) -> nnx.State:
    """Returns the state with variables of its own, as NNX puts those of a state into a model, which may write them."""
    return jax.tree.map(lambda a: a, state)


def flattened(x):
    return x.reshape(-1, x.shape[-1])


def loss_of(loss: Loss, model: Any, batch: Any) -> Any:
    """Returns what a drawn loss function does."""
    x, targets, weights = batch["x"], batch.get("targets"), batch.get("weights")
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def base(model: Any, x: Any) -> tuple[Any, Any]:
        y = model(x)
        if loss.kind in ("mean", "sum"):
            y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
            return (jnp.sin(y) + 0.1 * y**2).sum(), jnp.asarray(y.size, y.dtype)
        if model.pool == "flatten":
            return gtp.cross_entropy(y, *(None if one is None else one.reshape(-1) for one in (targets, weights)))
        return gtp.cross_entropy(y, targets, weights)

    def inner(params: Any, x: Any) -> Any:
        model = nnx.merge(graph, params, copied(others))
        if loss.inner == "sum":
            return model(x).sum()
        total, count = base(model, x)
        return total / count if loss.penalty == "params" else total  # of which no share is too small to be seen

    total, count = base(model, x)
    value = total if loss.counts else total / count
    for term in jax.tree.leaves(nnx.state(model, gtp.nn.AuxLoss)):
        value = value + term.sum() * (count if loss.counts else 1)
    if loss.penalty is not None:
        scale = count if loss.counts else 1
        if loss.penalty == "params":
            found = jax.grad(inner)(params, x)
            extra = sum((g**2).sum() for g in jax.tree.leaves(found))
        else:
            gradient = lambda x: jax.grad(inner, argnums=1)(params, x)  # noqa: E731
            found = jax.grad(lambda x: gradient(x).sum())(x) if loss.penalty == "hvp" else gradient(x)
            extra = (found**2).sum() / x.shape[0]
        value = scale * extra if loss.alone else value + scale * extra
    return (value, count) if loss.counts else value


def canonical(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the path of a variable in the oracle's parameters, which have no attributes of wrappers."""
    return tuple(str(part) for part in path if part != "inner")


def by_block(path: tuple[Any, ...], value: Any, stacked: bool) -> dict[tuple[str, ...], Any]:
    """Returns an array by its names in a list of blocks: those of a `Stack`, one for each block."""
    if stacked and path[0] == "body":
        assert path[1] == "layers"
        return {canonical(("body", i, *path[2:])): value[i] for i in range(value.shape[0])}
    return {canonical(path): value}


def start_of(draw: Draw, path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the value of a parameter, the same in a list of blocks and in a `Stack`, on every mesh."""
    rng = np.random.default_rng([zlib.crc32(".".join(path).encode()), draw.seed // GROUP])
    noise = rng.normal(size=shape)
    if "scale" in path:
        return 1 + 0.3 * noise
    if len(shape) == 1:
        return 0.3 * noise
    if path[-1] == "table":
        return noise
    ins = shape[-1] if len(shape) == 3 else shape[0]
    return noise / np.sqrt(ins)


def make(draw: Draw) -> tuple[Any, dict[tuple[str, ...], np.ndarray], dict[str, np.ndarray]]:
    """Returns a model on the mesh in scope, its parameters by the oracle's names, and the words of dropout's keys."""
    # `gtp.init` would compile a program for values that are replaced here
    model = gtp.nn.abstract_model(lambda _: Drawn(draw, nnx.Rngs(draw.seed, dropout=draw.seed + 1)))
    found, words = {}, {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array = variable.get_raw_value()
        if isinstance(variable, nnx.Param):
            shapes = by_block(path, np.zeros(array.shape, bool), draw.stacked)
            own = {name: start_of(draw, name, a.shape).astype(array.dtype) for name, a in shapes.items()}
            found |= own
            whole = np.stack(list(own.values())) if draw.stacked and path[0] == "body" else next(iter(own.values()))
            variable.set_value(jax.device_put(whole, array.sharding))
        elif isinstance(variable, nnx.RngKey):
            rng = np.random.default_rng([zlib.crc32(".".join(map(str, path)).encode()), draw.seed])
            own_words = rng.integers(0, 2**32, (*array.shape, 2), np.uint32)
            variable.set_value(jax.device_put(jax.random.wrap_key_data(own_words), array.sharding))
            for name, a in by_block(path, own_words, draw.stacked).items():
                words[f"{name[1]}.{name[3]}" if draw.model.residual else name[1]] = a
        else:  # counters, terms of the loss, and statistics
            value = np.full(array.shape, path[-1] == "var", array.dtype)
            variable.set_value(jax.device_put(value, array.sharding))
    return model, found, words


def named(state: Any, stacked: bool) -> dict[tuple[str, ...], np.ndarray]:
    """Returns gradients by the oracle's names, from a state or a nested dict of them."""
    if isinstance(state, nnx.State):
        flat = [(path, v.get_raw_value()) for path, v in nnx.to_flat_state(state)]
    else:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        flat = [(tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path), v) for path, v in leaves]
    found: dict[tuple[str, ...], np.ndarray] = {}
    for path, value in flat:
        found |= by_block(path, np.asarray(value, np.float64), stacked)
    return found


def computed(draw: Draw, model: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns what the drawn route computes: the loss, and gradients and other metrics where it has any."""
    loss = lambda model, batch: loss_of(draw.loss, model, batch)  # noqa: E731
    given = jax.tree.map(jnp.asarray, batch)
    recipe = None if draw.recipe is None else RECIPES[draw.recipe](**({} if draw.exclude else {"exclude": ()}))
    steps = draw.route in ("train_step", "eval_step", "loss_and_gradients")
    in_scope = recipe is not None and (draw.in_scope or not steps)
    argument: dict[str, Any] = {} if in_scope or recipe is None else {"recipe": recipe}

    def total(model: Any, batch: Any) -> tuple[Any, Any]:
        returned = loss(model, batch)
        return returned if draw.loss.counts else (returned, jnp.ones(()))

    with gtp.use_recipe(recipe) if in_scope else contextlib.nullcontext():
        if draw.route in ("nnx.jit", "jax.jit"):  # a sum is differentiated, and divided by its count then
            if draw.route == "nnx.jit":
                run = nnx.jit(lambda m, b: nnx.value_and_grad(total, has_aux=True)(m, b))
                (value, count), found = run(model, given)
            else:
                graph, params, others = nnx.split(model, nnx.Param, ...)
                of = lambda p, o, b: total(nnx.merge(graph, p, copied(o)), b)  # noqa: E731
                run = jax.jit(jax.value_and_grad(of, has_aux=True))
                (value, count), found = run(params, others, given)
            gradients = {name: g / np.float64(count) for name, g in named(found, draw.stacked).items()}
            return {"loss": value / count, "gradients": gradients}
        optimizer = optax.chain(optax.trace(decay=0.9), optax.sgd(0.1))  # the trace keeps the gradient
        state = gtp.TrainState.create(model, optimizer)
        if draw.route == "eval_step":
            metrics = gtp.eval_step(loss, **argument)(state, given)
            return {name: metrics[name] for name in ("loss", "tokens") if name in metrics}
        if draw.route == "loss_and_gradients":
            options = dict(microbatches=draw.microbatches, **argument)
            value, found = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, **options))(state, given)
            return {"loss": value, "gradients": named(found, draw.stacked)}
        step = gtp.train_step(loss, optimizer, microbatches=draw.microbatches, **argument)
        state, metrics = step(state, given)
        found = named(state.opt_state[0].trace, draw.stacked)
        kept = {name: metrics[name] for name in ("loss", "tokens", "grad_norm", "skipped") if name in metrics}
        return {**kept, "gradients": found}
