"""What `gtp-jax plan-faults` prints: counted from shapes, and what the programs move."""

from __future__ import annotations

import collections
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.hlo import bytes_per_device, collectives
from gtp_jax.inspect import FaultOptions, fault_text, inspect_faults
from gtp_jax.models import build, next_token_loss, preset_of
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Faults


def report(failed=(5,), **changes):
    own = {name: changes.pop(name) for name in ("core_tp", "replica_batches", "even") if name in changes}
    settings = {"preset": "tiny", "dp": 2, "tp": 4, "batch": 14} | changes
    return inspect_faults(FaultOptions(**settings, faults=Faults(failed_devices=failed, **own)))


@pytest.mark.full
def test_bytes_and_memory_are_those_of_the_arrays():
    found = report(core_tp=3)
    config = preset_of("tiny")
    factory = lambda rngs: build(config, rngs=rngs)  # noqa: E731
    with gtp.layout.even_shares():
        replicas = gtp.nonuniform.Replicas(factory, found.plan)
    optimizer = optax.adamw(1e-3)
    with jax.set_mesh(replicas.core), gtp.layout.even_shares():
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(lambda model, batch: (0.0, 1), optimizer, view="local", replicas=replicas)
        transfers = step.transfers(state)
        weights = step.weights(state)
    for place, transfer in enumerate(transfers):
        assert transfer["fold"].moves.bytes_in_turn == found.fold[place].bytes_in_turn
        one = 4  # the number of updates made goes with the weights, in a round of its own
        rounds = len({(m.sender, m.receiver) for r in transfer["unfold"].moves.rounds for m in r.messages}) > 0
        assert transfer["unfold"].moves.bytes_in_turn == found.unfold[place].bytes_in_turn + one * rounds
        assert bytes_per_device(weights[place]) == found.memory[place][0].weights
    masters = bytes_per_device((state.params, state.opt_state))
    stored = {use.masters for uses in found.memory for use in uses}
    assert stored == {masters, 0}
    assert sum(use.masters > 0 for uses in found.memory for use in uses) == replicas.core.size
    logical = state.logical()
    whole = sum(x.nbytes for x in jax.tree.leaves((logical.params, logical.opt_state)))
    assert found.even_masters == pytest.approx(whole / replicas.core.size, rel=1e-4)  # also divides the count of steps


def test_masters_are_close_to_an_even_share_where_a_degree_divides_little():
    """3 divides neither 4096 features nor 14336."""
    found = report(preset="8b", core_tp=3)
    stored = max(use.masters for uses in found.memory for use in uses)
    assert 1 <= stored / found.even_masters < 1.01
    assert "an even share of masters and AdamW's state is 16.1 GB (+0.5%)" in fault_text(found)
    replicated = report(preset="8b", core_tp=3, shard_optimizer=False)
    assert replicated.even_masters == pytest.approx(2 * found.even_masters)


def test_the_core_is_where_least_is_moved():
    best = report()
    others = [report(core_tp=core_tp) for core_tp in (1, 2, 3)]
    assert best.plan.core_tp == 3
    assert best.transferred.over_links == min(one.transferred.over_links for one in others)


@pytest.mark.slow
@pytest.mark.parametrize("grad_wire", [None, "mxfp8"])
def test_bytes_over_links_are_those_of_the_collectives_of_the_programs(grad_wire):
    found = report(core_tp=2, grad_wire=grad_wire)
    config = preset_of("tiny")
    factory = lambda rngs: build(config, rngs=rngs)  # noqa: E731
    with gtp.layout.even_shares():
        replicas = gtp.nonuniform.Replicas(factory, found.plan)
    optimizer = optax.sgd(1e-3)
    with jax.set_mesh(replicas.core), gtp.layout.even_shares():
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optimizer)
        recipe = gtp.recipes.BF16(grad_wire=grad_wire)
        step = gtp.train_step(next_token_loss, optimizer, view="local", replicas=replicas, recipe=recipe)
        tokens = np.zeros((14, 16), np.int32)
        programs = step.compile(state, {"tokens": tokens, "targets": tokens})
        for place, transfer in enumerate(step.transfers(state)):
            assert transfer["fold"].moves.bytes_in_turn == found.fold[place].bytes_in_turn
    kinds = collections.defaultdict(int)
    for name in ("gather", "update"):
        for one in collectives(programs[name].as_text() or ""):
            kinds[name, one.kind] += one.operand_bytes
    # of two replicas each sends the other half of what it has of a gradient, and what it stores of a weight
    assert kinds["gather", "all-gather"] in (found.transferred.gather, 2 * found.transferred.gather)  # CPUs widen bf16
    whole = sum(n for (name, kind), n in kinds.items() if name == "update" and kind == "all-reduce")
    halves = (kinds["update", "reduce-scatter"] + kinds["update", "all-to-all"]) / 2
    assert halves <= found.transferred.reduction <= halves + 2 * whole
    assert (kinds["update", "all-to-all"] > 0) == (grad_wire is not None)
    assert grad_wire is None or found.transferred.reduction < 0.5 * report(core_tp=2).transferred.reduction


def test_a_plan_that_does_not_fit_is_refused(capsys):
    needed = max(use.total for uses in report().memory for use in uses)
    assert report(memory=needed / 1e9)
    with pytest.raises(ValueError, match=naming("slot `memory`")):
        report(memory=0.99 * needed / 1e9)
    with pytest.raises(ValueError, match=naming("slot `memory`")):
        report(memory=needed / 1e9, activations=1.0)
    assert main(["plan-faults", "--preset", "tiny", "--failed-devices", "9"]) == 2
    assert re.search(naming("`failed_devices` 9 slot"), capsys.readouterr().err)
