"""Muon with the iterations of each matrix on one rank: its updates, and what a rank computes and sends."""

import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from padded_states import padding_of, same
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import Roles, use_roles
from gtp_jax.nn import abstract_model
from gtp_jax.optimizers import muon
from gtp_jax.optimizers._shares import Load, owners_of_rest
from gtp_jax.train import per_layer
from gtp_jax.train._scope import Placed, arrays_in_scope

from ..hlo.programs import needs_target

WIDE = dict(dtype="float64", param_dtype="float64")
WIDTH, HIDDEN = 18, 36  # 4 and 8 do not divide them
X = np.random.default_rng(0).normal(size=(16, 4, WIDTH))


class Model(nnx.Module):
    """A stack, a list of layers, experts, and vectors."""

    def __init__(self, rngs):
        make = functools.partial(gtp.Dense, WIDTH, WIDTH, **WIDE)
        self.stack = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, HIDDEN, rngs=rngs, **WIDE), 3, rngs=rngs)
        self.listed = nnx.List([make(rngs=rngs) for _ in range(3)])
        self.moe = gtp.nn.MoE(
            WIDTH, HIDDEN, num_experts=4, aux_loss_coeff=0.0, loss_reduction="mean", rngs=rngs, **WIDE
        )
        self.head = make(use_bias=True, rngs=rngs)

    def __call__(self, x):
        x = self.moe(self.stack(x))
        for layer in self.listed:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def dimensions(params):
    """Every matrix, experts too, but neither router nor vectors."""

    def of(path, leaf):
        matrix = leaf.ndim > 1 and "router" not in jax.tree_util.keystr(path)
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if matrix else None

    return jax.tree_util.tree_map_with_path(of, params)


def optimizer_of(make):
    options = dict(ns_steps=2, weight_decay=0.1, consistent_rms=0.2)
    return per_layer(make(1e-2, muon_weight_dimension_numbers=dimensions, **options))


def host(state):
    return jax.tree.map(np.asarray, state)


@functools.cache
def on_one_device():
    """States on the host after one step and two of optax's Muon on one device, and after the second of ours."""
    with jax.enable_x64(True), jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        theirs, ours = optimizer_of(optax.contrib.muon), optimizer_of(muon)
        step, own = gtp.train_step(loss, theirs), gtp.train_step(loss, ours)
        state, _ = step(gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), theirs), X)
        first, copy = host(state), host(state)
        return first, host(step(state, X)[0]), host(own(jax.device_put(copy), X)[0])


def placed_like(state, like):
    """Places a state from the host on a mesh, with zeros where it is stored padded."""

    def one(leaf, to):
        more = [(0, n - size) for n, size in zip(to.shape, leaf.shape, strict=True)]
        return jax.device_put(np.pad(leaf, more) if more else leaf, to.sharding)

    leaves = map(one, jax.tree.leaves(state), jax.tree.leaves(like))
    return jax.tree.unflatten(jax.tree.structure(like), list(leaves))


def of_optimizer(program):
    """The collectives of an optimizer in a compiled step, except sums of scalars."""
    return [c for c in hlo.collectives(program) if "/cond/" in c.op_name and c.kind != "all-reduce"]


MESHES = {  # degrees, roles, and the axis whose ranks have copies of some matrices, the results of which they gather
    "gtp 8": (dict(gtp=8), None, None),
    "gtp 4, tp 2": (dict(gtp=4, tp=2), None, "tp"),
    "dp 2, gtp 4": (dict(dp=2, gtp=4), None, None),
    "dp 2, gtp 4, replicas": (dict(dp=2, gtp=4), Roles(optimizer=()), "dp"),
    "ep 2, gtp 4": (dict(gtp=4, ep=2), Roles(batch=("gtp", "ep"), weights=("gtp", "ep"), experts="ep"), None),
}


