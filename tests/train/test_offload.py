"""A state that is kept partly in the memory of the host trains like one that is not."""

import functools
import math
import re
from collections import Counter, OrderedDict
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import is_on_host, on_device
from gtp_jax.nn import Dense, abstract_model
from gtp_jax.ops import Part
from gtp_jax.optimizers import low_precision
from gtp_jax.train import _streamed, compile_options, loss_and_gradients
from gtp_jax.train._evaluation import Evaluation
from gtp_jax.train._gradients import Computed
from gtp_jax.train._known_at import Piece, pieces_of_all
from gtp_jax.train._update import updated

from ..hlo.programs import needs_target

ROWS, COLUMNS = 257, 512  # a number of rows that the blocks do not divide
WHERE = (None, "optimizer", "masters")


class Model(nnx.Module):
    """One weight of ours, one of Flax, and vectors."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up = Dense(ROWS, COLUMNS, rngs=rngs)
        self.down = nnx.Linear(COLUMNS, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def sum_of_squares(model, x):
    return jnp.sum(model(x) ** 2), jnp.float32(len(x))


def batch_of(seed: int, scale: float = 1.0):
    x, y = np.split(np.random.default_rng(seed).normal(size=(16, ROWS + 256)).astype(np.float32), [ROWS], axis=1)
    return {"x": x * scale, "y": y}


def model_of() -> Model:
    return gtp.init(lambda rngs: Model(rngs=rngs), nnx.Rngs(0))


def state_of(optimizer, offload=None):
    model = abstract_model(lambda rngs: Model(rngs=rngs))
    return gtp.TrainState.create(model, optimizer, offload=offload)


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim > 1}


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-9)


def by_height():
    """Multiplies updates by a factor that is 1 for whole weights of this model, but not for some of their blocks."""
    factor = lambda u: max(1.0, u.shape[0] / u.shape[-1] / 2)  # noqa: E731
    return optax.stateless_with_tree_map(lambda u, _: u * factor(u) if jnp.ndim(u) > 1 else u)


def two_moments(params):
    return OrderedDict(first=optax.tree.zeros_like(params), second=optax.tree.zeros_like(params))


def turned(updates, state, params=None):
    """Returns both moments as they were, in the other order."""
    return updates, OrderedDict(reversed(state.items()))


def newest(updates, state, params=None):
    """Keeps the last updates, and never reads those before."""
    return updates, updates


@pytest.fixture(scope="module")
def trained():
    """Returns, for each place of the state, the states after each of three steps. The gradient of the second batch is
    not finite, so its step is skipped."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lion(optax.linear_schedule(1e-2, 1e-3, 5)))
    found = {}
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        step = gtp.train_step(loss, optimizer, max_grad_norm=1.0)
        for where in WHERE:
            state = gtp.TrainState.create(model_of(), optimizer, offload=where)
            found[where] = []
            for seed, scale in ((0, 1.0), (1, np.inf), (2, 1.0)):
                state, metrics = step(state, batch_of(seed, scale))
                assert bool(metrics["skipped"]) == (scale != 1.0)
                found[where].append((jax.tree.map(np.asarray, state), kinds(state.params), kinds(state.opt_state)))
            found[where].append(state)
    return optimizer, found


@pytest.mark.parametrize("where", WHERE[1:])
def test_steps_with_the_state_on_the_host_equal_steps_without_up_to_fusion(trained, where):
    for (own, *_), (plain, *_) in zip(trained[1][where][:3], trained[1][None][:3], strict=True):
        assert_close(own, plain)
    for one, other in zip(*(jax.tree.leaves(step[0]) for step in trained[1][where][:2]), strict=True):
        np.testing.assert_array_equal(one, other)  # the second step was skipped


@pytest.mark.parametrize("where", WHERE[1:])
def test_updates_of_equal_gradients_are_the_same_bit_for_bit(monkeypatch, where):
    # XLA's CPU compiler rounds differently where it fuses differently.
    options = {"xla_disable_hlo_passes": "fusion"}
    monkeypatch.setattr("gtp_jax.train._streamed._BYTES_PER_PART", 20_000)
    monkeypatch.setattr("gtp_jax.train._moved._BYTES_IN_FLIGHT", 50_000)
    optimizer = optax.adamw(1e-2)
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        found = []
        for at in (None, where):
            state = gtp.TrainState.create(model_of(), optimizer, offload=at)
            wave = lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)  # noqa: E731
            computed = Computed(jnp.float32(1.0), None, jax.tree.map(wave, on_device(state.params)), {}, ())
            update = functools.partial(updated, optimizer=optimizer, max_grad_norm=1.0, skip_nonfinite=False)
            found.append(jax.jit(update, donate_argnums=0, compiler_options=options)(state, computed)[0])
    assert_same(*found)
    assert kinds(found[1].opt_state) == {"pinned_host"}


