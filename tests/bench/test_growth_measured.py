"""`gtp-jax bench growth`: what it prints was run, or compiled; what fails leaves the rest."""

import dataclasses
import json

import pytest

import benchmarks
from gtp_jax import hlo
from gtp_jax.runner.cli import main


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


def test_what_comes_too_late_is_not_run():
    points = benchmarks.growth_points(benchmarks.Workload(gtp=2, sequences=2), benchmarks.parse_axes([]))
    runs = benchmarks.growth_runs(
        points, benchmarks.chosen_contenders(["gtp_jax bf16 regather"]), scan=True, target=None
    )
    costs = list(benchmarks.measure_growth(runs, environment={}, timeout_s=1, within_s=0))
    assert len(costs) == len(runs)
    assert all(
        c.failure == "not run: the time limit of 0 s for all points had passed" and c.step_s is None for c in costs
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs gtp_jax[target]")
def test_steps_are_compiled_for_gpus_that_are_not_there(tmp_path, capsys):
    saved = tmp_path / "growth.json"
    axes = ["--axes", "weak=1,2", "depth=2,4", "--contenders", "gtp_jax bf16 regather", "partitioner combined regather"]
    assert (
        main(["bench", "growth", "--target", "h200:2", "--num-layers", "2", *axes, "--scan", "--json", str(saved)]) == 0
    )
    assert "modelled ms" in capsys.readouterr().out
    costs = [benchmarks.Cost(**c) for c in json.loads(saved.read_text())["costs"]]
    assert not any(c.failure for c in costs)
    ceiling = hlo.fact("h200", "bf16_ceiling").value
    assert all(0.5 * ceiling < c.flops_rate <= 1.01 * ceiling for c in costs)
    found = {(c.contender, c.axis, c.value): c for c in costs}
    name = "gtp_jax bf16 regather"
    one, two = found[name, "weak", 1], found[name, "weak", 2]
    assert one.collectives < two.collectives and one.peak_bytes > two.peak_bytes
    assert one.tokens / one.devices == two.tokens / two.devices
    assert found[name, "depth", 4].collectives > found[name, "depth", 2].collectives
    assert ("gtp_jax bf16 scan regather", "depth", 4) in found and (
        "gtp_jax bf16 scan regather",
        "weak",
        2,
    ) not in found
    assert not any(benchmarks.over_memory(c, "h200") for c in costs)
