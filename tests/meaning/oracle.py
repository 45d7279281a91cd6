"""The oracle of random models: functions of nested dicts of arrays in plain JAX, which share no code with gtp_jax.

The parameters are named as the state of the drawn model names them, those of its blocks by their number under `body`.
Every function computes in the dtype `c`, norms, routers and softmax in at least float32, as the library's layers say.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import oracle as formats
from .grammar import Draw, Layer, Loss, Model
from .operations import INSIDE, OPERATIONS

TOP_K, EXPERTS = 2, 4
FORMATS = {"FP8": "FP8_E4M3", "MXFP8": "MXFP8", "NVFP4": "NVFP4"}


class Notes:
    """Values that layers leave in addition to the activation, and the keys of dropout.

    Attributes:
        words: of dropout's keys, by number of the block and the layer.
        number: the microbatch's number, by which dropout's keys differ.
        losses: values of `AuxLoss`.
        hidden: sums over tokens that are in the gradient and not in the reported loss, and the number of tokens.
        margins: by how much experts were chosen, in units of the logits' spread.
    """

    def __init__(self, words: dict[str, jax.Array], number: Any) -> None:
        self.words, self.number = words, number
        self.losses: list[jax.Array] = []
        self.hidden: list[tuple[jax.Array, int]] = []
        self.margins: list[jax.Array] = []


def wide_of(c: Any) -> Any:
    return jnp.promote_types(c, jnp.float32)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, c: Any) -> jax.Array:
    y = jnp.einsum("...i,io->...o", x.astype(c), kernel.astype(c))
    return y if bias is None else y + bias.astype(c)


def normed(x: jax.Array, p: dict[str, Any], norm: str | None) -> jax.Array:
    if norm is None:
        return x
    wide = x.astype(wide_of(x.dtype))
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    y = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    return (y + p["shift"] if norm == "layer" else y).astype(x.dtype)


def attention(p: dict[str, Any], x: jax.Array, layer: Layer, heads: int, groups: int, dim: int, c: Any) -> jax.Array:
    wide = wide_of(c)
    h = normed(x, p["qkv"], layer.norm)
    by_head = lambda name: linear(h, p["qkv"]["kernel"][name], None, c).reshape(*x.shape[:2], -1, dim)  # noqa: E731
    q, k, v = (by_head(name).astype(wide) for name in ("query", "key", "value"))
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
    cos, sin = (jnp.asarray(f(angle), wide)[:, None, :] for f in (np.cos, np.sin))

    def turned(a: jax.Array) -> jax.Array:
        one, other = a[..., : dim // 2], a[..., dim // 2 :]
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    q, k = turned(q), turned(k)
    k, v = (jnp.repeat(a, heads // groups, axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(dim)
    scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return linear(mixed.reshape(*x.shape[:2], -1), p["out"]["kernel"], None, c)


def moe(p: dict[str, Any], x: jax.Array, layer: Layer, notes: Notes, c: Any) -> jax.Array:
    wide, tokens = wide_of(c), x.shape[0] * x.shape[1]
    x = normed(x, p, "rms")
    logits = jnp.matmul(x.astype(wide), p["router"].astype(wide), precision="highest")
    scores = jax.nn.softmax(logits, -1)
    ordered, chosen = jax.lax.top_k(jax.lax.stop_gradient(logits), EXPERTS)
    notes.margins.append((ordered[..., TOP_K - 1] - ordered[..., TOP_K]).min())
    taken = jax.nn.one_hot(chosen[..., :TOP_K], EXPERTS, dtype=wide).sum(-2)
    shares = taken * scores
    shares = shares / shares.sum(-1, keepdims=True)
    by_expert = lambda name: jnp.einsum("bsi,eoi->bseo", x.astype(c), p["up"]["kernel"][name].astype(c))  # noqa: E731
    hidden = jax.nn.silu(by_expert("gate").astype(wide)) * by_expert("up") * shares[..., None]
    load = taken.sum(1, keepdims=True)
    length = x.shape[1]
    if layer.load_of == "microbatch":
        load, length = load.sum(0, keepdims=True), tokens
    term = layer.aux * (load * EXPERTS / (TOP_K * length) * scores).sum()
    term += layer.z * (jax.nn.logsumexp(logits, -1) ** 2).sum()
    notes.hidden.append((term, tokens))
    return jnp.einsum("bseo,eio->bsi", hidden.astype(c), p["down"]["kernel"].astype(c)).astype(c)


def dropout(words: jax.Array, x: jax.Array, number: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(words), number)  # the key counts the calls
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0).astype(x.dtype)


def batch_norm(p: dict[str, Any], x: jax.Array) -> jax.Array:
    wide = x.astype(wide_of(x.dtype))
    axes = tuple(range(x.ndim - 1))
    mean, var = wide.mean(axes), (wide**2).mean(axes) - wide.mean(axes) ** 2
    return ((wide - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["bias"]).astype(x.dtype)


def apply_layer(layer: Layer, p: dict[str, Any], x: jax.Array, notes: Notes, c: Any, place: str) -> jax.Array:
    match layer.kind:
        case "dense":
            return linear(x, p["kernel"], p.get("bias"), c)
        case "plain":
            return linear(x, p["kernel"], p.get("bias"), wide_of(c)).astype(x.dtype)
        case "param":
            return (jnp.tanh(x) @ p["matrix"].astype(wide_of(c))).astype(x.dtype)
        case "aux":
            y = jnp.tanh(linear(x, p["dense"]["kernel"], p["dense"].get("bias"), c))
            notes.losses.append(0.5 * (y.astype(wide_of(c)) ** 2).mean())
            return y
        case "pair":
            h = linear(normed(x, p["up"], layer.norm), p["up"]["kernel"], p["up"].get("bias"), c)
            return linear(INSIDE[layer.operation](h).astype(c), p["down"]["kernel"], p["down"].get("bias"), c)
        case "mlp":
            h, up = normed(x, p["up"], layer.norm), p["up"]
            bias = up.get("bias") or {}
            of = {name: linear(h, kernel, bias.get(name), c) for name, kernel in up["kernel"].items()}
            h = jax.nn.silu(of["gate"]) * of["up"] if layer.gated else jax.nn.silu(of["up"])
            return linear(h, p["down"]["kernel"], p["down"].get("bias"), c)
        case "attention":
            dim = 4
            heads, groups = (p["qkv"]["kernel"][name].shape[1] // dim for name in ("query", "key"))
            return attention(p, x, layer, heads, groups, dim, c)
        case "moe":
            return moe(p, x, layer, notes, c)
        case "norm":
            return batch_norm(p, x)
        case "dropout":
            return dropout(notes.words[place], x, notes.number)
        case "operation":
            return OPERATIONS[layer.operation](x).astype(x.dtype)
    raise AssertionError(layer.kind)


def forward(model: Model, p: dict[str, Any], x: jax.Array, c: Any, notes: Notes) -> jax.Array:
    """Returns the model's output; its layers add to the notes."""
    if model.entry == "embed":
        x = p["embed"]["table"].astype(c)[x]
    elif model.entry == "dense":
        x = linear(x, p["entry"]["kernel"], None, c)
    else:
        x = x.astype(c)
    for i in range(model.length):
        layers = p.get("body", {}).get(str(i), {})
        for j, layer in enumerate(model.block):
            own = layers.get("layers", {}).get(str(j), {}) if model.residual else layers
            y = apply_layer(layer, own, x, notes, c, f"{i}.{j}" if model.residual else str(i))
            x = x + y if model.residual else y
    match model.pool:
        case "mean":
            x = x.mean(1)
        case "last":
            x = x[:, -1]
        case "flatten":
            x = x.reshape(-1, x.shape[-1])
    match model.head:
        case "tied":
            x = linear(normed(x, p["head"], "rms"), p["embed"]["table"].T, None, c)
        case "normed":
            x = linear(normed(x, p["head"], "rms"), p["head"]["kernel"], None, c)
        case "column" | "dense":
            x = linear(x, p["head"]["kernel"], p["head"].get("bias"), c)
        case "plain":
            x = linear(x, p["head"]["kernel"], p["head"]["bias"], wide_of(c))
    return x


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    logits = logits.astype(wide_of(logits.dtype))
    counts = ((targets >= 0) * (1.0 if weights is None else weights)).reshape(logits.shape[:-1])
    targets = targets.reshape(counts.shape)
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - picked
    return (losses * counts).sum(), jnp.asarray(counts, logits.dtype).sum()


