"""Explains what a recipe does to each weight of a model, so that no weight is silently left unquantized."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..experts import GroupedDense, MoE, choose_transport
from ..formats import Format, Operands, Tiled
from ..hlo import columns, quantity
from ..hook import (
    INSIDE_TRANSFORMATION,
    UnitCall,
    UnitFact,
    WeightFact,
    calls_of,
    placement_of,
    recipe_of_step,
    sharded_weights,
    unit_facts,
    weight_facts,
)
from ..mesh import degree, supports_block_scaled_matmul, supports_fp8_matmul, supports_packed_attention
from ..nn import AttentionCore, Dense, Weight, groups_of, layout_of, weight_owners
from ..ops import MOST_MASKED, MOST_SCORES, lacks_blocked_product, multiplies_fp8_groups, multiplies_tiles
from ..recipes import BF16, Recipe, check_recipe
from ..weights import Layers, ModulePath, WeightGroup, bytes_on_wire, in_order, use_rows
from ._life import Lives, lives_of
from ._offload import OffloadFact, offload_facts
from ._share import StateShare, share_of

_NOTHING = (
    "gtp_jax gathers no weight of this model: it has none of gtp_jax's layers, and `gtp_jax.shard` has not sharded it"
)
_TILES = "for sequences of a multiple of 128; others are written out"
_SCORES, _MASKED = (f"{math.isqrt(most)} x {math.isqrt(most)}" for most in (MOST_SCORES, MOST_MASKED))
_ARRAY = f"as an array of (queries, keys), or above {_MASKED} in blocks without cuDNN, except a mask of that size"
_READS = f"reads a mask or segments, if there are any, {_ARRAY}"
_PACKS = f"packs segments that are runs; reads a mask and other segments {_ARRAY}"


@dataclasses.dataclass(frozen=True)
class WireFact:
    """How the weights of one module are sent and multiplied.

    Attributes:
        module: the path of the module in the model.
        shapes: the logical shapes of the module's kernels in one layer.
        layers: the number of layers that this describes.
        first: the index of the first of these layers.
        wire: the name of the wire format, or of the dtype if the weights are not quantized.
        bytes: the bytes of one layer's gathered weights on the wire, codes and scales of all shards together.
        bytes_per_element: the bytes on the wire per logical element.
        matmul: the formats or the dtype of the matmuls, and the kind of matmul that computes them.
        forward: the operands of input times weight; empty if matmul operands are not quantized.
        dgrad: the operands of gradient times weight; empty in the same case.
        wgrad: the operands of gradient times input; empty in the same case.
        reduction: how the gradient is summed over the gtp axis; `"none: frozen"` for frozen weights, and empty for
            others that the axis does not shard.
    """

    module: str
    shapes: tuple[tuple[int, ...], ...]
    layers: int
    first: int
    wire: str
    bytes: int
    bytes_per_element: float
    matmul: str
    forward: str
    dgrad: str
    wgrad: str
    reduction: str


@dataclasses.dataclass(frozen=True)
class AttentionFact:
    """How the attention of one module is computed on the devices of the mesh in scope.

    Attributes:
        module: the path of the module in the model.
        implementation: `"cuDNN"`, or `"written out"` in jax.numpy, with a `(queries, keys)` array of scores, or in
            blocks of it. If forward multiplies in FP8, it begins with `"FP8, "`.
        reason: what cuDNN does not support. If it supports the attention: which inputs it reads as an array of
            `(queries, keys)`, or for which lengths it computes in FP8. In both cases, from which size on attention is
            computed in blocks.
    """

    module: str
    implementation: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ExpertsFact:
    """How one `MoE` chooses its experts, and where they are on the mesh in scope.

    Attributes:
        module: the path of the module in the model.
        experts: the number of experts per token, the number of experts, and whether there is a shared one.
        router: the router's score function, and the settings that differ from the default.
        training: what keeps the load balanced and the logits small; `"nothing"` if nothing does.
        where: how a rank reaches the experts of its tokens: by sending tokens or by gathering weights.
    """

    module: str
    experts: str
    router: str
    training: str
    where: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The effects of a recipe on the modules of a model. Prints as tables.

    Attributes:
        facts: one fact for each module whose weights are gathered, and each run of layers treated the same way.
        attentions: one fact for each `Attention` and `CrossAttention`.
        experts: one fact for each `MoE`.
        untouched: the paths of all other parameters, which no recipe touches: norms, biases, routers, and parameters
            of modules that are not gtp_jax's.
        units: one fact for each module whose weights `gtp_jax.shard` has sharded.
        calls: one entry for each traced call that gathers or quantizes weights of such a module; empty if `explain` was
            not given a call.
        weights: one fact for each weight that `gtp_jax.shard` has sharded; empty if the recipe quantizes none.
        share: what each device stores of the weights and of AdamW's state, and an even share; `None` if nothing is
            trained.
        offloads: one fact for each `Stack` that the call runs and whose layers save their activations in the host's
            memory.
    """

    facts: tuple[WireFact, ...]
    untouched: tuple[str, ...] = ()
    attentions: tuple[AttentionFact, ...] = ()
    experts: tuple[ExpertsFact, ...] = ()
    units: tuple[UnitFact, ...] = ()
    calls: tuple[UnitCall, ...] = ()
    weights: tuple[WeightFact, ...] = ()
    share: StateShare | None = None
    offloads: tuple[OffloadFact, ...] = ()

    @property
    def unmultiplied(self) -> tuple[str, ...]:
        """Returns the sharded weights that the recipe would multiply in its format, but that the explained call uses in
        no such product."""
        found = {name for call in self.calls for name in call.multiplied}
        return tuple(w.weight for w in self.weights if self.calls and w.multiplied and w.weight not in found)

    @property
    def narrow(self) -> tuple[str, ...]:
        """Returns the sharded weights whose gradients should be summed in float32 or exchanged in a recipe's format,
        but may be summed in a call's compute dtype, because the call has no product with them that supports this."""
        return tuple(dict.fromkeys(name for call in self.calls for name in call.narrow))

    def __str__(self) -> str:
        header = ("module", "layers", "kernels", "wire", "per layer", "B/element", "matmul", "gradient")
        rows = [
            (
                fact.module,
                _layers(fact),
                " ".join("x".join(map(str, shape)) for shape in fact.shapes),
                fact.wire,
                quantity(fact.bytes, "B"),
                f"{fact.bytes_per_element:.3f}",
                fact.matmul,
                fact.reduction,
            )
            for fact in self.facts
        ]
        table = columns(header, rows, right=(1, 4, 5))
        products = [(f.module, _layers(f), f.forward, f.dgrad, f.wgrad) for f in self.facts if f.forward]
        header = ("module", "layers", "forward: input x weight", "dgrad: gradient x weight", "wgrad: gradient x input")
        parts = [
            *([table] if rows else [] if self.units else [_NOTHING]),
            *([columns(header, products, right=(1,))] if products else []),
        ]
        if self.units:
            rows = [
                (
                    _named(u.module or "the model", u.also),
                    u.type,
                    u.weights,
                    u.shards,
                    quantity(u.bytes, "B"),
                    u.gathered,
                )
                for u in self.units
            ]
            header = ("module", "class", "weights", "shards", "gathered bytes", "gathered")
            parts.append(columns(header, rows, right=(2, 3, 4)))
        if self.weights:
            rows = [
                (_named(w.weight, w.also), _slices(w), w.wire or "its compute dtype", quantity(w.bytes, "B"), w.reason)
                for w in self.weights
            ]
            parts.append(columns(("weight", "shape", "wire", "per gather", "why"), rows, right=(3,)))
        if self.calls:
            rows = [(c.module or "the model", "ahead" if c.prefetched else "at the call", c.reason) for c in self.calls]
            parts.append(columns(("call of", "gathered", "why"), rows))
        if any(c.reason == INSIDE_TRANSFORMATION for c in self.calls):
            parts.append("to gather ahead of calls inside a transformation, unroll it or use `gtp_jax.Stack`")
        if self.unmultiplied:
            parts.append(f"used in no product that the recipe's format supports: {', '.join(self.unmultiplied)}")
        if self.narrow:
            parts.append(
                "used in no product whose gradients can be summed in float32 or exchanged, so that they may be summed "
                f"in the dtype in which the model computes: {', '.join(self.narrow)}"
            )
        if self.attentions:
            rows = [(fact.module, fact.implementation, fact.reason) for fact in self.attentions]
            parts.append(columns(("module", "attention", "why"), rows))
        if self.experts:
            rows = [dataclasses.astuple(fact) for fact in self.experts]
            parts.append(columns(("module", "experts", "router", "trained with", "reached by"), rows))
        parts += map(str, self.offloads)
        if self.share is not None:
            parts.append(str(self.share))
        if self.untouched:
            parts.append(f"neither gathered nor quantized, used as they are: {', '.join(_grouped(self.untouched))}")
        return "\n\n".join(parts)


