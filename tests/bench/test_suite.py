"""`gtp-jax bench suite`: contenders take turns, a file is continued or refused, rounds become ratios and verdicts."""

import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from messages import naming

import benchmarks
import gtp_jax
from benchmarks import _suite, _suite_file
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.runner.cli import main

from .conftest import SCRIPTS

BY_NAME = {workload.name: workload for workload in benchmarks.WORKLOADS}
REFERENCE = BY_NAME["reference-gtp2"]
SMALL: dict[str, Any] = dict(
    hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=96, seq=16
)
SMALL["sequences"] = 2
THREE = ["gtp_jax bf16 regather", "partitioner combined grad-norm regather", "fsdp2 bf16 regather"]


class Anything(type):
    """Metaclass of classes that have any attribute, in place of those of PyTorch."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


@pytest.fixture
def load(script, monkeypatch):
    """Imports a contender's script; PyTorch's modules, which it may import, are empty."""

    def load(name: str):
        if name == "fsdp2":
            for torch in ("", ".nn", ".nn.functional", ".distributed", ".distributed.fsdp", ".distributed.tensor"):
                fake_module(monkeypatch, f"torch{torch}")
            for torch in ("_symmetric_memory", "device_mesh", "tensor.parallel"):
                fake_module(monkeypatch, f"torch.distributed.{torch}")
        return script(name)

    return load


def fake_module(monkeypatch, name: str) -> None:
    module = types.ModuleType(name)
    vars(module)["__getattr__"] = lambda attribute: getattr(Anything(name, (), {}), attribute)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def measured(monkeypatch):
    """Replaces the contenders' processes: returns the names that ran, and what a name is answered."""
    ran, answers = [], {}

    def measure_step(contender, work, **_):
        ran.append(contender.name)
        answer = answers.get(contender.name, 0.4)
        if isinstance(answer, str):
            return benchmarks.Row(contender, failure=answer)
        return benchmarks.Row(contender, (answer,) * 3, {"compile_s": 10.0, "planned_bytes": 2**30})

    monkeypatch.setattr(_suite, "measure_step", measure_step)
    return ran, answers


def options(**others):
    usual = {"platform": "gpu", "machine": "one", "environment": {}, "contenders": THREE}
    return benchmarks.SuiteOptions(**usual | others)


SETTINGS = {"device": "chip", "versions": {"jax": "1", "source": "a"}, "steps": None}


def test_every_contender_of_the_table_exists_once_and_its_script_takes_the_flags(load, monkeypatch):
    class Parsed(Exception):
        pass

    def parsed(args, **_):
        raise Parsed(args)

    scripts = {name: load(name) for name in ("ours", "stock", "partitioner", "fsdp2")}
    for module in scripts.values():
        monkeypatch.setattr(module, "workload", parsed)
    for workload in benchmarks.WORKLOADS:
        work, chosen = workload.workload("gpu"), workload.chosen([])
        assert work.devices == workload.devices and len(set(workload.contenders)) == len(chosen)
        for contender in chosen:
            assert contender.tp in ("any", "above 1" if work.tp > 1 else "1")
            command = contender.command(work.flags, work.devices, "python")
            at = command.index(str(SCRIPTS / contender.script))
            monkeypatch.setattr(sys, "argv", command[at:])
            with pytest.raises(Parsed) as found:
                scripts[Path(contender.script).stem].main()
            args = found.value.args[0]
            assert (args.num_layers, args.gtp, args.ep, args.tp) == (work.num_layers, work.gtp, work.ep, work.tp)
        for goal in workload.goals:
            assert any(f"{c.family} {c.variant}" == goal.ours for c in chosen)
            assert any(goal.rival in (c.family, f"{c.family} {c.variant}") for c in chosen)


