"""`gtp-jax bench step`: the contenders run the same step, make the choice they are named after, and are reported."""

import dataclasses
import json
import re

import numpy as np
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import PRESETS, LlamaConfig
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Quantization

SIZES = dict(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)


def test_ratios_compare_equal_matmuls_and_equal_policies():
    times = {
        "gtp_jax bf16 regather": 4.0,
        "gtp_jax fp8 regather": 3.9,  # codes on the wire alone
        "gtp_jax fp8-matmuls regather": 2.7,
        "gtp_jax nvfp4-matmuls regather": 5.0,
        "fsdp2 bf16 regather": 4.2,
        "fsdp2 bf16 keep": 4.1,
        "fsdp2 float8 tensorwise regather": 3.4,
        "fsdp2 float8 rowwise regather": 4.05,
        "partitioner combined regather": 4.1,
    }
    chosen = {c.name: c for c in benchmarks.CONTENDERS if c.name in times}
    rows = {name: benchmarks.Row(chosen[name], (seconds,)) for name, seconds in times.items()}

    def to(family: str, name: str) -> float | None:
        return benchmarks.ratio(rows[name], list(rows.values()), family)

    assert to("fsdp2", "gtp_jax bf16 regather") == pytest.approx(4.2 / 4.0)
    assert to("fsdp2", "gtp_jax fp8 regather") == pytest.approx(4.2 / 3.9)
    assert to("fsdp2", "gtp_jax fp8-matmuls regather") == pytest.approx(3.4 / 2.7)  # tensorwise is the faster
    assert to("fsdp2", "fsdp2 float8 rowwise regather") == pytest.approx(3.4 / 4.05)
    assert to("fsdp2", "gtp_jax nvfp4-matmuls regather") is None
    assert to("partitioner", "gtp_jax fp8-matmuls regather") is None
    (mixed,) = benchmarks.with_recipe(
        [chosen["gtp_jax bf16 regather"]], Quantization(override=("mlp.down=fp8-matmuls",))
    )
    assert mixed.matmuls == "bf16+fp8"


@pytest.mark.parametrize("others", [{}, {"num_experts": 8, "top_k": 2, "shared_hidden": 32, "qk_norm": True}])
def test_operations_are_those_of_the_model(others):
    config = LlamaConfig(**SIZES, **others)
    work = benchmarks.Workload(**SIZES, **others, seq=32, sequences=4, gtp=2)
    assert benchmarks.workload_flops(work) == hlo.step_flops(
        matmul_params=config.matmul_params(), tokens=4 * 32, layers=2, seq=32, heads=4, head_dim=16
    )


@pytest.mark.full
def test_the_command_reports_what_ran_and_why_the_rest_did_not(tmp_path, capsys):
    saved, picture = tmp_path / "run.json", tmp_path / "run.png"
    words = ["gtp_jax bf16 regather", "bound bf16", "fsdp2 bf16 regather"]
    flags = ["--num-layers", "1", "--seq", "32", "--steps", "2", "--gtp", "2", "--remat", "activations"]
    flags += ["--contenders", *words]
    nowhere = ["--torch-python", str(tmp_path / "python-without-torch")]
    (tmp_path / "python-without-torch").write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\"\nexit 1\n"
    )
    (tmp_path / "python-without-torch").chmod(0o755)
    assert main(["bench", "step", *flags, *nowhere, "--json", str(saved), "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^gtp_jax bf16 activations +bf16 +regather +bfloat16 +\d", printed, re.MULTILINE)
    assert "fsdp2 bf16 regather: ModuleNotFoundError: No module named 'torch'" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    ours, theirs, bound = json.loads(saved.read_text())["contenders"]
    config = PRESETS["tiny"]
    assert ours["steps"] == 2 and 0 < ours["low_s"] <= ours["median_s"] <= ours["high_s"]
    assert abs(ours["loss"] - np.log(config.vocab_size)) < 1 and ours["peak_bytes"] > 0
    assert (ours["matmuls"], ours["reduce_dtype"]) == ("bf16", "bfloat16")
    assert ours["ratio_to_fsdp2"] is None and theirs["failure"]
    assert bound["median_s"] < ours["median_s"]  # without norms, loss, optimizer and collectives


def test_a_saved_run_shows_what_has_become_slower():
    work = benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=2)
    contender, other = benchmarks.chosen_contenders(["gtp_jax bf16"])

    def run(seconds: float, bytes_: int):
        rows = [benchmarks.Row(contender, (seconds,) * 3, {"peak_bytes": bytes_}), benchmarks.Row(other, failure="no")]
        return json.loads(json.dumps(benchmarks.record(rows, work, "chip")))

    step, memory = benchmarks.changes(run(1.05, 100), run(1.0, 100))
    assert (step.what, step.is_regression, memory.is_regression) == ("step", True, False)
    assert step.relative == pytest.approx(0.05)
    assert not any(c.is_regression for c in benchmarks.changes(run(1.01, 90), run(1.0, 100)))
    older = run(1.0, 100)  # saved before there were experts
    older["workload"] = {name: value for name, value in older["workload"].items() if name not in ("ep", "num_experts")}
    assert len(benchmarks.changes(run(1.0, 100), older)) == 2
    elsewhere = run(1.0, 100) | {"device": "other chip"}
    with pytest.raises(ValueError, match=naming("other chip there", "chip here")):
        benchmarks.changes(run(1.0, 100), elsewhere)
    longer = benchmarks.record([], benchmarks.Workload(**SIZES, seq=64, sequences=4, gtp=2), "chip")
    with pytest.raises(ValueError, match=naming("seq 64 there 32 here")):
        benchmarks.changes(run(1.0, 100), longer)
    with pytest.raises(ValueError, match=naming("`gtp-jax bench step --json`")):
        benchmarks.changes(run(1.0, 100), {"kernels": []})


