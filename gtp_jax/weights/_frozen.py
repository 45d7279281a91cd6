"""Stores and sends frozen weights: ranks store what is sent, and no masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..formats import Format, Operands, QuantizedArray, Tiled, WireFormat
from ._codes import StoredCodes, codes_of, codes_specs
from ._fused import Shards
from ._optimizer_axes import stored_specs
from ._prepare import buffer_of
from ._quantize import Bundle, pack_all
from ._ranks import in_view
from ._stored_tiles import StoredTiles
from ._tiles import kernels_in_tiles
from ._wire import Kernels, Wire
from ._wire_spec import ModulePath, WireSpec

# What ranks store of each module's kernels, by the module's path: codes, or arrays in the dtype of the wire.
Kept = Mapping[ModulePath, tuple[Any, ...]]


class FrozenAs(NamedTuple):
    """The formats that were decided for a weight when it was frozen; see `WireSpec`."""

    wire: WireFormat | None
    operands: Operands | None


def quantize_frozen(groups: Sequence[WireSpec], masters: Sequence[Shards]) -> list[tuple[QuantizedArray, ...]]:
    """Returns, for each weight, the codes of its kernels that ranks store instead of masters, in the view in scope.

    Args:
        groups: the decisions about the weights. Each travels in a `Tiled` or, with shards of whole blocks, a `Format`.
        masters: this rank's shards, or the parts of them that it stores, with or without the leading dimension of a
            stack; in global view, whole arrays.
    """
    if not groups:
        return []
    layouts = [[one.of_shards for one in group.layouts] for group in groups]

    def pack(masters: Sequence[Shards]) -> list[tuple[QuantizedArray, ...]]:
        pairs = list(zip(masters, groups, strict=True))
        whole = [Bundle({(): own}, {(): group}) for own, group in pairs if isinstance(group.wire, Format)]
        packed = iter(pack_all(whole))
        tiled = iter(kernels_in_tiles([pair for pair in pairs if isinstance(pair[1].wire, Tiled)]))
        return [
            next(tiled) if isinstance(group.wire, Tiled) else codes_of(next(packed), own)
            for group, own in zip(groups, layouts, strict=True)
        ]

    def into(masters: Sequence[Shards]) -> tuple[Any]:
        return ([stored_specs(group.layouts, own) for group, own in zip(groups, masters, strict=True)],)

    out = [
        tuple(codes_specs(one, _format(group), x.ndim - len(one.shape)) for one, x in zip(kernels, own, strict=True))
        for group, kernels, own in zip(groups, layouts, masters, strict=True)
    ]
    return in_view(pack, into, out)(masters)


def _format(group: WireSpec) -> Format:
    assert isinstance(group.wire, Format | Tiled)
    return group.wire.format if isinstance(group.wire, Tiled) else group.wire


def frozen_wires(groups: Mapping[ModulePath, WireSpec], kept: Kept) -> list[Wire]:
    """Returns the wires of the frozen weights of a stack or of one module. Wires of codes come first: one for each
    buffer, or for each weight in tiles. Wires of arrays follow, one for each weight."""
    together: dict[ModulePath, list[ModulePath]] = {}
    for path, group in groups.items():
        if group.wire is not None:
            together.setdefault(buffer_of(group, path, stacked=True), []).append(path)
    kept = refuse_gradient(dict(kept))
    codes: list[Wire] = []
    for paths in together.values():
        wire, own = groups[paths[0]].wire, tuple(kept[path] for path in paths)
        codes.append(
            StoredTiles(own[0], tuple(paths), wire) if isinstance(wire, Tiled) else StoredCodes(own, tuple(paths))
        )
    return [*codes, *(Kernels(kept[path], (path,)) for path, group in groups.items() if group.wire is None)]


@jax.custom_vjp
def refuse_gradient(kept: Any) -> Any:
    """Returns its argument. Reverse-mode differentiation raises a `ValueError`."""
    return kept


def _fwd(kept: Any) -> Any:
    shapes = [one.shape for one in jax.tree.leaves(kept, is_leaf=_is_quantized)]
    several = f"{len(shapes)} frozen weights, with shapes such as {shapes[0]},"
    weights = several if len(shapes) > 1 else f"a frozen weight of shape {shapes[0]}"
    raise ValueError(
        f"the gradient of {weights} is requested, but `gtp_jax.nn.freeze` made frozen weights constant. Differentiate "
        "only what is trained: `nnx.grad(loss)` takes `nnx.Param`. To train a weight, let `trained` of `freeze` match "
        "it."
    )


def _bwd(_: Any, gradient: Any) -> Any:
    return (gradient,)


refuse_gradient.defvjp(_fwd, _bwd)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray)