def test_contenders_take_turns_and_a_file_goes_on_where_it_ended(measured, tmp_path):
    ran, _ = measured
    path = tmp_path / "suite.json"
    run = benchmarks.run_suite([REFERENCE], benchmarks.SuiteFile(path, SETTINGS), options())
    for _ in range(5):  # interrupted after five processes
        next(run)
    run.close()
    assert len(json.loads(path.read_text())["results"]) == 5
    again = benchmarks.SuiteFile(path, SETTINGS, lambda results: len(results))
    assert len(list(benchmarks.run_suite([REFERENCE], again, options()))) == 4
    assert ran == THREE * 3
    assert json.loads(path.read_text())["summary"] == 9
    assert not list(benchmarks.run_suite([REFERENCE], benchmarks.SuiteFile(path, SETTINGS), options()))
    assert ran == THREE * 3


def test_results_of_another_device_version_or_step_are_refused(measured, tmp_path):
    path = tmp_path / "suite.json"
    list(benchmarks.run_suite([REFERENCE], benchmarks.SuiteFile(path, SETTINGS), options(rounds=1)))
    for settings, message in (
        (SETTINGS | {"device": "other"}, "device chip there other here another file"),
        (SETTINGS | {"versions": {"jax": "1", "source": "b"}}, "source a there b here"),
        (SETTINGS | {"steps": 4}, "steps None there 4 here"),
    ):
        with pytest.raises(ValueError, match=naming(message)):
            benchmarks.SuiteFile(path, settings)
    changed = dataclasses.replace(REFERENCE, step=dataclasses.replace(REFERENCE.step, num_layers=2))
    with pytest.raises(ValueError, match=naming("reference-gtp2 (--num-layers=16 --num-layers=2)")):
        list(benchmarks.run_suite([changed], benchmarks.SuiteFile(path, SETTINGS), options()))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=naming("suite.json JSON")):
        benchmarks.SuiteFile(path, SETTINGS)
    path.write_text("{}")
    with pytest.raises(ValueError, match=naming("`gtp-jax bench suite`")):
        benchmarks.SuiteFile(path, SETTINGS)


def results_of(workload, times):
    return [
        benchmarks.Result(
            workload.name, name, number, "one", (), 1.0, (ms / 1e3, ms / 1e3, 9.0), {"planned_bytes": number}
        )
        for name, rounds in times.items()
        for number, ms in enumerate(rounds)
    ]


def test_a_row_is_the_median_of_its_rounds_and_is_held_against_the_same_work():
    times = {
        "gtp_jax bf16 regather": (400.0, 404.0, 390.0),
        "gtp_jax bf16 keep": (380.0, 380.0, 380.0),
        "partitioner combined grad-norm regather": (410.0, 408.0, 409.6),
        "partitioner unrolled grad-norm regather": (420.0, 420.0, 420.0),
        "partitioner combined regather": (395.0, 395.0, 395.0),  # without norm and guard
        "partitioner combined grad-norm keep": (385.0, 385.0, 385.0),
        "fsdp2 bf16 regather": (440.0, 440.0, 440.0),
    }
    rows = benchmarks.rows_of(REFERENCE, results_of(REFERENCE, times))
    by_name = {row.contender.name: row for row in rows}
    ours = by_name["gtp_jax bf16 regather"]
    assert (ours.median_s, ours.low_s, ours.high_s) == (0.4, 0.39, 0.404) and ours.facts == {"planned_bytes": 0}
    assert benchmarks.suite_ratio(ours, rows, "partitioner", REFERENCE) == pytest.approx(409.6 / 400)
    assert benchmarks.suite_ratio(ours, rows, "fsdp2", REFERENCE) == pytest.approx(1.1)
    assert benchmarks.suite_ratio(by_name["fsdp2 bf16 regather"], rows, "partitioner", REFERENCE) is None
    regather, keep = benchmarks.suite_verdicts(REFERENCE, rows)
    # 1.024 is 0.6 % below 1.03
    assert (regather.rival, regather.is_reached) == ("partitioner combined grad-norm regather", False)
    assert regather.low == pytest.approx(408 / 404) and regather.high == pytest.approx(409.6 / 390)
    assert (keep.ratio, keep.is_reached) == (pytest.approx(385 / 380), False)
    times["partitioner combined grad-norm regather"] = (410.0, 410.0, 410.0)  # 1.025 is within 0.5 % of 1.03
    rows = benchmarks.rows_of(REFERENCE, results_of(REFERENCE, times))
    assert [v.is_reached for v in benchmarks.suite_verdicts(REFERENCE, rows)] == [True, False]
    (entry,) = benchmarks.suite_summary(benchmarks.WORKLOADS, results_of(REFERENCE, times))
    assert (entry["workload"], entry["rows"][0]["rounds"], entry["goals"][0]["reached"]) == ("reference-gtp2", 3, True)