def loss_of(draw: Draw, p: Any, batch: Any, words: Any, c: Any, number: Any) -> tuple[jax.Array, Any]:
    """Returns what is differentiated, a mean or a sum; and the count of the sum, what is reported, and the margin."""
    model, loss = draw.model, draw.loss
    x, wide = batch["x"], wide_of(c)

    def base(p: Any, x: Any, notes: Notes) -> tuple[jax.Array, jax.Array]:
        y = forward(model, p, x, c, notes)
        if loss.kind in ("mean", "sum"):
            y = y.astype(wide)
            total = (jnp.sin(y) + 0.1 * y**2).sum()
            return total, jnp.asarray(y.size, wide)
        return cross_entropy(y, batch["targets"], batch.get("weights"))

    def inner(p: Any, x: Any) -> jax.Array:
        unused = Notes(words, number)
        if loss.inner == "sum":
            return forward(model, p, x, c, unused).sum()
        total, count = base(p, x, unused)
        return total / count if loss.penalty == "params" else total

    notes = Notes(words, number)
    total, count = base(p, x, notes)
    value = total if loss.counts else total / count
    value = value + sum(notes.losses, jnp.zeros((), wide)) * (count if loss.counts else 1)
    if loss.penalty is not None:
        extra = penalty(loss, inner, p, x)
        scale = count if loss.counts else 1
        value = scale * extra if loss.alone else value + scale * extra
    # each token weighs in them as it does in the loss
    hidden = sum((term / (1 if loss.counts else n) for term, n in notes.hidden), jnp.zeros((), wide))
    margin = jnp.stack([m.astype(jnp.float32) for m in notes.margins]).min() if notes.margins else jnp.float32(1)
    return value + hidden, (count, value, margin)


