"""Compiled for hundreds of H200s on a machine without a GPU: nothing grows with the degree but the gathers."""

import functools

import pytest

from gtp_jax import hlo
from gtp_jax.inspect import InspectOptions, inspect
from gtp_jax.inspect._report import as_json
from gtp_jax.runner.flags import Execution, Parallelism

MISSING = hlo.missing_packages()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"compiling for a GPU needs {', '.join(MISSING)}"),
]


@functools.cache
def compiled(preset: str, devices: int, unroll: str | int = "full", **degrees: int) -> dict:
    """What `gtp-jax inspect --seq 8192 --json` prints, one sequence a rank."""
    options = InspectOptions(
        preset=preset,
        target=f"h200:{devices}",
        parallelism=Parallelism(**degrees),
        execution=Execution(unroll=unroll),
        seq=8192,
    )
    return as_json(inspect(options))


def test_8b_on_512_gpus_computes_what_8_do_and_hides_its_gathers():
    """Slices padded to 16 rows made it multiply 61 % more."""
    few, many = (compiled("8b", n, gtp=n)["modelled"] for n in (8, 512))
    assert abs(many["compute_us"] / few["compute_us"] - 1) < 0.01
    assert many["exposed_us"] < 0.03 * many["total_us"]


def test_8b_on_64_gpus_hides_what_moves_over_dp():
    """Of replicas an all-reduce of 7/4 of a rank's shards in float32 was exposed, behind backward."""
    found = compiled("8b", 64, dp=8, gtp=8)
    assert found["modelled"]["exposed_us"] < 0.03 * found["modelled"]["total_us"]
    over_dp = [e for e in found["order"] if "dp" in e.get("axes", ())]
    assert {e["kind"] for e in over_dp} == {"all-gather", "reduce-scatter", "all-reduce"}
    exposed = sum(e["wire_bytes"] for e in over_dp if e["exposed"])
    assert exposed < 0.2 * sum(e["wire_bytes"] for e in over_dp), "the first layers' shards, the last ones' gradients"


def test_70b_permutes_nothing_but_the_sequence():
    """305 collective-permutes moved padding between optimizer and shards."""
    found = compiled("70b", 512, unroll=1, gtp=64, tp=8)
    permutes = [c for c in found["collectives"] if c["kind"] == "collective-permute"]
    assert permutes and {tuple(c["axes"]) for c in permutes} == {("tp",)}
    assert {shape for c in permutes for shape in c["operands"]} == {"bf16[1,1024,8192]"}
