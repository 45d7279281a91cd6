"""`gtp-jax bench growth`: steps of an axis differ in what it says; they are run, or compiled, and drawn readably."""

import dataclasses
import json
import random
import re

import pytest
from messages import naming

import benchmarks
from gtp_jax import hlo
from gtp_jax.models import PRESETS, LlamaConfig
from gtp_jax.runner.cli import main

SIZES = {f.name for f in dataclasses.fields(benchmarks.Workload)} & {f.name for f in dataclasses.fields(LlamaConfig)}


def step_of(preset: str, **given: int) -> benchmarks.Workload:
    config = PRESETS[preset]
    return benchmarks.Workload(**{name: getattr(config, name) for name in SIZES}, **given)


@pytest.fixture(params=["reference", "8b", "70b", "tiny"])
def work(request):
    gtp, microbatches = random.choice([2, 4, 6, 8]), random.choice([1, 2])
    share = microbatches * random.choice([1, 3])
    return step_of(
        request.param, seq=96 * 64, gtp=gtp, tp=random.choice([1, 2]), sequences=gtp * share, microbatches=microbatches
    )


def differing(work: benchmarks.Workload, other: benchmarks.Workload) -> set[str]:
    return {name for name, value in vars(work).items() if getattr(other, name) != value}


def test_every_axis_changes_what_it_is_named_after_and_goes_through_the_step(work):
    changes = {
        "weak": {"gtp", "sequences"},
        "strong": {"gtp", "seq"},
        "depth": {"num_layers"},
        "width": {"hidden_size", "intermediate_size", "num_heads", "num_kv_heads"},
        "sequence": {"seq"},
    }
    assert set(changes) == set(benchmarks.AXES)
    for name, fields in changes.items():
        points = benchmarks.growth_points(work, {name: []})
        assert len({p.value for p in points}) == len(points) >= 2
        assert all(differing(work, p.work) <= fields for p in points)
        if name != "strong":
            assert work in [p.work for p in points]


