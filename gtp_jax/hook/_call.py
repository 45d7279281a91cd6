"""Calls the methods of units and holders ([Note: words of the hook]), and gathers their weights for these calls."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from ..chain import OFFLOADED, Remat, Schedule
from ..flight_recorder import PLACES
from ..mesh import check_mesh_in_scope, current_view, legacy_mesh_in_scope
from ..weights import ModulePath
from ._choice import name_of, own_variables
from ._codes import coded, moving
from ._exchange import exchanged
from ._float_ids import float_ids_explained
from ._forward_mode import FORWARD, forward_mode_refused, of_own_code, refused_in_forward_mode
from ._made import scaling_of_call, wires_of_call
from ._matrix import logical_shape
from ._movement import own_part
from ._multiply import axes_in_scope
from ._nodes import is_array
from ._path import Paths, named, path_of, path_of_unit
from ._placement import Placement
from ._record import call_or_mark, can_record, is_recording, recorded
from ._recording import original
from ._rows import divided
from ._scope import hook_is_off
from ._shards import on_parts, refuse_shards
from ._sources import part_of_new_value
from ._stage import StagedCall
from ._trace import traced, written_while_quantized
from ._walk import is_under_way, note, walking
from ._weights import Weights, gather_once

# The weights of a module, hashable: for each, its path in the module, its placement, and its paths (`paths_of`).
Placements = tuple[tuple[ModulePath, Placement, Paths], ...]

# Words of JAX's error for a sharding constraint over a manual axis, and of the error that replaces it.
_CONSTRAINT = "passed to with_sharding_constraint"
_OF_LOCAL_VIEW = "but in local view each rank calls it with its own examples, and no array is sharded over these axes"


@legacy_mesh_in_scope()
def call_unit(
    method: Callable[..., Any],
    unit: nnx.Module,
    args: Any,
    kwargs: Any,
    placements: Placements,
    *,
    remat: Remat,
    schedule: Schedule,
    batch: tuple[str, ...],
    sequence: tuple[str, ...],
    wide: bool,
) -> Any:
    """Returns `method(unit, *args, **kwargs)`. Gathers the unit's weights in forward, and, unless they are kept, again
    in backward.

    While the hook is off (`hook_is_off`), only makes the checks that apply, and calls the method. So does a call that
    has no weight to gather or quantize, unless a walk is recorded, in which `remat` applies to every unit.

    Args:
        method: the method.
        unit: the unit.
        args: positional arguments.
        kwargs: keyword arguments.
        placements: the placements that the unit's weights had when it was sharded.
        remat: the policy for what is saved for backward.
        schedule: how the call is ordered among those of a recorded walk.
        batch: the axes of the role `batch`; those that the mesh in scope lacks do not count.
        sequence: the axis of the role `sequence`, if the mesh has one.
        wide: whether the model was sharded with `grad_reduce="float32"`.

    Raises:
        ValueError: if the unit's variables or the mesh in scope fail a check (`_refuse_parts`, `refuse_shards`,
            `_refuse_stripped`, `moving`, `_checked`), or if the method or the recipe in scope asks for something that
            sharded models do not support (`traced`, `_explained`).
        TypeError: if a gather, or a `jax.custom_vjp` function that the method calls, is differentiated in forward mode.
            If a traced program does this, such as that of `jax.jit`, the error is raised where the program is compiled,
            and for a function of the method's own it is JAX's.
    """
    _refuse_parts(unit)
    nodes: dict[ModulePath, Any] = dict(nnx.iter_graph(unit))
    if hook_is_off():
        refuse_shards(unit, nodes)
        return method(unit, *args, **kwargs)
    _refuse_stripped(unit, nodes, placements)
    named(nodes, {path: paths for path, _, paths in placements})
    moves = _checked(unit, [(node, p) for node in nodes.values() if (p := moving(node)) is not None])
    if not moves and (remat == "everything" or not is_recording()):
        return method(unit, *args, **kwargs)
    axes = axes_in_scope(batch)
    given = args, kwargs
    if not is_under_way():
        args, kwargs = divided(given, axes)
    with _explained(unit):
        call = traced(method, unit, args, kwargs, axes, given)
    owner = f"{type(unit).__name__} (of the weight {call.names[0]})" if moves else type(unit).__name__
    staged = StagedCall(call.program, remat=remat, axes=axes, sequence=sequence, wide=wide, owner=owner)
    pairs = zip(call.weights, call.program.placements, strict=True)
    shapes = [logical_shape(shard, placement) for shard, placement in pairs]
    note = _noting(unit, call.names, shapes, staged)
    source = name_of(path_of_unit(unit) or ()) if remat in OFFLOADED else ""
    source = source or (_name_from(placements) if PLACES.stamping else "")
    refused = functools.partial(forward_mode_refused, type(unit).__name__, call.program.jaxpr)
    return call.finish(call_or_mark(call, staged, schedule, note=note, refused=refused, source=source))


def _name_from(placements: Placements) -> str:
    """Returns the name of a unit, which its weights' paths in the model have in front of their paths in the unit."""
    return next((name_of(paths[0][: len(paths[0]) - len(own)]) for own, _, paths in placements), "")