def test_updates_under_backward_are_the_same_bit_for_bit(monkeypatch):
    # As above. Several parts of each array leave at once, and arrive before those of the layer before have left.
    monkeypatch.setattr("gtp_jax.train._streamed._BYTES_PER_PART", 20_000)
    monkeypatch.setattr("gtp_jax.train._moved._BYTES_IN_FLIGHT", 80_000)
    optimizer, rows = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)), batch_of(0)["x"][:, :128]
    found = []
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        step = gtp.train_step(
            sum_of_squares,
            optimizer,
            view="local",
            skip_nonfinite="loss",
            compiler_options={"xla_disable_hlo_passes": "fusion"},
        )
        for where in WHERE[::2]:
            model = gtp.init(
                lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(128, 256, rngs=rngs), 3, rngs=rngs), nnx.Rngs(0)
            )
            state = gtp.TrainState.create(model, optimizer, offload=where)
            for scale in (1.0, np.inf, 0.5):
                state, metrics = step(state, rows * scale)
                assert bool(metrics["skipped"]) == (scale == np.inf)
            found.append((state, metrics))
    assert_close(*found)
    moved = [pair for pair in zip(*map(jax.tree.leaves, found), strict=True) if is_on_host(pair[1])]
    assert len(moved) == 3 * 3
    assert_same(*zip(*moved, strict=True))


@pytest.mark.parametrize(
    ("where", "params", "moments"),
    [(None, "device", "device"), ("optimizer", "device", "pinned_host"), ("masters", "pinned_host", "pinned_host")],
)
def test_a_step_keeps_every_array_in_the_memory_that_was_chosen(trained, where, params, moments):
    for _, of_params, of_moments in trained[1][where][:3]:
        assert (of_params, of_moments) == ({params}, {moments})


def test_a_checkpoint_moves_between_host_and_device_bit_for_bit(trained, tmp_path):
    optimizer, found = trained
    with Checkpoints(tmp_path) as checkpoints:
        with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
            checkpoints.save(3, found["masters"][-1])
        with jax.set_mesh(gtp.make_mesh(gtp=8)):
            for where in WHERE:
                like = state_of(optimizer, where)
                restored, _ = checkpoints.restore(like)
                assert_same(restored, found["masters"][2][0])
                assert kinds(restored.opt_state) == {"device" if where is None else "pinned_host"}


def test_an_evaluation_gradients_and_a_diagnosis_read_parameters_on_the_host(trained):
    optimizer, found = trained
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        evaluate = gtp.eval_step(loss)
        values = [float(evaluate(found[where][-1], batch_of(3))["loss"]) for where in (None, "masters")]
        assert values[0] == values[1]
        assert kinds(found["masters"][-1].model().up.kernel[...]) == {"device"}
        shapes = jax.eval_shape(lambda state: loss_and_gradients(loss, state, batch_of(3)), found["masters"][-1])
        assert not any(map(is_on_host, jax.tree.leaves(shapes)))
        batch = batch_of(3)
        batch["x"][5] = np.inf
        diagnosis = gtp.train.diagnose(loss, found["masters"][-1], batch)
        assert (diagnosis.parameter, diagnosis.sample, diagnosis.layer) == (None, 5, "up")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optax.lamb(1e-3), "the optimizer's update .* it reads '.*' as a whole"),
        (lambda: optax.contrib.muon(1e-3), "cannot be computed in blocks"),
        (lambda: gtp.optimizers.muon(1e-3), "cannot be computed in blocks"),
        (lambda: optax.MultiSteps(optax.adam(1e-3), 2), "cannot be computed in blocks"),
        (lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-3)), "it is not elementwise"),
        (lambda: optax.chain(optax.adam(1e-3), by_height()), "depends on the shape of its array"),
        (lambda: low_precision(optax.adam(1e-3)), "it is not elementwise"),
        (lambda: low_precision(optax.adam(1e-3), moments="float8"), "cannot be computed in blocks"),
        (lambda: optax.GradientTransformation(two_moments, turned), "it changes the structure of its state"),
    ],
    ids=[
        *("lamb", "muon", "shared muon", "multi-steps", "noise"),
        *("factor-of-the-shape", "bfloat16", "fp8", "order-of-the-state"),
    ],
)
def test_updates_that_are_not_elementwise_are_refused(make, message):
    optimizer = make()
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = state_of(optimizer, "optimizer")
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(gtp.train_step(loss, optimizer), state, batch_of(0))


