"""Chooses which modules of a model are units, whose calls gather weights, and which are holders, which contain
units."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from ..weights import ModulePath

# How a caller names blocks: a pattern of paths, a class, a tuple of these, or a function of a path and a module.
Blocks = str | type | tuple[str | type, ...] | Callable[[str, nnx.Module], bool]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The modules of a model whose calls the hook handles, by path.

    Attributes:
        blocks: the modules that the argument `blocks` selects (`named`), or that were found by default.
        others: modules that have a path outside of blocks, hold weights themselves and contain no block, except those
            whose path here leads through another such module. They are units too.
        holders: the modules that contain units, except units themselves and modules whose path here leads through one.
    """

    blocks: dict[ModulePath, nnx.Module]
    others: dict[ModulePath, nnx.Module]
    holders: dict[ModulePath, nnx.Module]

    @property
    def units(self) -> dict[ModulePath, nnx.Module]:
        return {**self.blocks, **self.others}


def name_of(path: ModulePath) -> str:
    """Returns a path as patterns and messages write it: its names, joined by dots."""
    return ".".join(map(str, path))


def matches(pattern: str, path: ModulePath) -> bool:
    """Returns whether a path matches a pattern. In a pattern, names are joined by dots. Each is matched as by
    `fnmatch.fnmatchcase`, so `*` matches any part of one name."""
    names = pattern.split(".") if pattern else []
    return len(names) == len(path) and all(fnmatch.fnmatchcase(str(p), n) for p, n in zip(path, names, strict=True))


def choose(model: nnx.Module, blocks: Blocks | None, is_weight: Callable[[Any], bool]) -> Choice:
    """Chooses the units of a model.

    Args:
        model: any NNX model.
        blocks: which modules are blocks. By default, blocks are the members of all lists of two or more callable
            modules of one class that hold weights; of lists nested in one another, longer ones take precedence
            (`_longest_lists`).
        is_weight: a function that returns whether a node of the model is the variable of a weight to shard.

    Raises:
        ValueError: if no module matches `blocks`, or a pattern among its entries, or, by default, if the model has no
            such list.
        TypeError: if `blocks` has the wrong type.
    """
    modules, names = dict(in_order(model)), names_of(model)
    heavy = {path: m for path, m in modules.items() if any(is_weight(v) for _, v in nnx.iter_graph(m))}
    if blocks is None:
        chosen = _longest_lists(heavy, names)
    else:
        chosen = _named(blocks, modules, names)
    patterns = [one for one in blocks if isinstance(one, str)] if isinstance(blocks, tuple) else []
    missing = [one for one in patterns if not _named(one, modules, names)]
    if missing or not chosen:
        raise ValueError(_none_matches(missing[0] if missing else blocks, modules, _longest_lists(heavy, names)))
    chosen_modules = {id(modules[path]) for path in chosen}
    blocks_names = [name for path in chosen for name in names[id(modules[path])]]
    outside = {
        path: m
        for path, m in heavy.items()
        if not all(any(_related(name, block) for block in blocks_names) for name in names[id(m)])
        and not any(id(m) in chosen_modules for _, m in nnx.iter_modules(m))
        and any(is_weight(v) for v in own_variables(m).values())
    }
    others = {path: outside[path] for path in _outermost(list(outside))}
    units = [*chosen, *others]
    of_units = {id(modules[path]) for path in units}
    holders = {
        path: m
        for path, m in modules.items()
        if not any(path[: len(unit)] == unit for unit in units)
        and any(id(within) in of_units for _, within in nnx.iter_modules(m))
    }
    return Choice({path: modules[path] for path in chosen}, others, holders)


def named(model: nnx.Module, blocks: Blocks) -> dict[ModulePath, nnx.Module]:
    """Returns, by path, the modules of a model that `blocks` matches, except those whose path leads through another
    such module. The path of a module is that at which it is found first (`in_order`).

    Raises:
        TypeError: if `blocks` has the wrong type.
    """
    modules = dict(in_order(model))
    return {path: modules[path] for path in _named(blocks, modules, names_of(model))}


