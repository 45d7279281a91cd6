"""Shards the weights of any NNX model."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import get_pspec
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..chain import OFFLOADED, REMAT, Remat
from ..layout import shares_are_even
from ..mesh import (
    Roles,
    axes_of,
    check_mesh_in_scope,
    current_roles,
    degree,
    degrees,
    legacy_mesh,
    legacy_mesh_in_scope,
    use_roles,
)
from ..variables import make_padded
from ..weights import ModulePath
from ._call import Placements, lies, stripped
from ._choice import Blocks, choose, in_order, matches, name_of, named, names_of, own_variables
from ._placement import Placement, place, placed, placement_of
from ._shards import refuse_read
from ._unit import Holder, Unit, kind_of, make, methods_of, unmade

# A value of `specs`: the partition in which weights are stored; `None` for weights that `shard` does not partition.
Spec = PartitionSpec | tuple[Any, ...] | None
Paths = tuple[ModulePath, ...]  # the paths of one variable (`names_of`), which several modules may hold

_METHODS = ("__call__", "attend")  # the methods of Flax's layers that use weights
_TENSOR = ("tp", "tensor", "model")  # names that authors give to the axis of tensor parallelism
_LARGE = 1 << 20  # elements; a warning is issued if a weight of at least this size has too few shards


@legacy_mesh_in_scope()
def shard[M: nnx.Module](
    model: M,
    blocks: Blocks | None = None,
    *,
    min_size: int = 1 << 14,
    specs: Mapping[str, Spec] | None = None,
    remat: Remat = "matmuls",
    keep_last: bool = True,
    methods: tuple[str, ...] = _METHODS,
    grad_reduce: Literal["float32"] | None = None,
    roles: Roles | None = None,
) -> M:
    """Shards the weights of any NNX model in place, without changes to its code, and returns the model.

        model = Transformer(config, rngs=rngs)                  # anyone's NNX model
        model = gtp_jax.shard(model, blocks="layers.*")

    By default, every floating-point `nnx.Param` with at least `min_size` elements is stored as shards, over the axes of
    the roles `weights` (gtp) and `optimizer` (dp, ZeRO) that divide its dimensions. Forward gathers the weights of a
    block, if possible while the previous block computes. Backward gathers them again, unless `keep_last` keeps them,
    and reduces the gradients of the block, if possible while another block computes. Modules with weights outside of
    blocks, such as an embedding or a head, are treated like blocks, unless they contain blocks. In global view and
    without a recipe, results are those of the model without a mesh, except for rounding. Under a recipe, ranks gather
    codes of the matrices that it quantizes, in its wire format, and results are computed from the values of the codes.
    `gtp_jax.explain(model)` reports which modules gather weights, and when.

    Under `gtp_jax.even_shares`, a weight may be stored padded if its dimensions cannot be divided evenly over all of
    these axes. Outside of local view, `param[...]` still reads and sets the array of the logical shape. A weight is not
    padded if `specs` names its partition, or if the model's annotation partitions it over axes of the roles `weights`,
    `optimizer` or `batch`. Nor is it padded if its class is a subclass of `nnx.Param`, if it has a hook for creating or
    reading its value, if it is a hijax variable or holds a `Ref`, or if it comes from a Linen module.

    The model may be concrete or abstract; `gtp_jax.init(lambda rngs: gtp_jax.shard(Model(rngs)), rngs)` creates the
    weights as shards. Modules whose calls gather weights, and modules around them, remain instances of their classes,
    but their `type` becomes a subclass. The weights of gtp_jax's own layers, and each `gtp_jax.Param`, keep their own
    partition. If arrays of a sharded model have been replaced by unsharded ones, another call stores the new arrays as
    shards.

    Args:
        model: any NNX model.
        blocks: which modules are blocks: a pattern of paths, in which `*` matches any part of a name between dots; a
            class; a tuple of these; or a function `(path, module) -> bool`. A matching module does not count if the
            path at which it is found first leads through another one. By default, blocks are the members of all lists
            of two or more callable modules of one class that hold weights. Attributes whose names differ only in a
            number at the end also form a list. Of lists nested in one another, longer ones take precedence.
        min_size: the minimum number of elements of a sharded weight.
        specs: the partitions in which weights are stored, by patterns of the weights' paths; `None` for weights that
            `shard` does not partition or gather, which stay whole, or partitioned as the model annotates them. A weight
            of a shared module has several paths. The first pattern that matches any of them applies.
        remat: the policy for what a block saves for backward, as in `gtp_jax.Stack`, but without moving it to the host.
        keep_last: whether to keep the gathered weights of the last block (or other module with weights) in a call of
            the model, so that backward does not begin by waiting for a gather. Pass `False` for a model that is called
            in a loop, because these weights could be kept for every iteration.
        methods: the names of the methods whose calls gather weights as described above. In other methods of a block,
            unless they run within such a call, XLA gathers the weights, which it can only do in global view.
        grad_reduce: how the gradients of weights are summed. By default, products return gradients in the dtype in
            which the model computes, and ranks may sum them in that dtype, unless a recipe has a `grad_wire`. With
            `"float32"`, both use at least float32, as in gtp_jax's own layers by default. Weights of a block for which
            no product is found (`gtp_jax.explain` with `call` names them), and weights that a module around blocks
            holds itself, keep the default.
        roles: the roles of the mesh axes; by default those in scope (`use_roles`).

    Raises:
        ValueError: if no mesh is in scope, or it has Explicit axes; if it lacks all axes that the roles name for
            weights and the optimizer, or all that they name for the batch; if no module matches `blocks`, or the model
            has no list that gives the default; if `methods` has a name, other than `__call__` and `attend`, that no
            module of the model defines as a public method; if no weight has `min_size` elements, or one that has them
            has been frozen; if a pattern of `specs` matches no weight, or, with the value `None`, no variable; if
            `specs` or an annotation of the model names a partition that does not fit the mesh or the weight; or if
            `min_size`, `remat` or `grad_reduce` is not an allowed value. For a model that is sharded already: if no
            array has to be put back; if the mesh lacks an axis that shards it, or has that axis in another size; if an
            array lacks the dimensions or the padding of its weight, or cannot be divided like it; if `blocks` matches
            modules other than its blocks; or if another argument is neither the default nor the value with which the
            model was sharded.
        TypeError: if `model` is not an `nnx.Module`, or `blocks`, `methods` or `roles` has the wrong type.
    """
    _check_arguments(model, min_size, remat, grad_reduce)
    _check_methods(model, methods)
    check_mesh_in_scope()
    if jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            "`gtp_jax.shard` found no mesh in scope to shard the model over. Call it, and the model, under "
            "`with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`."
        )
    partitions = tuple((name, None if spec is None else PartitionSpec(*spec)) for name, spec in (specs or {}).items())
    if any(kind_of(module) is not None for _, module in nnx.iter_modules(model)):
        options = {"remat": remat, "keep_last": keep_last, "methods": methods, "grad_reduce": grad_reduce}
        _check_unchanged(model, blocks, {"min_size": min_size, "specs": partitions, **options, "roles": roles})
        return _put_back(model)
    roles = current_roles() if roles is None else roles
    _check_roles(roles)
    variables = _variables(model)
    _refuse_frozen(variables, min_size)
    own = _of_own_layers(model)
    is_weight = lambda v: isinstance(v, nnx.Variable) and id(v) not in own and _is_weight(v, min_size)  # noqa: E731
    if not any(map(is_weight, variables.values())):
        raise ValueError(
            f"the model has no floating-point `nnx.Param` of {min_size} elements or more to shard (gtp_jax's own "
            "layers and each `gtp_jax.Param` partition their own weights). If it has smaller ones, pass a smaller "
            "`min_size`."
        )
    choice, specs = choose(model, blocks, is_weight), specs or {}
    weights = {paths: v for paths, v in variables.items() if is_weight(v)}
    _check_patterns(specs, variables, weights, min_size, own)
    with use_roles(roles):
        placements = {paths: _placement(paths, v, specs, roles) for paths, v in weights.items()}
    _warn_of_whole(placements, variables, specs, roles)
    for paths, variable in variables.items():
        if placements.get(paths, ...) is None and specs.get(_pattern(specs, paths) or "") is not None:
            variable.set_metadata(out_sharding=())  # a partition without axes replaces the annotation
        _put(paths, variable, placements.get(paths), own=id(variable) in own)
    for path, module in choice.units.items():
        of_weights, block = _placements(dict(nnx.iter_graph(module))), path in choice.blocks
        make(
            module,
            Unit(remat, keep_last, methods, roles, grad_reduce is not None, block, min_size, partitions, of_weights),
        )
    for module in choice.holders.values():
        make(module, Holder(_placements(own_variables(module))))
    return model


def _placements(nodes: Mapping[ModulePath, Any]) -> Placements:
    """Returns, by path, the placements in the metadata of a module's variables, given the module's nodes."""
    variables = {path: node for path, node in nodes.items() if isinstance(node, nnx.Variable)}
    return tuple((path, p) for path, v in variables.items() if (p := v.get_metadata().get("placement")) is not None)


def _check_arguments(model: Any, min_size: Any, remat: Any, grad_reduce: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; it must be an `nnx.Module`.")
    if not isinstance(min_size, int) or min_size < 1:
        raise ValueError(f"`min_size` is {min_size!r}; it must be a whole number of at least 1.")
    if remat in OFFLOADED:
        raise ValueError(
            f"`remat` is {remat!r}, which moves saved activations to the host. `gtp_jax.Stack` supports that; "
            f"`gtp_jax.shard` does not. Use {OFFLOADED[remat]!r}, which saves the same activations on the device."
        )
    if remat not in REMAT:
        allowed = [name for name in REMAT if name not in OFFLOADED]
        raise ValueError(f"`remat` is {remat!r}; it must be one of {', '.join(map(repr, allowed))}.")
    if grad_reduce not in (None, "float32"):
        raise ValueError(
            f"`grad_reduce` is {grad_reduce!r}; it must be 'float32', or `None` to sum gradients in the dtype in which "
            "the model computes. 'bf16' and 'bf16-wire' are for gtp_jax's own layers."
        )


def _check_methods(model: nnx.Module, methods: Any) -> None:
    if not isinstance(methods, tuple) or not all(isinstance(name, str) for name in methods):
        raise TypeError(f"`methods` is {methods!r}; it must be a tuple of names of methods, such as {_METHODS!r}.")
    known = [name for _, module in nnx.iter_modules(model) for name in methods_of(type(module))]
    for name in methods:
        if name not in (*_METHODS, *known):
            near = difflib.get_close_matches(name, set(known), n=3, cutoff=0.0)
            raise ValueError(
                f"`methods` has {name!r}, which no module of the model defines as a public method (a plain function, "
                f"not a generator, a property, or a static or class method); the nearest are {', '.join(near)}."
            )


def _check_roles(roles: Any) -> None:
    if not isinstance(roles, Roles):
        raise TypeError(f"`roles` is a {type(roles).__name__}; it must be a `gtp_jax.Roles`.")
    names = jax.sharding.get_abstract_mesh().axis_names
    if not {*roles.weights, *roles.over_optimizer} & set(names):
        tensor = next((axis for axis in names[1:] if axis in _TENSOR), None)
        raise ValueError(
            f"the mesh in scope has the axes {names}, but the roles shard weights over {roles.weights!r}. Pass the "
            f"roles of its axes, such as `roles=gtp_jax.Roles(batch=({names[0]!r},), weights=({names[0]!r},), "
            f"tensor={tensor!r})`."
        )
    if roles.batch and not {*roles.batch} & set(names):
        raise ValueError(
            f"the mesh in scope has the axes {names}, but the roles shard the batch over {roles.batch!r}, none of "
            "which it has. In `roles`, name the axes of the mesh that shard the batch as `batch`; pass `batch=()` if "
            "none does."
        )


def _variables(model: nnx.Module) -> dict[Paths, nnx.Variable]:
    """Returns the variables of a model. The key of each is a tuple of its paths (`names_of`), of which the first is the
    path in `nnx.state`."""
    names = names_of(model)
    found = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    return {tuple(dict.fromkeys((path, *names.get(id(v), ())))): v for path, v in found.items()}


def _is_weight(variable: nnx.Variable, min_size: int) -> bool:
    """Returns whether a variable is a floating-point `nnx.Param` of at least `min_size` elements that does not shard
    itself."""
    value = variable.get_raw_value()
    if not isinstance(variable, nnx.Param) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    own = "layout" in variable.get_metadata()  # a `gtp_jax.Param` in a user's module, which shards itself
    return not own and jnp.issubdtype(value.dtype, jnp.floating) and math.prod(value.shape) >= min_size


def _refuse_frozen(variables: dict[Paths, nnx.Variable], min_size: int) -> None:
    """Raises an error if a weight of at least `min_size` elements has been frozen: it is then no longer an `nnx.Param`,
    so `shard` would pass over it."""
    for (path, *_), v in variables.items():
        value = v.get_raw_value()
        if getattr(type(v), "constant", False) and "layout" not in v.get_metadata() and _size(value) >= min_size:
            raise ValueError(
                f"{name_of(path)} has been frozen, by `gtp_jax.lora` or `gtp_jax.freeze`, so it is no longer an "
                "`nnx.Param` to shard. Call `gtp_jax.shard` first, and then freeze it or add adapters: what is frozen "
                "stays sharded."
            )


def _size(value: Any) -> int:
    floating = hasattr(value, "shape") and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    return math.prod(value.shape) if floating else 0


def _of_own_layers(model: nnx.Module) -> set[int]:
    """Returns the `id`s of the variables within gtp_jax's own layers and subclasses of them, which partition their own
    weights."""
    package = __name__.partition(".")[0]
    own = (
        module
        for _, module in nnx.iter_modules(model)
        if any(base.__module__.partition(".")[0] == package for base in type(module).__mro__)
    )
    return {id(node) for module in own for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}


def _pattern(specs: Iterable[str], paths: Paths) -> str | None:
    """Returns the first pattern that matches any of these paths; `None` if no pattern does."""
    return next((pattern for pattern in specs if any(matches(pattern, path) for path in paths)), None)


def _check_patterns(
    specs: Mapping[str, Spec],
    variables: Mapping[Paths, nnx.Variable],
    weights: Collection[Paths],
    min_size: int,
    own: Collection[int],
) -> None:
    """Raises an error if a pattern matches no weight to shard. For a pattern with the value `None`, it is enough to
    match any variable of the model; on a variable that is not such a weight, the pattern has no effect.

    Args:
        specs: the argument `specs` of `shard`.
        variables: the variables of the model.
        weights: the paths of the weights to shard.
        min_size: the argument `min_size` of `shard`.
        own: the `id`s of the variables within gtp_jax's own layers.
    """
    for pattern, spec in specs.items():
        allowed = variables if spec is None else weights
        if not any(_pattern([pattern], paths) for paths in allowed):
            found = next((paths for paths in variables if _pattern([pattern], paths)), None)
            if found is not None:
                variable = variables[found]
                why = _why_whole(variable, min_size, own=id(variable) in own)
                matched = name_of(next(path for path in found if matches(pattern, path)))
                raise ValueError(
                    f"`specs` has the pattern {pattern!r}, which matches {matched}. That is not a weight to shard: "
                    f"{why}"
                )
            names = [name_of(path) for paths in allowed for path in paths]
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            kind = "variable" if spec is None else "weight to shard"
            raise ValueError(
                f"`specs` has the pattern {pattern!r}, which matches no {kind} of the model; the nearest are "
                f"{', '.join(near)}."
            )


def _why_whole(variable: nnx.Variable, min_size: int, *, own: bool) -> str:
    if own or "layout" in variable.get_metadata():
        return (
            "it is a `gtp_jax.Param`, or belongs to one of gtp_jax's own layers, which partition their own weights. "
            "Leave the pattern out."
        )
    size = _size(variable.get_raw_value()) if isinstance(variable, nnx.Param) else 0
    if 0 < size < min_size:
        return (
            f"it has {size} elements, fewer than `min_size`, {min_size}. Pass a smaller `min_size`, or leave the "
            "pattern out."
        )
    return (
        "it is not a floating-point `nnx.Param` of at least one element. Name such a parameter, or leave the pattern "
        "out."
    )


def _placement(paths: Paths, variable: nnx.Variable, specs: Mapping[str, Spec], roles: Roles) -> Placement | None:
    """Returns the placement of a weight; `None` if `specs` has `None` for it, if it is a scalar, or if the partition
    that `specs` names has no axes of more than one rank.

    Raises:
        ValueError: for the same reasons as `_checked_spec`.
    """
    shape = variable.get_raw_value().shape
    gathered = {*roles.weights, *roles.over_optimizer, *roles.batch}
    pattern = _pattern(specs, paths)
    named = _annotation(variable) if pattern is None else specs[pattern]
    if pattern is not None and named is None:
        return None
    spec = _checked_spec(paths[0], shape, named, "its `out_sharding`" if pattern is None else f"`specs[{pattern!r}]`")
    used = PartitionSpec(*(_without(entry, gathered) for entry in spec))
    if pattern is None and not axes_of(spec) & gathered:
        return place(shape, roles, used, can_pad=_can_pad(variable))
    return placed(spec, used, shape) if axes_of(spec) else None


def _can_pad(variable: nnx.Variable) -> bool:
    """Returns whether a parameter may be stored padded. Its class must be `nnx.Param` itself, because it becomes
    `PaddedParam`. It must have no hook for creating or reading its value, which would be given the padded array. It
    must not be a hijax variable, hold a `Ref`, or come from a Linen module."""
    metadata = variable.get_metadata()
    special = any(metadata.get(name) for name in ("on_create_value", "on_get_value", "hijax", "ref", "linen_meta_type"))
    return type(variable) is nnx.Param and not special


def _annotation(variable: nnx.Variable) -> Any:
    """Returns the partition with which the model's author has annotated a variable; `None` if there is none. Logical
    names are replaced by mesh axes if Flax's rules (`nnx.logical_axis_rules`) map them."""
    metadata = variable.get_metadata()
    named = metadata.get("out_sharding")
    return None if named is None else get_pspec(named, metadata.get("sharding_rules"))