@overload
def explain(model: nnx.Module, recipe: Recipe | None = None, *, path: str) -> Lives: ...
@overload
def explain(
    model: nnx.Module, recipe: Recipe | None = None, *, call: Callable[[Any], Any] | None = None
) -> Explanation: ...
def explain(
    model: nnx.Module,
    recipe: Recipe | None = None,
    *,
    call: Callable[[Any], Any] | None = None,
    path: str | None = None,
) -> Explanation | Lives:
    """Reports what a recipe does with each weight of a model, including the weights that no recipe touches.

    Args:
        model: the model, which may be abstract.
        recipe: the recipe, such as `gtp_jax.NVFP4()`; `gtp_jax.recipes.BF16()` by default.
        call: a function of the model, such as `lambda model: model(tokens)`. It is traced but not run, and the report
            then says for each call of a module that `gtp_jax.shard` has sharded whether its weights are prefetched; and
            for each `Stack` whose `remat` offloads, what a layer copies to the host, and whether it computes longer
            than the copies take.
        path: the path of one module, or the end of it, such as `"layers.mlp.up"`; or of one weight that `gtp_jax.shard`
            has sharded. If given, the life of its weights in a step is returned instead: each state, and the function
            that makes it.

    Raises:
        TypeError: if `recipe` is not a recipe, or `model` is not an NNX module.
        ValueError: if the format's blocks do not fit a weight as ranks divide it, if the recipe names modules or layers
            of which the model trains none, if a pattern of the recipe is never used, if the recipe quantizes but the
            model has nothing to quantize, or if `path` does not name exactly one such module or weight.
    """
    check_recipe(recipe)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"`model` is a {type(model).__name__}; it must be an `nnx.Module`. A Linen layer "
            "follows the recipe in scope; see `gtp_jax.use_recipe`."
        )
    recipe = BF16() if recipe is None else recipe
    owners = weight_owners(model)
    groups = groups_of(model, recipe)
    with recipe_of_step(recipe):
        calls = () if call is None else calls_of(model, call)
    if path is not None:
        return lives_of(path, owners, groups, sharded_weights(model, recipe, calls))
    facts = tuple(_fact(at, owners[at], group, layers) for (at, layers), group in groups.items())
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    fp8 = {path for (path, _), group in groups.items() if group.operands is not None and group.operands.attention}
    cores = [(path[:-1], m) for path, m in nnx.iter_modules(model) if isinstance(m, AttentionCore)]
    attentions = tuple(_attention(path, core, (*path, "out") in fp8) for path, core in cores)
    experts = tuple(_experts(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, MoE))
    weights = weight_facts(model, recipe, calls)
    coded = {fact.weight for fact in weights if fact.wire}
    others = [
        name
        for path, v in params
        if layout_of(v) is None
        and (name := ".".join(map(str, path))) not in coded
        and ((placement := placement_of(v)) is None or not placement.gathered)
    ]
    weights = weights if any(kind.wire is not None for kind in recipe.kinds) else ()
    units, share = unit_facts(model, calls), share_of(model)
    with recipe_of_step(recipe):
        offloads = () if call is None else offload_facts(model, call)
    return Explanation(facts, tuple(others), attentions, experts, units, calls, weights, share, offloads)