def test_the_command_prints_rows_saves_and_draws(measured, tmp_path, monkeypatch, capsys):
    ran, answers = measured
    answers |= {THREE[0]: 0.40, THREE[1]: 0.44, THREE[2]: "No module named 'torch'"}
    monkeypatch.setattr(benchmarks, "probe", lambda environment: ("chip", "gpu", 2))
    monkeypatch.setattr(benchmarks, "this_machine", lambda is_gpu: "one")
    saved, picture = tmp_path / "suite.json", tmp_path / "suite.png"
    flags = ["--workloads", "reference-gtp2", "--contenders", *THREE, "--json", str(saved), "--png", str(picture)]
    assert main(["bench", "suite", *flags]) == 0
    printed = capsys.readouterr().out
    assert ran == [*THREE, *THREE[:2], *THREE[:2]]
    assert "reference-gtp2  3/3  partitioner combined grad-norm regather  440.0 ms (440.0 to 440.0)" in printed
    assert "no result from fsdp2 bf16 regather: No module named 'torch'" in printed
    assert "reached: gtp_jax bf16 regather 1.100 x partitioner combined grad-norm regather" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "suite", *flags]) == 0 and len(ran) == 7  # all there: nothing runs
    monkeypatch.setattr(benchmarks, "probe", lambda environment: ("other chip", "gpu", 2))
    assert main(["bench", "suite", *flags]) == 2
    assert "device is chip there, other chip here" in capsys.readouterr().err


@pytest.mark.full
def test_the_partitioners_guarded_step_is_the_plain_one_if_finite_and_changes_nothing_if_not(partitioner):
    work = benchmarks.Workload(**SMALL)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("gtp", "tp"), axis_types=(AxisType.Auto,) * 2)
    made = {"unroll": 0, "keep_gathered": False, "dtype": jnp.float32}
    tokens = jax.random.randint(jax.random.key(1), (1, 2, 16), 0, 96)
    with jax.set_mesh(mesh):
        plain, make_state, _ = partitioner.make_step(work, mesh, **made)
        state = jax.tree.map(np.array, make_state(jax.random.key(0)))
        want, loss = plain(state, tokens, tokens)
        assert float(np.abs(want[0]["head"] - state[0]["head"]).max()) > 0
        for guard in ("where", "cond"):
            guarded, _, _ = partitioner.make_step(work, mesh, **made, grad_norm=guard)
            found, same_loss = guarded(state, tokens, tokens)
            np.testing.assert_allclose(same_loss, loss, rtol=1e-6)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), found, want)
            bad = jax.tree.map(np.array, found)
            bad[0]["norm"][0] = np.nan
            after, loss_of_bad = guarded(bad, tokens, tokens)
            assert np.isnan(loss_of_bad)
            jax.tree.map(np.testing.assert_array_equal, after, bad)