def test_an_update_with_side_effects_keeps_them():
    def reported(updates, _):
        jax.debug.callback(lambda _: None, optax.tree.norm(updates))
        return updates

    optimizer = optax.chain(optax.stateless(reported), optax.adam(1e-3))
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        step: Any = gtp.train_step(loss, optimizer)
        for where in WHERE:
            text = str(step.trace(state_of(optimizer, where), batch_of(0)).jaxpr)
            assert text.count("debug_callback[") == 1


def test_what_offload_cannot_do_is_refused_when_the_state_is_made(monkeypatch):
    with pytest.raises(ValueError, match="`offload` is set for an abstract model, but no mesh is in scope"):
        state_of(optax.adam(1e-3), "masters")
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        with pytest.raises(ValueError, match="`offload` is 'params'; it must be 'optimizer', 'masters', or `None`"):
            state_of(optax.adam(1e-3), "params")
        with gtp.layout.even_shares():
            model = abstract_model(lambda rngs: Dense(300, 515, rngs=rngs))
        with pytest.raises(ValueError, match="'kernel', which is stored padded"):
            gtp.TrainState.create(model, optax.adam(1e-3), offload="optimizer")
        monkeypatch.setattr("gtp_jax.train._host_memory.available_bytes", lambda: 1 << 20)
        with pytest.raises(ValueError, match=r"keeps .* of the state in the memory of this host, which has 0\.0 GiB"):
            gtp.TrainState.create(model_of(), optax.adam(1e-3), offload="masters")


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("where", WHERE[1:])
def test_compiled_for_8_h200s_the_state_stays_on_the_host_and_changes_in_place(where):
    mesh = gtp.make_mesh(gtp=8, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    with jax.set_mesh(mesh):
        model = abstract_model(lambda rngs: Dense(2048, 4096, rngs=rngs))
        optimizer = optax.adamw(1e-3)
        state = gtp.TrainState.create(model, optimizer, offload=where)
        like = {"x": jax.ShapeDtypeStruct((8, 2048), jnp.float32), "y": jax.ShapeDtypeStruct((8, 4096), jnp.float32)}
        options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", copies=True)}
        lowered: Any = gtp.train_step(loss, optimizer, max_grad_norm=1.0, compiler_options=options)
        compiled = lowered.lower(state, like).compile()
    memory = compiled.memory_analysis()
    on_host = (2 if where == "optimizer" else 3) * 2048 * 4096 * 4 // 8
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == on_host
    assert memory.host_temp_size_in_bytes == 0
    calls = re.findall(r'custom_call_target="(gtp_\w+)"', compiled.as_text())
    moved = 2 if where == "optimizer" else 3
    assert Counter(calls) == {
        "gtp_read": moved,
        "gtp_arrive": moved,
        "gtp_write": moved,
        "gtp_leave": moved,
    }


def steps_of_layers(skip_nonfinite, where, view="global"):
    """Returns the kinds of launches of a step over six layers, compiled for an H200, in order. No array on the host is
    copied."""
    mesh = gtp.make_mesh(gtp=1, devices=hlo.topology_devices(hlo.parse_target("h200:1")))
    with jax.set_mesh(mesh):
        model = abstract_model(lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(1024, 4096, rngs=rngs), 6, rngs=rngs))
        state = gtp.TrainState.create(model, optax.adamw(1e-3), offload=where)
        options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", copies=True)}
        step: Any = gtp.train_step(
            sum_of_squares if view == "local" else lambda model, x: jnp.mean(model(x) ** 2),
            optax.adamw(1e-3),
            view=view,
            skip_nonfinite=skip_nonfinite,
            compiler_options=options,
        )
        text = step.lower(state, jax.ShapeDtypeStruct((8, 128, 1024), jnp.bfloat16)).compile().as_text()
    assert not re.findall(r"S\(5\)\} copy\(", text)
    return re.findall(r'custom_call_target="(gtp_\w+|__cublas\$lt\$matmul)"', text[text.index("ENTRY") :])


