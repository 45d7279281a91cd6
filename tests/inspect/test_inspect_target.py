"""What `gtp-jax inspect --target` adds: the order of launches, what is exposed, a picture."""

from __future__ import annotations

import json
from collections import Counter

import jax
import pytest

from gtp_jax.inspect import Inspection, InspectOptions, inspect
from gtp_jax.inspect._report import as_json, as_text
from gtp_jax.runner.cli._inspect import show
from gtp_jax.runner.flags import Execution, Parallelism

from ..hlo.programs import needs_target

jax.devices()  # fixes the number of devices to what the suite runs with

pytestmark = [pytest.mark.full, needs_target]


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
    late = 1e6 * near["link_latency"]["value"] * sum(c["count"] * len(c["operands"]) for c in data["collectives"])
    assert near["communication_us"] == pytest.approx(late + sent / 326e3)
    assert far["communication_us"] == pytest.approx(late + sent / 4 / 20e3)


def _asynchronous(events):
    return sum(e.end > e.start for e in events)


def test_json_marks_what_is_exposed(found):
    data = json.loads(json.dumps(as_json(found)))
    exposed = [e["name"] for e in data["order"] if e.get("exposed")]
    assert exposed == [e.name for e in found.order.exposed()]
    rates = data["modelled"]["rates"]
    assert set(rates) == {"bf16 matmuls", "attention forward", "attention backward", "elementwise work"}
    assert rates["bf16 matmuls"]["unit"] == "FLOP/s" and rates["elementwise work"]["unit"] == "B/s"
    assert data["modelled"]["exposed_us"] == pytest.approx(found.timeline.exposed_us)


def test_showing_it_prints_and_writes_the_picture(found, tmp_path, capsys):
    path = tmp_path / "timeline.png"
    show(found, png=path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert capsys.readouterr().out == as_text(found) + "\n"


@pytest.mark.slow
def test_8b_on_64_gpus_hides_what_moves_over_dp():
    """Of replicas an all-reduce of 7/4 of a rank's shards in float32 was exposed, behind backward."""
    options = InspectOptions(preset="8b", target="h200:64", parallelism=Parallelism(dp=8, gtp=8), seq=8192)
    found = as_json(inspect(options))
    assert found["modelled"]["exposed_us"] < 0.03 * found["modelled"]["total_us"]
    over_dp = [e for e in found["order"] if "dp" in e.get("axes", ())]
    assert {e["kind"] for e in over_dp} == {"all-gather", "reduce-scatter", "all-reduce"}
    exposed = sum(e["wire_bytes"] for e in over_dp if e["exposed"])
    assert exposed < 0.2 * sum(e["wire_bytes"] for e in over_dp), "the first layers' shards, the last ones' gradients"


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "limit"), [("attention", 130e9), ("offload-attention", 60e9)])
def test_8b_on_a_million_tokens_fits_8_gpus_and_runs_no_attention_again(remat, limit):
    options = InspectOptions(
        preset="8b",
        target="h200:8",
        parallelism=Parallelism(cp=8),
        seq=2**20,
        batch=1,
        execution=Execution(remat=remat, loss_chunk=4096),
    )
    found = inspect(options)
    assert found.memory.peak_bytes < limit
    attention = Counter(e.direction for e in found.order.events if e.kind == "attention")
    assert attention == {"forward": 32, "backward": 32}
    exchanges = Counter(e.direction for e in found.order.collectives("all-to-all"))
    assert exchanges == {"forward": 2 * 32, "backward": 4 * 32}
