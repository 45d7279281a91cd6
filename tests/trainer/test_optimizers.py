"""The optimizers and the schedules that a run chooses by name."""

from __future__ import annotations

import jax
import numpy as np
import optax.contrib
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.mesh import with_paths
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._held import held_of
from gtp_jax.runner.trainer._optimizer import learning_rate, optimizer_of
from gtp_jax.runner.trainer._start import check_same_optimizer
from gtp_jax.train._scope import arrays_in_scope

from .runs import read_records, small

SIZES = dict(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, seq=16)
MODEL = LlamaConfig(**{name: size for name, size in SIZES.items() if name != "seq"}, vocab_size=128)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("cosine", {10: 1, 60: 0.1 + 0.9 * (1 + np.cos(np.pi * 50 / 90)) / 2, 99: 0.10027, 100: 0.1}),
        ("linear", {10: 1, 55: 0.55, 100: 0.1}),
        ("wsd", {10: 1, 82: 1, 91: 0.55, 100: 0.1}),
        ("constant", {10: 1, 55: 1, 100: 1}),
    ],
)
def test_a_schedule_warms_up_and_then_falls_to_a_tenth_or_stays(schedule, shares):
    rate = learning_rate(TrainConfig(steps=100, warmup=10, lr=2.0, schedule=schedule))
    for step in range(10):  # 1/11 of the highest at first, in equal steps
        assert rate(step) == pytest.approx(2 * (1 / 11 + step / 11), rel=1e-5)
    for step, share in shares.items():
        assert rate(step) == pytest.approx(2 * share, rel=1e-3), step


@pytest.mark.full
@pytest.mark.parametrize(
    "chosen",
    [
        dict(optimizer="lion"),
        dict(optimizer="adafactor"),
        dict(optimizer="muon"),
        dict(optimizer="muon", optimizer_state="float8"),
        dict(optimizer_state="bfloat16"),
        dict(optimizer_state="float8", average=0.9),
    ],
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)
def test_a_run_with_an_optimizer_learns_and_goes_on_from_a_checkpoint(chosen, text, tmp_path):
    flags = dict(SIZES, **chosen, schedule="wsd", eval_every=0)
    assert main(["train", *small(text, tmp_path / "run", **flags)]) == 0
    first = [record["loss"] for record in read_records(tmp_path / "run") if "loss" in record]
    assert first[-1] < first[0] and len(first) == 8
    assert main(["train", "--resume", "--step=6", f"--out={tmp_path / 'run'}"]) == 0
    again = [record["loss"] for record in read_records(tmp_path / "run") if "loss" in record]
    assert again[-2:] == first[-2:]


def test_moments_are_stored_as_the_flag_says_and_counted_in_the_memory_of_a_device():
    mesh = gtp.make_mesh(gtp=2, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        model = abstract_model(lambda rngs: Llama(MODEL, rngs=rngs))
        configs = [TrainConfig(optimizer_state=state) for state in ("float32", "bfloat16", "float8")]
        states = [gtp.TrainState.create(model, optimizer_of(config, model)) for config in configs]
    full, half, eighth = (held_of(state, mesh).bytes for state in states)
    parameters = jax.tree.leaves(states[0].params)
    local = [np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in parameters]
    coded = sum(n for n, leaf in zip(local, parameters, strict=True) if leaf.size >= 4096)
    count = 4  # the number of updates, from which random bits are drawn
    assert full - half == 2 * 2 * sum(local) - count and coded > sum(local) / 2
    assert full - eighth == 2 * (4 - 1 - 1 / 16) * coded - count


@pytest.mark.parametrize("state", ["bfloat16", "float8"])
def test_a_format_of_moments_is_refused_without_moments_and_kept_by_a_resumed_run(state):
    for optimizer in ("adafactor", "schedule-free"):
        with pytest.raises(ValueError, match=naming(f"`optimizer_state` '{state}' {optimizer} adamw lion muon")):
            TrainConfig(optimizer=optimizer, optimizer_state=state)
    with pytest.raises(ValueError, match=naming(f"{state} float32 --optimizer-state")):
        check_same_optimizer(TrainConfig(optimizer_state=state), TrainConfig())
    with pytest.raises(ValueError, match=naming("`optimizer_state` 'fp8' float8")):
        TrainConfig(optimizer_state="fp8")


@pytest.mark.full
def test_muon_orthogonalizes_the_matrices_of_each_layer_alone_and_adamw_has_the_rest():
    config = TrainConfig(optimizer="muon", weight_decay=0.1, warmup=0, lr=0.5, schedule="constant")
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.init(lambda rngs: Llama(MODEL, rngs=rngs), nnx.Rngs(0))
        state = gtp.TrainState.create(model, optimizer_of(config, model))
        grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), state.params)
        with arrays_in_scope(state.model_def.layer_counts):
            updates, _ = optimizer_of(config, model).update(grads, state.opt_state, state.params)
        updates, params, grads = jax.device_get((updates, state.params, grads))
    update, gate = (tree["blocks"]["layers"]["mlp"]["up"]["kernel"]["gate"] for tree in (updates, params))
    up = update + 0.05 * gate
    for layer in up:  # (32, 64): all singular values are alike, and the size is that of AdamW's updates
        values = np.linalg.svd(layer / 0.5, compute_uv=False)
        assert values.max() / values.min() < 2 and 0.1 < np.sqrt(np.mean(np.square(layer / 0.5))) < 0.3
    alone = optax.contrib.muon(0.5, weight_decay=0.1, consistent_rms=0.2)
    hidden = {path for path, leaf in with_paths(updates["blocks"]) if leaf.ndim == 3}
    # each part of a fused kernel
    assert {path[-1] for path in hidden} == {*"query key value gate up kernel".split()}
    trees = (dict(with_paths(tree["blocks"])) for tree in (updates, grads, params))
    found, gradients, weights = ({path: tree[path] for path in hidden} for tree in trees)
    for path in hidden:
        for layer in range(2):
            weight = {"w": weights[path][layer]}
            wanted, _ = alone.update({"w": gradients[path][layer]}, alone.init(weight), weight)
            np.testing.assert_allclose(found[path][layer], wanted["w"], atol=1e-4, err_msg=str(path))
    for name in ("embed", "head"):
        for own, param in zip(*map(jax.tree.leaves, (updates[name], params[name])), strict=True):
            decay = 0.05 * param if param.ndim > 1 else 0
            np.testing.assert_allclose(np.abs(own + decay), 0.5, rtol=1e-3)  # the sign of the first gradient