def penalty(loss: Loss, inner: Any, p: Any, x: Any) -> jax.Array:
    """Returns the mean square of a derivative."""
    if loss.penalty == "params":
        found = jax.grad(inner)(p, x)
        return sum((g**2).sum() for g in jax.tree.leaves(found))
    gradient = lambda x: jax.grad(inner, argnums=1)(p, x)  # noqa: E731
    if loss.penalty == "hvp":
        return (jax.jvp(gradient, (x,), (jnp.ones_like(x),))[1] ** 2).sum() / x.shape[0]
    return (gradient(x) ** 2).sum() / x.shape[0]


def quantized(draw: Draw, path: tuple[str, ...], value: np.ndarray) -> np.ndarray:
    """Returns the values of a weight after its trip as codes; a weight that travels as it is unchanged."""
    recipe = None if draw.exclude and path[0] in ("embed", "head") else draw.recipe
    if recipe is None or path[-1] == "matrix" or _of_flax(draw.model, path):
        return value
    form = FORMATS[recipe]
    if path[-1] == "table":
        return _matrix(value, form)
    if "kernel" not in path:
        return value
    if value.ndim == 3:  # experts, of which each is a tensor of its own, (out, in)
        return np.stack([_matrix(one, form) for one in value])
    return _matrix(value.T, form).T


def _of_flax(model: Model, path: tuple[str, ...]) -> bool:
    if path[0] == "head":
        return model.head == "plain"
    if path[0] != "body":
        return False
    return model.block[int(path[3]) if model.residual else 0].kind == "plain"


def _matrix(weight: np.ndarray, form: str) -> np.ndarray:
    weight = np.ascontiguousarray(weight, np.float32)
    whole = formats.amax(weight)
    codes, scales = formats.quantize(form, weight[None], whole)
    return formats.dequantize(form, codes, scales, whole[None], weight.shape, np.float32)[0]
