"""Meshes with other axis names, and weights that a model's author has annotated, also for tensor parallelism."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp

from .models import F64, WIDTH
from .steps import PLAIN, assert_equal, train

ROLES = gtp.mesh.Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor="tp")


class Block(nnx.Module):
    """A feed-forward network, column-parallel and then row-parallel if `annotated`; of a name alone otherwise."""

    def __init__(self, rngs, annotated):
        def init(*names):
            kind = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(kind, names) if annotated else kind

        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=init(None, "tp"), use_bias=False, rngs=rngs, **F64)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=init("tp", "fsdp"), use_bias=False, rngs=rngs, **F64)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return x + self.out(jnp.tanh(self.down(jax.nn.gelu(self.up(x)))))


def make(annotated):
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*[Block(rngs, annotated) for _ in range(2)])


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def loss(model, x):
    return jnp.sin(3 * model(x)).mean()


def test_annotations_are_kept_and_steps_are_those_without_a_mesh(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    wanted = train(nnx.jit(lambda: make(False))(), loss, x, optimizer=PLAIN)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tp=2)):
        model = gtp.shard(nnx.jit(lambda: make(True))(), Block, min_size=64, roles=ROLES)
        block = model.layers[0]
        specs = [layer.kernel.get_value().sharding.spec for layer in (block.up, block.down, block.out)]
        # the author's partition of `up` has no axis to gather over, so the data axes are added; that of `down` has
        # one and is kept; `out` has no annotation and is sharded over all axes but tp
        assert specs == [P(("data", "fsdp"), "tp"), P("tp", "fsdp"), P(("data", "fsdp"), None)]
        assert_equal(train(model, loss, x, optimizer=PLAIN), wanted)


def test_names_of_the_authors_own_are_mapped_to_axes_by_flax_rules(x64):
    class Named(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("narrow", "wide"))
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=init, rngs=rngs, **F64)

        def __call__(self, x):
            return x + self.up(x).reshape(*x.shape, 4).sum(-1)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))

    def make():
        return nnx.jit(lambda: nnx.Sequential(*[Named(nnx.Rngs(i)) for i in range(2)]))()

    with nnx.use_eager_sharding(False):
        wanted = train(make(), loss, x, optimizer=PLAIN)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tp=2)), nnx.logical_axis_rules((("wide", "tp"), ("narrow", "fsdp"))):
        model = gtp.shard(make(), Named, min_size=64, roles=ROLES)
        assert model.layers[0].up.kernel.get_value().sharding.spec == P("fsdp", "tp")
        assert_equal(train(model, loss, x, optimizer=PLAIN), wanted)
    with nnx.use_eager_sharding(False), jax.set_mesh(mesh_of(data=2, fsdp=2, tp=2)):
        with pytest.raises(ValueError, match=naming("('narrow', 'wide') nnx.logical_axis_rules")):
            gtp.shard(make(), Named, min_size=64, roles=ROLES)
        with nnx.logical_axis_rules((("wide", "tp"), ("narrow", "tp"))):
            with pytest.raises(ValueError, match=naming("layers.0.up.kernel twice")):
                gtp.shard(make(), Named, min_size=64, roles=ROLES)


def test_rules_per_path_come_before_annotations_which_may_be_named_shardings(x64):
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    with jax.set_mesh(mesh):
        model = nnx.jit(lambda: make(True))()
    model.layers[1].up.kernel.set_metadata(out_sharding=jax.NamedSharding(mesh, P(None, "tp")))
    model.layers[1].out.bias.set_metadata(out_sharding=jax.NamedSharding(mesh, P("tp")))
    specs = {"layers.0.down.kernel": P("fsdp"), "layers.0.out.kernel": None, "layers.0.up.kernel": P()}
    with jax.set_mesh(mesh):
        first, second = gtp.shard(model, Block, min_size=64, roles=ROLES, specs=specs).layers
    assert first.down.kernel.get_value().sharding.spec == P("fsdp")
    assert first.out.kernel.get_value().sharding.is_fully_replicated
    assert first.up.kernel.get_value().sharding.spec == P()
    assert second.up.kernel.get_value().sharding.spec == P(("data", "fsdp"), "tp")
    assert second.out.bias.get_value().sharding.spec == P("tp")


class Parallel(nnx.Module):
    """A column-parallel layer and a row-parallel one, as their author annotated them."""

    def __init__(self, rngs, bias=64):
        up, down = (
            nnx.with_partitioning(nnx.initializers.lecun_normal(), names) for names in ((None, "tp"), ("tp", None))
        )
        normal = nnx.with_partitioning(nnx.initializers.normal(), ("tp",))
        self.up = nnx.Linear(32, bias, kernel_init=up, bias_init=normal, rngs=rngs)
        self.down = nnx.Linear(bias, 32, kernel_init=down, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def summed(model, x):
    return jnp.sin(model(x)).sum(), jnp.float32(x.size)


def parallel(rngs, min_size=64):
    return gtp.shard(nnx.Sequential(*[Parallel(rngs) for _ in range(2)]), Parallel, min_size=min_size)


RECIPES = {"none": None, "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False)}


@pytest.mark.parametrize("name", others_full(RECIPES, ["none"]))
def test_in_local_view_tensor_ranks_gather_whole_weights(name):
    options = dict(recipe=RECIPES[name], tolerance=1e-2 if RECIPES[name] else 1e-5)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        errors = gtp.train.check(summed, parallel, jnp.ones((16, 32)), view="local", **options)
    assert len(errors) == 7


class Tailed(nnx.Module):
    """Blocks, and a module outside of them whose parameters are all small."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Parallel(rngs, 128)])
        self.tail = nnx.Sequential(Parallel(rngs, 2))

    def __call__(self, x):
        return self.tail(self.blocks[0](x))


