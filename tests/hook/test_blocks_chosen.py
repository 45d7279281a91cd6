"""Blocks are chosen by a pattern, a class, a function, several of these, or as the members of the longest lists."""

import pytest
from flax import nnx

import gtp_jax as gtp

from .models import WIDTH
from .steps import MESHES, scope


class Block(nnx.Module):
    def __init__(self, rngs):
        self.pair = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.pair[1](self.pair[0](x))


class Tail(Block):
    pass


class Model(nnx.Module):
    """Three blocks in a list, each with a shorter list in it, and a module of a subclass."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.tail = Tail(rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.tail(x)


LAYERS = ["layers.0", "layers.1", "layers.2"]
PAIR = ["tail.pair.0", "tail.pair.1"]
CHOICES = {
    "default": (None, [*LAYERS, *PAIR]),
    "pattern": ("layers.*", [*LAYERS, *PAIR]),
    "pattern of part of a name": ("t*l", ["tail", *(f"{name}.pair.{i}" for name in LAYERS for i in range(2))]),
    "class, with its subclasses": (Block, [*LAYERS, "tail"]),
    "several": (("layers.*", Tail), [*LAYERS, "tail"]),
    "function": (lambda path, module: path in ("layers.1", "tail") and isinstance(module, Block), None),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_units_are_the_chosen_blocks_and_what_has_weights_outside_of_them(choice):
    blocks, wanted = CHOICES[choice]
    if wanted is None:
        wanted = ["layers.1", "tail", *(f"layers.{i}.pair.{j}" for i in (0, 2) for j in range(2))]
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Model(), blocks, min_size=64)
        found = [unit.module for unit in gtp.explain(model).units if "ahead of its call" in unit.gathered]
    assert sorted(found) == sorted(wanted)