def test_weak_keeps_the_tokens_of_a_device_and_strong_those_of_the_step(work):
    weak, strong = (benchmarks.growth_points(work, {name: []}) for name in ("weak", "strong"))
    assert {p.work.tokens / p.work.devices for p in weak} == {work.tokens / work.devices}
    assert {p.work.tokens for p in strong} == {work.tokens // work.gtp}
    assert len({benchmarks.workload_flops(p.work) for p in strong}) == 1
    for points in (weak, strong):
        assert all(p.value == p.work.devices and p.work.tp == work.tp for p in points)
        assert {p.value for p in points} >= {work.tp, work.devices}


def test_a_scan_is_measured_along_the_depth_and_a_target_is_compiled_by_the_same_scripts():
    points = benchmarks.growth_points(
        step_of("reference", gtp=2, sequences=2), benchmarks.parse_axes(["depth", "weak"])
    )
    chosen = benchmarks.chosen_contenders(["gtp_jax mxfp8 keep", "partitioner scan regather"])
    runs = benchmarks.growth_runs(points, chosen, scan=True, target=hlo.parse_target("h200:2"))
    names = {axis: {c.name for p, c in runs if p.axis == axis} for axis in ("depth", "weak")}
    assert names["weak"] == {c.name for c in chosen}
    assert names["depth"] - names["weak"] == {"gtp_jax mxfp8 scan keep"}
    assert all("--target=h200" in c.flags for _, c in runs)
    assert all(c in chosen for _, c in benchmarks.growth_runs(points, chosen, scan=False, target=None))


def test_efficiency_is_1_where_time_grows_as_the_operations_of_a_device():
    contender, other = benchmarks.chosen_contenders(["gtp_jax bf16"])
    points = benchmarks.growth_points(step_of("reference", gtp=8, sequences=8), benchmarks.parse_axes([]))
    rate, waste = random.uniform(1e14, 9e14), random.uniform(1.1, 3)

    def measured(point: benchmarks.Point, by: benchmarks.Contender) -> benchmarks.Cost:
        ideal = benchmarks.workload_flops(point.work) / point.work.devices / rate
        seconds = ideal if by is contender or point.value == 1 else ideal * waste
        facts = {"peak_bytes": random.randrange(10**9), "compile_s": random.random()}
        return benchmarks.cost(point, benchmarks.Row(by, (seconds,) * 3, facts))

    costs = [measured(point, by) for point in points for by in (contender, other)]
    failed = benchmarks.cost(points[0], benchmarks.Row(contender, failure="RESOURCE_EXHAUSTED: Out of memory"))
    assert all(benchmarks.efficiency(c, costs) == pytest.approx(1) for c in costs if c.contender == contender.name)
    weak = [c for c in costs if c.contender == other.name and c.axis == "weak" and c.value > 1]
    assert all(benchmarks.efficiency(c, costs) == pytest.approx(1 / waste) for c in weak)
    assert benchmarks.efficiency(failed, [failed, *costs[1:]]) is None and failed.failure
    assert [benchmarks.Cost(**c) for c in json.loads(json.dumps([dataclasses.asdict(c) for c in costs]))] == costs


def test_bad_axes_are_refused_with_the_remedy(capsys):
    for flags, message in (
        (["--axes", "height"], "`--axes` 'height' weak strong depth width sequence"),
        (["--axes", "depth=8,x"], "`--axes` 'depth=8,x' `depth=1,2,4`"),
        (["--axes", "depth=0"], "`--axes` 'depth=0' `depth=1,2,4`"),
        (["--axes", "weak=16"], "`--axes` weak=16 tp 1 8"),
        (["--axes", "strong=3"], "`--axes` strong=3 8 sequences gtp 3"),
        (["--seq", "100"], "100 tokens 8 tp"),
        (["--axes", "width=100"], "width 512"),
        (["--contenders", "fsdp2 bf16"], "fsdp2 bf16 regather fsdp2 bf16 keep Remove"),
        (["--contenders", "deepspeed"], "deepspeed"),
        (["--png", "nowhere/at/all.png"], "directory create"),
    ):
        assert main(["bench", "growth", "--target", "h200:8", *flags]) == 2, flags
        assert re.search(naming(message), capsys.readouterr().err), flags


@pytest.mark.slow
def test_points_run_and_one_that_fails_leaves_the_others(tmp_path, capsys):
    saved, picture, logs = tmp_path / "growth.json", tmp_path / "growth.png", tmp_path / "logs"
    shape = ["--num-layers", "1", "--seq", "16", "--gtp", "2", "--steps", "2"]
    torch = tmp_path / "python-without-torch"
    torch.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\"\nexit 1\n")
    torch.chmod(0o755)
    flags = ["--axes", "weak=2", "depth=1", "--contenders", "gtp_jax bf16 regather", "fsdp2 bf16 regather"]
    outputs = ["--json", str(saved), "--png", str(picture), "--logs", str(logs), "--torch-python", str(torch)]
    assert main(["bench", "growth", *shape, *flags, *outputs]) == 0
    printed = capsys.readouterr().out
    assert (
        "ModuleNotFoundError: No module named 'torch'\n  fsdp2 bf16 regather, weak 2\n  fsdp2 bf16 regather, depth 1\n"
        in printed
    )
    assert "weak: all points have the same tokens per device" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    run = json.loads(saved.read_text())
    costs = [benchmarks.Cost(**c) for c in run["costs"]]
    assert json.loads(json.dumps([dataclasses.asdict(c) for c in costs])) == run["costs"] and run["target"] is None
    ours = [c for c in costs if c.contender == "gtp_jax bf16 regather"]
    theirs = [c for c in costs if c.contender == "fsdp2 bf16 regather"]
    assert {c.axis for c in ours} == {c.axis for c in theirs} == {"weak", "depth"}
    assert all(c.step_s and c.low_s <= c.step_s <= c.high_s and c.peak_bytes and c.compile_s for c in ours)
    assert all(c.failure and c.step_s is None for c in theirs)
    assert ours[0].step_s == ours[1].step_s  # one step that lies on both axes: it has run once
    assert sum("gtp_jax" in log.name for log in logs.iterdir()) == 1