def in_order(
    module: nnx.Module, path: ModulePath = (), seen: set[int] | None = None
) -> Iterable[tuple[ModulePath, nnx.Module]]:
    """Yields a module, then the modules within it, each once and with the path at which it is found first. Searches
    attributes, in the order of `vars`, and lists, tuples and dicts."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if not _is_container(module):
        yield path, module
    for name, value in _children(module):
        if isinstance(value, nnx.Module) or _is_container(value):
            yield from in_order(value, (*path, name), seen)


def names_of(model: nnx.Module) -> dict[int, list[ModulePath]]:
    """Returns, by `id`, the paths of the modules and variables that are found in the attributes, lists, tuples and
    dicts of a model.

    A module that several modules hold has a path through each of them, and so does everything within it. Where modules
    refer to each other, for example through an attribute `parent` or `previous`, only some of the paths are returned.
    """
    names: dict[int, list[ModulePath]] = defaultdict(list)

    def visit(node: Any, path: ModulePath, around: tuple[int, ...]) -> None:
        if id(node) in around:
            return
        first = names[id(node)][0] if id(node) in names else None
        if first is not None:
            for own in names.values():
                own.extend([(*path, *one[len(first) :]) for one in own if one[: len(first)] == first])
            return
        names[id(node)].append(path)
        for name, value in () if isinstance(node, nnx.Variable) else _children(node):
            if isinstance(value, nnx.Module | nnx.Variable) or _is_container(value):
                visit(value, (*path, name), (*around, id(node)))

    visit(model, (), ())
    return dict(names)


def own_variables(module: nnx.Module) -> dict[ModulePath, nnx.Variable]:
    """Returns, by path, the variables that a module holds directly or in lists, tuples and dicts. The variables of
    inner modules are left out."""
    found: dict[ModulePath, nnx.Variable] = {}
    for name, value in _children(module):
        if isinstance(value, nnx.Variable):
            found[(name,)] = value
        elif _is_container(value):
            found |= {(name, *path): variable for path, variable in own_variables(value).items()}
    return found


def _is_container(value: Any) -> bool:
    return isinstance(value, nnx.List | nnx.Dict | list | tuple | dict)


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, list | tuple | nnx.List):
        return list(enumerate(node))
    return [(name, value) for name, value in vars(node).items() if not name.startswith("_pytree__")]


def _longest_lists(modules: dict[ModulePath, nnx.Module], names: dict[int, list[ModulePath]]) -> list[ModulePath]:
    """Returns the paths at which the members of lists of callable modules are found first. Of lists nested in one
    another, longer ones take precedence.

    A list consists of two or more entries of one class in one list or tuple. Attributes of one module, or entries of
    one dict, also form a list if they are of one class and their names differ only in a number at the end. A module may
    be several entries. Lists are considered from the longest to the shortest. A list is dropped if the path of one of
    its entries leads through an entry of a list that counts already, or the other way around. A member is left out if
    the path at which it is found first leads through another member.

    Args:
        modules: the modules with weights, by the path at which each is found first.
        names: all paths of each module, by its `id` (`names_of`).
    """
    lists: dict[Any, list[ModulePath]] = defaultdict(list)
    for module in filter(callable, modules.values()):
        for path in filter(None, names[id(module)]):
            lists[path[:-1], re.sub(r"\d+$", "", str(path[-1])), type(module)].append(path)
    chosen: list[ModulePath] = []
    for members in sorted((own for own in lists.values() if len(own) > 1), key=len, reverse=True):
        if not any(_related(one, other) for one in members for other in chosen):
            chosen += members
    return _outermost([path for path, module in modules.items() if set(names[id(module)]) & set(chosen)])


def _related(one: ModulePath, other: ModulePath) -> bool:
    count = min(len(one), len(other))
    return one[:count] == other[:count]


def _outermost(paths: list[ModulePath]) -> list[ModulePath]:
    return [path for path in paths if not any(path[: len(o)] == o and path != o for o in paths)]


def _named(
    blocks: Blocks, modules: dict[ModulePath, nnx.Module], names: dict[int, list[ModulePath]]
) -> list[ModulePath]:
    told = _told(blocks)
    return _outermost([path for path, m in modules.items() if any(told(name, m) for name in names[id(m)])])


def _told(blocks: Blocks, around: Blocks | None = None) -> Callable[[ModulePath, nnx.Module], bool]:
    """Returns a function that tells, given a path and a module, whether `blocks` matches them.

    Args:
        blocks: the argument `blocks`, or an entry of it.
        around: if `blocks` is an entry of a tuple, the whole argument, which the error quotes.
    """
    if isinstance(blocks, str):
        return lambda path, _: matches(blocks, path)
    if isinstance(blocks, type):
        return lambda _, module: isinstance(module, blocks)
    if isinstance(blocks, tuple) and blocks:
        each = [_told(one, around or blocks) for one in blocks]
        return lambda path, module: any(one(path, module) for one in each)
    if callable(blocks):
        return lambda path, module: bool(blocks(name_of(path), module))
    entry = f", of which {blocks!r} is not allowed" if around else ""
    raise TypeError(
        f"`blocks` is {(around or blocks)!r}{entry}; it must be a pattern of paths such as 'layers.*', a module class, "
        "a function `(path, module) -> bool`, or a tuple of at least one of these."
    )


def _none_matches(blocks: Any, modules: dict[ModulePath, nnx.Module], listed: list[ModulePath]) -> str:
    paths = [name_of(path) for path in modules if path]
    shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
    if blocks is None:
        return (
            "the model has no list of two or more callable modules of one class that hold weights to shard; the "
            "members of such a list would be its blocks. Name the blocks with `blocks`: a pattern such as 'layers.*', "
            f"or a class. The modules of the model are {shown or 'none'}."
        )
    first = ", ".join(map(name_of, listed[:3])) + (", ..." if len(listed) > 3 else "")
    pattern = f"{name_of(listed[0][:-1])}.".lstrip(".") + re.sub(r"\d+$", "*", str(listed[0][-1])) if listed else ""
    default = f" Without `blocks`, the blocks are {first}; {pattern!r} matches the first of these." if listed else ""
    return f"`blocks` has {blocks!r}, which matches no module of the model. Its modules are {shown or 'none'}.{default}"