def test_bad_arguments_are_refused_with_the_remedy(capsys):
    for flags, message in (
        (["--tokens", "100", "--seq", "64", "--gtp", "2"], "multiple 64"),
        (["--contenders", "deepspeed"], "deepspeed"),
        (["--compare", "no.json"], "`--compare` no.json `gtp-jax bench step --json`"),
        (["--tp", "0"], "`tp` 0 1"),
        (["--torch-python", "/nope"], "`--torch-python` '/nope'"),
    ):
        assert main(["bench", "step", *flags]) == 2
        assert re.search(naming(message), capsys.readouterr().err), message


def every_variant(tp: int) -> list[str]:
    """The names of contenders: every variant with one of the policies at tp 1 and with the other one over tp, or with
    both where it runs at one of the two alone."""
    variants = list(dict.fromkeys((c.family, c.variant) for c in benchmarks.CONTENDERS))
    names = []
    for one in benchmarks.chosen_contenders([], tp=tp):
        in_tiles = one.variant == "fp8-blocks"  # of 128 x 128, which tp would cut in so small a model
        if one not in benchmarks.CONTENDERS or (in_tiles and tp > 1):
            continue
        policy = ("regather", "keep")[(variants.index((one.family, one.variant)) + (tp > 1)) % 2]
        if in_tiles or one.tp != "any" or one.policy in ("", policy):
            names.append(one.name)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(4, 1, 1), (2, 2, 2)])
def test_every_contender_runs_the_step(degrees, tmp_path, capsys):
    saved = tmp_path / "run.json"
    flags = [f"{name}={degree}" for name, degree in zip(("--gtp", "--tp", "--microbatches"), degrees, strict=True)]
    shape = ["--num-layers", "2", "--seq", "64", "--steps", "4"]
    names = every_variant(degrees[1])
    assert main(["bench", "step", *flags, *shape, "--json", str(saved), "--contenders", *names]) == 0
    rows = {row["name"]: row for row in json.loads(saved.read_text())["contenders"]}
    assert rows.keys() >= set(names)
    without = ("No module named 'torch'", "pip install torchao")  # optional: PyTorch's contenders are then left out
    absent = {n for n, row in rows.items() if any(reason in row.get("failure", "") for reason in without)}
    assert absent <= {name for name in rows if name.startswith("fsdp2")}
    run = [row for name, row in rows.items() if name not in absent]
    assert not any("failure" in row for row in run), capsys.readouterr().out
    steps = [row for row in run if row["family"] != "bound"]
    config = gtp.models.PRESETS["tiny"]
    assert len({row["parameters"] for row in steps}) == 1 and {row["reduce_dtype"] for row in steps} == {"bfloat16"}
    assert all(abs(row["loss"] - np.log(config.vocab_size)) < 1 and row["last_loss"] < row["loss"] for row in steps)


def test_rivals_say_what_they_lack_of_a_mixture():
    work = benchmarks.Workload(**SIZES, num_experts=8, seq=32, sequences=4, gtp=2, tp=2)
    words = ["fsdp2 bf16 regather", "partitioner scan regather", "bound bf16"]
    chosen = [benchmarks.chosen_contenders([name], tp=2)[0] for name in words]
    run = {"environment": {"PATH": ""}, "timeout_s": 60.0, "torch_python": "no-python"}
    assert [benchmarks.measure_step(c, work, **run).failure for c in chosen[:2]] == [
        "supports experts, and norms of queries and keys, only at tp 1"
    ] * 2
    adapted = benchmarks.with_experts(
        chosen, ["--exchange-chunks=2", "--router-score=sigmoid", "--no-router-normalize"], []
    )
    message = "supports only the default router, not --router-score=sigmoid --no-router-normalize"
    assert [c.refused for c in adapted] == [message, message, ""]
    assert benchmarks.measure_step(adapted[0], dataclasses.replace(work, tp=1), **run).failure == message
    assert not any(c.refused for c in benchmarks.with_experts(chosen, ["--exchange-chunks=2"], ["gather"]))