def _checked_spec(path: Any, shape: tuple[int, ...], named: Any, where: str) -> PartitionSpec:
    """Checks a partition that the user or the model's author has named, and returns it without axes of size 1.

    Raises:
        ValueError: if the partition has more dimensions than the weight, names an axis of several ranks twice, names an
            axis that the mesh lacks, or does not divide the weight evenly.
    """
    entries = () if named is None else tuple(named)
    names = jax.sharding.get_abstract_mesh().axis_names
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    unknown = [axis for entry in axes for axis in entry if axis not in names]
    if unknown or len(entries) > len(shape):
        raise ValueError(
            f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}, but the mesh "
            f"in scope has the axes {names}. In `specs`, give each dimension an axis of the mesh, a tuple of axes, or "
            "`None`. If the model has names of its own, map them to axes with `nnx.logical_axis_rules`, or make a mesh "
            "with axes of these names and pass `roles`."
        )
    axes = [tuple(axis for axis in entry if degree(axis) > 1) for entry in axes]
    used = [axis for entry in axes for axis in entry]
    if len(set(used)) < len(used):
        raise ValueError(
            f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}, which names an "
            "axis twice. Choose another partition with `specs`."
        )
    for dim, entry in enumerate(axes):
        if shape[dim] % degrees(entry):
            raise ValueError(
                f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}, but "
                f"{degrees(entry)} ranks of {' x '.join(entry)} do not divide dimension {dim}. Choose another "
                "partition with `specs`."
            )
    return PartitionSpec(*(None if not entry else entry[0] if len(entry) == 1 else entry for entry in axes))


