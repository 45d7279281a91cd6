"""What fits on GPUs with which options is counted from shapes, and is what a state and a compiled step take."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import optax
import pytest
from messages import naming

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.inspect import InspectOptions, PlanOptions, as_json, as_text, inspect, plan
from gtp_jax.inspect._state_memory import state_memory
from gtp_jax.models import PRESETS, build, preset_of
from gtp_jax.nn import abstract_model
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Execution, FreeDegrees, ModelSizes

from ..hlo.programs import needs_target

WHERE = (None, "optimizer", "masters")


@pytest.mark.parametrize("where", WHERE)
def test_the_bytes_of_a_plan_are_those_of_the_arrays_of_a_state(where):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), gtp.layout.even_shares():
        model = abstract_model(lambda rngs: build(preset_of("100m"), rngs=rngs))
        state = gtp.TrainState.create(model, optax.adamw(1e-3), offload=where)
        found, planned = state_memory(state), gtp.explain(model).share.memory(where)  # pyright: ignore
    assert found == dataclasses.replace(planned, device_bytes=planned.device_bytes + 4)  # and the count of updates
    assert (found.host_bytes > 0) == (where is not None) and (found.copied_bytes > 0) == (where == "masters")


def options_of(said: str) -> dict[str, list[str]]:
    """The cells of the rows of a plan, by option."""
    rows = [re.split(r"\s{2,}", line) for line in said.splitlines() if re.search(r"\d B|[kMGT]B", line)]
    return {row[0]: row[1:] for row in rows if len(row) > 3}


def test_8b_fits_on_one_h200_only_with_a_state_on_the_host_or_with_narrow_moments(monkeypatch, capsys):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert main(["plan", "8b", "--target", "h200:1"]) == 0
    said = capsys.readouterr().out
    assert "none of 1 placements fits" in said
    count = PRESETS["8b"].param_count()
    gb = lambda n: hlo.quantity(n * count, "B")  # noqa: E731
    found = options_of(said)
    assert found["none"][:4] == [gb(12), "0 B", gb(16), "no: on 2 GPUs or more"]
    assert found["--optimizer-state bfloat16"][:3] == [gb(8), "0 B", gb(12)]
    assert found["--optimizer-state float8"][:3] == [gb(6.125), "0 B", gb(10.125)]
    assert found["--offload optimizer"][:3] == [gb(4), gb(8), gb(8)] and "are left" in found["--offload optimizer"][3]
    assert found["--offload masters"][1:3] == [gb(12), gb(4)]
    assert found["--offload masters"][4] == f"{4 * count / 55e9 + 12 * count / 35e9:.2f} s"
    assert re.search(naming("114 GB 151 GB (0.75) activations"), said)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    assert "are left" in options_of(str(plan(PlanOptions(preset="8b", target="h200:1")).memory))["none"][3]


def test_weights_that_are_gathered_are_not_kept_whole_and_their_gradients_are_summed_in_float32():
    degrees = FreeDegrees(dp=1, gtp=4, tp=2)
    memory = plan(PlanOptions(preset="8b", degrees=degrees)).memory
    by_name = {choice.options: choice for choice in memory.choices}
    weights = by_name["none"].between.device_bytes // 3
    assert memory.degrees == {"dp": 1, "gtp": 4, "tp": 2}
    assert by_name["none"].step_bytes == 4 * weights
    masters = by_name["--offload masters"]
    assert masters.step_bytes == masters.between.device_bytes + weights + weights // 2


def test_a_plan_says_where_the_host_can_keep_nothing():
    memory = plan(PlanOptions(preset="8b", target="h200:7", degrees=FreeDegrees(dp=1))).memory
    assert not [choice for choice in memory.choices if "--offload" in choice.options]
    assert re.search(naming("--offload refused padded blocks.layers.attention.out.kernel"), str(memory))


@pytest.mark.parametrize("share", ["much", "0", "-1", "nan", "inf"])
def test_a_fraction_of_memory_that_is_none_is_refused(share, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    with pytest.raises(ValueError, match=naming(f"XLA_PYTHON_CLIENT_MEM_FRACTION '{share}' 0.9")):
        plan(PlanOptions(preset="tiny"))


@pytest.mark.full
@needs_target
def test_an_inspection_tells_the_state_on_the_host_from_activations_there():
    """Counts the copies of activations in the compiled program, with a state on the host and without one."""
    sizes = ModelSizes(hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=8, intermediate_size=1024)
    options: Any = dict(preset="tiny", target="h200:2", seq=256, sizes=sizes)
    found = inspect(InspectOptions(**options, execution=Execution(offload="masters", remat="offload")))
    state, memory = found.state, found.memory
    assert memory.host_bytes == state.host_bytes == 3 * state.copied_bytes > 0
    assert memory.weights_bytes + memory.optimizer_bytes == state.device_bytes
    assert memory.peak_bytes + memory.host_bytes == sum(dataclasses.asdict(memory).values())
    plain = inspect(InspectOptions(**options, execution=Execution(remat="offload")))
    assert found.host_bytes == plain.host_bytes > 0, "of activations alone"
    moved = [[(copy.kind, copy.shapes) for copy in one.host_copies] for one in (found, plain)]
    assert sorted(moved[0], key=str) == sorted(moved[1], key=str)
    seconds = state.copied_bytes / 55e9 + state.host_bytes / 35e9
    assert as_json(found)["state"] == {**dataclasses.asdict(state), "copying_s": pytest.approx(seconds)}
    assert re.search(naming("offload masters nothing hides device host forward backward"), as_text(found))