def test_on_one_device_it_is_that_of_optax_bit_for_bit(x64):
    _, wanted, found = on_one_device()
    same(found, wanted, 0)
    *theirs, own = inspect.signature(muon).parameters
    assert theirs == list(inspect.signature(optax.contrib.muon).parameters) and own == "iteration_dtype"


@pytest.mark.parametrize("name", others_full(MESHES, ["gtp 4, tp 2"]))
def test_a_step_equals_that_of_optax_on_one_device_and_exchanges_matrices_by_all_to_alls(name, x64):
    before, wanted, _ = on_one_device()
    degrees, roles, copies = MESHES[name]
    with jax.set_mesh(gtp.make_mesh(**degrees)), use_roles(roles or Roles()), gtp.layout.even_shares():
        optimizer = optimizer_of(muon)
        like = gtp.TrainState.create(abstract_model(Model), optimizer)
        assert like.model_def.padded
        program = gtp.train_step(loss, optimizer).lower(like, X).compile()
        state = host(program(placed_like(before, like), X)[0])
    same(state.logical(), wanted)
    assert not padding_of(state).any()
    found = {(c.kind, *(c.axes if c.kind == "all-gather" else ())) for c in of_optimizer(program.as_text())}
    assert found == {("all-to-all",)} | ({("all-gather", copies)} if copies else set())


class Square(nnx.Module):
    """Matrices that eight ranks share evenly, and three that they do not."""

    def __init__(self, rngs):
        self.stack = gtp.Stack(functools.partial(gtp.Dense, 16, 16, **WIDE), 16, rngs=rngs)
        self.rest = nnx.List([gtp.Dense(16, 16 * n, rngs=rngs, **WIDE) for n in (1, 2, 2)])

    def __call__(self, x):
        x = self.stack(x)
        return sum(jnp.sum(layer(x)) for layer in self.rest)