@legacy_mesh_in_scope()
def call_holder(
    method: Callable[..., Any],
    holder: nnx.Module,
    args: Any,
    kwargs: Any,
    placements: Placements,
    *,
    batch: tuple[str, ...],
) -> Any:
    """Returns `method(holder, *args, **kwargs)`. Gathers the holder's own weights for the call, and begins a walk, or
    joins the walk that is under way in the same trace.

    While the hook is off (`hook_is_off`), only makes the checks that apply, and calls the method.

    Raises:
        ValueError: for the same reasons as `call_unit` and `_gathered`.
        TypeError: for the same reasons as `call_unit`.
    """
    _refuse_parts(holder)
    variables = own_variables(holder)
    if hook_is_off():
        refuse_shards(holder, variables)
        return method(holder, *args, **kwargs)
    _refuse_stripped(holder, variables, placements)
    named(variables, {path: paths for path, _, paths in placements})
    own = [(v, p) for v in variables.values() if (p := moving(v)) is not None]
    if can_record():
        again = functools.partial(_call_again, method, placements, batch)
        divided_args, divided_kwargs = divided((args, kwargs), axes_in_scope(batch))
        with contextlib.suppress(TraceContextError), forward_mode_refused(type(holder).__name__):
            # JAX raises TraceContextError if the model writes a variable that it does not contain
            return recorded(again, holder, divided_args, divided_kwargs, (args, kwargs))
    with walking(), _gathered(holder, own if _checked(holder, own) else []), _explained(holder):
        return method(holder, *args, **kwargs)


