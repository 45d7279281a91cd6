"""The planner's events, read as a machine would run them, and how often a traced chain prepares what it sends."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gtp_jax.chain import Barrier, Compute, Divide, Fetch, Gather, Loop, Offload, Reduce, Schedule, plan, run

from .stages import AXIS, FEATURES, arrays, shared_inputs, stage

# The planner itself takes no time: all of its schedules, of all rows of stages.
LENGTHS = [[1], [3], [1, 6, 1], [2, 5], [1, 1, 1], [7, 1, 4]]
SCHEDULES = [
    Schedule(prefetch=prefetch, unroll=unroll, keep_gathered=keep_gathered)
    for prefetch, unroll, keep_gathered in itertools.product([True, False], ["full", 1, 2], [0, 1, 3, "all"])
]


def written_out(events, reverse: bool):
    """The events in the order in which they happen, loops unrolled, each layer as (stage, number)."""
    for event in events:
        if isinstance(event, Loop):
            layers = range(event.start, event.stop)
            for origin in reversed(layers) if reverse else layers:
                for inner in written_out(event.body, reverse):
                    if isinstance(inner, Barrier):
                        yield inner
                    else:
                        kind, (stage, layer), keep = inner
                        yield kind, (stage, origin + layer), keep
        elif isinstance(event, Barrier):
            yield event
        else:
            yield type(event), (event.stage, event.layer), getattr(event, "keep", None)


def _without_barriers(events):
    return [event for event in written_out(events, reverse=False) if not isinstance(event, Barrier)]


def layers(lengths):
    return [(stage, layer) for stage, length in enumerate(lengths) for layer in range(length)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_layer_is_gathered_before_it_is_computed_and_reduced_once(lengths, schedule):
    found, order = plan(lengths, schedule), layers(lengths)
    kept = set(order if schedule.keep_gathered == "all" else order[len(order) - schedule.keep_gathered :])
    for events, reverse in ((found.forward, False), (found.backward, True)):
        in_flight, reduced, computed, most = set(), [], [], 0
        for event in written_out(events, reverse):
            if isinstance(event, Barrier):
                continue
            kind, place, keep = event
            if kind is Gather:
                assert place not in in_flight
                in_flight.add(place)
                most = max(most, len(in_flight))
            elif kind is Compute:
                assert keep is (place in kept)
                assert (place in in_flight) is (not reverse or place not in kept)
                in_flight.discard(place)
                computed.append(place)
            else:
                assert reverse and place in computed  # its gradient is there
                reduced.append(place)
        assert not in_flight
        assert computed == (order[::-1] if reverse else order)
        assert reduced == (order[::-1] if reverse else [])
        # one layer ahead, never two
        assert most <= (2 if schedule.prefetch else 1)


@pytest.mark.parametrize("others", [False, True])  # whether the stages that are not loops divide, or the loops
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one.prefetch], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_gather_and_sum_runs_under_the_neighbouring_layer_and_in_a_loop_of_single_layers_the_sums_are_of_two(
    lengths, schedule, others
):
    divides = [(length > 1) is not others for length in lengths]
    found, order = plan(lengths, schedule, divides=divides), layers(lengths)
    loops = [event for event in found.backward if isinstance(event, Loop)]
    looped = {(loop.stage, layer) for loop in loops for layer in range(loop.start, loop.stop)}
    for events, reverse in ((found.forward, False), (found.backward, True)):
        sequence = order[::-1] if reverse else order
        divided, reduced, group = [], [], []
        for event in itertools.chain(written_out(events, reverse), [Barrier()]):
            if not isinstance(event, Barrier):
                group.append(event)
                continue
            by_kind = {kind: [place for one, place, _ in group if one is kind] for kind, _, _ in group}
            reduced += by_kind.pop(Reduce, [])
            own = by_kind.pop(Divide, [])
            divided += own
            assert divided == [place for place in reduced if divides[place[0]]][: len(divided)]
            if Compute in by_kind:
                (here,) = by_kind.pop(Compute)
                at = sequence.index(here)
                assert set(by_kind.pop(Gather, [])) - {here} <= set(sequence[at + 1 : at + 2])
                assert reduced == (sequence[:at] if reverse else [])
                if here in looped and reverse:
                    other = sequence[at - 2 if schedule.unroll == 1 else at - 1]
                    assert own == ([other] if divides[here[0]] else [])
            assert not by_kind
            group = []
        assert reduced == (sequence if reverse else [])
        assert divided == [place for place in reduced if divides[place[0]]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_what_layers_save_goes_to_the_host_and_back_once_under_the_layer_that_follows(lengths, schedule):
    offload = [stage % 2 == 0 for stage in range(len(lengths))]
    found, order = plan(lengths, schedule, offload=offload), layers(lengths)
    wanted = [place for place in order[:-1] if offload[place[0]]]
    host, late = [], 1 if schedule.prefetch else 0  # how many layers after its own a layer's copy runs
    computed = -1
    for event in _without_barriers(found.forward):
        if event[0] is Compute:
            computed += 1
        elif event[0] is Offload:
            assert order[computed - late] == event[1]
            host.append(event[1])
    assert host == wanted
    computed, back = len(order), []
    for event in written_out(found.backward, reverse=True):
        if isinstance(event, Barrier):
            continue
        if event[0] is Compute:
            computed -= 1
            assert order[computed] == event[1]
            assert (event[1] in back) is (event[1] in wanted)
        elif event[0] is Fetch:
            assert order[computed - 1 - late] == event[1]
            back.append(event[1])
    assert back == wanted[::-1]


def test_nothing_is_copied_to_the_host_unless_a_stage_offloads():
    found = plan([1, 6, 1], Schedule())
    kinds = {kind for events in (found.forward, found.backward) for kind, *_ in _without_barriers(events)}
    assert kinds == {Gather, Compute, Reduce}


def test_a_loop_stands_for_all_layers_but_the_first_and_the_last():
    found = plan([1, 12, 1], Schedule(unroll=2, keep_gathered=1))
    for events in (found.forward, found.backward):
        (loop,) = [event for event in events if isinstance(event, Loop)]
        assert (loop.stage, loop.start, loop.stop, loop.unroll) == (1, 1, 10, 2)
    assert not any(isinstance(event, Loop) for event in plan([12], Schedule(unroll="full")).forward)


@pytest.mark.parametrize("only_casts, unroll, kept", [(False, "full", 1), (True, "full", 4), (True, 1, 1)])
def test_by_default_all_layers_keep_weights_that_do_not_travel_unless_a_loop_would_stack_them(only_casts, unroll, kept):
    found = plan([4], Schedule(unroll=unroll), only_casts=only_casts)
    computed = [keep for kind, _, keep in _without_barriers(found.forward) if kind is Compute]
    assert computed == [False] * (4 - kept) + [True] * kept


def test_a_plan_prints_copies_to_the_host_and_back_with_what_hides_them():
    text = plan([1, 4, 1], Schedule(unroll=1), offload=[False, True, True]).describe(["embed", "blocks", "head"])
    assert (
        text
        == """\