def test_a_rank_computes_its_share_alone_and_sends_its_parts_twice(x64):
    """Of matrices m x n with m <= n, a step takes five times 2 m^2 (2 n + m) operations."""
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        optimizer = per_layer(muon(1e-2))
        state = gtp.TrainState.create(abstract_model(Square), optimizer)
        step = gtp.train_step(lambda model, x: model(x), optimizer)
        module = hlo.parse(step.lower(state, np.zeros((8, 16))).compile().as_text())
    inner = [v.instruction for v in module.walk() if v.instruction.op_name.endswith("/shard_map/cond")]
    of_owners = {visit.instruction.name for one in inner for visit in module.inside(one)}
    dots = [e for e in hlo.launch_order(module).events if e.kind == "matmul" and e.shapes[0].elements >= 16 * 16]
    owned, shared = (sum(e.flops for e in dots if (e.name in of_owners) == own) for own in (True, False))
    assert shared == 5 * 2 * 16**2 * (2 * 16 + 16) * 16 // 8
    assert owned == 5 * 2 * 16**2 * ((2 * 16 + 16) + (2 * 32 + 16))  # of which a rank runs one at most
    sent = [c.operand_bytes for c in of_optimizer(module)]
    assert sorted(sent) == 2 * [8 * 16 * 16 * 2 // 8 * 8] + 2 * [8 * 16 * 32]


ARRAYS = {  # shapes and partitions; 4 and 2 do not divide 6 rows, 5 experts, and 3 heads
    "matrix": ((6, 20), P("gtp", "tp")),
    "tall": ((20, 6), P(("tp", "gtp"))),
    "experts": ((5, 6, 8), P("tp", None, "gtp")),
    "heads": ((8, 3, 10), P(None, "tp", "gtp")),
    "whole": ((8, 3, 4), P(("gtp", "tp"))),  # each rank has matrices of its own
    "none": ((0, 4, 8), P(None, "gtp")),
    "vector": ((5,), P()),
    "unknown": ((7, 9), None),  # the optimizer is not told how it lies on the mesh
}
AXES = optax.contrib.MuonDimensionNumbers
DIMENSIONS = {
    "matrix": AXES(),
    "tall": AXES(1, 0),
    "experts": AXES(-2, -1),
    "heads": AXES(0, (1, 2)),
    "whole": AXES(1, 2),
    "none": AXES(1, 2),
    "vector": None,
    "unknown": AXES(),
}
VARIANTS = {
    "as it is": dict(),
    "aol, dion": dict(preconditioning="aol", ns_coeffs="dion", adaptive=True),
    "schatten, masked": dict(preconditioning="schatten", nesterov=False, mu_dtype="bfloat16", weight_decay=0.1)
    | dict(weight_decay_mask={name: name == "heads" for name in ARRAYS}),
    "spectral, with a schedule": dict(preconditioning="spectral", learning_rate=optax.linear_schedule(1.0, 0.1, 3))
    | dict(adam_learning_rate=0.3, consistent_rms=0.2, beta=0.5, ns_steps=3),
}


@pytest.mark.parametrize("name", others_full(VARIANTS, ["aol, dion"]))
def test_arguments_mean_what_they_mean_to_optax(name, x64):
    options = {"learning_rate": 0.1, "muon_weight_dimension_numbers": DIMENSIONS} | VARIANTS[name]
    rng = np.random.default_rng(0)
    params, *gradients = ({k: rng.normal(size=shape) for k, (shape, _) in ARRAYS.items()} for _ in range(3))

    def run(make):
        def steps(params, *gradients):
            optimizer = make(**options)
            state = optimizer.init(params)
            for own in gradients:
                updates, state = optimizer.update(own, state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        return jax.jit(steps)(params, *gradients)

    wanted = run(optax.contrib.muon)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        with arrays_in_scope({}, placed={(k,): Placed(*one) for k, one in ARRAYS.items() if one[1] is not None}):
            found = run(muon)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert [a.dtype for a in jax.tree.leaves(found)] == [a.dtype for a in jax.tree.leaves(wanted)]
    same(found, wanted, 1e-11)


def test_matrices_travel_and_are_iterated_in_the_dtype_asked_for_and_results_keep_theirs():
    rng = np.random.default_rng(0)
    params, gradients = (
        {k: rng.normal(size=shape).astype("float32") for k, (shape, _) in ARRAYS.items()} for _ in "12"
    )
    options = dict(learning_rate=0.1, muon_weight_dimension_numbers=DIMENSIONS, beta=0.5)
    exact = optax.contrib.muon(**options)
    wanted = jax.jit(exact.update)(gradients, exact.init(params), params)

    def run(dtype):
        optimizer = muon(**options, iteration_dtype=dtype)
        lowered = jax.jit(optimizer.update).lower(gradients, optimizer.init(params), params)
        result = lowered.compile()(gradients, optimizer.init(params), params)
        dtypes = [a.dtype for a in jax.tree.leaves(result)]
        assert dtypes == [a.dtype for a in jax.tree.leaves(wanted)]
        same(result[1], wanted[1], 1e-6)
        far = {
            k: np.linalg.norm(leaf - wanted[0][k]) / np.linalg.norm(leaf) for k, leaf in result[0].items() if leaf.size
        }
        return lowered.as_text(), far.pop("vector"), far

    for placed in (False, True):
        known = {(k,): Placed(*one) for k, one in ARRAYS.items() if one[1] is not None and placed}
        with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), arrays_in_scope({}, placed=known):
            _, vector, far = run("float32")
            assert vector == 0 and max(far.values()) < 1e-5
            text, vector, far = run(jnp.bfloat16)
        assert vector == 0 and 1e-3 < min(far.values()) and max(far.values()) < 0.1
        assert set(re.findall(r"all_to_all.*tensor<[0-9x]+x(\w+)>", text)) == ({"bf16"} if placed else set())
        assert set(re.findall(r"dot_general.*tensor<[0-9x]+x(\w+)>", text)) == {"bf16"}


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(iteration_dtype="int8"), "`iteration_dtype` is int8. Use bfloat16, float32 or float64; or `None`"),
        (dict(iteration_dtype=jnp.float16), "`iteration_dtype` is float16. Use bfloat16, float32 or float64"),
        (dict(iteration_dtype="foo"), "`iteration_dtype` is 'foo'. Use bfloat16, float32 or float64; or `None`"),
        (
            dict(iteration_dtype="bfloat16", preconditioning="spectral"),
            '`preconditioning="spectral"` takes norms that JAX does not compute in bfloat16. Use another',
        ),
    ],
)
def test_dtypes_in_which_iterations_would_fail_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        muon(1e-3, **options)