def _call_again(
    method: Callable[..., Any],
    placements: Placements,
    batch: tuple[str, ...],
    holder: nnx.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return call_holder(method, holder, args, kwargs, placements, batch=batch)


def _noting(
    unit: nnx.Module, names: Sequence[str], shapes: Sequence[tuple[int, ...]], call: StagedCall
) -> Callable[..., None]:
    """Adds a record of a call, if calls are recorded. Returns a function that completes it once the call has been
    traced, with further attributes."""
    replace = note(original(unit)) if names else None

    def complete(**attributes: Any) -> None:
        if replace is not None:
            found = call.products()
            paths = {field: tuple(names[i] for i in sorted(getattr(found, field))) for field in found._fields}
            replace(weights=tuple(zip(names, shapes, strict=True)), **paths, **attributes)

    return complete


Sharded = list[tuple[nnx.Variable, Placement]]


def stripped(nodes: Mapping[ModulePath, Any], placements: Placements) -> dict[ModulePath, Placement]:
    """Returns, by path, the placements that are missing from the metadata of a module's weights. `nnx.update` with the
    state of an unsharded model removes them, because it replaces the metadata of variables too.

    A variable is left out if its class or the shape of its value does not fit the placement, because it is then taken
    for another weight. For a padded weight, whose variable is a `PaddedParam`, the class `nnx.Param` also fits.

    Args:
        nodes: the nodes and variables of a module, by path.
        placements: the placements of its weights when it was sharded.
    """
    return {
        path: placement
        for path, placement, _ in placements
        if isinstance(node := nodes.get(path), nnx.Variable)
        and (type(node) is placement.kind or (placement.padding.size and type(node) is nnx.Param))
        and "placement" not in node.get_metadata()
        and placement.fits(getattr(node.get_raw_value(), "shape", None))
    }


def _refuse_stripped(owner: nnx.Module, nodes: Mapping[ModulePath, Any], placements: Placements) -> None:
    for path in stripped(nodes, placements):
        raise ValueError(
            f"the weight {name_of(path)} of {type(owner).__name__} was sharded by `gtp_jax.shard`, and now has the "
            "array and the metadata of another weight; `nnx.update` with the state of an unsharded model does that, "
            "and so does replacing a module. Call `gtp_jax.shard` on the model again, which puts its arrays "
            "back as shards."
        )


def _refuse_parts(owner: nnx.Module) -> None:
    """Raises an error in local view if a module, or one within it, has a variable that the model's annotation
    partitions and that no call gathers. Each rank would compute with only its part of the variable."""
    for path, variable in nnx.iter_graph(owner) if on_parts() else ():
        if isinstance(variable, nnx.Variable) and (axes := variable.get_metadata().get("parted")):
            raise ValueError(
                f"the variable {'.'.join(map(str, path))} of {type(owner).__name__} is partitioned over "
                f"{', '.join(axes)}, as annotated, and no call gathers it. In local view, each rank would compute with "
                f"its own part, of shape {variable.get_raw_value().shape}. Use the global view; or, if the variable is "
                "a floating-point `nnx.Param`, shard a new model so that a call gathers the variable: with a "
                "`min_size` of at most the variable's number of elements, and without `None` for it in `specs`."
            )


def _checked(owner: nnx.Module, weights: Sharded) -> bool:
    """Checks the weights that a call gathers or quantizes, and returns whether there are any.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, lacks an axis that shards a weight, or has it in another
            size; or for the same reason as `_check_place`.
    """
    if not weights:
        return False
    check_mesh_in_scope()
    name = type(owner).__name__
    for placement, variable in {placement: variable for variable, placement in reversed(weights)}.items():
        placement.check_mesh(f"{name_of(path_of(variable))} of {name}")
    for variable, placement in weights:
        _check_place(variable, placement, name)
    return True


def _check_place(variable: nnx.Variable, placement: Placement, owner: str) -> None:
    """Raises an error if a weight's value is a concrete JAX array for which `lies` is false."""
    value = variable.get_raw_value()
    if not is_array(value) or isinstance(value, Tracer) or lies(value, placement):
        return
    mesh = " x ".join(f"{axis} {size}" for axis, size in jax.sharding.get_abstract_mesh().shape.items())
    if not mesh:
        raise ValueError(
            f"the weight {name_of(path_of(variable))} of {owner} was sharded by `gtp_jax.shard`, and no mesh is in "
            "scope. Use the model under `with jax.set_mesh(mesh):`, with the mesh for which it was sharded."
        )
    raise ValueError(
        f"the weight {name_of(path_of(variable))} of {owner}, which `gtp_jax.shard` stored as {placement.stored}, "
        f"holds an array with the sharding {value.sharding}, and the mesh in scope is {mesh}. Either another array has "
        "been put in, for example by `nnx.update`, or the model was sharded on a mesh with other axes or sizes. Call "
        "`gtp_jax.shard` on the model again, which puts its arrays back as shards."
    )


def lies(value: jax.Array, placement: Placement) -> bool:
    """Returns whether an array is stored as a placement specifies, on a mesh with the axes and sizes of the mesh in
    scope."""
    mesh = getattr(value.sharding, "mesh", None)  # in a trace, the mesh in scope has no devices
    if mesh is None or dict(mesh.shape) != dict(jax.sharding.get_abstract_mesh().shape):
        return False
    return value.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, placement.stored), value.ndim)