def _without(entry: Any, axes: set[str]) -> Any:
    kept = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis not in axes)
    return None if not kept else kept[0] if len(kept) == 1 else kept


def _put(paths: Paths, variable: nnx.Variable, placement: Placement | None, *, own: bool) -> None:
    """Puts the value of a variable on the mesh, padded if its placement says so. If there is a placement, records it
    and the variable's paths in the metadata. Otherwise, if an annotation divides the value among ranks, records the
    axes of that annotation, unless the variable is a `gtp_jax.Param` or belongs to one of gtp_jax's own layers."""
    if placement is not None:
        if placement.padded is not None:
            make_padded(variable, placement.padded)
        placement = dataclasses.replace(placement, kind=type(variable))
        stored = tuple(placement.stored)
        names = tuple(tuple(map(str, path)) for path in paths)
        variable.set_metadata(out_sharding=stored, placement=placement, weight_paths=names)
        variable.set_metadata(on_get_value=_with_refusal(variable.get_metadata().get("on_get_value", ())))
        # An optimizer's variables copy this metadata. With `None`, `nnx.use_eager_sharding` decides whether Flax places
        # their arrays. With `False`, Flax does not, so that `refuse_optimizer` raises its error first.
        variable.set_metadata(eager_sharding=None if placement.padded is None else False)
        if (mesh := legacy_mesh()) is not None:  # Flax finds no mesh in scope when it makes an optimizer's variables
            variable.set_metadata(mesh=mesh)
    named = _annotation(variable) or ()
    known = axes_of(PartitionSpec(*named)) <= set(jax.sharding.get_abstract_mesh().axis_names)
    spec = PartitionSpec(*named) if known else PartitionSpec()
    parts = tuple(sorted(axis for axis in axes_of(spec) if degree(axis) > 1))
    if placement is None and parts and not own and "layout" not in variable.get_metadata():  # a `gtp_jax.Param` has one
        variable.set_metadata(parted=parts)
    value = variable.get_raw_value()
    if placement is not None:
        value = jax.tree.map(lambda array: _padded(array, placement), value)
    variable.set_raw_value(jax.tree.map(lambda array: _on_mesh(array, spec), value))


