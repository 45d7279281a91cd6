"""The loss and its first two derivatives against NumPy, in every view, and tokens that are left out."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo

P = jax.sharding.PartitionSpec
MESHES = {"no mesh": None, "gtp 8": dict(gtp=8), "tp 2": dict(gtp=4, tp=2), "tp 4": dict(dp=2, tp=4)}
BATCH = P(("dp", "gtp"))


def under(degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext()


def expected(logits, targets, tangent):
    """Sum of losses, count, gradient, and Hessian times tangent, of tokens with a target."""
    counts = targets >= 0
    shifted = logits - np.where(counts, logits.max(-1), 0)[..., None]
    probability = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    one_hot = np.eye(logits.shape[-1])[np.maximum(targets, 0)]
    loss = -np.log((probability * one_hot).sum(-1))
    product = probability * (tangent - (probability * tangent).sum(-1, keepdims=True))
    of_counted = lambda a: np.where(counts.reshape(counts.shape + (1,) * (a.ndim - counts.ndim)), a, 0)  # noqa: E731
    return of_counted(loss).sum(), counts.sum(), of_counted(probability - one_hot), of_counted(product)


def example(rng, vocab):
    logits, tangent = 5 * rng.normal(size=(2, 8, 6, vocab))
    targets = rng.integers(0, vocab, (8, 6))
    targets[2, 1], targets[4, 4], targets[0] = -1, -100, -1
    return logits, targets, tangent


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * max(1.0, np.abs(wanted).max()))


LEFT_OUT = ["nan", "inf", "-inf", "finite"]


@pytest.mark.parametrize(("mesh", "left_out"), pairwise(["tp 4", "no mesh", "tp 2", "gtp 8"], LEFT_OUT, usual=2))
def test_derivatives_in_global_view_are_those_of_the_formula_and_tokens_left_out_take_no_part(mesh, left_out, x64):
    rng = np.random.default_rng(0)
    logits, targets, tangent = example(rng, 24)
    wanted = expected(logits, targets, tangent)
    given = logits.copy()
    if left_out != "finite":
        given[targets < 0, :3] = float(left_out)
        given[2, 1] = float(left_out)
    with under(MESHES[mesh]):
        total = lambda logits: gtp.cross_entropy(logits, jnp.asarray(targets))  # noqa: E731
        gradient = jax.grad(lambda logits: total(logits)[0])
        value, count = jax.jit(total)(given)
        close(value, wanted[0])
        assert count == wanted[1]
        given, tangent = jnp.asarray(given), jnp.asarray(tangent)
        close(jax.jit(gradient)(given), wanted[2])
        forward_over_reverse = jax.jit(lambda x, t: jax.jvp(gradient, (x,), (t,))[1])
        close(forward_over_reverse(given, tangent), wanted[3])
        reverse_over_reverse = jax.jit(jax.grad(lambda x: jnp.vdot(jnp.where(tangent == 0, 0, gradient(x)), tangent)))
        close(reverse_over_reverse(given), wanted[3])


def test_a_weight_of_zero_leaves_a_token_out_even_if_its_logits_are_not_finite(x64):
    logits, targets, tangent = example(np.random.default_rng(1), 10)
    wanted = expected(logits, targets, tangent)
    weights = (targets >= 0).astype(np.float32)
    logits[targets < 0] = np.nan
    value = jax.jit(jax.value_and_grad(lambda x, w: gtp.cross_entropy(x, np.maximum(targets, 0), w), has_aux=True))
    (total, count), gradient = value(jnp.asarray(logits), jnp.asarray(weights))
    close(total, wanted[0])
    assert count == wanted[1]
    close(gradient, wanted[2])


@pytest.mark.parametrize("vocab", [24, 25])  # the last part of 25 is padded with -inf, as a head does
@pytest.mark.parametrize("sharded", [True, False])
def test_inside_a_shard_map_sharded_and_whole_logits_give_the_same(sharded, vocab, x64):
    logits, targets, tangent = example(np.random.default_rng(2), vocab)
    wanted = expected(logits, targets, tangent)
    padding = [(0, 0), (0, 0), (0, -vocab % 2)]
    own, along = logits, tangent
    if sharded:
        own, along = np.pad(logits, padding, constant_values=-np.inf), np.pad(tangent, padding)

    def local(x, t, targets):
        loss = lambda x: gtp.cross_entropy(x, targets, vocab_size=vocab)  # noqa: E731
        gradient = jax.grad(lambda x: loss(x)[0])
        # the convention of a shard_map: gradients are those of the sum of all ranks' losses
        copies = 2 if sharded else 1
        product = jax.jvp(gradient, (x,), (t,))[1]
        return *(v[None] for v in loss(x)), gradient(x) / copies, product / copies

    with under(dict(gtp=4, tp=2)):
        of_logits = P(("dp", "gtp"), None, "tp" if sharded else None)
        run = jax.shard_map(
            local,
            in_specs=(of_logits, of_logits, BATCH),
            out_specs=(BATCH, BATCH, of_logits, of_logits),
            check_vma=False,
        )
        total, count, gradient, product = jax.jit(run)(own, along, targets)
        close(total.sum(), wanted[0])
        assert count.sum() == wanted[1]
        close(gradient[..., :vocab], wanted[2])
        close(product[..., :vocab], wanted[3])


# of targets: classifiers, sequences, and more dimensions, one of them tp; some batches are no multiple of the ranks
SHAPES = [(), (8,), (6,), (3, 2), (8, 3, 2), (5, 2, 2), (8, 1, 2, 2)]


def of_shapes(vocab):
    rng = np.random.default_rng(3)
    logits = [rng.normal(size=(*shape, vocab)) for shape in SHAPES]
    targets = [np.asarray(rng.integers(-1, vocab, shape)) for shape in SHAPES]
    wanted = [expected(x[None], t[None], x[None]) for x, t in zip(logits, targets, strict=True)]
    return logits, targets, wanted


@pytest.mark.parametrize("mesh, vocab", pairwise(["tp 2", "no mesh", "tp 4"], [12, 13], usual=1))
def test_logits_of_any_rank_and_any_batch_have_the_loss_and_gradient_of_the_formula(mesh, vocab, x64):
    logits, targets, wanted = of_shapes(vocab)

    def losses(logits):
        found = [gtp.cross_entropy(x, jnp.asarray(t)) for x, t in zip(logits, targets, strict=True)]
        return sum(total for total, _ in found), found

    with under(MESHES[mesh]):
        gradients, found = jax.jit(jax.grad(losses, has_aux=True))(logits)
    for (total, count), gradient, (loss, number, slope, _) in zip(found, gradients, wanted, strict=True):
        close(total, loss)
        assert count == number
        close(gradient, slope[0])


def test_inside_a_shard_map_logits_have_any_rank(x64):
    shapes = [place for place, shape in enumerate(SHAPES) if shape[:1] == (8,)]
    logits, targets, wanted = ([one[place] for place in shapes] for one in of_shapes(12))
    specs = [P(("dp", "gtp"), *(None,) * (x.ndim - 2), "tp") for x in logits]

    def local(logits, targets):
        loss = lambda x, t: gtp.cross_entropy(x, t, vocab_size=12)[0]  # noqa: E731
        found = [jax.value_and_grad(loss)(x, t) for x, t in zip(logits, targets, strict=True)]
        return [total[None] for total, _ in found], [slope / 2 for _, slope in found]  # of both tp ranks' losses

    with under(dict(gtp=4, tp=2)):
        run = jax.shard_map(local, in_specs=(specs, BATCH), out_specs=(BATCH, specs), check_vma=False)
        totals, gradients = jax.jit(run)(logits, targets)
    for total, gradient, (loss, _, slope, _) in zip(totals, gradients, wanted, strict=True):
        close(total.sum(), loss)
        close(gradient, slope[0])


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(None, "`cross_entropy` 24 tp 2 vocab_size"), (50, "`vocab_size` 50 24 2 25")]
)
def test_logits_of_another_extent_than_the_vocabulary_are_refused(vocab_size, message):
    def local(x, targets):
        return gtp.cross_entropy(x, targets, vocab_size=vocab_size)[0][None]

    with under(dict(gtp=4, tp=2)):
        run = jax.shard_map(local, in_specs=(BATCH, BATCH), out_specs=BATCH, check_vma=False)
        with pytest.raises(ValueError, match=naming(message)):
            jax.eval_shape(run, np.zeros((8, 6, 24)), np.zeros((8, 6), np.int32))
    with pytest.raises(ValueError, match=naming("`vocab_size` 12 24")):
        gtp.cross_entropy(np.zeros((2, 3, 24)), np.zeros((2, 3), np.int32), vocab_size=12)


@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs the `target` extra")
def test_no_wide_copy_of_the_logits_is_made_on_gpus():
    mesh = gtp.make_mesh(gtp=4, tp=2, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    with jax.set_mesh(mesh):
        place = lambda *spec: jax.sharding.NamedSharding(mesh, P(*spec))  # noqa: E731
        logits = jax.ShapeDtypeStruct((8, 2048, 32768), jnp.bfloat16, sharding=place(("dp", "gtp"), None, "tp"))
        targets = jax.ShapeDtypeStruct((8, 2048), jnp.int32, sharding=place(("dp", "gtp")))
        loss = jax.jit(jax.value_and_grad(lambda logits, targets: gtp.cross_entropy(logits, targets)[0]))
        compiled = loss.lower(logits, targets).compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    ours = 2 * 8 * 2048 * 32768 // 8
    assert compiled.memory_analysis().temp_size_in_bytes < ours / 20