def tailed(rngs, **options):
    return gtp.shard(Tailed(rngs), "blocks.*", **options)


SMALL = [
    (parallel, dict(min_size=128), "layers.0.up.bias of Sequential"),
    (tailed, dict(min_size=65), "tail.layers.0.down.kernel of Tailed"),
    (tailed, dict(min_size=64, specs={"blocks.0.up.kernel": None}), "blocks.0.up.kernel of Tailed"),
]


@pytest.mark.parametrize("factory, options, name", SMALL, ids=["in a block", "outside of blocks", "specs"])
def test_in_local_view_a_part_that_no_call_gathers_is_refused(factory, options, name):
    hook = gtp.hook.without_hook if options.get("specs") else contextlib.nullcontext
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), hook(), pytest.raises(ValueError, match=naming(name, "tp gathers")):
        state = gtp.TrainState.create(gtp.init(lambda rngs: factory(rngs, **options), nnx.Rngs(0)), optax.sgd(0.1))
        jax.eval_shape(
            lambda state: gtp.train.loss_and_gradients(summed, state, jnp.ones((16, 32)), view="local")[0], state
        )


def test_roles_that_fit_no_axis_are_refused_with_roles_that_fit_all(x64):
    model, fit = nnx.eval_shape(lambda: make(False)), dict(batch=("data",), weights=("data",), tensor="model")
    advice = ", ".join(f"{name}={value!r}" for name, value in fit.items())
    with jax.set_mesh(mesh_of(model=2, data=4)):
        with pytest.raises(ValueError, match=re.escape(f"roles=gtp_jax.mesh.Roles({advice})")):
            gtp.shard(model, min_size=64)
        with pytest.raises(ValueError, match=naming("('fsdp',) none `batch=()`")):
            gtp.shard(model, min_size=64, roles=gtp.mesh.Roles(batch=("fsdp",), weights=("data",)))
        assert gtp.shard(model, min_size=np.int64(64), roles=gtp.mesh.Roles(**fit))
