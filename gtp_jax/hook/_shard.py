"""Shards the weights of any NNX model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..chain import REMAT, Remat, Schedule
from ..mesh import Roles, check_mesh_in_scope, current_roles, legacy_mesh_in_scope, use_roles
from ..weights import ModulePath
from ._again import check_unchanged, put_back
from ._call import Placements
from ._choice import Blocks, choose, own_variables
from ._path import paths_of
from ._put import put
from ._specs import Spec, check_patterns, first_match, placement_by, warn_of_whole
from ._unit import Holder, Unit, kind_of, make, methods_of
from ._variables import is_weight, of_one_layer, of_own_layers, refuse_frozen, variables_of

_METHODS = ("__call__", "attend")  # the methods of Flax's layers that use weights
_TENSOR = ("tp", "tensor", "model")  # names that authors give to the axis of tensor parallelism


@legacy_mesh_in_scope()
def shard[M: nnx.Module](
    model: M,
    blocks: Blocks | None = None,
    *,
    min_size: int = 1 << 14,
    specs: Mapping[str, Spec] | None = None,
    remat: Remat = "matmuls",
    schedule: Schedule | None = None,
    methods: tuple[str, ...] = _METHODS,
    grad_reduce: Literal["float32"] | None = None,
    roles: Roles | None = None,
) -> M:
    """Shards the weights of any NNX model in place, without changes to its code, and returns the model.

        model = Transformer(config, rngs=rngs)                  # anyone's NNX model
        model = gtp_jax.shard(model, blocks="layers.*")

    By default, every floating-point `nnx.Param` with at least `min_size` elements is stored as shards, over the axes of
    the roles `weights` (gtp) and `optimizer` (dp, ZeRO) that divide its dimensions. The weights within gtp_jax's own
    layers, and each `gtp_jax.Param`, keep their own partition. A weight that the axes do not divide is stored padded
    in a `TrainState`, or at once under `gtp_jax.layout.even_shares`. In global view, `param[...]` still reads and sets
    the array of the logical shape.

    Forward gathers the weights of a block, if possible while the previous block computes. Backward gathers them again,
    unless the schedule keeps them, and reduces the gradients of the block, if possible while another block computes.
    Modules with weights outside of blocks, such as an embedding or a head, are treated like blocks, unless they contain
    blocks. `gtp_jax.explain(model)` reports which modules gather weights, and when.

    In global view and without a recipe, results are those of the model without a mesh, except for rounding. Under a
    recipe, ranks gather codes of the matrices that it quantizes, and results are computed from the values of the codes.

    The model may be concrete or abstract; `gtp_jax.init(lambda rngs: gtp_jax.shard(Model(rngs)), rngs)` creates the
    weights as shards. Modules remain instances of their classes, but the `type` of some becomes a subclass. If arrays
    of a sharded model have been replaced by unsharded ones, another call stores the new arrays as shards.

    Args:
        model: any NNX model.
        blocks: which modules are blocks: a pattern of paths, in which `*` matches any part of a name between dots; a
            class; a tuple of these; or a function `(path, module) -> bool`. A matching module does not count if the
            path at which it is found first leads through another one. By default, blocks are the members of all lists
            of two or more callable modules of one class that hold weights. Attributes whose names differ only in a
            number at the end also form a list. Of lists nested in one another, longer ones take precedence.
        min_size: the minimum number of elements of a weight that `shard` partitions.
        specs: the partitions in which weights are stored, by patterns of the weights' paths. `None` leaves weights
            whole or as the model annotates them, and calls do not gather them. A weight of a shared module has several
            paths. The first pattern that matches any of them applies.
        remat: what a block saves for backward: a policy of `gtp_jax.Stack`. Those that offload move what they save to
            the host's memory where blocks are prefetched, which `gtp_jax.explain` with `call` shows; elsewhere, such as
            in a scan, what they save stays on the device.
        schedule: which gathered weights are kept for backward, and whether blocks are prefetched; `Schedule()` by
            default, which keeps the weights that a call of the model gathers last. If that call runs in a loop, they
            may be kept for every iteration; pass `Schedule(keep_gathered=0)` to avoid that.
        methods: the names of the methods whose calls gather weights. Other methods of a block use the weights that such
            a call has gathered, if they run within it. Otherwise, XLA gathers the weights, which it can only do in
            global view.
        grad_reduce: how the gradients of weights are summed. By default, products and ranks may sum them in the dtype
            in which the model computes. With `"float32"`, both use at least float32 for the weights of blocks, as far
            as their products are found; `gtp_jax.explain` with `call` names the others.
        roles: the roles of the mesh axes; by default those in scope (`use_roles`).

    Raises:
        ValueError: if no mesh is in scope; if the mesh has Explicit axes, or lacks all axes that the roles name for
            weights and the optimizer, or all that they name for the batch; if no module matches `blocks`, or the model
            has no list that gives the default; if there is no weight to shard, or one has been frozen; if a pattern of
            `specs` matches no weight to shard (with the value `None`: no variable); if a partition that `specs` or an
            annotation of the model names does not fit the mesh or the weight; or if `min_size`, `remat`, `grad_reduce`,
            `schedule.unroll` or a name in `methods` is not allowed. For a model that is sharded already: if no array
            has to be put back; if the modules that `blocks` matches are not exactly its blocks; if another argument is
            neither the default nor the value with which the model was sharded; or if the mesh or an array does not fit
            a weight as it was sharded.
        TypeError: if `model` is not an `nnx.Module`, or `blocks`, `methods`, `roles` or `schedule` has the wrong type.
    """
    _check_arguments(model, min_size, remat, grad_reduce, schedule)
    _check_methods(model, methods)
    check_mesh_in_scope()
    if jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            "`gtp_jax.shard` found no mesh in scope to shard the model over. Call it, and the model, under "
            "`with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`."
        )
    partitions = tuple((name, None if spec is None else PartitionSpec(*spec)) for name, spec in (specs or {}).items())
    if any(kind_of(module) is not None for _, module in nnx.iter_modules(model)):
        options = {
            "min_size": min_size,
            "specs": partitions,
            "remat": remat,
            "schedule": schedule,
            "methods": methods,
            "grad_reduce": grad_reduce,
            "roles": roles,
        }
        defaults = {name: parameter.default for name, parameter in inspect.signature(shard).parameters.items()}
        check_unchanged(model, blocks, options, {**defaults, "specs": ()})
        return put_back(model)
    roles = current_roles() if roles is None else roles
    _check_roles(roles)
    variables = variables_of(model)
    own = of_own_layers(model)
    refuse_frozen(variables, min_size, own)
    to_shard = lambda v: isinstance(v, nnx.Variable) and id(v) not in own and is_weight(v, min_size)  # noqa: E731
    if not any(map(to_shard, variables.values())):
        raise ValueError(
            f"the model has no floating-point `nnx.Param` of {min_size} elements or more to shard (gtp_jax's own "
            "layers and each `gtp_jax.Param` partition their own weights). If it has smaller ones, pass a smaller "
            "`min_size`."
        )
    choice, specs = choose(model, blocks, to_shard), specs or {}
    weights = {paths: v for paths, v in variables.items() if to_shard(v)}
    check_patterns(specs, variables, weights, min_size, own)
    with use_roles(roles):
        single = of_one_layer(model)
        placements = {
            paths: placement_by(paths, v, specs, roles, of_layers=id(v) not in single) for paths, v in weights.items()
        }
    warn_of_whole(placements, variables, specs, roles)
    for paths, variable in variables.items():
        if placements.get(paths, ...) is None and specs.get(first_match(specs, paths) or "") is not None:
            variable.set_metadata(out_sharding=())  # a partition without axes replaces the annotation
        put(paths, variable, placements.get(paths), own=id(variable) in own)
    for path, module in choice.units.items():
        of_weights, block = placements_in(dict(nnx.iter_graph(module))), path in choice.blocks
        make(
            module,
            Unit(
                remat,
                schedule or Schedule(),
                methods,
                roles,
                grad_reduce is not None,
                block,
                min_size,
                partitions,
                of_weights,
            ),
        )
    for module in choice.holders.values():
        make(module, Holder(roles, placements_in(own_variables(module))))
    return model


def has_weights_to_shard(model: nnx.Module, min_size: int = 1 << 14) -> bool:
    """Returns whether a model is not sharded yet, and has a weight that `shard` would shard: one of at least `min_size`
    elements outside of gtp_jax's own layers."""
    if any(kind_of(module) is not None for _, module in nnx.iter_modules(model)):
        return False
    own = of_own_layers(model)
    return any(id(v) not in own and is_weight(v, min_size) for v in variables_of(model).values())