def _with_refusal(hooks: Any) -> tuple[Any, ...]:
    """Returns the hooks that run when a variable is read, with `refuse_read` as the first."""
    own = hooks if isinstance(hooks, tuple) else () if hooks is None else (hooks,)
    return (refuse_read, *(hook for hook in own if hook is not refuse_read))


def _padded(value: Any, placement: Placement) -> Any:
    """Pads an array of the logical shape to the stored shape; returns any other value unchanged. The result is abstract
    if the array is."""
    if not placement.padding.size or getattr(value, "shape", None) != placement.shape:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(placement.array_shape, value.dtype)
    return placement.pad(value)


def _on_mesh(value: Any, spec: PartitionSpec) -> Any:
    if isinstance(value, Tracer):
        extended = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return value if extended else lax.with_sharding_constraint(value, spec)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(_mesh(), spec))
    if isinstance(value, jax.Array | np.ndarray):
        return jax.device_put(value, NamedSharding(_mesh(), spec))
    return value


def _is_elsewhere(value: Any) -> bool:
    """Returns whether a value is a concrete array on more or fewer devices than the mesh in scope has."""
    concrete = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return concrete and len(value.sharding.device_set) != jax.sharding.get_abstract_mesh().size


def _mesh() -> Any:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # in a trace
        return jax.sharding.get_abstract_mesh()


