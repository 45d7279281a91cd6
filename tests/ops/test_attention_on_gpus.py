"""cuDNN's attention against the one written out, on this machine's GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.ops import attention

pytestmark = pytest.mark.gpu

LENGTH, MEMORY = 512, 384
RNG = np.random.default_rng(0)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 6, (2, LENGTH)), axis=1))
OF_MEMORY = jnp.asarray(np.sort(RNG.integers(2, 8, (2, MEMORY)), axis=1))  # none of segments 0 and 1
MASK = RNG.random((2, LENGTH, LENGTH)) < 0.5
MASK[:, 7] = False  # a query that sees no key
MASK = jnp.asarray(MASK)

CASES = {
    "causal": dict(causal=True),
    "bidirectional": {},
    "causal window": dict(causal=True, window=100),
    "window to both sides": dict(window=100),
    "mask": dict(mask=MASK),
    "causal mask": dict(causal=True, mask=MASK),
    "mask alike": dict(mask=MASK[0]),
    "segments": dict(causal=True, segment_ids=SEGMENTS),
    "segments in a window": dict(causal=True, segment_ids=SEGMENTS, window=50),
    "scale": dict(causal=True, scale=0.2),
    "another sequence": dict(keys=MEMORY),
    "another sequence, segments": dict(keys=MEMORY, segment_ids=(SEGMENTS, OF_MEMORY)),
}


def error(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 128), (8, 64), (1, 128)])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_agrees_with_the_written_out_one(name, kv_heads, head_dim, key):
    options = dict(CASES[name])
    keys = options.pop("keys", LENGTH)
    shapes = ((2, LENGTH, 8, head_dim), *((2, keys, kv_heads, head_dim),) * 2, (2, LENGTH, 8, head_dim))
    drawn = (jax.random.normal(one, shape) for one, shape in zip(jax.random.split(key, 4), shapes, strict=True))
    *half, of_output = (t.astype(jnp.bfloat16) for t in drawn)

    def measured(how, operands, of_output):
        y, back = jax.vjp(lambda *t: attention(*t, implementation=how, **options), *operands)
        return y, *back(of_output)

    found = jax.jit(lambda *t: measured("native", *t))(half, of_output)
    with jax.default_matmul_precision("highest"):
        wide = [t.astype(jnp.float32) for t in half]
        wanted = jax.jit(lambda *t: measured("reference", *t))(wide, of_output.astype(jnp.float32))
    for what, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert error(one, other) < 1e-2, what
    unseen = np.asarray(wanted[0] == 0).all((2, 3))
    assert unseen.any() == (name in ("mask", "causal mask", "mask alike", "another sequence, segments"))
    for array in found[:2]:  # the output, and the gradient of queries
        assert (np.asarray(array, np.float32)[unseen] == 0).all()


@pytest.mark.parametrize("head_dim", [8, 256])
def test_sizes_that_explain_promises_run(head_dim):
    if head_dim == 256 and jax.devices()[0].compute_capability < "9.0":
        pytest.skip("heads of 256 need compute capability 9.0")
    x = jnp.ones((1, 64, 2, head_dim), jnp.bfloat16)
    run = jax.jit(jax.grad(lambda x: attention(x, x, x, causal=True, implementation="native").astype(float).sum()))
    assert jnp.isfinite(run(x)).all()


def test_packed_documents_in_cudnn_have_the_loss_that_they_have_alone(key):
    """In bfloat16, as far off as eight bits allow; a row that sees its neighbours is far off."""

    module = gtp.init(lambda rngs: gtp.Attention(256, num_heads=4, num_kv_heads=2, rngs=rngs), nnx.Rngs(0))
    documents = [jax.random.normal(jax.random.fold_in(key, n), (1, n, 256), jnp.bfloat16) for n in (64, 160, 32)]
    ids = jnp.repeat(jnp.arange(3), jnp.asarray([64, 160, 32]), total_repeat_length=256)[None]
    call = nnx.jit(lambda module, x, **more: module(x, **more))
    alone = jnp.concatenate([call(module, d) for d in documents], axis=1)
    packed = jnp.concatenate(documents, axis=1)
    assert error(call(module, packed, segment_ids=ids), alone) < 1e-2
    assert error(call(module, packed), alone) > 0.1