forward
  gather embed[0] | gather blocks[0] | compute embed[0]
  gather blocks[1] | compute blocks[0]
  for i in blocks[1:3]
    gather blocks[i+1] | compute blocks[i] | offload blocks[i-1]
  gather head[0] | compute blocks[3] | offload blocks[2]
  compute head[0], keep weights | offload blocks[3]
backward
  fetch blocks[3] | compute head[0], keep weights | gather blocks[3]
  fetch blocks[2] | compute blocks[3] | gather blocks[2] | reduce head[0]
  for i in reversed(blocks[1:3])
    fetch blocks[i-1] | compute blocks[i] | gather blocks[i-1] | reduce blocks[i+1]
  compute blocks[0] | gather embed[0] | reduce blocks[1]
  compute embed[0] | reduce blocks[0]
  reduce embed[0]"""
    )


@pytest.mark.parametrize(
    "schedule, passes",
    [
        (Schedule(), 1),
        (Schedule(prefetch=False), 1),
        (Schedule(keep_gathered="all"), 1),
        (Schedule(keep_gathered=0), 2),
    ],
    ids=str,
)
def test_written_out_layers_prepare_what_they_send_once_unless_nothing_is_kept(schedule, passes):
    weights, params, constants = arrays(3)
    prepared = []

    def prepare(own):
        prepared.append(own)
        return {"w": 2 * own["w"]}

    def loss(weights, x):
        own = dataclasses.replace(
            stage(weights, params, constants),
            prepare=prepare,
            gather=lambda _, own, sent: {"w": lax.all_gather(sent["w"], AXIS, axis=0, tiled=True)},
        )
        return jnp.sum(run([own], x, schedule, shared_inputs(2))[0])

    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    split = P(None, AXIS)
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(split, P()), out_specs=split, check_vma=False)
    jax.eval_shape(step, weights, jnp.zeros((2, FEATURES)))
    assert len(prepared) == passes * 3
