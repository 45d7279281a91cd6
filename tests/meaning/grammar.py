"""Draws of models, losses, meshes and routes: each is a function of one integer.

Draws of `GROUP` consecutive seeds have one model and one loss, so that they share the oracle's program; mesh, recipe,
route and whether the blocks are a list or a `Stack` are a draw's own.
"""

from __future__ import annotations

import dataclasses
import math
import random

GROUP = 2

MESHES: tuple[dict[str, int] | None, ...] = (
    None,
    dict(gtp=1),
    dict(gtp=2),
    dict(gtp=3),
    dict(gtp=4),
    dict(gtp=8),
    dict(tp=2),
    dict(tp=3),
    dict(gtp=2, tp=2),
    dict(gtp=4, tp=2),
    dict(dp=2),
    dict(dp=2, gtp=2),
    dict(dp=2, gtp=4),
    dict(dp=2, tp=2),
    dict(dp=2, gtp=2, tp=2),
    dict(gtp=2, ep=2),
    dict(ep=2, tp=2),
)
RECIPES = ("FP8", "MXFP8", "NVFP4")
# of every five models one has a second derivative, one is a classifier or has logits of rank 4, one has experts, one is
# a `Stack` of the library's own layers
THEMES = ("second derivatives", "classifier", "experts", "stack", "any")
ROUTES = ("train_step", "train_step", "loss_and_gradients", "eval_step", "nnx.jit", "jax.jit")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a block.

    Attributes:
        kind: `dense`, `pair` (column- and row-parallel), `mlp`, `attention`, `moe`, `param` (a `gtp.Param`), `aux` (a
            `Dense` that writes an `AuxLoss`), `plain` (of Flax), `norm` (Flax's batch norm), `dropout` (Flax's) or
            `operation`.
        bias: whether the layer has one.
        norm: the norm of the input of a `pair`, `mlp` or `attention`.
        operation: between the layers of a `pair`, or of an `operation`: a key of `operations`.
        parallel, aux, z, reduction, load_of: of a `moe`; a `reduction` of `None` is the default.
    """

    kind: str
    bias: bool = False
    norm: str | None = None
    operation: str = ""
    gated: bool = True
    parallel: str | None = "features"
    aux: float = 0.0
    z: float = 0.0
    reduction: str | None = None
    load_of: str = "sequence"

    @property
    def sums(self) -> bool:
        """Whether a `moe` is built for a loss that is a sum."""
        return self.reduction != "mean"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its input.

    Attributes:
        dtype: `None` for the library's defaults: no argument names a dtype.
        shape: the input's shape, `(batch, ...)`, without its features.
        tokens: whether the input are tokens.
        width: features between blocks.
        entry: `embed`, `dense`, or `cast` for none.
        block: layers, each on a residual branch if `residual`.
        length: number of blocks.
        pool: `mean`, `last`, `flatten` or `None`: what is done before the head.
        head: `column`, `dense`, `normed`, `tied`, `plain` or `None`.
    """

    dtype: str | None
    shape: tuple[int, ...]
    tokens: bool
    width: int
    entry: str
    block: tuple[Layer, ...]
    residual: bool
    length: int
    pool: str | None
    head: str | None
    classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape if self.tokens else (*self.shape, self.width)

    @property
    def rank(self) -> int:
        """Dimensions of the activations of the blocks."""
        return len(self.shape) + 1

    def has(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.block)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        kind: `mean` of a function of the output; `sum` of it with a count; `tokens`, the two that `cross_entropy`
            returns; `cross_entropy`, their quotient.
        masked: whether targets are masked, by weights and by negative ids.
        penalty: the square of a first derivative, with respect to `input` or `params`, or of a product of the Hessian
            and a vector (`hvp`); `None` for none.
        inner: what the penalty differentiates: the output's `sum`, or the `loss`.
        alone: whether the penalty is the whole loss.
    """

    kind: str
    masked: bool = False
    penalty: str | None = None
    inner: str = "sum"
    alone: bool = False

    @property
    def counts(self) -> bool:
        """Whether the loss is a pair of a sum and a count."""
        return self.kind in ("sum", "tokens")


@dataclasses.dataclass(frozen=True)
class Draw:
    """A case: a model, its loss, and where and how they are computed."""

    seed: int
    model: Model
    loss: Loss
    microbatches: int
    mesh: tuple[tuple[str, int], ...] | None
    stacked: bool
    remat: str | None
    sequence_parallel: bool
    route: str
    recipe: str | None
    in_scope: bool
    exclude: bool

    @property
    def degrees(self) -> dict[str, int]:
        return dict(self.mesh or ())

    def degree(self, *axes: str) -> int:
        return math.prod(self.degrees.get(axis, 1) for axis in axes)

    @property
    def ranks_of_batch(self) -> int:
        return self.degree("dp", "gtp", "ep")


def draw(seed: int) -> Draw:
    """Returns the draw of a seed."""
    shared, own = random.Random(f"group {seed // GROUP}"), random.Random(f"draw {seed}")
    theme = THEMES[seed // GROUP % len(THEMES)]
    model, loss, microbatches = _model_and_loss(shared, theme)
    meshes = [m for m in MESHES if model.has("moe") or "ep" not in (m or {})]
    if theme == "stack" and own.random() < 0.6:
        meshes = [m for m in meshes if "tp" in (m or {})]
    mesh = own.choice(meshes)
    stacked = theme == "stack" or own.random() < 0.5
    tp = (mesh or {}).get("tp", 1)
    divides = model.rank < 3 or model.shape[1] % tp == 0
    sequence_parallel = own.random() < (0.85 if divides else 0.3)
    routes = [route for route in ROUTES if microbatches == 1 or "step" in route or "loss" in route]
    if any(one.kind == "moe" and one.sums != loss.counts for one in model.block):
        routes = ["train_step", "loss_and_gradients"]  # a step of one's own cannot tell
    route = own.choice(routes)
    # most weights are too small for blocks in narrow models
    formats = RECIPES if model.width >= 32 or own.random() < 0.2 else RECIPES[:1]
    recipe = own.choice(formats) if own.random() < 0.25 and _quantizable(model) else None
    return Draw(
        seed,
        model,
        loss,
        1 if route == "eval_step" else microbatches,
        None if mesh is None else tuple(mesh.items()),
        stacked,
        own.choice([None, None, "nothing", "everything", "activations"]) if stacked else None,
        sequence_parallel,
        route,
        recipe,
        own.random() < 0.5,
        own.random() < 0.5,
    )


def _model_and_loss(rng: random.Random, theme: str) -> tuple[Model, Loss, int]:
    dtype = rng.choice([None, None, None, "float32", "float64", "float64"])
    tokens = theme in ("any", "second derivatives", "experts") and rng.random() < 0.35
    ranks = {"experts": [3], "classifier": [2, 2, 4], "stack": [2, 2, 3, 4]}.get(theme, [2, 3, 3, 4])
    rank = 3 if tokens else rng.choice(ranks)
    batch = rng.choice([8, 8, 8, 16, 24]) if rng.random() < 0.8 else rng.choice([5, 6, 10])
    shape = (batch, *((rng.choice([4, 6, 6]),) if rank > 2 else ()), *((rng.choice([2, 3]),) if rank > 3 else ()))
    width = rng.choice([8, 12, 16, 32])
    penalty = theme == "second derivatives" or (theme in ("any", "stack") and rng.random() < 0.2)
    kinds = {"stack": ["dense", "mlp"], "experts": ["moe"]}.get(theme) or _kinds(rank, penalty)
    layers = (_layer(rng, rng.choice(kinds), penalty),)
    if theme != "stack" and rng.random() < 0.4:
        layers = (*layers, _layer(rng, rng.choice(_kinds(rank, penalty)), penalty))
    if penalty and not any(one.kind in ("pair", "mlp", "attention", "moe", "aux", "param") for one in layers):
        layers = (*layers, Layer("pair", operation=rng.choice(["tanh", "gelu"]), bias=True))
    if any(one.kind == "moe" for one in layers):
        # so few tokens and routers that a batch is found for which rounding changes no choice
        layers = (
            layers[0],
            *(dataclasses.replace(one, kind="mlp") if one.kind == "moe" else one for one in layers[1:]),
        )
        shape = (min(batch, 8) if batch % 8 == 0 else batch, *shape[1:])
    kind = rng.choice(["mean", "sum", "tokens", "tokens", "cross_entropy"][3 * (tokens or theme == "classifier") :])
    classes = rng.choice([6, 10, 16, 24]) if not tokens else rng.choice([24, 30])
    head, pool = None, None
    if kind in ("tokens", "cross_entropy"):
        head = rng.choice(["column", "dense", "normed", "plain"] + ["tied"] * 3 * tokens)
        pool = rng.choice([None, None, "mean", "last", "flatten"]) if rank == 3 and not tokens else None
    reduction = rng.choice(["sum" if kind in ("sum", "tokens") else "mean", None])
    layers = tuple(dataclasses.replace(one, reduction=reduction) if one.kind == "moe" else one for one in layers)
    loss = Loss(kind, masked=rng.random() < 0.4)
    if penalty:
        where = rng.choice(["params"] if tokens else ["input", "input", "params", "hvp"])
        inner = rng.choice(["sum", "loss"]) if where == "input" else "loss"
        loss = dataclasses.replace(loss, penalty=where, inner=inner, alone=rng.random() < 0.5)
    entry = "embed" if tokens else rng.choice(["cast", "dense"])
    residual = (theme != "stack" and rng.random() < 0.6) or any(
        one.kind in ("operation", "norm", "dropout") for one in layers
    )
    model = Model(
        dtype,
        shape,
        tokens,
        width,
        entry,
        layers,
        residual or len(layers) > 1,
        rng.choice([1, 2, 2]),
        pool,
        head,
        classes,
    )
    microbatches = 2 if rng.random() < 0.2 and batch % 2 == 0 else 1
    return model, loss, microbatches


def _kinds(rank: int, penalty: bool) -> list[str]:
    kinds = ["dense", "dense", "pair", "pair", "mlp", "mlp", "plain", "param", "norm"]
    kinds += ["attention", "moe", "operation", "operation"] if rank == 3 else []
    return kinds + ([] if penalty else ["aux", "aux", "dropout"])


def _layer(rng: random.Random, kind: str, penalty: bool) -> Layer:
    if kind == "pair":
        operation = rng.choice(["tanh", "gelu", *(INSIDE if rng.random() < 0.5 else [])])
        return Layer(kind, rng.random() < 0.5, rng.choice(["rms", "layer", None]), operation)
    if kind == "mlp":
        return Layer(kind, rng.random() < 0.3, rng.choice(["rms", "layer", None]), gated=rng.random() < 0.7)
    if kind == "moe":
        return Layer(
            kind,
            parallel=rng.choice(["features", "expert", None]),
            aux=0.0 if penalty else rng.choice([0.0, 0.0, 0.5]),
            z=0.0 if penalty else rng.choice([0.0, 0.5, 1.0]),
            load_of=rng.choice(["sequence", "microbatch"]),
        )
    if kind == "attention":
        return Layer(kind, norm=rng.choice(["rms", "layer", None]))
    if kind == "operation":
        return Layer(kind, operation=rng.choice(BETWEEN))
    return Layer(kind, bias=rng.random() < 0.5)


def _quantizable(model: Model) -> bool:
    return model.has("dense", "pair", "mlp", "attention", "moe", "aux")


# keys of `operations`, in a fixed order; those whose derivative is smooth
INSIDE = ("features reversed", "norm over features", "softmax over features", "split in two")
BETWEEN = (
    "a slice of the sequence",
    "a softmax over the batch",
    "convolution over the sequence",
    "cumulative sum",
    "flip",
    "mean over the sequence",
    "pairs within the batch",
    "softmax over the sequence",
    "statistics over the batch",
    "the batch reversed",
    "the first position",
)
