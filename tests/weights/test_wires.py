"""Every form in which weights travel keeps the protocol of `gtp_jax.weights.Wire`, one's own too.

`row_scaled` is a format that the library does not know. It trains like any other. To test another format, add its
recipe to `RECIPES` and its largest error to `ERROR`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from messages import naming
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.nn import abstract_model, groups_of, shards_of
from gtp_jax.weights import Kernels, Prepared, Stretch, Wire, frozen_wires, part_of, prepare, ranks_spec

from .row_scaled import LARGEST, Rows, RowScaled, RowScaledRecipe

WIDTH, LAYERS = 64, 3
# A format's largest error, as a share of the weight's largest element.
ERROR = {"float32": 0.0, "bfloat16": 2**-8, "fp8": 2**-4, "mxfp8": 2**-4, "nvfp4": 2**-2, "row_scaled": 2**-4}
RECIPES = {
    "float32": None,
    "bfloat16": None,
    "fp8": gtp.FP8(),
    "mxfp8": gtp.MXFP8(),
    "nvfp4": gtp.NVFP4(),
    "row_scaled": RowScaledRecipe(),
}
MESHES = {"gtp 4": {"gtp": 4}, "dp 2 x gtp 2": {"dp": 2, "gtp": 2}, "gtp 2 x tp 2": {"gtp": 2, "tp": 2}}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: str = "float32"):
        self.up = gtp.Dense(WIDTH, {"gate": 128, "value": 256}, parallel="column", dtype=dtype, rngs=rngs)
        self.down = gtp.Dense(128, WIDTH, parallel="row", dtype=dtype, rngs=rngs)

    def __call__(self, x):
        y = self.up(x)
        return x + self.down(jnp.tanh(y["gate"] + y["value"][..., : y["gate"].shape[-1]]))


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: str = "float32", layers: int = LAYERS):
        self.blocks = gtp.Stack(lambda rngs: Block(rngs, dtype), layers, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, layers: int):
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def mesh_of(name: str) -> jax.sharding.Mesh:
    return gtp.make_mesh(**MESHES[name], devices=jax.devices()[:4])


WHOLE = PartitionSpec()


def in_local_view(function, model, *, out=WHOLE):
    """Returns what a function of a model gives on every rank, which is the same on all unless `out` says otherwise."""
    model_def, params, _, frozen = gtp.nn.split_model(model)
    local = lambda params, frozen: function(model_def.model(params, {}, frozen))  # noqa: E731
    specs = (model_def.specs, model_def.frozen_specs)
    return jax.jit(jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False))(params, frozen)


def wires_of(model: Stacked, name: str) -> tuple[dict, list[Stretch]]:
    """Returns what is decided about a layer's weights, and what a step makes of those of all layers."""
    found = {path[2:]: (path, at, group) for (path, at), group in groups_of(model, RECIPES[name]).items()}
    of_all_layers = {(path, at._replace(written_out=False)): group for path, at, group in found.values()}
    made: Prepared = prepare(of_all_layers, shards_of(model))
    stretches = [one for own in made.values() for one in own]
    left = set(found) - {member for one in stretches for member in one.wire.members}
    shards = shards_of(model)
    stretches += [Stretch(Kernels(shards[found[one][0]], (one,)), (found[one][2],), 0, LAYERS) for one in sorted(left)]
    return {member: group for member, (_, _, group) in found.items()}, stretches


def gathered(groups, stretches, layer):
    """Returns the fused weights of a layer, in float32."""
    weights = {}
    for one in stretches:
        wire = jax.tree.map(lambda a: a[layer], one.wire)
        weights |= wire.gather(groups)
    return {".".join(name): weight.astype(jnp.float32) for name, weight in weights.items()}


