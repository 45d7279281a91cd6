"""Ids outside the vocabulary: an error where their values are at hand, else NaN; never the row of another token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp

from .test_cross_entropy import MESHES, under

F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)


def ids(rng, vocab, bad):
    """Ids of every row of the vocabulary's ends, with bad ones at some positions."""
    tokens = rng.integers(0, vocab, (8, 8))
    tokens[:, 0], tokens[:, 1] = 0, vocab - 1
    places = ((0, 3), (5, 7), (7, 0))
    for place, value in zip(places, bad, strict=True):
        tokens[place] = value
    return tokens, places


# 97 is divided by no degree: the table's last part is padded
@pytest.mark.parametrize(("mesh", "vocab"), pairwise(["tp 2", "no mesh", "gtp 8", "tp 4"], [97, 64], usual=2))
def test_a_bad_token_has_a_row_of_nan_and_no_gradient_and_the_others_their_own(mesh, vocab, x64):
    rng = np.random.default_rng(vocab)
    tokens, places = ids(rng, vocab, (vocab, -1, 2**31 - 1))
    outside = np.zeros(tokens.shape, bool)
    for place in places:
        outside[place] = True
    cotangent = rng.normal(size=(8, 8, 16))
    with under(MESHES[mesh]):
        graph, state = nnx.split(gtp.init(lambda rngs: gtp.Embed(vocab, 16, rngs=rngs, **F64), nnx.Rngs(0)))

        def embed(state, tokens):
            y = nnx.merge(graph, state)(tokens)
            return jnp.sum(jnp.where(outside[..., None], 0, y) * cotangent), y

        (_, rows), gradient = jax.jit(jax.value_and_grad(embed, has_aux=True))(state, jnp.asarray(tokens))
        table = np.asarray(state["table"].get_value())
        np.testing.assert_array_equal(np.isnan(rows), np.broadcast_to(outside[..., None], rows.shape))
        np.testing.assert_array_equal(np.asarray(rows)[~outside], table[tokens[~outside]])
        expected = np.zeros(table.shape)
        np.add.at(expected, tokens[~outside], cotangent[~outside])
        np.testing.assert_allclose(gradient["table"].get_value(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mesh", others_full(MESHES, ["tp 2"]))
def test_a_bad_target_makes_the_loss_nan_and_leaves_every_gradient_finite(mesh, x64):
    rng = np.random.default_rng(3)
    targets, places = ids(rng, 64, (64, 2**31 - 1, 100))
    left_out = targets.copy()
    for place in places:
        left_out[place] = -1
    logits = jnp.asarray(rng.normal(size=(8, 8, 64)))
    with under(MESHES[mesh]):
        step = jax.jit(jax.value_and_grad(lambda logits, targets: gtp.cross_entropy(logits, targets)[0]))
        loss, gradient = step(logits, jnp.asarray(targets))
        finite, expected = step(logits, jnp.asarray(left_out))
        assert np.isnan(loss) and np.isfinite(finite)
        np.testing.assert_array_equal(gradient, expected)


def test_a_target_in_the_padding_of_a_vocabulary_is_outside_it(x64):
    P = jax.sharding.PartitionSpec
    with under(dict(gtp=4, tp=2)):
        head = gtp.init(lambda rngs: gtp.nn.LayerNormDense(16, 97, rngs=rngs, **F64), nnx.Rngs(0))
        graph, state = nnx.split(head)

        def local(params, x, targets):
            return gtp.cross_entropy(nnx.merge(graph, params)(x), targets, vocab_size=97)[0][None]

        specs = jax.tree.map(lambda v: P(*v.sharding.spec), state)
        into = (specs, P(("dp", "gtp"), "tp"), P(("dp", "gtp")))
        run = jax.jit(jax.shard_map(local, in_specs=into, out_specs=P(("dp", "gtp")), check_vma=False))
        x = jnp.ones((4, 2, 16))
        good = run(state, x, jnp.full((4, 2), 96))
        bad = run(state, x, jnp.asarray([[0, 97], [1, 1], [1, 1], [1, 1]]))
        assert np.isfinite(good).all()
        np.testing.assert_array_equal(np.isnan(bad), [True, False, False, False])


@pytest.mark.parametrize("mesh", others_full(["no mesh", "tp 2"], ["no mesh"]))
def test_ids_with_values_are_refused_by_name_and_position(mesh):
    with under(MESHES[mesh]):
        embed = gtp.init(lambda rngs: gtp.Embed(50, 16, rngs=rngs), nnx.Rngs(0))
        good = np.full((8, 4), 49)
        embed(good)
        for value in (50, -1):
            bad = good.copy()
            bad[6, 2] = bad[7, 0] = value
            message = naming(f"`tokens` {value} (6, 2) 50")
            for tokens in (bad, jnp.asarray(bad)):
                with pytest.raises(ValueError, match=message):
                    embed(tokens)
        logits = jnp.zeros((8, 4, 50))
        bad = np.full((8, 4), -100)
        assert gtp.cross_entropy(logits, bad)[1] == 0  # negative targets are left out
        bad[1, 3] = 50
        with pytest.raises(ValueError, match=naming("`targets` 50 (1, 3) negative")):
            gtp.cross_entropy(logits, bad)
        weights = jnp.ones((8, 4)).at[1, 3].set(0)
        assert gtp.cross_entropy(logits, bad, weights)[0] == 0


def test_ids_of_every_integer_type_are_compared_as_numbers():
    embed = gtp.Embed(300, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    table = np.asarray(embed.table.get_value())
    for dtype, found in ((jnp.uint8, 255), (jnp.int8, 127), (jnp.uint16, 299)):
        np.testing.assert_array_equal(jax.jit(embed)(np.full((1, 2), found, dtype))[0, 0], table[found])
    assert np.isnan(jax.jit(embed)(np.full((1, 2), 2**32 - 1, jnp.uint32))).all()
    loss = jax.jit(lambda targets: gtp.cross_entropy(jnp.zeros((1, 2, 300)), targets)[0])
    assert np.isnan(loss(np.full((1, 2), 2**32 - 1, jnp.uint32)))
    np.testing.assert_allclose(loss(np.full((1, 2), 255, jnp.uint8)), 2 * np.log(300), rtol=1e-6)


def test_ids_of_64_bits_without_a_sign_are_compared_as_numbers(x64):
    embed = jax.jit(gtp.Embed(300, 4, rngs=nnx.Rngs(0), **F64))
    rows = {last: embed(jnp.asarray([[7, last]], jnp.uint64))[0] for last in (299, 300, 2**63, 2**64 - 1)}
    np.testing.assert_array_equal(rows[299], embed(jnp.asarray([[7, 299]]))[0])
    for last in (300, 2**63, 2**64 - 1):
        np.testing.assert_array_equal(rows[last][0], rows[299][0])
        assert np.isnan(rows[last][1]).all()
    loss = jax.jit(lambda targets: gtp.cross_entropy(jnp.zeros((1, 2, 300)), targets)[0])
    assert np.isnan(loss(jnp.asarray([[7, 2**64 - 1]], jnp.uint64)))
    np.testing.assert_allclose(loss(jnp.asarray([[7, 299]], jnp.uint64)), 2 * np.log(300), rtol=1e-6)


def test_check_ids_finds_a_position_in_a_sharded_batch_and_refuses_what_has_no_values():
    with under(dict(gtp=4, tp=2)):
        tokens = np.zeros((8, 4), np.int32)
        tokens[5, 1] = 70
        spec = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.sharding.PartitionSpec(("dp", "gtp")))
        with pytest.raises(ValueError, match=naming("`tokens` 70 (5, 1)")):
            gtp.ops.check_ids(jax.device_put(tokens, spec), 70)
        gtp.ops.check_ids(jax.device_put(tokens, spec), 71)
    with pytest.raises(TypeError, match=naming("`tokens` traced `gtp_jax.ops.check_ids`")):
        jax.jit(lambda ids: gtp.ops.check_ids(ids, 8))(tokens)
    with pytest.raises(TypeError, match=naming("`targets` integers float32")):
        gtp.ops.check_ids(np.ones(3), 8, name="targets")
