"""A Llama under gtp_jax against the same Llama in stock Flax on one device: gradients, losses, parameters.

The conformance lines of TransformerEngine #2960 (`test_etp.py`), Megatron-LM (`test_gtp_basics.py`, `test_tp_gtp.py`)
that concern bf16 and plain weights, and where each is held here:

| upstream | here |
|---|---|
| 3a, 3b shard content, unaligned padding | `tests/layout/test_layouts.py` |
| 4a, 4b weight replaced, grouped list | `tests/nn/test_dense_views.py`; `test_moe_parity.py` |
| 5 Linear forward, backward at 0.1; 1e-5 in Megatron | this module, at 1e-12 in float64 |
| 6 LayerNormLinear smoke | this module: every block has two |
| 8a, 21 chain wired, prefetch disabled | `test_schedules_agree_with_the_plain_model` |
| 8b asynchronous prefetch | `tests/chain/test_overlap_h200.py` |
| 9a, 9b, 19 gradient shape, deferred scatter, padding stripped | this module: gradient *values*, unaligned sizes |
| 10 microbatches consistent | `test_meshes_agree_with_the_plain_model[...four microbatches]` |
| 14 config, unknown key | `tests/nn/test_errors_messages.py` |
| 15 shape properties | `tests/layout/test_layouts.py` |
| 20 group of size one is the plain path | `test_degree_one_is_the_plain_path_bit_for_bit` |
| 22, 23 main_grad accumulates | this module: five optimizer steps |
| gradient dtype on the wire | `tests/chain/test_collectives_of_a_step.py` |
| TP x GTP: group ranks, column, row, padding per tp slice | this module; `tests/layout/test_layouts.py` |
| 1, 2, 16, 17 state machines, tickets, buffer cache | no such state here: a compiled program owns its buffers |
| 18 debug names | parameters are named by their path in the model |
| hooks, graph capture, streams, symmetric memory | no such thing: order is data dependence in one program |
"""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from ..gradients import keeps_gradient
from .plain_llama import Oracle

# Nothing divides evenly: features of 56, a hidden size of 120, 1000 tokens.
UNALIGNED = LlamaConfig(
    vocab_size=1000, hidden_size=56, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=14, intermediate_size=120,
    dtype="float64",
)  # fmt: skip
STEPS = 5


MESHES = {
    "gtp 8": (dict(gtp=8), {}, 1),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), {}, 1),
    "gtp 4 x tp 2, whole sequence": (dict(gtp=4, tp=2), dict(sequence_parallel=False), 1),
    "dp 2 x gtp 2 x tp 2": (dict(dp=2, gtp=2, tp=2), {}, 1),
    "dp 2 x gtp 2 x tp 2, tied": (dict(dp=2, gtp=2, tp=2), dict(tie_embeddings=True), 1),
    "dp 2 x gtp 2, four microbatches": (dict(dp=2, gtp=2), {}, 4),
}
USUAL = ["dp 2 x gtp 2 x tp 2, tied", "dp 2 x gtp 2, four microbatches"]
SCHEDULES = {
    "waited for": dict(prefetch=False),
    "looped": dict(unroll=1),
    "looped by 2": dict(unroll=2),
    "none kept": dict(keep_gathered=0),
    "all kept": dict(keep_gathered="all", unroll=1),
    "nothing saved": dict(remat="nothing"),
    "activations saved": dict(remat="activations"),
    "everything saved": dict(remat="everything"),
}


