"""A plan's model of a step, against steps that were measured and steps that were compiled; and what a plan says."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from messages import naming

from gtp_jax import hlo
from gtp_jax.hlo import Network, quantity
from gtp_jax.inspect import InspectOptions, PlanOptions, inspect, plan
from gtp_jax.inspect._placement import Placement, placement, step_shape
from gtp_jax.inspect._plan_text import MODELLED_OF_MEASURED
from gtp_jax.inspect._step_launches import step_launches
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import ExpertOptions, FreeDegrees, ModelSizes, Parallelism, add_flags, from_settings, given
from gtp_jax.runner.trainer import TrainConfig

from ..hlo.programs import needs_target

DOCS = Path(__file__).parents[2] / "docs"


class Row(NamedTuple):
    """A measured step.

    Attributes:
        workload: the start of its row in docs/speed.md or docs/experiments.md.
        preset: the model.
        chip: the GPU.
        ms: the measured time.
        part: what the model has of it at least; at most 0.03 more.
        gib: the memory that XLA planned; `None` if it is not in the row.
        layers, seq, sequences, microbatches: those of the step; sequences are of a rank and microbatch.
        degrees: those above 1.
    """

    workload: str
    preset: str
    chip: str
    ms: float
    part: float
    gib: float | None = None
    layers: int | None = None
    seq: int = 8192
    sequences: int = 1
    microbatches: int = 1
    degrees: dict[str, int] = {}  # noqa: RUF012


def experts(*row: Any, layers: int, **degrees: int) -> Row:
    return Row(*row, layers=layers, seq=4096, sequences=4, degrees=degrees)


ROWS = [
    Row("| V | `100m` |", "100m", "h100", 53.2, 0.91, 7.5, seq=2048, sequences=16),
    Row("| V | `1b` |", "1b", "h100", 128.4, 0.98, 22.7, seq=4096, sequences=2),
    Row("| V | `reference-6` |", "reference", "h100", 151.6, 1.0, 25.7, layers=6),
    Row("| R | `reference-6` |", "reference", "h200", 145.7, 0.98, 25.7, layers=6),
    Row("| W | `reference-gtp2` |", "reference", "h200", 385.9, 0.91, 37.5, degrees={"gtp": 2}),
    Row("| W | `reference-gtp2-2048` |", "reference", "h200", 115.4, 0.85, 28.3, seq=2048, degrees={"gtp": 2}),
    Row(
        "| W | `reference-gtp2-microbatches` |",
        "reference",
        "h200",
        1572.3,
        0.9,
        24.1,
        layers=8,
        microbatches=8,
        degrees={"gtp": 2},
    ),
    Row("| W | `reference-tp2` |", "reference", "h200", 111.1, 0.93, 16.6, layers=8, degrees={"tp": 2}),
    Row("| K | `reference-gtp2` |", "reference", "h100", 397.3, 0.92, 37.5, degrees={"gtp": 2}),
    Row("| K | `reference-gtp2-2048` |", "reference", "h100", 124.5, 0.85, 28.3, seq=2048, degrees={"gtp": 2}),
    Row("| K | `reference-tp2` |", "reference", "h100", 116.4, 0.94, 16.6, layers=8, degrees={"tp": 2}),
    Row("| C, 8 B, 32 layers | gtp_jax", "8b", "h200", 789.0, 0.88, 50.4, degrees={"gtp": 4}),
    Row("| D, four layers of 70 B | gtp_jax", "70b", "h200", 424.5, 0.88, 27.6, layers=4, degrees={"gtp": 4}),
    Row("| E, 8 microbatches | gtp_jax", "reference", "h200", 3061.3, 0.88, 30.8, microbatches=8, degrees={"gtp": 4}),
    experts("| V | `qwen3-4` |", "qwen3-30b-a3b", "h100", 113.1, 0.9, 40.3, layers=4),
    experts("| V | `mixtral-2` |", "mixtral", "h100", 215.1, 0.88, 49.2, layers=2),
    experts("| R | `mixtral-2` |", "mixtral", "h200", 195.4, 0.89, 50.4, layers=2),
    experts("| W | `qwen3-8-gtp2` |", "qwen3-30b-a3b", "h200", 206.4, 0.78, 44.0, layers=8, gtp=2),
    experts("| W | `qwen3-8-ep2` |", "qwen3-30b-a3b", "h200", 195.2, 0.79, 40.9, layers=8, ep=2),
    experts("| K | `qwen3-8-gtp2` |", "qwen3-30b-a3b", "h100", 222.7, 0.79, 44.0, layers=8, gtp=2),
    experts("| K | `qwen3-8-ep2` |", "qwen3-30b-a3b", "h100", 210.8, 0.81, 40.9, layers=8, ep=2),
    experts("| T | 2 H100 | `mixtral-4-ep2` |", "mixtral", "h100", 429.5, 0.77, layers=4, ep=2),
]


def modelled(row: Row) -> Placement:
    """The step of a row, whose gradients were reduced in bf16."""
    degrees: Any = {"gtp": 1, **row.degrees}
    mesh = Parallelism(**degrees)
    devices = max(row.degrees.values(), default=1)
    ranks = devices // row.degrees.get("tp", 1)
    options = PlanOptions(
        preset=row.preset,
        sizes=ModelSizes(num_layers=row.layers, vocab_size=32768 if row.sequences == 4 else None),
        target=f"{row.chip}:{devices}",
        seq=row.seq,
        batch=ranks * row.sequences * row.microbatches,
        grad_reduce="bf16",
    )
    return placement(options, mesh, row.microbatches)


def test_measured_steps_take_as_long_as_they_are_modelled_and_what_a_plan_says_of_them_holds():
    pages = "".join((DOCS / name).read_text() for name in ("speed.md", "experiments.md"))
    parts = {}
    for row in ROWS:
        assert re.search(rf"^{re.escape(row.workload)}.*\| {row.ms} \|", pages, re.MULTILINE), row.workload
        found = modelled(row)
        parts[row.workload] = found.step_ms / row.ms
        assert row.part <= found.step_ms / row.ms < row.part + 0.03, row.workload
        if row.gib is not None:
            assert 0.95 < found.memory_bytes / 2**30 / row.gib < 1.2, row.workload
    low, high = MODELLED_OF_MEASURED
    assert low == pytest.approx(min(parts.values()), abs=0.01) and high == pytest.approx(max(parts.values()), abs=0.01)
    assert min(parts, key=lambda name: parts[name]) == "| T | 2 H100 | `mixtral-4-ep2` |"


def test_masked_scores_count_neither_as_time_nor_as_work():
    seq, batch = 32768, 8
    options = PlanOptions(preset="gemma3-1b", seq=seq, batch=batch)
    shape = step_shape(options, Parallelism(dp=2, gtp=1, cp=4), 1)
    config, order = shape.config, step_launches(shape)
    tokens = np.arange(1, seq + 1)
    seen = sum(np.minimum(tokens, reach.window or seq).sum() for reach in config.reaches)
    of_scores = 12 * batch * int(seen) * config.num_heads * config.head_dim
    assert shape.flops == pytest.approx(6 * config.matmul_params() * batch * seq + of_scores, rel=1e-3)
    attention = sum(event.flops * event.times for event in order.events if event.kind == "attention")
    assert 8 * attention == pytest.approx(of_scores * 14 / 12, rel=1e-3), "scores are computed again in backward"


@needs_target
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "degrees"),
    [("h200:16", {"dp": 2, "gtp": 8}), ("h200:16", {"gtp": 4, "tp": 4}), ("h200:16", {"gtp": 16})],
)
def test_compiled_steps_are_modelled_in_the_order_in_which_xla_launches_them(target, degrees):
    """The same rates, bytes and flops, so that only the order and the elementwise kernels differ."""
    sizes, mesh = ModelSizes(num_layers=4), Parallelism(**degrees)
    shared: Any = dict(preset="reference", sizes=sizes, target=target, seq=8192, network_rate=50.0)
    compiled = inspect(InspectOptions(parallelism=mesh, **shared))
    options = PlanOptions(batch=compiled.batch, **shared)
    found = placement(options, mesh, 1)
    near = hlo.timeline(step_launches(found.shape), "h200")
    assert compiled.timeline is not None and compiled.over_network is not None
    for own, theirs in ((near, compiled.timeline), (found.line, compiled.over_network)):
        assert own.total_us == pytest.approx(theirs.total_us, rel=0.03)
        assert own.communication_us == pytest.approx(theirs.communication_us, rel=0.03)
        assert own.exposed_us == pytest.approx(theirs.exposed_us, rel=0.15)
    assert 0.9 < found.memory_bytes / compiled.memory.peak_bytes < 1.2


def test_a_plan_lists_the_fastest_placements_and_says_why(monkeypatch, capsys):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    options = PlanOptions(preset="1b", target="h200:16", seq=4096)
    found = plan(options)
    steps = [one.step_ms for one in found.placements]
    assert steps == sorted(steps) and len(steps) >= 3
    assert all(one.memory_bytes <= found.memory.limit_bytes for one in found.placements)
    for one in found.placements:
        assert one.step_ms == pytest.approx(one.compute_ms + sum(one.exposed_ms.values()))
        assert all(0 <= ms <= one.traffic_ms[axes] + 1e-9 for axes, ms in one.exposed_ms.items()), one
        assert one.crossing, "of 16 GPUs in two hosts"
    assert any(one.shape.tp > 1 for one in found.placements), "shown to say what it costs"
    tp = next(one for one in found.placements if one.shape.tp > 1)
    assert ("tp",) not in tp.crossing
    assert main(["plan", "1b", "--target", "h200:16", "--seq", "4096"]) == 0
    said = capsys.readouterr().out
    best = found.placements[0]
    assert re.search(
        naming(f"{best} is the fastest", f"{best.step_ms:.1f}", "0.78 1.01 711 TFLOP/s --network-rate"), said
    )
    assert re.search(naming("nothing has run there", "Nothing was compiled or run"), said)
    assert all(f"{one} is {one.step_ms - best.step_ms:.1f} ms slower: " in said for one in found.placements[1:])
    flags = " ".join(f"--{axis} {size}" for axis, size in best.shape.degrees.items())
    assert f"--preset 1b {flags} --batch 16 --microbatches 1 --seq 4096" in said


def test_the_flags_of_a_plan_give_train_and_inspect_the_step_that_was_planned():
    options = PlanOptions(
        preset="tiny-moe",
        sizes=ModelSizes(num_layers=2),
        experts=ExpertOptions(top_k=4, shared_hidden=64, router_normalize=False),
        degrees=FreeDegrees(dp=2, ep=2, shard_optimizer=False),
        grad_reduce="bf16",
        microbatches=2,
        batch=16,
    )
    found = plan(options)
    said = str(found)
    assert said.startswith("tiny-moe --num-layers=2 --top-k=4 --shared-hidden=64 --no-router-normalize: ")
    (flags,) = re.findall(r"flags of train and inspect: (.*)", said)
    for kind in (InspectOptions, TrainConfig):
        parser = argparse.ArgumentParser()
        add_flags(parser, kind)
        one: Any = from_settings(kind, given(parser.parse_args(flags.split()), kind))
        assert (one.preset, one.sizes, one.experts) == (options.preset, options.sizes, options.experts)
        assert one.parallelism == found.placements[0].parallelism
        assert (one.batch, one.seq, one.execution.microbatches) == (16, options.seq, 2)
        assert one.execution.grad_reduce == "bf16"


def test_degrees_that_are_given_stay_and_a_network_costs_what_crosses_hosts():
    shared: Any = dict(preset="8b", target="h200:64", degrees=FreeDegrees(gtp=8, tp=8, dp=1))
    times = []
    for rate in (400.0, 50.0, 25.0):
        (one,) = plan(PlanOptions(network_rate=rate, **shared)).placements
        assert one.shape.degrees == {"dp": 1, "gtp": 8, "tp": 8} and one.crossing == {("gtp",)}
        assert one.line.network == Network(rate * 1e9) and one.ranks_per_host(("gtp",)) == 1
        times.append(one.exposed_ms[("gtp",)])
    assert times[0] < times[1] < times[2]
    inside = plan(PlanOptions(gpus_per_host=64, **shared)).placements[0]
    assert inside.line.network is None and not inside.crossing
    slow, fast = (plan(PlanOptions(peak=peak, **shared)).placements[0].compute_ms for peak in (989, 1978))
    assert slow / 2 < fast < 0.6 * slow, "elementwise kernels are as fast as before"


def test_placements_that_layers_refuse_are_left_out():
    found = plan(PlanOptions(preset="gpt-oss-20b", target="h200:16")).placements
    assert found and all(one.shape.ep == 1 for one in found), "its experts have biases"


def test_microbatches_are_the_fewest_that_fit(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    shared: Any = dict(preset="8b", degrees=FreeDegrees(gtp=8))
    assert plan(PlanOptions(batch=8, **shared)).placements[0].shape.microbatches == 1
    assert plan(PlanOptions(batch=32, **shared)).placements[0].shape.microbatches == 2
    none = plan(PlanOptions(batch=32, microbatches=1, **shared))
    assert not none.placements and none.smallest is not None
    state, working = none.smallest.state_bytes, none.smallest.shape.working_bytes
    assert state == none.memory.choices[0].between.device_bytes and state + working > none.memory.limit_bytes
    sizes = [quantity(size, "B") for size in (state + working, none.memory.limit_bytes, state, working)]
    assert re.search(naming("1 gtp 8 --microbatches activations workspace", *sizes), str(none))


def test_the_smallest_placement_that_layers_allow_is_shown_if_none_fits():
    found = plan(PlanOptions(preset="gpt-oss-20b", seq=1 << 20))
    assert not found.placements and found.smallest is not None and found.smallest.shape.ep == 1
    for degrees in (FreeDegrees(gtp=8), FreeDegrees(tp=8)):
        one = plan(PlanOptions(preset="gpt-oss-20b", seq=1 << 20, degrees=degrees)).smallest
        assert one is not None and one.memory_bytes > found.smallest.memory_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("8b --target b200:8", "`target` 'b200:8' 'b200' h100, h200"),
        ("8b --target h200:12", "`target` 'h200:12' 12"),
        ("8b --gtp 3", "gtp 3 divide 8 'h200:8'"),
        ("8b --dp 1 --gtp 2 --cp 1 --ep 1 --tp 2", "dp 1 gtp 2 tp 2 is 4 equal 8 'h200:8'"),
        ("phi4 --dp 1 --gtp 1 --cp 1 --ep 1", "`tp` 8 10 --tp"),
        ("8b --num-kv-heads 32 --target h200:16 --dp 1 --gtp 1 --cp 1 --ep 1", "`tp` 16 8 host --tp"),
        ("8b --target h200:64 --batch 3", "`batch` 3 multiple dp gtp ep 2 64 'h200:64'"),
        ("8b --target h200:64 --tp 64", "tp 64 (32 query heads)"),
        ("8b --ep 2", "`ep` 2 experts"),
        ("mixtral --target h200:16 --ep 16", "`ep` 16 8 experts"),
        ("gpt-oss-20b --ep 2", "`biases` ep 2"),
        ("8b --gtp 8 --batch 7", "`batch` 7 multiple gtp 8"),
        ("8b --microbatches 3 --gtp 8", "`batch` 8 multiple microbatches 3 24"),
        ("8b --network-rate 0", "`network_rate` 0.0"),
        ("8b --peak -1", "`peak` -1.0"),
        ("8b --dp 0", "`dp` 0"),
        ("8c", "`preset` '8c' 8b"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(words, message, capsys):
    assert main(["plan", *words.split()]) == 2
    assert re.search(naming(message), capsys.readouterr().err)
