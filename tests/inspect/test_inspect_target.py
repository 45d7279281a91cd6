"""What `gtp-jax inspect --target` adds: the order of launches, what is exposed, a picture."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from gtp_jax import hlo
from gtp_jax.inspect import Inspection, InspectOptions, inspect
from gtp_jax.inspect._report import as_json, as_text
from gtp_jax.inspect._timeline import picture
from gtp_jax.runner.cli._inspect import show
from gtp_jax.runner.flags import Execution, Parallelism

jax.devices()  # fixes the number of devices to what the suite runs with

MISSING = hlo.missing_packages()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"compiling for a GPU needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def found() -> Inspection:
    """On two hosts of 4."""
    options = InspectOptions(
        target="h200:8", network_rate=20.0, gpus_per_host=4, parallelism=Parallelism(gtp=8), seq=128
    )
    return inspect(options)


def test_the_launch_order_holds_every_matmul_and_attention_of_the_step(found):
    forward = [e.kind for e in found.order.events if e.collective is None and e.direction == "forward"]
    assert forward.count("matmul") == 4 * 4 + 1  # four a layer, and the head; the embedding is a look-up
    assert forward.count("attention") == 4


def test_it_is_compiled_with_the_options_of_the_gpus_so_that_a_layer_is_one_gather(found):
    assert len(found.order.collectives("all-gather")) <= 2 * 4 + 2  # twice a layer, embedding and head


def test_text_shows_the_order_and_what_is_exposed(found):
    text = as_text(found)
    assert "parameters on h200:8, dp 1 x gtp 8 x tp 1" in text
    assert "order of launches" in text and "in flight" in text and "EXPOSED" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("all-gather ") and "forward" not in line)
    gathers = found.order.collectives("all-gather")
    assert row[1:4] == [str(n) for n in (len(gathers), _asynchronous(gathers), len(found.order.exposed("all-gather")))]
    assert "of the 151 GB of an h200" in text and "NVLink between all GPUs  " in text


def test_network_between_hosts_is_modelled_beside_nvlink_alone(found):
    """A gtp group of 8 spans two hosts of 4, whose four adapters share a ring."""
    data = json.loads(json.dumps(as_json(found)))
    near, far = data["modelled"], data["modelled_over_network"]
    assert far["network"] == {"rate": 20e9, "gpus_per_host": 4} and "network" not in near
    assert far["compute_us"] == pytest.approx(near["compute_us"])
    assert {c["kind"] for c in data["collectives"]} <= {"all-gather", "reduce-scatter", "all-reduce"}
    sent = sum(c["count"] * c["wire_bytes"] for c in data["collectives"])
    assert near["communication_us"] == pytest.approx(sent / 326e3)
    assert far["communication_us"] == pytest.approx(sent / 4 / 20e3)


@pytest.mark.slow
def test_text_compares_the_copies_of_a_layer_with_its_compute():
    offloading = Execution(remat="offload", unroll=1)
    found = inspect(InspectOptions(target="h200:8", parallelism=Parallelism(gtp=8), seq=128, execution=offloading))
    layer = 128 * 128 * 2  # tokens of a rank x width, in bfloat16
    assert found.host_bytes == 4 * layer == as_json(found)["host_bytes"]
    for kind in (hlo.TO_HOST, hlo.FROM_HOST):
        copies = [copy for copy in found.host_copies if copy.kind == kind]
        assert sum(copy.times * copy.shapes[0].bytes for copy in copies) == 4 * layer
    text = as_text(found).split("activations in the host's memory, remat offload: 131 kB per device")[1]
    assert text.split()[:2] == ["copies", "count"]
    assert "to host        4  131 kB" in text and "from host      4  131 kB" in text
    # 32.8 kB at 64 GB/s; the forward FLOPs of the layer at 787 TFLOP/s
    assert f"break-even: a layer's 32.8 kB take {layer / 64:.0f} ns each way" in text
    assert f"which hides {found.layer_flops / 787e12 * 64e9 / layer:.0%} of them" in text


def _asynchronous(events):
    return sum(e.end > e.start for e in events)


@pytest.mark.slow
def test_text_lists_every_collective_over_dp_with_what_hides_it():
    options = InspectOptions(target="h200:8", parallelism=Parallelism(dp=2), seq=128)
    found = inspect(options)
    text = as_text(found)
    lines = text.split("collectives over dp, and what hides them\n\n")[1].split("\n\n")[0].splitlines()[2:]
    events = [e for e in found.order.collectives() if "dp" in e.collective.axes]
    assert sum(int(line.split()[0]) for line in lines) == sum(e.times for e in events) > 8
    kinds = {line.split()[1] for line in lines}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}
    assert any("matmul" in line for line in lines if "reduce-scatter" in line)
    replicas = dataclasses.replace(options, parallelism=Parallelism(dp=2, shard_optimizer=False))
    assert {e.kind for e in inspect(replicas).order.collectives() if "dp" in e.collective.axes} == {"all-reduce"}


def test_json_marks_what_is_exposed(found):
    data = json.loads(json.dumps(as_json(found)))
    exposed = [e["name"] for e in data["order"] if e.get("exposed")]
    assert exposed == [e.name for e in found.order.exposed()]
    assert data["modelled"]["flop_rate"]["unit"] == "FLOP/s"
    assert data["modelled"]["exposed_us"] == pytest.approx(found.timeline.exposed_us)


def test_picture_has_two_lanes_and_exposed_parts_in_red(found):
    figure = picture(found.timeline, "a step")
    assert "modelled, not measured" in figure.get_suptitle() and figure.get_suptitle().startswith("a step\n")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "communication"]
    red = [bar for bar in axes.patches if bar.get_facecolor() == pytest.approx((0.839, 0.153, 0.157, 1), abs=1e-2)]
    assert len(red) == sum(span.exposed_us > 0 for span in found.timeline.spans) > 0
    assert sum(bar.get_width() for bar in red) <= found.timeline.exposed_us / 1e3 * (1 + 1e-9)


def test_showing_it_prints_and_writes_the_picture(found, tmp_path, capsys):
    path = tmp_path / "timeline.png"
    show(found, png=path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert capsys.readouterr().out == as_text(found) + "\n"