def _grouped(names: Sequence[str]) -> list[str]:
    """Returns names. Those that differ only in numbers become one name, with `*` for the numbers, and their count."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [f"{key} ({len(own)})" if len(own) > 1 else own[0] for key, own in groups.items()]


def _attention(path: ModulePath, core: AttentionCore, fp8: bool) -> AttentionFact:
    module = ".".join(map(str, path))
    if fp8:
        lacks = core.lacks_fp8()
        return AttentionFact(module, "FP8, written out" if lacks else "FP8, cuDNN", lacks or _TILES)
    lacks = core.lacks()
    if lacks:
        return AttentionFact(module, "written out", f"{lacks}; in blocks above {_SCORES}")
    if core.reach.window is not None and not core.causal:
        return AttentionFact(module, "cuDNN", f"reads a window to both sides {_ARRAY}")
    return AttentionFact(module, "cuDNN", _PACKS if supports_packed_attention() else _READS)


def _experts(path: ModulePath, moe: MoE) -> ExpertsFact:
    routing, axis = moe.routing, moe.roles.experts
    router = [routing.score]
    if routing.num_groups > 1:
        router.append(f"{routing.top_groups} of {routing.num_groups} groups")
    router += [] if routing.normalize else ["weights not normalized"]
    router += [] if routing.scale == 1 else [f"weights times {routing.scale:g}"]
    router += [f"jitter {routing.jitter:g}"] if routing.jitter else []
    router += [] if routing.bias_rate is None else ["biases"]
    training = [f"loss per {routing.aux_loss}, {moe.aux_loss_coeff:g}"] if moe.aux_loss_coeff else []
    training += [f"biases, {routing.bias_rate:g} per step"] if routing.bias_rate else []
    training += [f"z loss, {routing.z_loss_coeff:g}"] if routing.z_loss_coeff else []
    if axis is not None and (ranks := degree(axis)) > 1:
        transport = choose_transport(axis, moe.transport)
        where = f"sending tokens over {axis} {ranks} ({transport}), {moe.up.own_experts} experts per rank"
    else:
        where = "gathering their weights"
    shared = " and a shared one" if moe.shared is not None else ""
    return ExpertsFact(
        module=".".join(map(str, path)),
        experts=f"{moe.top_k} of {moe.num_experts}{shared}",
        router=", ".join(router),
        training=", ".join(training) or "nothing",
        where=where,
    )


def _fact(path: ModulePath, owner: Weight, group: WeightGroup, layers: Layers) -> WireFact:
    layouts, form = group.layouts, group.wire
    total = bytes_on_wire(group)
    operands = group.operands if isinstance(owner, Dense | GroupedDense) else None
    return WireFact(
        module=".".join(map(str, path)),
        shapes=owner.shapes,
        layers=layers.stop - layers.start,
        first=layers.start,
        wire=group.dtype.name if form is None else form.name,
        bytes=total,
        bytes_per_element=total / sum(int(np.prod(layout.shape)) for layout in layouts),
        matmul=_matmul(group, isinstance(owner, GroupedDense), operands),
        **_products(operands),
        reduction=_reduction(group),
    )


def _matmul(group: WeightGroup, grouped: bool, operands: Operands | None) -> str:
    if group.array is not None:
        return f"{group.dtype.name}, as no recipe quantizes arrays of any shape"
    if operands is None:
        return group.dtype.name if group.wire is None else f"{group.dtype.name}, on dequantized weights"
    names = list(dict.fromkeys((operands.activation.name, operands.gradient.name)))
    formats, values = ", gradients ".join(names), f"{group.dtype.name} on dequantized values"
    if grouped and group.as_codes and _multiplies_codes(group):
        return f"{formats}: grouped"
    if grouped:
        return f"{formats}: grouped, {values}"
    if operands.weight.block is None:
        formats = formats if operands.delayed is None else f"{formats}, delayed scaling"
        return formats if supports_fp8_matmul() else f"{formats}: {values}"
    if isinstance(group.wire, Tiled):
        lacks = lacks_blocked_product()
        return f"{formats}: float32 values, as {lacks}" if lacks else formats
    return f"{formats}: {_scaled(group, operands, values) if supports_block_scaled_matmul() else values}"


def _multiplies_codes(group: WeightGroup) -> bool:
    """Returns whether the matmul of the experts, which are gathered as codes, takes these codes directly."""
    order = group.order if isinstance(group.wire, Tiled) else None
    rows, first = sum(use_rows(group.layouts)), group.layouts[0]
    shards = group.ranks if in_order(group.layouts) and order is None else 1
    shape = shards, first.matrices, rows // shards, first.matrix_of(first.use_shape)[1]
    multiplies = multiplies_tiles(shape, order) if isinstance(group.wire, Tiled) else multiplies_fp8_groups(shape)
    return group.dtype in (jnp.bfloat16, jnp.float16) and multiplies


def _scaled(group: WeightGroup, operands: Operands, values: str) -> str:
    """Returns in words which products `scaled_matmul` computes on hardware that supports it. `scaled_matmul` needs
    whole blocks along the contraction."""
    first = group.layouts[0]
    within = first.matrix_of(first.use_shape)[1]  # on a rank
    assert operands.activation.block is not None and operands.gradient.block is not None
    lengths = {
        "forward": (within, operands.activation.block[1]),
        "dgrad": (sum(group.rows_in_blocks), operands.gradient.block[1]),
    }
    ragged = [f"{name} along {length}" for name, (length, block) in lengths.items() if length % block]
    # with Hadamard transforms, tokens fill whole blocks; without, the number of tokens decides, which is unknown here
    ragged += [] if operands.hadamard else ["wgrad where tokens fill no whole blocks"]
    return "scaled_matmul" + (f", but {', '.join(ragged)}: {values}" if ragged else "")


def _reduction(group: WeightGroup) -> str:
    if group.frozen:
        return "none: frozen"
    if group.ranks == 1:
        return ""
    if group.exchanged is None:
        return f"reduce-scatter {group.summed.sums.name}"
    return f"all-to-all {group.exchanged.name}, summed in float32"


def _products(operands: Operands | None) -> dict[str, str]:
    if operands is None:
        return dict.fromkeys(("forward", "dgrad", "wgrad"), "")
    weight, x, gradient = (_operand(form) for form in (operands.weight, operands.activation, operands.gradient))
    gradient += ", stochastic" if operands.stochastic else ""
    transformed = "; both Hadamard" if operands.hadamard else ""
    return {
        "forward": f"{x} x {weight}",
        "dgrad": f"{gradient} x {weight}",
        "wgrad": f"{gradient} x {x}{transformed}",
    }


def _operand(form: Format) -> str:
    element = form.element.upper()
    return element if form.block is None else f"{element} {form.block[0]}x{form.block[1]}"


def _named(path: str, also: tuple[str, ...]) -> str:
    """Returns the paths of a module or weight, joined by `=`; if there are more than three, two and the number of the
    others."""
    return " = ".join((path, *also)) if len(also) < 3 else f"{path} = {also[0]} = {len(also) - 1} more"


def _slices(fact: WeightFact) -> str:
    shape = "x".join(map(str, fact.shape))
    return shape if fact.slices == 1 else f"{fact.slices} of {shape}"


def _layers(fact: WireFact) -> str:
    return f"{fact.first}-{fact.first + fact.layers - 1}" if fact.layers > 1 else str(fact.first)
