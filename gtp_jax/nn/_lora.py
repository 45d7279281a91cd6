"""Adds low-rank adapters (LoRA) to a model's projections, and freezes all other parameters."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from .._numbers import is_size
from ..layout import Layout
from ..mesh import check_mesh_in_scope, current_view
from ..recipes import EXCLUDED, Recipe, matches
from ._adapted_linear import AdaptedLinear, check_stock, layout_of_stock, places_of
from ._adapter import Adapter
from ._dense import Dense
from ._frozen import freeze
from ._init import init
from ._owners import stacks_of, weight_owners

_SHOWN = 12


def lora[M: nnx.Module](
    model: M,
    rank: int,
    alpha: float,
    *,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
    recipe: Recipe | None = None,
    rngs: nnx.Rngs,
) -> M:
    """Returns a copy of the model with an adapter on each targeted projection, in which all other parameters are
    frozen.

    A projection is a kernel of a `Dense`, `nnx.Linear` or `nnx.LinearGeneral`. If you use `gtp_jax.shard`, call it
    before this function.

    `x @ kernel` becomes `x @ kernel + alpha / rank * dropout(x) @ a @ b`. Each projection has its own adapter, even if
    several projections share a matmul (query, key and value; gate and up). Initially, `a` is Kaiming-uniform and `b` is
    zero, so that adapters at first add nothing. Both are `nnx.LoRAParam`s of dtype float32, or of the projection's
    dtype if that is wider. gtp does not shard them. If tp divides the kernel evenly, tp shards one of them; see
    `Adapter`. A step computes and sums gradients of the adapters only.

        model = gtp_jax.nn.lora(gtp_jax.models.load("llama"), 8, 16, rngs=nnx.Rngs(0))

    Args:
        model: the model, which is not changed. It may already be frozen, even as codes.
        rank: the rank of the adapters.
        alpha: the numerator of the adapters' scale, `alpha / rank`.
        targets: patterns of projections, such as `"query"`, `"attention.out"` or `"mlp"`: names joined by dots, with
            wildcards, as in a recipe. In a layer with several kernels, the path of a projection ends with the kernel's
            name. By default, all projections are targeted, except those with the usual names of heads and embeddings.
        dropout: the fraction of an adapter's input that is dropped in `gtp_jax.train_step` and `loss_and_gradients`,
            with different random bits in each step and microbatch. In other calls, nothing is dropped. In a `Dense`,
            and in local view, the bits also differ between ranks, so results differ between meshes.
        recipe: the recipe, which decides which weights are frozen as codes; see `freeze`.
        rngs: the random streams; only the stream `params` is used.

    Raises:
        ValueError: if an argument is out of range; if `targets` is not a list of patterns; if a pattern matches no
            projection, or matches weights that are not projections, such as those of experts; if a targeted Flax layer
            is in several places of the model, has a stacked kernel, or does not contract the last dimensions of its
            input; if a `recipe` is given and a Flax layer is targeted; if the model has no projections, already has
            adapters, or is abstract; if the call is inside a `shard_map`; or for the reasons that `freeze` gives.
        TypeError: if `recipe` is not a recipe.
    """
    _check(rank, alpha, dropout)
    check_mesh_in_scope()
    if current_view() == "local":
        raise ValueError(
            "`lora` takes a model of global arrays, but it is called inside a `shard_map`. Call it outside."
        )
    graph, state = nnx.split(model)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state)):
        raise ValueError(
            "the model is abstract, so there are no values to freeze. Add adapters inside `abstract_model`: "
            "`gtp_jax.nn.abstract_model(lambda rngs: gtp_jax.nn.lora(Model(rngs), ..., rngs=rngs))`."
        )
    adapted = nnx.merge(graph, jax.tree.map(lambda array: array, state))  # a copy with its own variables
    lengths = {path: stack.length for path, stack in stacks_of(adapted).items()}
    chosen = _chosen(adapted, targets)
    flax_layer = next((place for place in chosen if place.holder is not None), None)
    if recipe is not None and flax_layer is not None:
        raise ValueError(
            f"`recipe` is {type(recipe).__name__}, but {'.'.join(flax_layer.words)} is a Flax layer, whose weight "
            "cannot be frozen as codes. Remove `recipe`."
        )

    def make(rngs: nnx.Rngs) -> nnx.List:
        made = []
        for place in chosen:
            inside = [length for start, length in lengths.items() if place.path[: len(start)] == start]
            length, dtype = inside[0] if inside else None, jnp.promote_types(place.dtype, jnp.float32)
            made.append(Adapter(place.layout, rank, alpha / rank, dropout, length=length, dtype=dtype, rngs=rngs))
        return nnx.List(made)

    traced = isinstance(jnp.zeros(()), jax.core.Tracer)
    made = make(rngs) if traced or current_view() != "global" else init(make, rngs)
    for place, adapter in zip(chosen, made, strict=True):
        place.put(adapter)
    if recipe is None and not any(_is_of_base(v) for _, v in nnx.to_flat_state(nnx.state(adapted))):
        return adapted
    return freeze(adapted, recipe)


def _is_of_base(variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam)


def _check(rank: Any, alpha: Any, dropout: Any) -> None:
    if not is_size(rank):
        raise ValueError(f"`rank` is {rank!r}; it must be a whole number of at least 1.")
    if not isinstance(alpha, numbers.Real) or isinstance(alpha, bool) or not 0 < float(alpha) < math.inf:
        raise ValueError(f"`alpha` is {alpha!r}; it must be a finite number above 0, such as twice the rank.")
    if not isinstance(dropout, numbers.Real) or isinstance(dropout, bool) or not 0 <= float(dropout) < 1:
        raise ValueError(f"`dropout` is {dropout!r}; it must be a number of at least 0 and below 1.")


@dataclasses.dataclass(frozen=True)
class _Place:
    """A projection that can have an adapter.

    Attributes:
        words: the path of the projection as strings, which patterns must match.
        path: the path of its layer.
        layer: the layer, a `Dense` or a Flax layer.
        name: the name of the kernel, for a `Dense` whose `out_features` is a mapping; otherwise empty.
        layout: the layout of the kernel.
        dtype: the compute dtype of a `Dense`, or the parameter dtype of a Flax layer.
        holder: the node that contains a Flax layer; `None` for a `Dense`.
    """

    words: tuple[str, ...]
    path: tuple[Any, ...]
    layer: Any
    name: str
    layout: Layout
    dtype: Any
    holder: Any = None

    def put(self, adapter: Adapter) -> None:
        """Adds an adapter to this projection."""
        if self.holder is not None:
            key, around = self.path[-1], AdaptedLinear(self.layer, adapter)
            if isinstance(self.holder, nnx.List | nnx.Dict):
                self.holder[key] = around
            else:
                setattr(self.holder, key, around)
        elif self.name:
            self.layer.lora = nnx.Dict({**(self.layer.lora or {}), self.name: adapter})
        else:
            self.layer.lora = adapter


def _chosen(model: nnx.Module, targets: Sequence[str] | None) -> list[_Place]:
    """Returns the projections that `targets` selects, in the order of their paths.

    Raises:
        ValueError: for the reasons that `lora` gives, as far as they concern the model and `targets`.
    """
    found: dict[tuple[str, ...], _Place] = {}
    others: dict[tuple[str, ...], str] = {}
    for path, owner in weight_owners(model).items():
        words = tuple(map(str, path))
        if not isinstance(owner, Dense):
            others[words] = owner.name
            continue
        if owner.lora is not None:
            _refuse_another(words, owner.name)
        for name, layout in zip(owner.names, owner.layouts, strict=True):
            own = (*words, name) if name else words
            found[own] = _Place(own, path, owner, name, layout, owner.dtype)
    shared: dict[int, tuple[str, ...]] = {}
    for path, holder, layer in places_of(model):
        words = tuple(map(str, path))
        if isinstance(holder, AdaptedLinear):
            _refuse_another(words[:-1], type(layer).__name__)
        found[words] = _Place(words, path, layer, "", layout_of_stock(layer), layer.param_dtype, holder)
        first = shared.setdefault(id(layer), words)
        if first != words:
            others[words] = f"layer that is also {'.'.join(first)}"
            others.setdefault(first, f"layer that is also {'.'.join(words)}")
    if not found:
        raise ValueError(
            f"the {type(model).__name__} contains no layer that supports adapters: no gtp_jax.Dense, nnx.Linear or "
            "nnx.LinearGeneral. If the model itself is such a layer, wrap it: `nnx.Sequential(layer)`."
        )
    if targets is None:
        chosen = [words for words in found if not any(matches(pattern, words) for pattern in EXCLUDED)]
        _refuse_shared(chosen, others)
    else:
        chosen = _matching(targets, found, others)
    for words in chosen:
        if found[words].holder is not None:
            check_stock(found[words].layer, ".".join(words))
    return [found[words] for words in sorted(chosen)]


def _refuse_another(words: Sequence[str], name: str) -> None:
    raise ValueError(
        f"{'.'.join(words) or name} already has an adapter. Call `gtp_jax.nn.lora` once, with all `targets`."
    )


def _refuse_shared(chosen: Sequence[tuple[str, ...]], others: Mapping[tuple[str, ...], str]) -> None:
    for words in chosen:
        if words in others:
            raise ValueError(
                f"{'.'.join(words)} is a {others[words]}, so it cannot have an adapter of its own. Name other "
                "projections in `targets`."
            )


def _matching(
    targets: Any, projections: Mapping[tuple[str, ...], Any], others: Mapping[tuple[str, ...], str]
) -> list[tuple[str, ...]]:
    if isinstance(targets, str) or not all(isinstance(pattern, str) for pattern in targets) or not targets:
        raise ValueError(
            f"`targets` is {targets!r}; it must be a list of patterns, such as ['query', 'value'], or None for all "
            "projections except heads."
        )
    for pattern in targets:
        other = next((words for words in others if matches(pattern, words)), None)
        if other is not None:
            raise ValueError(
                f"`targets` has {pattern!r}, which matches {'.'.join(other)} ({others[other]}). Only projections "
                "can have adapters: the kernels of gtp_jax.Dense, and those of Flax's linear layers that are in only "
                "one place of the model. Other weights, such as those of experts, embeddings and `gtp_jax.Param`s, "
                "cannot have adapters. Use a pattern that matches only projections."
            )
        if not any(matches(pattern, words) for words in projections):
            known = [".".join(words) for words in projections]
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise ValueError(
                f"`targets` has {pattern!r}, which matches no projection. The projections are "
                f"{', '.join(known[:_SHOWN])}{more}."
            )
    return [words for words in projections if any(matches(pattern, words) for pattern in targets)]