@pytest.mark.parametrize("name, mesh", pairwise(RECIPES, MESHES, usual=4))
def test_a_wire_has_the_protocol_and_gathers_the_weights_up_to_its_rounding(name, mesh, key):
    with jax.set_mesh(mesh_of(mesh)):
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        model = gtp.init(lambda rngs: Stacked(rngs, dtype), nnx.Rngs(key))

        def local(model):
            groups, stretches = wires_of(model, name)
            assert all(isinstance(one.wire, Wire) and dataclasses.is_dataclass(one.wire) for one in stretches)
            assert sorted(member for one in stretches for member in one.wire.members) == sorted(groups)
            assert all(groups[m].wire == one.wire.format for one in stretches for m in one.wire.members)
            found = gathered(groups, stretches, 1)
            ready = [jax.tree.map(lambda a: a[1], one.wire).ready(groups) for one in stretches]
            again = [wire.gather(groups) for wire in ready if wire is not None]
            again = {".".join(path): w.astype(jnp.float32) for own in again for path, w in own.items()}
            exact = {path: dataclasses.replace(group, dtype=np.dtype("float32")) for path, group in groups.items()}
            shards = shards_of(model)
            plain = {
                ".".join(path): Kernels(tuple(x[1] for x in own), (path[2:],)).gather(exact)[path[2:]]
                for path, own in shards.items()
            }
            return found, again, plain

        axis = PartitionSpec("tp") if "tp" in MESHES[mesh] else PartitionSpec()
        found, again, plain = jax.device_get(in_local_view(local, model, out=axis))
    assert len(found) == 2
    for path, exact in plain.items():
        mine = found[path.removeprefix("blocks.layers.")]
        assert np.max(np.abs(mine - exact)) <= ERROR[name] * np.max(np.abs(exact)), path
        assert name == "float32" or np.any(mine != exact)
    assert bool(again) == (
        name == "bfloat16" and mesh != "dp 2 x gtp 2"
    )  # else there is nothing to cast, or join first
    for path, mine in again.items():
        np.testing.assert_array_equal(mine, found[path])


def test_codes_of_frozen_weights_keep_the_protocol(key):
    with jax.set_mesh(mesh_of("gtp 4")):
        master = gtp.init(Stacked, nnx.Rngs(key))
        made = lambda rngs: gtp.nn.freeze(Adapted(rngs), gtp.NVFP4())  # noqa: E731
        frozen = gtp.init(made, nnx.Rngs(key))

        def local(model):
            groups = {path[2:]: g for (path, _), g in groups_of(model, None).items() if g.frozen}
            owners = {path[2:]: o for path, o in gtp.nn.weight_owners(model).items() if o.frozen}
            (wire,) = frozen_wires(groups, {path: owner.stored() for path, owner in owners.items()})
            assert isinstance(wire, Wire) and wire.format == gtp.formats.NVFP4
            return gathered(groups, [Stretch(wire, tuple(groups[m] for m in wire.members), 0, LAYERS)], 1)

        found = in_local_view(local, frozen)
        expected = in_local_view(lambda model: gathered(*wires_of(model, "nvfp4"), 1), master)
    for path, weight in found.items():
        np.testing.assert_array_equal(weight, expected[path])


class Adapted(Stacked):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.adapter = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)


@functools.cache
def of_two_layers(model):
    return lambda rngs: model(rngs, layers=2)


@functools.cache
def losses(model, mesh, recipe, seed=0, **options):
    """The losses of three steps; without a mesh if there is none."""
    x, optimizer = np.asarray(jax.random.normal(jax.random.key(seed), (8, 4, WIDTH))), optax.adam(1e-2)

    def loss(model, batch):
        terms = jnp.square(model(batch["x"]) - jnp.roll(batch["x"], 1, -1)).mean(-1)
        return (terms.sum(), jnp.asarray(terms.size, jnp.float32)) if options.get("view") == "local" else terms.mean()

    found = []
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh_of(mesh)):
        state = gtp.TrainState.create(placed(of_two_layers(model)), optimizer)
        step = gtp.train_step(loss, optimizer, recipe=recipe, **options)
        for _ in range(3):
            state, metrics = step(state, {"x": x})
            found.append(float(metrics["loss"]))
    return found


WAYS = [("gtp 4", {"view": "local"}), ("gtp 4", {}), ("dp 2 x gtp 2", {"microbatches": 2})]
OF_LISTS = (Listed, *WAYS[2])