def test_what_is_left_of_all_classes_is_shared_by_cost():
    sizes = {"gtp": 4, "ep": 2, "tp": 2}
    of_experts = Load(6, 7.0, ("tp", "gtp"))  # the ranks of ep have experts of their own
    for others in (
        [],
        [Load(21, 5.0, ("gtp", "ep", "tp"))],
        [Load(3, 9.0, ("ep",)), Load(17, 2.0, ("gtp", "ep", "tp"))],
    ):
        loads = [of_experts, *others]
        owners = owners_of_rest(loads, sizes)
        busy = np.zeros((4, 2, 2))
        for load, own in zip(loads, owners, strict=True):
            assert len(own) == load.matrices % math.prod(sizes[axis] for axis in load.axes)
            for owner in own:
                where = dict(zip(load.axes, np.unravel_index(owner, [sizes[axis] for axis in load.axes]), strict=True))
                busy[tuple(where.get(axis, slice(None)) for axis in sizes)] += load.cost
        assert busy.max() <= busy.mean() + max(load.cost for load in loads)


def test_a_resumed_run_on_another_mesh_equals_one_never_stopped(x64, tmp_path):
    make, checkpoints = functools.partial(gtp.Dense, 16, 24, use_bias=True, **WIDE), Checkpoints(tmp_path)
    optimizer = muon(1e-2)
    step = gtp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optimizer)
    x = np.random.default_rng(0).normal(size=(8, 16))
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state, _ = step(gtp.TrainState.create(gtp.init(lambda rngs: make(rngs=rngs), nnx.Rngs(0)), optimizer), x)
        checkpoints.save(1, state)
        checkpoints.wait()
        wanted = host(step(state, x)[0])
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=2, tp=2)):
        like = gtp.TrainState.create(abstract_model(lambda rngs: make(rngs=rngs)), optax.contrib.muon(1e-2))
        state, _ = checkpoints.restore(like)  # the state is that of optax's Muon
        same(host(step(state, x)[0]), wanted)


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("count", [2, 8])
def test_compiled_for_h200s_exchanges_run_beside_iterations(count):
    """Nothing but exchanges belongs to the optimizer, and they send each part twice, once each way."""
    mesh = gtp.make_mesh(gtp=count, devices=hlo.topology_devices(hlo.parse_target(f"h200:{count}")))
    make = lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(1024, 2048, rngs=rngs), 8, rngs=rngs)  # noqa: E731
    with jax.set_mesh(mesh):
        optimizer = per_layer(muon(1e-2))
        state = gtp.TrainState.create(abstract_model(make), optimizer)
        options = {**hlo.COMPILE_OPTIONS, **gtp.train.compile_options("gpu")}
        step = gtp.train_step(lambda model, x: jnp.mean(model(x) ** 2), optimizer, compiler_options=options)
        rows = jax.ShapeDtypeStruct((8, 128, 1024), jnp.bfloat16)
        program = step.lower(state, rows).compile().as_text()
    order = hlo.launch_order(program)
    events = [e for e in order.collectives("all-to-all")]
    assert all(e.collective.asynchronous for e in events)
    parts = sum(leaf.size * 4 // count for leaf in jax.tree.leaves(state.params) if leaf.ndim == 3)
    assert sum(e.collective.operand_bytes for e in events) == 2 * parts
    assert {c.kind for c in of_optimizer(program)} == {"all-to-all"}
    hidden = [e for e in events if order.under(e)]
    assert len(hidden) >= len(events) // 2