def placements_in(nodes: Mapping[ModulePath, Any]) -> Placements:
    """Returns the placements in the metadata of variables, with the paths of the variables.

    Args:
        nodes: the nodes of a module, by path. Only variables count.
    """
    variables = {path: node for path, node in nodes.items() if isinstance(node, nnx.Variable)}
    placed = {path: v for path, v in variables.items() if v.get_metadata().get("placement") is not None}
    return tuple((path, v.get_metadata()["placement"], paths_of(v)) for path, v in placed.items())


def _check_arguments(model: Any, min_size: Any, remat: Any, grad_reduce: Any, schedule: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; it must be an `nnx.Module`.")
    if not is_size(min_size):
        raise ValueError(f"`min_size` is {min_size!r}; it must be a whole number of at least 1.")
    if not isinstance(remat, str) or remat not in REMAT:
        raise ValueError(f"`remat` is {remat!r}; it must be one of {', '.join(map(repr, REMAT))}.")
    if grad_reduce not in (None, "float32"):
        raise ValueError(
            f"`grad_reduce` is {grad_reduce!r}; it must be 'float32' or `None`. 'bf16' and 'bf16-wire' are for "
            "gtp_jax's own layers."
        )
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; it must be a `gtp_jax.nn.Schedule`.")
    if schedule is not None and schedule.unroll != "full":
        raise ValueError(
            f"`schedule` has `unroll={schedule.unroll!r}`, which applies to the layers of a `gtp_jax.Stack`. The calls "
            "of blocks run as the model's code makes them; leave `unroll` out."
        )


def _check_methods(model: nnx.Module, methods: Any) -> None:
    if not isinstance(methods, tuple) or not all(isinstance(name, str) for name in methods):
        raise TypeError(f"`methods` is {methods!r}; it must be a tuple of names of methods, such as {_METHODS!r}.")
    modules = [module for _, module in nnx.iter_modules(model) if not isinstance(module, nnx.List | nnx.Dict)]
    known = [name for module in modules for name in methods_of(type(module))]
    for name in methods:
        if name not in (*_METHODS, *known):
            near = difflib.get_close_matches(name, {*_METHODS, *known}, n=3, cutoff=0.0)
            raise ValueError(
                f"`methods` has {name!r}, which no module of the model defines as a public method (not a "
                f"generator, a property, or a static or class method); the nearest names are {', '.join(near)}."
            )


def _check_roles(roles: Any) -> None:
    if not isinstance(roles, Roles):
        raise TypeError(f"`roles` is a {type(roles).__name__}; it must be a `gtp_jax.mesh.Roles`.")
    names = jax.sharding.get_abstract_mesh().axis_names
    if not {*roles.weights, *roles.over_optimizer} & set(names):
        tensor = next((axis for axis in names if axis in _TENSOR), None) if len(names) > 1 else None
        others = tuple(axis for axis in names if axis != tensor)
        raise ValueError(
            f"the mesh in scope has the axes {names}, but the roles shard weights over {roles.weights!r}. Pass the "
            f"roles of its axes, such as `roles=gtp_jax.mesh.Roles(batch={others!r}, weights={others!r}, "
            f"tensor={tensor!r})`."
        )
    if roles.batch and not {*roles.batch} & set(names):
        raise ValueError(
            f"the mesh in scope has the axes {names}, but the roles shard the batch over {roles.batch!r}, none of "
            "which it has. In `roles`, name the axes of the mesh that shard the batch as `batch`; pass `batch=()` if "
            "none does."
        )