def _check_unchanged(model: nnx.Module, blocks: Blocks | None, options: Mapping[str, Any]) -> None:
    """Raises an error if an option is neither the default nor the value with which the model was sharded. `blocks` may
    have another value that matches the same modules.

    Args:
        model: the model, which is sharded already.
        blocks: the argument `blocks` of `shard`.
        options: other arguments of `shard`, by name; `specs` has the form of `Unit.specs`.
    """
    modules = list(in_order(model))
    units = [(path, module, kind) for path, module in modules if isinstance(kind := kind_of(module), Unit)]
    defaults = {name: parameter.default for name, parameter in inspect.signature(shard).parameters.items()}
    defaults["specs"] = ()
    for _, _, unit in units:
        used = {**vars(unit), "grad_reduce": "float32" if unit.wide else None}
        for name, asked in options.items():
            if asked not in (used[name], defaults[name]):
                shown = (dict(asked), dict(used[name])) if name == "specs" else (asked, used[name])
                raise ValueError(_changed(f"`{name}` is {shown[0]!r}", repr(shown[1])))
    if blocks is None:
        return
    with unmade(module for _, module in modules):  # a function may ask for the exact class of a module
        asked = named(model, blocks)
    used = {path: module for path, module, unit in units if unit.block}
    if set(map(id, asked.values())) != set(map(id, used.values())):
        raise ValueError(_changed(f"`blocks` is {blocks!r}, which matches {_listed(asked)}", _listed(used)))


