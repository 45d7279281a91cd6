"""`gtp-jax bench step`: the contenders run the same step, make the choice they are named after, and are reported."""

import contextlib
import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

import benchmarks
import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import PRESETS, Llama, LlamaConfig
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Quantization

from ..parity.plain_llama import Oracle

SIZES = dict(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
CHAIN = {"regather": 2, "keep": 1}  # gathers of a block's weight in a step


@pytest.fixture
def partitioner(monkeypatch):
    """The script, imported as if from its own folder."""
    monkeypatch.syspath_prepend(str(Path(benchmarks.__file__).with_name("contenders")))
    yield importlib.import_module("partitioner")
    for name in ("partitioner", "partitioned_experts", "engine", "timed", "deviceless", "workload"):
        sys.modules.pop(name, None)


def mesh_of(gtp_degree: int, tp: int):
    devices = jax.devices()[: gtp_degree * tp]
    return jax.make_mesh((gtp_degree, tp), ("gtp", "tp"), devices=devices, axis_types=(AxisType.Auto,) * 2)


def test_contenders_are_picked_by_words():
    names = [c.name for c in benchmarks.chosen_contenders(["fsdp2 bf16", "gtp_jax nvfp4"])]
    assert sorted(names) == ["fsdp2 bf16 keep", "fsdp2 bf16 regather", "gtp_jax nvfp4 keep", "gtp_jax nvfp4 regather"]
    at_some_degree = {c for tp in (1, 2) for c in benchmarks.chosen_contenders([], tp=tp)}
    assert at_some_degree == set(benchmarks.CONTENDERS) and len({c.name for c in at_some_degree}) == len(
        benchmarks.CONTENDERS
    )
    with pytest.raises(ValueError, match="no contender is called deepspeed; there are gtp_jax bf16 regather, "):
        benchmarks.chosen_contenders(["deepspeed"])


def test_contenders_take_part_at_the_tp_degrees_where_they_differ_and_can_run():
    bf16 = ["fsdp2 bf16 regather", "fsdp2 bf16 keep"]
    over_tp = [c.name for c in benchmarks.chosen_contenders(["fsdp2"], tp=2)]
    assert over_tp == [*bf16, "fsdp2 bf16 async-tp regather", "fsdp2 bf16 async-tp keep"]
    alone = [c.name for c in benchmarks.chosen_contenders(["fsdp2"])]
    scalings = [f"fsdp2 float8 {scaling} {policy}" for scaling in ("tensorwise", "rowwise") for policy in CHAIN]
    assert alone == [*bf16, *scalings]


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


def test_float8_without_torchao_or_over_tp_ends_with_what_to_do(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(benchmarks.__file__).with_name("contenders")))
    monkeypatch.delitem(sys.modules, "float8", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    float8 = importlib.import_module("float8")
    float8.check(None, tp=2)
    with pytest.raises(SystemExit, match="error: --float8 shards only over gtp, but tp is 2; remove --float8 or"):
        float8.check("tensorwise", tp=2)
    with pytest.raises(SystemExit, match="error: --float8 needs torchao, .*; run `pip install torchao`"):
        float8.check("rowwise", tp=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # an old torchao
    with pytest.raises(SystemExit, match="error: --float8 with experts needs torchao's grouped FP8; run `pip install "):
        float8.check("rowwise", tp=1, experts=True)
    with pytest.raises(SystemExit, match="error: --float8 with experts needs NVIDIA GPUs; remove --float8 or the"):
        float8.check("rowwise", tp=1, experts=True, cuda=False)
    sys.modules.pop("float8")


def test_contenders_of_transformer_engine_take_part_if_it_is_installed_or_named(monkeypatch):
    def chosen(*only: str, tp: int = 1) -> list[str]:
        return [c.name for c in benchmarks.chosen_contenders(only, tp=tp) if c.family == "te"]

    named = [f"te current {guard} {policy}" for policy in CHAIN for guard in ("grad-norm", "grad-norm-cond")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (chosen(), chosen("regather"), sorted(chosen("te", "gtp_jax bf16"))) == ([], [], sorted(named))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert (sorted(chosen()), chosen(tp=2)) == (sorted(named), [])
    assert benchmarks.contender_named("te current grad-norm keep").matmuls == "fp8"


def test_matmuls_of_transformer_engine_end_with_what_to_do_where_they_cannot_run(partitioner, monkeypatch):
    check = partitioner.engine.check
    check(None, tp=2)
    with pytest.raises(SystemExit, match="error: --te shards only over gtp, but tp is 2; remove --te or --tp"):
        check("current", tp=2)
    with pytest.raises(SystemExit, match="error: --te supports only dense layers; remove --te or the experts"):
        check("current", tp=1, experts=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="error: --te needs TransformerEngine, .*; run `pip install --no-build-isol"):
        check("current", tp=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(SystemExit, match="error: --te needs NVIDIA GPUs, for TransformerEngine's matmuls; remove --te"):
        check("current", tp=1, cuda=False)


def test_the_command_says_why_transformer_engine_did_not_run(capsys):
    step = ["--num-layers", "1", "--seq", "32", "--steps", "1", "--gtp", "1"]
    assert main(["bench", "step", *step, "--contenders", "te grad-norm keep"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^te current grad-norm +fp8 +keep +-", printed, re.MULTILINE) and " x te" in printed
    assert re.search(
        r"te current grad-norm keep: error: (--te needs TransformerEngine|TransformerEngine's matmuls)", printed
    )


def test_the_partitioner_multiplies_and_saves_as_it_is_told(partitioner, key):
    work = benchmarks.Workload(**SIZES, seq=32, sequences=2, gtp=2)
    tokens = jax.random.randint(key, (2, 32), 0, work.vocab_size)
    params = partitioner.init(work, key)
    seen, asked = [], set()

    def doubled(x, w):
        seen.append(w.shape)
        return 2 * jnp.tensordot(x, w, 1)

    def saves(primitive, *_, **known):
        asked.add(primitive.name)
        return False

    def gradient(matmuls, weights):
        fixed = {"unroll": 0, "keep_gathered": False, "dtype": jnp.float32, "attention": "xla", "matmuls": matmuls}
        return jax.jit(jax.grad(lambda p: partitioner.loss(work, p, tokens, tokens, **fixed)))(weights)

    with jax.set_mesh(mesh_of(2, 1)):
        told = gradient(partitioner.engine.Matmuls(doubled, saves, contextlib.nullcontext()), params)
        layers = params["layers"]
        twice = {name: 2 * w if name in partitioner.LAYER else w for name, w in layers.items()}
        usual = gradient(None, params | {"layers": twice})
    assert set(seen) == {layers[name].shape[1:] for name in partitioner.LAYER}
    assert {"dot_general", "name"} <= asked
    for name in partitioner.LAYER:
        np.testing.assert_allclose(told["layers"][name], 2 * usual["layers"][name], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(told["embed"], usual["embed"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("others", [{}, {"num_experts": 8, "top_k": 2, "shared_hidden": 32, "qk_norm": True}])
def test_operations_are_those_of_the_model(others):
    config = LlamaConfig(**SIZES, **others)
    work = benchmarks.Workload(**SIZES, **others, seq=32, sequences=4, gtp=2)
    assert benchmarks.workload_flops(work) == hlo.step_flops(
        matmul_params=config.matmul_params(), tokens=4 * 32, layers=2, seq=32, heads=4, head_dim=16
    )


@pytest.mark.parametrize("tp, unroll", [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_the_partitioner_has_the_same_loss_as_the_oracle(partitioner, key, tp, unroll):
    config = LlamaConfig(**SIZES, dtype="float32")
    oracle = Oracle(config)
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(int(jax.random.bits(key) % 1000)))))
    layers, head = params["blocks"]["layers"], params["head"]
    groups, size = config.num_heads // config.num_kv_heads, config.head_dim

    def by_head(name: str, count: int) -> jax.Array:
        kernel = layers["attention"]["qkv"]["kernel"][name]
        return jnp.reshape(kernel, (config.num_layers, config.hidden_size, config.num_kv_heads, count * size))

    up = layers["mlp"]["up"]["kernel"]
    theirs = {
        "layers": {
            "qkv": jnp.concatenate([by_head("query", groups), by_head("key", 1), by_head("value", 1)], axis=-1),
            "out": layers["attention"]["out"]["kernel"],
            "up": jnp.stack([up["gate"], up["up"]], axis=2),
            "down": layers["mlp"]["down"]["kernel"],
            "norm1": layers["attention"]["qkv"]["scale"],
            "norm2": layers["mlp"]["up"]["scale"],
        },
        "embed": params["embed"]["table"],
        "norm": head["scale"],
        "head": head["kernel"],
    }
    work = benchmarks.Workload(**SIZES, seq=32, sequences=2, gtp=2, tp=tp)
    tokens = jax.random.randint(key, (2, 32), 0, config.vocab_size)
    targets = jnp.roll(tokens, -1, axis=1)
    with jax.set_mesh(mesh_of(2, tp)):
        loss = jax.jit(
            lambda p: partitioner.loss(
                work, p, tokens, targets, unroll=unroll, keep_gathered=False, dtype=jnp.float32, attention="xla"
            )
        )(theirs)
    batch = {"tokens": tokens, "targets": targets, "weights": jnp.ones(tokens.shape)}
    np.testing.assert_allclose(loss, oracle.loss(params, batch), rtol=1e-5)


@pytest.mark.parametrize(
    "policy, unroll",
    [
        ("regather", 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("regather", 1), ("keep", 0), ("keep", 1))),
    ],
)
def test_the_partitioner_gathers_as_often_as_its_policy_says(partitioner, policy, unroll):
    work = benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=4)
    mesh = mesh_of(4, 1)
    step, make_state, shardings = partitioner.make_step(work, mesh, unroll=unroll, keep_gathered=policy == "keep")
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tokens = jax.ShapeDtypeStruct((1, 4, 32), jnp.int32, sharding=NamedSharding(mesh, partitioner.BATCH))
    with jax.set_mesh(mesh):
        found = hlo.collectives(step.lower(state, tokens, tokens).compile().as_text())
    elements = sum(
        c.times * shape.elements
        for c in found
        if c.kind == "all-gather"
        for shape in c.results
        if shape.elements >= 4096
    )
    model = LlamaConfig(**SIZES)
    blocks = model.matmul_params() - model.vocab_size * model.hidden_size
    assert elements == CHAIN[policy] * blocks + 2 * model.vocab_size * model.hidden_size


needs_target = pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs gtp_jax[target]")


def schedule_on_h200(partitioner, policy: str, layers: int, tp: int = 1) -> hlo.LaunchOrder:
    sizes = {name: value for name, value in vars(PRESETS["reference"]).items() if name in SIZES}
    work = benchmarks.Workload(**sizes | {"num_layers": layers}, sequences=8 // tp, gtp=8 // tp, tp=tp)
    devices = hlo.topology_devices(hlo.parse_target("h200:8"))
    mesh = Mesh(np.array(devices).reshape(work.gtp, tp), ("gtp", "tp"), axis_types=(AxisType.Auto,) * 2)
    options = {**hlo.COMPILE_OPTIONS, **partitioner.combined(work)}
    step, _, shardings = partitioner.make_step(work, mesh, unroll=0, keep_gathered=policy == "keep", xla=options)
    params = partitioner.abstract(work)
    shapes = params, jax.eval_shape(optax.adamw(1.0).init, params)
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tokens = jax.ShapeDtypeStruct((1, work.sequences, 8192), jnp.int32, sharding=NamedSharding(mesh, partitioner.BATCH))
    with jax.set_mesh(mesh):
        return hlo.launch_order(step.lower(state, tokens, tokens).compile().as_text())


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("policy", CHAIN)
def test_the_partitioner_at_its_best_hides_all_but_two_collectives_on_h200(partitioner, policy):
    found = schedule_on_h200(partitioner, policy, layers=4)
    assert len(found.exposed("all-gather", "reduce-scatter", "all-reduce")) <= 2
    gathers = [e.direction for e in found.collectives("all-gather")]
    assert (gathers.count("forward"), gathers.count("backward")) == (6, 4 * (policy == "regather"))


@pytest.mark.slow
@needs_target
def test_the_partitioner_compiles_over_tp_on_h200_with_cudnn_attention(partitioner):
    found = schedule_on_h200(partitioner, "regather", layers=1, tp=2)
    assert {e.direction for e in found.events if e.kind == "attention"} == {"forward", "backward"}


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
    assert "FLOPs of a step: 6 x matmul parameters x tokens" in printed
    assert re.search(r"^gtp_jax bf16 activations +bf16 +regather +bfloat16 +\d", printed, re.MULTILINE)
    assert "fsdp2 bf16 regather: ModuleNotFoundError: No module named 'torch'" in printed
    assert "grads: dtype in which weight gradients are sent and summed over the ranks" in printed
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
    with pytest.raises(ValueError, match="the saved run timed another step: other chip there, chip here. Use the same"):
        benchmarks.changes(run(1.0, 100), elsewhere)
    longer = benchmarks.record([], benchmarks.Workload(**SIZES, seq=64, sequences=4, gtp=2), "chip")
    with pytest.raises(ValueError, match="seq 64 there, 32 here"):
        benchmarks.changes(run(1.0, 100), longer)
    with pytest.raises(ValueError, match="was not written by `gtp-jax bench step --json`"):
        benchmarks.changes(run(1.0, 100), {"kernels": []})


def test_bad_arguments_are_refused_with_the_remedy(capsys):
    for flags, message in (
        (["--tokens", "100", "--seq", "64", "--gtp", "2"], "Use a multiple of 64"),
        (["--contenders", "deepspeed"], "no contender is called deepspeed"),
        (["--compare", "no.json"], "`--compare` is no.json, which is not a file. Give one that `gtp-jax bench"),
        (["--tp", "0"], "`tp` is 0; it must be a whole number of at least 1"),
    ):
        assert main(["bench", "step", *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_python_that_cannot_be_started_is_refused(capsys):
    assert main(["bench", "step", "--torch-python", "/nope"]) == 2
    assert "`--torch-python` is '/nope', which cannot be run." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [("4", "1", "1"), ("2", "2", "2")])
def test_every_contender_runs_the_step(degrees, tmp_path, capsys):
    saved = tmp_path / "run.json"
    flags = [f for pair in zip(("--gtp", "--tp", "--microbatches"), degrees, strict=True) for f in pair]
    shape = ["--num-layers", "2", "--seq", "64", "--steps", "4"]
    assert main(["bench", "step", *flags, *shape, "--json", str(saved)]) == 0
    rows = {row["name"]: row for row in json.loads(saved.read_text())["contenders"]}
    without = ("No module named 'torch'", "pip install torchao")  # optional: PyTorch's contenders are then left out
    absent = {n for n, row in rows.items() if any(reason in row.get("failure", "") for reason in without)}
    assert absent <= {name for name in rows if name.startswith("fsdp2")}
    run = [row for name, row in rows.items() if name not in absent]
    assert len(run) >= len([c for c in benchmarks.CONTENDERS if c.family != "fsdp2"]) and not any(
        "failure" in row for row in run
    ), capsys.readouterr().out
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


@pytest.mark.slow
def test_experts_over_ep_are_timed_by_transport(tmp_path, capsys):
    saved = tmp_path / "run.json"
    model = ["--preset", "tiny-moe", "--num-layers", "1", "--seq", "32", "--steps", "2", "--shared-hidden", "32"]
    words = ["gtp_jax bf16 regather", "partitioner scan regather", "bound bf16"]
    flags = ["--ep", "2", "--gtp", "2", "--transport", "gather", "padded", "--contenders", *words, "--json", str(saved)]
    assert main(["bench", "step", *model, *flags]) == 0
    assert "4 x cpu, gtp 2, ep 2, tp 1: 1 layers of width 128, 2 of 8 experts per token" in capsys.readouterr().out
    gather, padded, other, bound = json.loads(saved.read_text())["contenders"]
    assert [row["variant"] for row in (gather, padded)] == ["bf16 gather", "bf16 padded"]
    assert gather["loss"] == padded["loss"] and gather["last_loss"] == padded["last_loss"]  # bit for bit
    config = dataclasses.replace(PRESETS["tiny-moe"], num_layers=1, shared_hidden=32)
    assert gather["parameters"] == other["parameters"] == config.param_count()
    assert abs(other["loss"] - gather["loss"]) < 1 and bound["median_s"] < other["median_s"]
