"""Adapters of low rank on a model's projections, and nothing else to train: LoRA."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx

from ..mesh import check_mesh_in_scope, current_view
from ..recipes import EXCLUDED, Recipe, matches
from ._adapter import Adapter
from ._dense import Dense
from ._frozen import freeze
from ._init import init
from ._weight import stacks_of, weight_owners

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
    """Returns the model with an adapter on each projection of its `Dense` layers, and with all else frozen.

    `x @ kernel` becomes `x @ kernel + alpha / rank * dropout(x) @ a @ b`. Each projection has an adapter of its own,
    also where several share a matmul (query, key and value; gate and up). `a` begins Kaiming-uniform and `b` as zeros,
    so that the model computes at first what it did. Adapters are `nnx.LoRAParam`s, in float32 at least, whole over gtp
    and sharded over tp like the side of the kernel that tp divides. A step computes and sums gradients of them alone.

        model = gtp_jax.lora(gtp_jax.models.load("llama"), 8, 16, rngs=nnx.Rngs(0))

    Args:
        model: is left as it is. It may be frozen already, as codes too.
        rank: of adapters.
        alpha: their scale is `alpha / rank`.
        targets: patterns of projections, such as `"query"`, `"attention.out"` or `"mlp"`: names joined by dots, with
            wildcards, as in a recipe; a name of several kernels' is the last one. By default all but heads.
        dropout: the share of an adapter's input that is dropped in `gtp_jax.train_step` and `loss_and_gradients`, by
            other bits in each step and microbatch; elsewhere nothing is. Each rank has bits of its own, so that they
            differ between meshes.
        recipe: what is frozen as codes; see `freeze`.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if an argument is out of range; if a pattern matches no projection, or weights that are not those
            of a `Dense`, such as those of experts; if the model has adapters already; as `freeze`.
    """
    _check(rank, alpha, dropout)
    check_mesh_in_scope()
    if current_view() == "local":
        raise ValueError("`lora` takes a model of global arrays; call it outside of the `shard_map`.")
    graph, state = nnx.split(model)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(state)):
        raise ValueError(
            "the model is abstract, so that there is nothing to freeze. Add adapters within: "
            "`gtp_jax.nn.abstract_model(lambda rngs: gtp_jax.lora(Model(rngs), ..., rngs=rngs))`."
        )
    adapted = nnx.merge(graph, jax.tree.map(lambda array: array, state))  # with variables of its own
    lengths = {path: stack.length for path, stack in stacks_of(adapted).items()}
    owners, makers = weight_owners(adapted), []
    for path, names in sorted(_chosen(adapted, targets).items(), key=lambda item: tuple(map(str, item[0]))):
        layer = owners[path]
        assert isinstance(layer, Dense)
        inside = [length for start, length in lengths.items() if path[: len(start)] == start]
        dtype = jnp.promote_types(layer.dtype, jnp.float32)
        options: Any = {"length": inside[0] if inside else None, "dtype": dtype}
        makers += [
            (layer, name, functools.partial(Adapter, layout, rank, alpha / rank, dropout, **options))
            for name, layout in zip(layer.names, layer.layouts, strict=True)
            if name in names
        ]

    def make(rngs: nnx.Rngs) -> nnx.List:
        return nnx.List([maker(rngs=rngs) for _, _, maker in makers])

    traced = isinstance(jnp.zeros(()), jax.core.Tracer)
    made = make(rngs) if traced or current_view() != "global" else init(make, rngs)
    for (layer, name, _), adapter in zip(makers, made, strict=True):
        if layer.names == ("",):
            layer.lora = adapter
        else:
            layer.lora = nnx.Dict({**({} if layer.lora is None else layer.lora), name: adapter})
    if recipe is None and not any(_is_of_base(v) for _, v in nnx.to_flat_state(nnx.state(adapted))):
        return adapted
    return freeze(adapted, recipe)


def _is_of_base(variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam)


def _check(rank: Any, alpha: Any, dropout: Any) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"`rank` is {rank!r}; it must be a whole number of at least 1.")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise ValueError(f"`alpha` is {alpha!r}; it must be a number above 0, such as twice the rank.")
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"`dropout` is {dropout!r}; it must be a number of at least 0 and below 1.")


def _chosen(model: nnx.Module, targets: Sequence[str] | None) -> Mapping[Any, set[str]]:
    """Returns the names of the kernels that get adapters, by path of their layer."""
    projections: dict[tuple[str, ...], tuple[Any, str]] = {}
    others: dict[tuple[str, ...], str] = {}
    for path, owner in weight_owners(model).items():
        words = tuple(map(str, path))
        if not isinstance(owner, Dense):
            others[words] = owner.name
            continue
        if owner.lora is not None:
            raise ValueError(
                f"{'.'.join(words) or owner.name} has an adapter already. Call `gtp_jax.lora` once, with all `targets`."
            )
        projections |= {(*words, name) if name else words: (path, name) for name in owner.names}
    if not projections:
        raise ValueError(
            f"the {type(model).__name__} has no layer of type gtp_jax.Dense, which alone takes adapters. Give stock "
            "layers adapters of Flax's, `nnx.LoRA` around them, ahead of `gtp_jax.shard` or behind it."
        )
    if targets is None:
        chosen = [words for words in projections if not any(matches(pattern, words) for pattern in EXCLUDED)]
    else:
        chosen = _matching(targets, projections, others)
    found: dict[Any, set[str]] = {}
    for words in chosen:
        path, name = projections[words]
        found.setdefault(path, set()).add(name)
    return found


def _matching(
    targets: Any, projections: Mapping[tuple[str, ...], Any], others: Mapping[tuple[str, ...], str]
) -> list[tuple[str, ...]]:
    if isinstance(targets, str) or not all(isinstance(pattern, str) for pattern in targets) or not targets:
        raise ValueError(
            f"`targets` is {targets!r}; it must be a list of patterns, such as ['query', 'value'], or None for all "
            "projections but heads."
        )
    for pattern in targets:
        other = next((words for words in others if matches(pattern, words)), None)
        if other is not None:
            raise ValueError(
                f"`targets` has {pattern!r}, which matches {'.'.join(other)}, a {others[other]}. Adapters are for "
                "projections of gtp_jax.Dense alone: weights of experts, embeddings and arrays have none. Let the "
                "pattern name projections."
            )
        if not any(matches(pattern, words) for words in projections):
            known = [".".join(words) for words in projections]
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise ValueError(
                f"`targets` has {pattern!r}, which matches no projection. There are {', '.join(known[:_SHOWN])}{more}."
            )
    return [words for words in projections if any(matches(pattern, words) for pattern in targets)]