def test_gradients_of_loops_and_of_reductions_have_a_place():
    w = jnp.ones((5, 5))
    programs = [
        lambda c: jax.lax.scan(lambda c, x: (c, x.sum()), c, w)[1],  # results of another shape than those of the body
        lambda c: jax.lax.reduce(w * c, 0.0, jax.lax.add, (0,)),
        lambda c: jax.lax.map(lambda x: x @ x, w * c),
        lambda c: jax.lax.while_loop(lambda v: v[0] < 1, lambda v: 2 * v, w[0] * c),
        lambda c: jax.lax.cond(c > 0, lambda: w, lambda: -w),
        lambda c: w,
    ]
    for program in programs:
        closed = jax.make_jaxpr(program)(1.0)
        (found,) = pieces_of_all(closed, {"g": 0}).values()
        assert sum(piece.size for piece in found) == 5


def calls_of(function, *args):
    """Returns the calls of this library and the copies in a program compiled for an H200: kind, result, operands."""
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", copies=True)}
    text = jax.jit(function, donate_argnums=0, compiler_options=options).lower(*args).compile().as_text()
    line = r"%(\S+) = \S+ (?:custom-call|copy-start|copy)\((.*?)\)(?:.*custom_call_target=\"(gtp_\w+)\")?"
    calls = re.findall(line, text[text.index("ENTRY") :])
    return [(target or "copy", name, re.findall(r"%([\w.\-]+)", operands)) for name, operands, target in calls]


@pytest.mark.slow
@needs_target
def test_compiled_for_an_h200_no_copy_is_left_unwaited_for():
    last = optax.GradientTransformation(optax.tree.zeros_like, newest)
    optimizer = optax.chain(last, optax.scale_by_adam(), optax.scale(-1e-3))
    mesh = gtp.make_mesh(gtp=1, devices=hlo.topology_devices(hlo.parse_target("h200:1")))
    with jax.set_mesh(mesh):
        state = state_of(optimizer, "masters")
        like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch_of(0)))
        step = gtp.train_step(loss, optimizer, skip_nonfinite=False)
        calls = calls_of(lambda state, batch: step(step(state, batch)[0], batch)[0], state, like)
    names = Counter(target for target, *_ in calls)
    assert names["gtp_read"] == names["gtp_arrive"] and names["gtp_write"] == names["gtp_leave"] == 2 * 2 * 4
    by = {kind: {name for target, name, _ in calls if target == kind} for kind in names}
    for target, _, operands in calls:
        if target == "gtp_arrive":  # of the buffer itself, not of a copy that was made too early
            assert operands[0] in by["gtp_read"]
        elif target != "gtp_leave":  # the second step reads what has left
            assert target == "gtp_write" or operands[0] not in by["gtp_write"]


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("where", WHERE[1:])
def test_in_local_view_the_update_of_a_layer_comes_before_the_backward_of_the_next_but_one(where, monkeypatch):
    monkeypatch.setattr("gtp_jax.train._streamed._BYTES_PER_PART", 4 << 20)  # 3 to 4 parts of each array of a layer
    order = steps_of_layers("loss", where, "local")
    assert order.count("gtp_write") == order.count("gtp_leave")
    writes = [n for n, kind in enumerate(order) if kind == "gtp_write"]
    per_layer = len(writes) // 6
    for layer in range(4):  # of five or six matmuls each in backward, at most two layers come before
        assert order[: writes[(layer + 1) * per_layer - 1]].count("__cublas$lt$matmul") <= 6 * 3 + (layer + 2) * 6
    assert "__cublas$lt$matmul" not in order[writes[-per_layer] :]