@contextlib.contextmanager
def _explained(owner: nnx.Module) -> Iterator[None]:
    """Replaces errors that a module's own code may raise with errors that say what to do instead: JAX's error for a
    `jax.custom_vjp` function that is differentiated in forward mode, Flax's for token ids that are not integers, and,
    in local view, JAX's for a sharding constraint over a manual axis."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if (message := float_ids_explained(error)) not in ("", text):
            raise ValueError(message) from error
        explained = _OF_LOCAL_VIEW in text  # by a module within this one, which has the constraint
        if current_view() == "global" or _CONSTRAINT not in text or explained:
            raise
        raise ValueError(
            f"{type(owner).__name__} constrains the sharding of an array over axes of the mesh, {_OF_LOCAL_VIEW}. Use "
            f"`view='global'`, or leave the constraint out. JAX says: {error}"
        ) from error
    except TypeError as error:
        if FORWARD not in str(error):
            raise
        calls = traceback.extract_tb(error.__traceback__)
        own = [call for call in calls if not call.filename.startswith(os.path.dirname(jax.__file__))][-1]
        where = f"`{own.line}`, in {own.name} at {own.filename}:{own.lineno}"
        raise of_own_code(type(owner).__name__, where) from error


def _not_in_trace(variable: nnx.Variable, quantized: bool) -> str:
    name = ".".join(path_of(variable))
    why = f"the recipe in scope quantizes {name}" if quantized else f"in local view, ranks hold shards of {name}"
    instead = (
        f"use the global view and keep {name!r} in high precision (`exclude` or `override` of the recipe)"
        if quantized
        else "use the global view"
    )
    return (
        f"{why}, whose module is called inside a transformation (such as `jax.linearize`) into which the module was "
        f"not passed, so the {'quantized' if quantized else 'gathered'} weight cannot be put into its variable. Pass "
        f"the module to the transformation, as `nnx.scan` and `nnx.remat` do; or {instead}."
    )


@contextlib.contextmanager
def _gathered(owner: nnx.Module, weights: Sharded) -> Iterator[None]:
    """Puts gathered weights into variables while a call runs, and puts the shards back afterwards.

    During the call, these variables have no placement. Therefore, units and holders that share them do not gather them
    again, and neither do the copies that `nnx.remat` and other transformations make. If the call writes a weight that
    is not quantized, each rank keeps its part of the new value.

    A variable that belongs to an outer trace cannot be set, as in `jax.linearize` of code that is not traced otherwise.
    In global view, the variable of an unquantized weight then keeps its shards, which XLA gathers.

    Raises:
        ValueError: if the call writes a weight that the recipe in scope quantizes; if a variable cannot be set, and its
            weight is quantized or the view is local; or for the same reasons as `scaling_of_call`.
    """
    if not weights:
        yield
        return
    put = []
    shards = [variable.get_raw_value() for variable, _ in weights]
    formats = tuple(coded(variable, placement) for variable, placement in weights)
    # In global view, the gradients of a holder's weights are not exchanged: the hook computes no products with these
    # weights, so XLA sums the gradients of all ranks; see [Note: one gradient per rank].
    sums = [exchanged(v, p, ()) if current_view() != "global" else None for v, p in weights]
    how = Weights(tuple(placement for _, placement in weights), formats, tuple(sums), (None,) * len(weights))
    wires = wires_of_call([variable for variable, _ in weights], formats)
    scaling = [scaling_of_call(variable, form) for (variable, _), form in zip(weights, formats, strict=True)]
    with forward_mode_refused(type(owner).__name__) as message:
        gathered = gather_once(how, refused_in_forward_mode(message, shards), wires, scaling)
    for (variable, placement), shard, weight, form in zip(weights, shards, gathered, formats, strict=True):
        stored = {name: own for name, own in variable.get_metadata().items() if name in ("placement", "padded")}
        try:
            variable.set_metadata(**dict.fromkeys(stored))
            variable.set_raw_value(weight)
        except TraceContextError as error:  # the variable belongs to an outer trace, such as that around a scan
            if form is not None or current_view() != "global":
                raise ValueError(_not_in_trace(variable, form is not None)) from error
            continue  # XLA gathers the weights that the inner trace reads
        put.append((variable, shard, weight, placement, form, stored))
    try:
        yield
    finally:
        written = []
        for variable, shard, weight, placement, form, metadata in put:
            now = variable.get_raw_value()
            variable.set_metadata(**metadata)
            if now is not weight and form is not None:
                written.append(variable)
            if now is not weight and form is None:
                shard = part_of_new_value(functools.partial(own_part, placement=placement), shard, weight, now)
            variable.set_raw_value(shard)
    if written:
        raise ValueError(
            f"{written_while_quantized(path_of(written[0]), type(owner).__name__)} `nnx.jit` and `nnx.remat` around a "
            "method of this module also write the weight; put them around a method of a block instead."
        )