def _changed(asked: str, used: str) -> str:
    return (
        f"{asked}, but the model is sharded already, with {used}. Leave it out to put arrays back as shards; to shard "
        "the model differently, build it again."
    )


def _listed(paths: Collection[ModulePath]) -> str:
    names = [name_of(path) or "the model itself" for path in paths]
    return (", ".join(names[:3]) + (", ..." if len(names) > 3 else "")) or "no module"


def _put_back[M: nnx.Module](model: M) -> M:
    """Puts a model's arrays back where `shard` stored them. If an array has replaced a shard, it is stored as a shard
    again. An array without a placement is moved to the mesh if it is on more or fewer devices than the mesh has.

    Raises:
        ValueError: if there is nothing to put back (an uncommitted array without a placement does not count),
            or for the same reasons as `Placement.check_mesh` and `placement_of`.
    """
    variables, lost = _variables(model), dict[int, Placement]()
    for _, module in nnx.iter_modules(model):
        if (kind := kind_of(module)) is not None:
            nodes: dict[ModulePath, Any] = dict(
                nnx.iter_graph(module) if isinstance(kind, Unit) else own_variables(module)
            )
            lost |= {id(nodes[path]): placement for path, placement in stripped(nodes, kind.placements).items()}
    for placement in set(lost.values()):
        placement.check_mesh("the model")
    moved = bool(lost)
    for paths, variable in variables.items():
        if id(variable) in lost:
            _put(paths, variable, lost[id(variable)], own=False)
            continue
        placement, value = placement_of(variable), variable.get_raw_value()
        if placement is None or not isinstance(value, jax.Array | np.ndarray) or isinstance(value, Tracer):
            continue
        placement.check_mesh("the model")
        if not isinstance(value, jax.Array) or not lies(value, placement):
            variable.set_raw_value(_on_mesh(value, placement.stored))
            moved = True
    others = {
        paths: [array for array in jax.tree.leaves(variable.get_raw_value()) if _is_elsewhere(array)]
        for paths, variable in variables.items()
        if placement_of(variable) is None
    }
    if not moved and not any(array.committed for arrays in others.values() for array in arrays):
        raise ValueError(
            "the model, or a part of it, is sharded already, and no array has to be put back. Shard a whole model "
            "once; to shard it differently, build it again."
        )
    own = _of_own_layers(model)
    for paths in (paths for paths, arrays in others.items() if arrays):
        _put(paths, variables[paths], None, own=id(variables[paths]) in own)
    return model


