"""Two pipeline stages by a 1F1B schedule: the chain's forward and backward called apart, microbatches in flight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gtp_jax.chain import Schedule, backward, forward, plan

from .stages import AXIS, FEATURES, arrays, plain, shared_inputs, stage

LENGTHS = (4, 3)
MICROBATCHES = 4
ROWS = 2  # of a microbatch, on a device

# F and B with the number of the microbatch: the first stage runs one ahead, as 1F1B has it.
ORDER = [(0, "F", 0), (0, "F", 1), (1, "F", 0), (1, "B", 0), (0, "B", 0)]
for number in range(1, MICROBATCHES):
    if number + 1 < MICROBATCHES:
        ORDER.append((0, "F", number + 1))
    ORDER += [(1, "F", number), (1, "B", number), (0, "B", number)]


def target_loss(y):
    return jnp.sum(jnp.square(y - 1))


def pipeline(weights, params, constants, x, shared, schedule):
    """Loss and gradients by 1F1B on one rank's part, and the most microbatches that were in flight in each stage."""
    plans = [plan([length], schedule) for length in LENGTHS]
    stages = [stage(*of) for of in zip(weights, params, constants, strict=True)]
    saved, activations, gradients, most = {}, {}, {}, [0, 0]
    total, found, outputs = 0.0, [None, None], {}
    for number, way, part in ORDER:
        own = {"mask": shared["mask"][part], "bias": shared["bias"]}
        if way == "F":
            entering = x[part] if number == 0 else activations.pop(part)
            done = forward([stages[number]], entering, plans[number], own)
            saved[number, part], outputs[number, part] = done.residuals, done.outputs[0]
            total += 0.3 * jnp.sum(done.outputs[0].scalars["balance"])
            if number == 0:
                activations[part] = done.y
            else:
                loss, back = jax.vjp(target_loss, done.y)
                total, gradients[part] = total + loss, back(jnp.ones_like(loss))[0]
            most[number] = max(most[number], sum(key[0] == number for key in saved))
        else:
            auxiliary = {"balance": jnp.full(LENGTHS[number], 0.3)}
            residuals = saved.pop((number, part))
            done = backward([stages[number]], residuals, gradients.pop(part), plans[number], own, [auxiliary])
            if number == 1:
                gradients[part] = done.x
            one = (done.shards[0]["w"], done.params[0]["scale"], done.shared["bias"])
            found[number] = one if found[number] is None else jax.tree.map(jnp.add, found[number], one)
    assert not saved and not activations
    states = [[outputs[number, part].state["mean"] for part in range(MICROBATCHES)] for number in (0, 1)]
    return total, found, states, most


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(Schedule(), marks=pytest.mark.slow),
        Schedule(unroll=1),
        pytest.param(Schedule(prefetch=False, keep_gathered=0), marks=pytest.mark.slow),
        pytest.param(Schedule(unroll=1, keep_gathered="all"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_forward_one_backward_equals_plain_autodiff(schedule, x64):
    weights, params, constants = zip(*(arrays(length, seed) for seed, length in enumerate(LENGTHS)), strict=True)
    ranks = len(jax.devices())
    rows = MICROBATCHES, ranks * ROWS
    x = jnp.asarray(np.random.default_rng(5).normal(size=(*rows, FEATURES)))
    shared = shared_inputs(rows[1])
    shared["mask"] = jnp.stack([jnp.roll(shared["mask"], part) for part in range(MICROBATCHES)])
    most = []

    def local(weights, x, mask):
        given = {"mask": mask, "bias": shared["bias"]}
        total, found, states, in_flight = pipeline(weights, params, constants, x, given, schedule)
        most[:] = in_flight
        reduced = [(w, *jax.lax.psum(rest, AXIS)) for w, *rest in found]
        return jax.lax.psum(total, AXIS), reduced, [[one[None] for one in of] for of in states]

    cut = [P(None, AXIS)] * 2
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    out = (P(), [(P(None, AXIS), P(), P())] * 2, [[P(AXIS)] * MICROBATCHES] * 2)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(cut, P(None, AXIS), P(None, AXIS)), out_specs=out, check_vma=False
    )
    total, found, states = jax.jit(mapped)(list(weights), x, shared["mask"])
    assert most == [2, 1]

    def whole(weights, scales, bias):
        """Every rank's rows of every microbatch by themselves, as their batch statistics are."""

        def one(y, mask):
            loss, means = 0.0, []
            for number in (0, 1):
                given, own = params[number] | {"scale": scales[number]}, {"mask": mask, "bias": bias}
                y, outputs = plain(weights[number], given, y, own, constants[number])
                loss += 0.3 * jnp.sum(outputs.scalars["balance"])
                means.append(outputs.state["mean"])
            return loss + target_loss(y), means

        parts = (MICROBATCHES, ranks, ROWS)
        losses, means = jax.vmap(jax.vmap(one))(jnp.reshape(x, (*parts, -1)), jnp.reshape(shared["mask"], parts))
        return jnp.sum(losses), means

    scales = [one["scale"] for one in params]
    wanted, back, means = jax.vjp(jax.jit(whole), list(weights), scales, shared["bias"], has_aux=True)
    to_weights, to_scales, to_bias = back(jnp.ones_like(wanted))
    assert abs(total - wanted) <= 1e-12 * abs(wanted)
    for number in (0, 1):
        close(found[number][0], to_weights[number])
        close(found[number][1], to_scales[number])
        for part in range(MICROBATCHES):
            close(states[number][part], means[number][part])
    close(found[0][2] + found[1][2], to_bias)


def close(one, other):
    assert np.linalg.norm(one - other) <= 1e-12 * np.linalg.norm(other)
