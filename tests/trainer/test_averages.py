"""Averages of weights: what is evaluated, sampled, exported and read of a run that trains others."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from messages import naming
from placed import placed
from safetensors.numpy import load_file

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints, StoredArray
from gtp_jax.convert import export_llama
from gtp_jax.experts import Routing
from gtp_jax.mesh import with_paths
from gtp_jax.models import Llama, LlamaConfig, evaluation_weights, load, next_token_loss
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig, _family
from gtp_jax.runner.trainer._average import averaged
from gtp_jax.runner.trainer._optimizer import optimizer_of
from gtp_jax.runner.trainer._start import check_same_optimizer

from .runs import losses, read_records, small

SIZES = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, seq=16)
MODEL = LlamaConfig(
    **{name: size for name, size in SIZES.items() if name != "seq"},
    vocab_size=128,
    num_experts=4,
    top_k=2,
    routing=Routing(score="sigmoid", bias_rate=0.1),
)
WAYS = {"schedule-free": dict(optimizer="schedule-free"), "average": dict(average=0.8)}
TABLE = ("embed", "table")


def tokens(seed):
    ids = np.random.default_rng(seed).integers(0, 128, (4, 17))
    return {"tokens": jnp.asarray(ids[:, :-1]), "targets": jnp.asarray(ids[:, 1:])}


def llama(rngs):
    return Llama(MODEL, rngs=rngs)


def state_of(config):
    model = placed(llama)
    return gtp.TrainState.create(model, optimizer_of(config, model))


def after_each_step(config, steps):
    """The parameters after each of a few steps, and the state after the last."""
    state, found = state_of(config), []
    step = gtp.train_step(next_token_loss, optimizer_of(config, state.model()), view="local")
    for i in range(steps):
        state, _ = step(state, tokens(i))
        found.append({path: np.asarray(leaf, np.float64) for path, leaf in with_paths(state.params)})
    return found, state


@pytest.fixture
def mesh():
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])) as mesh:
        yield mesh


def is_bias(path):
    return path[-1] == "router_bias"


@pytest.mark.full
def test_an_average_weighs_a_step_less_with_each_one_behind_it(mesh):
    found, state = after_each_step(TrainConfig(average=0.8, warmup=0), 4)
    weights = dict(with_paths(evaluation_weights(state.params, state.opt_state)))
    shares = 0.8 ** np.arange(3, -1, -1)
    assert any(is_bias(path) for path in weights)
    for path, weight in weights.items():
        assert weight.dtype == jnp.float32
        wanted = np.tensordot(shares / shares.sum(), np.stack([params[path] for params in found]), 1)
        if is_bias(path):  # of a router, which the optimizer does not move
            wanted = found[-1][path]
            assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_schedule_free_weights_are_those_of_optax(mesh):
    found, state = after_each_step(TrainConfig(optimizer="schedule-free", warmup=0), 3)
    weights = dict(with_paths(evaluation_weights(state.params, state.opt_state)))
    free = state.opt_state.inner_states[True].inner_state
    z = dict(with_paths(free.z))
    (bias,) = weights.keys() - z.keys()
    assert is_bias(bias)
    np.testing.assert_array_equal(weights.pop(bias), found[-1][bias])
    params = {path: leaf for path, leaf in with_paths(state.params) if path != bias}
    wanted = optax.contrib.schedule_free_eval_params(free._replace(z=z), params)
    for path, weight in weights.items():
        np.testing.assert_array_equal(weight, wanted[path])
    assert any(np.abs(np.asarray(params[path]) - wanted[path]).max() > 1e-4 for path in wanted)


@pytest.mark.parametrize("way", WAYS)
def test_shards_stay_shards_and_nothing_is_sent(way, mesh):
    state = state_of(TrainConfig(**WAYS[way]))
    compiled = jax.jit(evaluation_weights).lower(state.params, state.opt_state).compile()
    assert hlo.collectives(compiled.as_text()) == []
    weights = compiled(state.params, state.opt_state)
    for weight, param in zip(jax.tree.leaves(weights), jax.tree.leaves(state.params), strict=True):
        assert weight.sharding.is_equivalent_to(param.sharding, param.ndim)
    own = {path: leaf.sharding for path, leaf in with_paths(state.params)}
    beside = [(path, leaf) for path, leaf in with_paths(state.opt_state) if path[-2:] == TABLE]
    assert len(beside) >= 2 and all(leaf.sharding == own[TABLE] for _, leaf in beside)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999999, 1 - 1e-9])
def test_the_initial_weights_do_not_count_and_the_shares_add_up_to_one(decay):
    @jax.jit
    def average(weight):
        optimizer = averaged(optax.sgd(1.0), decay, True)
        state = optimizer.init(weight)
        for value in (0.0, 4.0, -1.0):
            update, state = optimizer.update(weight - value, state, weight)
            weight = optax.apply_updates(weight, update)
        return state.average

    shares = np.array([decay**2, decay, 1.0])
    assert float(average(np.float32(1))) == pytest.approx(
        float(shares @ [0.0, 4.0, -1.0] / shares.sum()), rel=1e-5, abs=1e-5
    )


@pytest.fixture(scope="module", params=["average", pytest.param("schedule-free", marks=pytest.mark.full)])
def run(request, text, tmp_path_factory):
    """A run of eight steps, with the tables of embeddings that it evaluated and that it sampled from."""
    directory = tmp_path_factory.mktemp(request.param) / "run"
    seen = {"evaluated": [], "sampled": []}
    with pytest.MonkeyPatch.context() as patch:
        evaluate, sample = _family.FamilyTask._evaluate, _family.sample
        table = lambda state: np.asarray(state.params["embed"]["table"])  # noqa: E731
        for owner, name, call, which in (
            (_family.FamilyTask, "_evaluate", evaluate, "evaluated"),
            (_family, "sample", sample, "sampled"),
        ):
            noted = lambda *args, call=call, which=which: seen[which].append(table(args[-1])) or call(*args)  # noqa: E731
            patch.setattr(owner, name, noted, raising=True)
        flags = dict(SIZES, sample_tokens=4, keep=4, gtp=4, tp=2, **WAYS[request.param])
        assert main(["train", *small(text, directory, **flags)]) == 0
    return directory, seen


def trained_and_evaluated(run, step=None):
    """The two sets of weights of a checkpoint, by path."""
    arrays = Checkpoints(run / "checkpoints", read_only=True).arrays(step)
    trained = {
        tuple(name.split("/")[1:]): array.read(0, array.shape[0])
        for name, array in arrays.items()
        if name.startswith("params/")
    }
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=2, tp=2)):
        model = load(run, step=step, dtype="float32")
        evaluated = {
            tuple(map(str, path)): np.asarray(v.get_raw_value())
            for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
        }
    assert trained.keys() == evaluated.keys()
    return trained, evaluated


@pytest.mark.full
def test_a_run_evaluates_and_samples_the_weights_that_are_read_of_it(run):
    directory, seen = run
    trained, evaluated = trained_and_evaluated(directory)
    assert np.abs(trained[TABLE] - evaluated[TABLE]).max() > 1e-3
    for what in ("evaluated", "sampled"):
        assert len(seen[what]) == 3  # steps 0, 4, 8
        np.testing.assert_allclose(seen[what][-1], evaluated[TABLE], atol=1e-7)
    _, earlier = trained_and_evaluated(directory, step=4)
    np.testing.assert_allclose(seen["evaluated"][1], earlier[TABLE], atol=1e-7)


def test_an_export_has_the_evaluated_weights(run, tmp_path):
    directory, _ = run
    export_llama(directory / "checkpoints", tmp_path / "out", dtype="float32")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    _, evaluated = trained_and_evaluated(directory)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], evaluated[TABLE])
    gates = evaluated["blocks", "layers", "mlp", "up", "kernel", "gate"]
    for layer, gate in enumerate(gates):
        np.testing.assert_array_equal(tensors[f"model.layers.{layer}.mlp.gate_proj.weight"], gate.T)


@pytest.mark.full
def test_another_run_starts_from_the_evaluated_weights(run, text, tmp_path):
    directory, seen = run
    flags = dict(num_layers=1, seq=16, steps=1, gtp=8, tp=1)
    assert main(["train", f"--from={directory}", *small(text, tmp_path / "next", **flags)]) == 0
    before, after = (list(losses(one, "held_out").values()) for one in (directory, tmp_path / "next"))
    assert after[0] == pytest.approx(before[-1], rel=1e-6)


@pytest.mark.full
def test_a_checkpoint_has_both_sets_and_goes_on_anywhere(run, tmp_path):
    directory, _ = run
    first = read_records(directory)
    for name, degrees, rtol in (("same", [], 0), ("other", ["--gtp=2", "--tp=1", "--dp=4"], 1e-5)):
        out = tmp_path / name
        shutil.copytree(directory, out)
        assert main(["train", "--resume", "--step=6", f"--out={out}", *degrees]) == 0
        for record, wanted in zip(read_records(out), first, strict=True):
            assert record == pytest.approx(wanted, rel=rtol, abs=0), name


def test_an_average_that_was_changed_on_disk_is_not_read(run, monkeypatch, tmp_path):
    directory, _ = run
    read = StoredArray._rows
    changed = lambda self, begin, end: read(self, begin, end) + np.float32(self.name.endswith("embed/table") * 1e-3)  # noqa: E731
    monkeypatch.setattr(StoredArray, "_rows", changed)
    message = "opt_state/(.*/)?(z|average)/embed/table"
    with jax.set_mesh(gtp.make_mesh(gtp=8)), pytest.raises(ValueError, match=f"(?s)damaged:.*{message}"):
        load(directory)
    with pytest.raises(ValueError, match=message):
        export_llama(directory / "checkpoints", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, dict(average=0.9), "0.9 --average"),
        (dict(average=0.9), {}, "average given"),
        (dict(optimizer="schedule-free"), {}, "--optimizer"),
    ],
)
def test_a_resumed_run_keeps_its_averages(before, after, message):
    with pytest.raises(ValueError, match=naming(message)):
        check_same_optimizer(TrainConfig(**before), TrainConfig(**after))
    check_same_optimizer(TrainConfig(average=0.9), TrainConfig(average=0.99))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(average=1.0), "`average` 1.0 0 1 0.999"),
        (dict(optimizer="schedule-free", average=0.9), "--average"),
        (dict(optimizer="schedule-free", schedule="wsd"), "`schedule` 'wsd' `optimizer`"),
    ],
)
def test_averages_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=naming(message)):
        TrainConfig(**settings)