@pytest.mark.parametrize(
    "model, mesh, options", others_full([*((Stacked, *w) for w in WAYS), OF_LISTS], [(Stacked, *WAYS[0])])
)
def test_a_format_of_ones_own_trains_as_on_one_device(model, mesh, options):
    expected = losses(model, None, RowScaledRecipe())
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses(model, mesh, RowScaledRecipe(), **options), expected, rtol=2e-6)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("members", "format"))
@dataclasses.dataclass(frozen=True)
class SameScales(Rows):
    """All ranks have the same scales, and `specs` says so. It wants to know what is decided about every member."""

    def specs(self, groups, *, stacked=False):
        assert all(groups[name].wire == self.format for name in self.members)
        count = len(self.members)
        codes, scales = (ranks_spec(stacked=stacked),) * count, (PartitionSpec(),) * count
        return dataclasses.replace(self, codes=codes, scales=scales)


@dataclasses.dataclass(frozen=True)
class OneScale(RowScaled):
    """E4M3, one scale a weight."""

    name: str = "ONE_SCALE"

    def make(self, shards, groups):
        axes = jax.sharding.get_abstract_mesh().axis_names
        codes, scales = [], []
        for name, own in shards.items():
            part = part_of(own, groups[name].layouts, jnp.float32)
            amax = jnp.max(jnp.abs(part), axis=(-2, -1), keepdims=True)
            scale = (jax.lax.pmax(amax, axes) if axes else amax) / LARGEST
            codes.append(jax.lax.bitcast_convert_type((part / scale).astype(jnp.float8_e4m3fn), jnp.uint8))
            scales.append(scale)
        return SameScales(tuple(codes), tuple(scales), tuple(shards), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneScaleRecipe(RowScaledRecipe):
    @property
    def wire(self):
        return OneScale()


PLACES = [(Stacked, "gtp 2 x tp 2", {}), (Stacked, "dp 2 x gtp 2", {"view": "local"}), (Listed, "gtp 2 x tp 2", {})]
# a code may be another if a sum is another in its last bit, which moves losses; with these inputs, none is
SEED = 409718766


@pytest.mark.parametrize("model, mesh, options", others_full(PLACES, PLACES[:1]))
def test_partitions_of_ones_own_hold_for_what_is_made_and_for_what_is_gathered(model, mesh, options):
    """Of a stack both weights of a layer are in one wire."""
    expected = losses(model, None, OneScaleRecipe(), SEED)
    np.testing.assert_allclose(losses(model, mesh, OneScaleRecipe(), SEED, **options), expected, rtol=2e-6)


# what a format's `make` returns in place of its wire, and what the message names
WRONG = {
    "a weight left out": (lambda rows: dict(members=rows.members[:1]), "`make` ROW_SCALED members"),
    "no format": (lambda _: dict(format=None), "`make` ROW_SCALED `format` RowScaled `self`"),
    "another format": (lambda _: dict(format=OneScale()), "`make` ROW_SCALED `format` RowScaled `self`"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wire_of_ones_own_that_is_not_what_was_asked_for_is_refused(wrong, monkeypatch):
    whole, (change, message) = RowScaled.make, WRONG[wrong]
    monkeypatch.setattr(RowScaled, "make", lambda *args: dataclasses.replace(rows := whole(*args), **change(rows)))
    with pytest.raises(ValueError, match=naming(message)):
        losses.__wrapped__(Stacked, "gtp 4", RowScaledRecipe())


def test_a_format_of_ones_own_is_explained_and_refused_where_it_has_no_form():
    with jax.set_mesh(mesh_of("gtp 4")):
        facts = {fact.module: fact for fact in gtp.explain(abstract_model(Stacked), RowScaledRecipe()).facts}
        up = facts["blocks.layers.up"]
        assert up.wire == "ROW_SCALED" and up.bytes == 384 * (WIDTH + 4)
        with pytest.raises(ValueError, match=naming("ROW_SCALED stored")):
            abstract_model(lambda rngs: gtp.nn.freeze(Adapted(rngs), RowScaledRecipe()))
    with pytest.raises(ValueError, match=naming("ROW_SCALED gathered")):
        losses(Stacked, "gtp 4", RowScaledRecipe(), pregathered_layers=1)