def batches(config: LlamaConfig, size: int, length: int) -> list[dict[str, jax.Array]]:
    """Random tokens; some masked, unevenly over the batch."""
    rng = np.random.default_rng(list(map(ord, config.dtype)) + [size, length])
    found = []
    for _ in range(STEPS):
        tokens = rng.integers(0, config.vocab_size, (size, length + 1))
        weights = (rng.random((size, length)) > np.linspace(0, 0.8, size)[:, None]).astype(np.float32)
        found.append({"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)})
        found[-1]["weights"] = weights
    return found


def train(config, degrees: dict[str, int] | None, data, microbatches=1, rate=1e-2, view="local"):
    """Initial parameters, first gradient, losses and final parameters, all logical; without a mesh if no degrees.

    The gradient is what the first step gives its optimizer, clipped, and its norm from before.
    """
    count = int(np.prod(list(degrees.values()))) if degrees else 0
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[:count]) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        optimizer = keeps_gradient(optax.adamw(rate))
        model = placed(lambda rngs: Llama(config, rngs=rngs), 3)
        state = gtp.TrainState.create(model, optimizer)
        host = lambda tree: jax.tree.map(np.asarray, tree)  # noqa: E731
        start = host(state.logical().params)
        step = gtp.train_step(next_token_loss, optimizer, max_grad_norm=0.5, microbatches=microbatches, view=view)
        losses, gradient = [], None
        for batch in data:
            state, metrics = step(state, batch)
            gradient = gradient or host((state.logical().opt_state[0], metrics["grad_norm"]))
            losses.append(float(metrics["loss"]))
        return start, gradient, losses, host(state.logical().params)


_answers: dict = {}


def oracle(config: LlamaConfig, start, data, rate: float = 1e-2):
    """What stock Flax makes of these parameters and batches on the CPU; once for configurations that are one to it."""
    plain = dataclasses.replace(
        config, sequence_parallel=True, prefetch=True, unroll="full", keep_gathered=1, remat="matmuls"
    )
    key = (plain, rate, hash(tuple(np.asarray(a).tobytes() for a in jax.tree.leaves((start, data)))))
    if key not in _answers:
        # on a GPU, jax 0.12.0.1 gets the gradients of the stock model wrong by 60 %; the CPU is right
        with jax.default_device(jax.devices("cpu")[0]):
            answer = Oracle(plain).train(start, data, optax.adamw(rate), 0.5)
        _answers[key] = jax.tree.map(np.asarray, answer)
    return _answers[key]


def assert_close(found, wanted, tolerance: float, what: str) -> None:
    """Leaf by leaf: the norm of the difference, relative to the norm."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.ravel(a - b)) / max(np.linalg.norm(np.ravel(b)), 1e-30)
        assert error <= tolerance, f"{what}{jax.tree_util.keystr(path)}: relative error {error:.2e} > {tolerance}"


def check(config: LlamaConfig, degrees: dict[str, int], tolerance: float, microbatches: int = 1, view="local"):
    data = batches(config, 16 if microbatches > 1 else 8, 8)
    start, gradient, losses, end = train(config, degrees, data, microbatches, view=view)
    wanted_gradient, wanted_losses, wanted_end = oracle(config, start, data)
    assert_close(gradient, wanted_gradient, tolerance, "gradient of ")
    assert_close(losses, wanted_losses, tolerance, "loss of step ")
    # five steps of Adam amplify rounding where a gradient is near zero
    assert_close(end, wanted_end, 30 * tolerance, "after 5 steps ")


@pytest.mark.parametrize("name", others_full(MESHES, USUAL[1:]))
def test_meshes_agree_with_the_plain_model(name, x64):
    degrees, changes, microbatches = MESHES[name]
    check(dataclasses.replace(UNALIGNED, **changes), degrees, 1e-12, microbatches)


@pytest.mark.full
@pytest.mark.parametrize("name", USUAL)
def test_meshes_agree_with_the_plain_model_in_global_view(name, x64):
    degrees, changes, microbatches = MESHES[name]
    check(dataclasses.replace(UNALIGNED, **changes), degrees, 1e-12, microbatches, view="global")


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree_with_the_plain_model(name, x64):
    fields = SCHEDULES[name]
    layers = 4 if fields.get("unroll") == 2 else 3  # the fewest that leave a loop in the middle
    check(dataclasses.replace(UNALIGNED, num_layers=layers, **fields), dict(gtp=2, tp=2), 1e-12)


def test_degree_one_is_the_plain_path_bit_for_bit():
    config = dataclasses.replace(UNALIGNED, dtype="float32", num_layers=1)
    data = batches(config, 4, 8)[:3]
    found = (train(config, degrees, data) for degrees in (dict(dp=1, gtp=1, tp=1), None))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
def test_models_start_equal_on_every_mesh():
    config, found = dataclasses.replace(UNALIGNED, dtype="float32"), []
    for degrees in (dict(gtp=1), dict(gtp=8), dict(gtp=2, tp=2), dict(dp=2, gtp=2, tp=2)):
        with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
            model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(7))
            found.append(jax.tree.map(np.asarray, nnx.state(model)))
    for other in found[1:]:
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(found[0]), strict=True):
            np.testing.assert_array_equal(a, b)