def _warn_of_whole(placements: Mapping[Paths, Placement | None], variables: Any, specs: Any, roles: Roles) -> None:
    """Warns about each large weight that is not divided over all axes of the role `weights`: it stays whole, or only
    some of these axes, or only others such as dp, divide it. Does not warn about weights that a pattern of `specs`
    matches."""
    names = jax.sharding.get_abstract_mesh().axis_names
    all_axes = tuple(axis for axis in (*roles.over_optimizer, *roles.weights) if axis in names and degree(axis) > 1)
    ranks = degrees(tuple(axis for axis in all_axes if axis in roles.weights))
    for paths, placement in placements.items():
        shape, asked = variables[paths].get_raw_value().shape, _pattern(specs, paths)
        sizes = {} if placement is None else dict(placement.degrees)
        divided = math.prod(size for axis, size in sizes.items() if axis in roles.weights)
        if divided < ranks and math.prod(shape) >= _LARGE and not asked:
            over = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            parts = f"is divided over {over} only" if over else "stays whole on every rank"
            pad = "" if shares_are_even() else "shard the model for a `TrainState` under `gtp_jax.even_shares()`, "
            warnings.warn(
                f"a weight of shape {shape} {parts}: {name_of(paths[0])}, because {degrees(all_axes)} ranks of "
                f"{' x '.join(all_axes)} divide none of its dimensions, or the model annotates another partition. "
                f"Choose sizes that the degrees divide, {pad}or name a partition in `specs` (the present one, if it is "
                "intended).",
                stacklevel=3,
            )