def test_a_trace_is_evaluated_in_steps_and_what_follows_waits_for_what_came_between():
    def function(x, y):
        first = jnp.sin(x) @ y
        second = jnp.cos(first) @ y
        both = jnp.concatenate([second[None], first[None].astype(jnp.float32)])
        return both.astype(jnp.bfloat16), jnp.sum(second), y, 2.0

    args = [jax.random.normal(jax.random.key(seed), (4, 4)) for seed in (1, 2)]
    closed = jax.make_jaxpr(function)(*args)

    def in_steps(*args):
        evaluation = Evaluation(closed, args)
        late, early = evaluation.slabs(evaluation.outvars[0])
        assert late.at > early.at >= 0 and (late.shape, early.shape) == ((1, 4, 4),) * 2
        evaluation.until(early.at)
        found = early.value()
        evaluation.before_rest([found * 2])
        return found, late.value(), evaluation.results()

    early, late, results = jax.jit(in_steps)(*args)
    assert_same(results, jax.tree.leaves(function(*args)))
    assert_same((late, early), (results[0][:1], results[0][1:]))
    equations = list(jax.make_jaxpr(in_steps)(*args).jaxpr.eqns)
    barrier = next(n for n, eqn in enumerate(equations) if eqn.primitive.name == "optimization_barrier")
    names = [eqn.primitive.name for eqn in equations]
    assert names.index("sin") < barrier < names.index("cos") and names.count("sin") == names.count("cos") == 1
    assert equations[names.index("cos")].invars[0] in equations[barrier].outvars


def test_a_trace_with_references_is_evaluated_in_its_order():
    def function(x):
        kept, total = jax.new_ref(jnp.zeros(())), (x**2).sum()
        kept[...] = total
        return total * (1 + kept[...])

    x = jnp.ones(3)
    closed = jax.make_jaxpr(function)(x)
    assert jax.jit(lambda x: (own := Evaluation(closed, [x])).value(own.outvars[0]))(x) == function(x) == 12


@pytest.mark.slow
@needs_target
def test_compiled_for_an_h200_a_part_is_written_after_its_old_value_has_arrived():
    optimizer = optax.optimistic_gradient_descent(1e-3)  # keeps the last gradients, and reads those before
    mesh = gtp.make_mesh(gtp=1, devices=hlo.topology_devices(hlo.parse_target("h200:1")))
    with jax.set_mesh(mesh):
        state = state_of(optimizer, "optimizer")
        like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch_of(0)))
        for checked, operands in ((False, 3), ("loss", 2)):
            step = gtp.train_step(loss, optimizer, skip_nonfinite=checked)
            calls = calls_of(lambda state, batch, step=step: step(state, batch)[0], state, like)
            assert [len(own) for target, _, own in calls if target == "gtp_write"] == [operands] * 2


@pytest.mark.slow
@needs_target
def test_updates_run_under_backward_unless_they_wait_for_all_gradients():
    waits, early = (steps_of_layers(skip_nonfinite, "masters") for skip_nonfinite in (True, "loss"))
    assert "__cublas$lt$matmul" not in waits[waits.index("gtp_write") :]
    assert early[early.index("gtp_write") :].count("__cublas$lt$matmul") >= 12  # half of those of backward
    for order in (waits, early):  # XLA gives a part up only after it has left
        assert order.count("gtp_write") == order.count("gtp_leave")
        assert order.index("gtp_leave") > order.index("gtp_write") + 8


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 2000),
)
def test_parts_cover_an_array_once_and_keep_to_the_pieces_of_its_gradient(shape, sizes, most):
    shape[0] = sum(sizes)
    pieces = tuple(Piece(size, (-at,)) for at, size in enumerate(sizes))
    group = _streamed._Group((), (0, 1), (0,), PartitionSpec(), tuple(shape))
    with mock.patch.object(_streamed, "_BYTES_PER_PART", most):
        parts = group.parts(pieces, 4)
    rows = [row for _, part in parts for row in range(part.first, part.first + part.rows)]
    assert rows == list(range(math.prod(shape[:-1])))
    per_index = math.prod(shape[1:-1])
    of_row = [-at for at, size in enumerate(sizes) for _ in range(size * per_index)]
    for at, part in parts:
        assert part.rows * shape[-1] * 4 <= most or part.rows == 1
        assert at == (min(of_row[part.first : part.first + part.rows]),)


def test_a_part_of_an_array_is_put_back_where_it_was():
    array = jnp.arange(6 * 4 * 8.0).reshape(6, 4, 8)
    for first, rows in ((0, 24), (8, 8), (5, 7)):  # all, two of six matrices, and rows of three
        part = Part(first, rows, (1, rows, 8))
        np.testing.assert_array_equal(part.of(array)[0], array.reshape(24, 8)[first : first + rows])
        changed = part.put(array, -part.of(array))
        np.testing.assert_array_equal(changed.reshape(24, 8)[first : first + rows], -part.of(array)[0])
        assert int((changed != array).sum()) == rows * 8 - (first == 0)