@pytest.mark.full
def test_the_stock_model_is_the_llama_of_the_workload(script):
    stock = script("stock")
    work = benchmarks.Workload(**SMALL, qk_norm=True)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 96)
    qkv, up = ("attention", "qkv"), ("mlp", "up")
    places = {
        "q": (*qkv, "kernel", "query"),
        "k": (*qkv, "kernel", "key"),
        "v": (*qkv, "kernel", "value"),
        "o": ("attention", "out", "kernel"),
        "gate": (*up, "kernel", "gate"),
        "up": (*up, "kernel", "up"),
        "down": ("mlp", "down", "kernel"),
        "norm1": (*qkv, "scale"),
        "norm2": (*up, "scale"),
        "norm_q": ("attention", "core", "query_scale"),
        "norm_k": ("attention", "core", "key_scale"),
    }
    with jax.set_mesh(gtp_jax.make_mesh(devices=jax.devices()[:1])):
        llama = gtp_jax.init(lambda rngs: Llama(LlamaConfig(**work.model), rngs=rngs), nnx.Rngs(0))
        model = gtp_jax.init(lambda rngs: stock.Llama(work, rngs=rngs), nnx.Rngs(1))
        own = dict(nnx.to_flat_state(nnx.state(llama, nnx.Param)))
        for path, variable in own.items():
            if "scale" in str(path[-1]):  # of ones, a scale that is left out would not show
                noise = np.random.default_rng(len(path)).normal(size=variable.get_value().shape)
                variable.set_value(jnp.asarray(np.exp(noise), jnp.float32))
        nnx.update(llama, nnx.from_flat_state(own))
        model.embed.embedding.set_value(own["embed", "table"].get_value())
        model.head.kernel.set_value(own["head", "kernel"].get_value())
        model.norm.scale.set_value(own["head", "scale"].get_value())
        for number, layer in enumerate(model.layers):
            for name, place in places.items():
                module = getattr(layer, name)
                weight = module.scale if "norm" in name else module.kernel
                weight.set_value(own["blocks", "layers", *place].get_value()[number])
        call = nnx.jit(lambda model, tokens: model(tokens))
        want, found = (np.asarray(call(m, tokens), np.float32) for m in (llama, model))
    # both compute in bfloat16; without the rotation, a norm or the causal order it is above 0.5
    assert np.linalg.norm(found - want) < 0.05 * np.linalg.norm(want)
    assert model_size(model) == model_size(llama) == LlamaConfig(**work.model).param_count()


def model_size(model) -> int:
    return sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.slow
def test_a_tiny_suite_runs_on_virtual_devices(tmp_path, capsys):
    saved = tmp_path / "suite.json"
    flags = ["--workloads", "qwen3-8-ep2", "--contenders", "gtp_jax bf16 regather", "combined grad-norm regather"]
    assert main(["bench", "suite", *flags, "--rounds", "1", "--steps", "2", "--json", str(saved)]) == 0
    assert "no result" not in capsys.readouterr().out
    (entry,) = json.loads(saved.read_text())["summary"]
    ours, combined, tuned = entry["rows"]
    assert (ours["embedding_dtype"], combined["embedding_dtype"]) == ("float32", "bfloat16")
    assert ours["ratio_to_partitioner"] == min(combined["median_s"], tuned["median_s"]) / ours["median_s"]


def test_the_source_of_results_is_the_package_without_its_commands_and_the_rivals_scripts(tmp_path, monkeypatch):
    package, scripts = tmp_path / "gtp_jax", tmp_path / "contenders"
    shutil.copytree(Path(gtp_jax.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(SCRIPTS, scripts)
    monkeypatch.setattr(gtp_jax, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(_suite_file, "SCRIPTS", scripts)

    def changed_by(path: Path) -> bool:
        before = _suite_file._source()
        path.write_text(path.read_text() + "\n")
        return _suite_file._source() != before

    assert changed_by(scripts / "partitioner.py") and changed_by(package / "ops" / "__init__.py")
    assert not changed_by(package / "runner" / "cli" / "_doctor.py")
