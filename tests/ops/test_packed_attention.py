"""Packed rows: which way is taken, and that each is right for what it is taken for.

cuDNN's part is written out by hand here; `test_attention_on_gpus.py` runs cuDNN's own.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import every, others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.chain._policy import with_remat
from gtp_jax.ops import attention, attention_backward, attention_with_lse, packed_lacks
from gtp_jax.ops._attention import _cudnn_calls, _packed

from ..hlo.programs import array, needs_target
from . import cudnn_by_hand

P = jax.sharding.PartitionSpec
LENGTH, HEADS, WIDTH = 64, 4, 8


def runs(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


ONE = runs(64)
SHORT = runs(*[4] * 16)
CASES = {  # ids of two rows, which way is taken: alone, room for 4 documents a row and for 16, the mask
    "one document": ([ONE, ONE + 3], 0),
    "two": ([ONE, runs(35, 29)], 1),
    "the same ids in both rows": ([runs(35, 29), runs(13, 51)], 1),
    "one-token documents": ([runs(1, 1, 61, 1), ONE], 1),
    "one row with more than four": ([runs(8, 8, 8, 8, 8, 11, 13), ONE], 1),
    "as many as there is room for": ([runs(1, 13, 15, 35), runs(16, 16, 16, 16)], 1),
    "one too many": ([runs(1, 13, 15, 35), runs(16, 16, 16, 3, 13)], 2),
    "a quarter of a row, and one token more": ([runs(16, 17, 15, 1, 15), runs(17, 17, 17, 13)], 2),
    "a long one among many short": ([runs(1, 3, 40, *[2] * 10), ONE], 2),
    "as many short ones as there is room for": ([SHORT, SHORT], 2),
    "one short one too many": ([SHORT, runs(*[4] * 15, 3, 1)], 3),
    "a document a token": ([np.arange(64), np.arange(64)], 3),
    "padding": ([runs(15, 14, 35) % 2 - 1, runs(39, 25)], 3),  # both ends of a row have the id -1, and see each other
    "descending ids": ([3 - runs(15, 14, 35), ONE], 1),
    "an id comes back": ([np.array([0] * 25 + [1] * 15 + [0] * 24), ONE], 3),
}
OPTIONS = {"causal": (True, None), "bidirectional": (False, None), "window": (True, 9)}


@pytest.fixture
def by_hand(monkeypatch, x64):
    """cuDNN written out, in float64, and rows of 64 tokens with room for 16 documents."""
    monkeypatch.setattr(jax.ffi, "ffi_call", cudnn_by_hand.call)
    monkeypatch.setitem(_cudnn_calls._ELEMENTS, "float64", "F64")
    monkeypatch.setitem(_packed._UNSEEN, "float64", -1e30)
    monkeypatch.setattr(_packed, "_TILE", 16)
    assert _packed.calls_for(LENGTH) == 2


def operands(kv_heads, batch=2):
    rng = np.random.default_rng(0)
    shapes = [(batch, LENGTH, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def packed(ids, causal, window):
    return lambda q, k, v: _packed.packed_attention(q, k, v, ids, causal=causal, window=window, scale=0.3)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, q, k, v, of_out):
    y, back = jax.vjp(function, q, k, v)
    return y, *back(of_out)


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


EVERY_WAY = ("one document", "two", "a long one among many short", "an id comes back")


@pytest.mark.parametrize(
    ("name", "options"),
    every(
        12,
        [
            *((name, "causal") for name in CASES),
            *((name, o) for name in EVERY_WAY for o in ("bidirectional", "window")),
        ],
    ),
)
def test_every_way_is_right_for_the_ids_that_take_it(name, options, by_hand):
    rows, way = CASES[name]
    ids = jnp.asarray(np.stack(rows))
    assert jax.jit(lambda ids: _packed.documents_of(ids).way)(ids) == way
    found, wanted = both_ways(options)(ids, *operands(2))
    assert_equal(found, wanted)


@functools.cache
def both_ways(options):
    """Returns the program, for all ids, of packed attention and of the reference; to be called `by_hand`."""
    causal, window = OPTIONS[options]

    def run(ids, *given):
        reference = functools.partial(
            attention, causal=causal, window=window, segment_ids=ids, scale=0.3, implementation="reference"
        )
        return with_gradients(packed(ids, causal, window), *given), with_gradients(reference, *given)

    return jax.jit(run)


@pytest.mark.parametrize("window", others_full([None, 9], [9]))
def test_long_rows_of_any_ids_are_computed_in_blocks(window, by_hand, monkeypatch):
    monkeypatch.setattr(_packed, "MOST_MASKED", LENGTH**2 - 1)
    monkeypatch.delitem(_packed._UNSEEN, "float64")  # no bias is made
    ids = jnp.asarray(np.stack(CASES["an id comes back"][0]))

    def run(*given):
        blocks = functools.partial(_packed.packed_attention, segment_ids=ids, causal=True, window=window, scale=0.29)
        reference = functools.partial(attention, segment_ids=ids, causal=True, window=window, scale=0.29)
        return with_gradients(blocks, *given), with_gradients(reference, *given)

    assert_equal(*jax.jit(run)(*operands(2)))


def test_calls_are_for_documents_of_a_tile_and_more():
    calls = {1024: 2, 2048: 3, 4096: 3, 8192: 3, 1030: 1, 1028: 2}
    assert {length: _packed.calls_for(length) for length in calls} == calls


def test_documents_are_found_and_divided_in_random_rows(monkeypatch):
    monkeypatch.setattr(_packed, "_TILE", 4)
    rng = np.random.default_rng(3)
    find = jax.jit(lambda ids: (found := _packed.documents_of(ids), _packed.calls_of(found, 3)))
    ways = set()
    for longest in (2, 6, 30, 60) * 4:
        ids = np.stack([np.repeat(rng.permutation(64), rng.integers(1, longest + 1, 64))[:64] for _ in range(3)])
        found, calls = find(jnp.asarray(ids))
        places = [(row, at) for row in range(3) for at in range(64) if at == 0 or ids[row, at] != ids[row, at - 1]]
        starts = np.array([row * 64 + at for row, at in places])
        room = 3 * 64
        np.testing.assert_array_equal(found.starts, [*starts, *[192] * (room + 1 - len(starts))])
        np.testing.assert_array_equal(found.number.reshape(-1), np.searchsorted(starts, np.arange(192), "right") - 1)
        assert found.way == sum(len(starts) > 3 * n for n in (1, 4, 16, 64))
        ways.add(int(found.way))
        lengths = np.diff([*starts, 192])
        for call, (least, most) in zip(calls, ((17, 64), (5, 16), (1, 4)), strict=True):
            chosen = (lengths >= least) & (lengths <= most)
            size = 4 * 192 // most
            assert call.length == most and chosen.sum() <= size
            rest = size - chosen.sum()
            np.testing.assert_array_equal(call.documents.starts, [*starts[chosen], *[192] * (rest + 1)])
            np.testing.assert_array_equal(call.documents.lengths, [*lengths[chosen], *[0] * rest])
            np.testing.assert_array_equal(call.mine, chosen[np.asarray(found.number)])
    assert ways == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_vmap_joins_the_batch_and_still_chooses_one_way(shared, by_hand):
    given = [jnp.stack([x, 2 * x, x - 1]) for x in operands(2)]
    rows = [runs(39, 25), runs(3, 61), ONE]
    ids = jnp.asarray(np.stack([rows[0], rows[1]])) if shared else jnp.asarray([[a, b] for a in rows[:1] for b in rows])

    def one(ids, *given):
        return with_gradients(packed(ids, True, None), *given)

    run = jax.vmap(one, in_axes=(None if shared else 0, 0, 0, 0, 0))
    wanted = [one(ids if shared else ids[i], *(x[i] for x in given)) for i in range(3)]
    assert_equal(run(ids, *given), [jnp.stack(x) for x in zip(*wanted, strict=True)])
    text = str(jax.make_jaxpr(run)(ids, *given))
    assert text.count("cond[") == 2  # forward and backward, each with an index and not a `select` of all ways


def test_ranks_choose_for_themselves_over_batch_and_heads(by_hand):
    given = operands(2, batch=8)
    rows = [ONE, ONE, runs(39, 25), ONE, np.arange(64), ONE, SHORT, runs(1, 63)]
    ids = jnp.asarray(np.stack(rows))
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        spec = P("gtp", None, "tp")
        mapped = jax.shard_map(
            lambda ids, *given: with_gradients(packed(ids, True, None), *given),
            in_specs=(P("gtp"), *(spec,) * 4),
            out_specs=(spec,) * 4,
            check_vma=False,
        )
        found = jax.jit(mapped)(ids, *given)
    reference = functools.partial(attention, causal=True, segment_ids=ids, scale=0.3, implementation="reference")
    assert_equal(found, with_gradients(reference, *given))


@pytest.mark.full
def test_it_works_under_remat_and_scan(by_hand):
    q, k, v, of_out = operands(2)
    ids = jnp.asarray(np.stack([runs(39, 25), ONE]))

    def twice(attend, q, k, v):
        body = jax.checkpoint(lambda q, _: (attend(q, k, v), None))
        return jax.lax.scan(body, q, None, length=2)[0]

    reference = functools.partial(attention, causal=True, segment_ids=ids, scale=0.3, implementation="reference")
    wanted = with_gradients(functools.partial(twice, reference), q, k, v, of_out)
    assert_equal(with_gradients(functools.partial(twice, packed(ids, True, None)), q, k, v, of_out), wanted)


def equations(jaxpr):
    """All equations, those of what is called too, as often as it is called."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("remat", ["attention", "matmuls", "activations"])
def test_recomputation_does_not_run_it_again(by_hand, remat):
    q, k, v, of_out = operands(2)
    ids = jnp.asarray(np.stack([runs(39, 25), ONE]))

    def choices(remat):
        attend = with_remat(packed(ids, True, None), remat)
        made = jax.make_jaxpr(functools.partial(with_gradients, attend))(q, k, v, of_out)
        return sum(equation.primitive.name == "cond" for equation in equations(made.jaxpr))

    assert choices("nothing") == 3  # forward, again, backward
    assert choices(remat) == choices("everything") == 2


# What is emitted for GPUs ---------------------------------------------------------------------------------------------

HALF = {heads: jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2)}


def calls(function, *shapes):
    """cuDNN's custom calls in a program for GPUs: target, configuration, and the rest of the text."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if match := re.search(r"custom_call @(__cudnn\$\w+)\(([^)]*)\) \{(.*)backend_config = \"(.*?)\"(.*)", line):
            target, _, before, config, after = match.groups()
            found.append((target, json.loads(config.replace(r"\22", '"')), before + after))
    return found


def plain(options, bias):
    def run(q, k, v, of_out, *mask):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask[0] if mask else None,
            is_causal=options.causal,
            scale=options.scale,
            local_window_size=None if options.window is None else (options.window - 1, 0),
            implementation="cudnn",
        )

    return run if bias else lambda *t: jax.vjp(lambda q, k, v: run(q, k, v, None), *t[:3])[1](t[3])


@needs_target
@pytest.mark.parametrize(
    ("options", "keys"),
    [((True, None, 0.125), 1024), ((False, None, 0.125), 1024), ((False, None, 0.125), 320), ((True, 100, 0.2), 1024)],
)
def test_calls_without_documents_are_those_of_jax(options, keys):
    options = _cudnn_calls.Options(*options)

    def ours(q, k, v, of_out):
        y, stats = _cudnn_calls.forward(q, k, v, None, None, options)
        return _cudnn_calls.backward(q, k, v, None, None, stats, y, of_out, options)

    of_keys = HALF[2].update(shape=(2, keys, 2, 64))
    shapes = HALF[8], of_keys, of_keys, HALF[8]
    found = calls(ours, *shapes)
    assert [target for target, *_ in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert found == calls(plain(options, False), *shapes)


@needs_target
@pytest.mark.parametrize(("local", "made"), [(True, 2), (False, 0)])
def test_parts_of_keys_are_cudnns_where_xla_need_not_shard_its_calls(local, made):
    def ours(q, k, v, of_out):
        y, lse = attention_with_lse(q, k, v)
        return attention_backward(q, k, v, y, lse, of_out)

    def each(*given):  # under `vmap`, whose dimension joins the batch
        return jax.vmap(ours)(*(x[None] for x in given))

    mesh = gtp.make_mesh(gtp=2, devices=hlo.topology_devices(hlo.parse_target("h200:2")))
    of_keys = HALF[2].update(shape=(2, 320, 2, 64))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(each, in_specs=P(None), out_specs=P(None), check_vma=False) if local else each
        assert len(calls(mapped, HALF[8], of_keys, of_keys, HALF[8])) == made


@needs_target
def test_masked_call_is_that_of_jax_but_for_what_backward_needs():
    options = _cudnn_calls.Options(True, None, 0.125)
    mask = jax.ShapeDtypeStruct((2, 1, 1024, 1024), jnp.bool_)
    ((_, config, operands),) = calls(plain(options, True), HALF[8], HALF[2], HALF[2], HALF[8], mask)
    bias = jax.ShapeDtypeStruct(mask.shape, jnp.bfloat16)
    ours = lambda q, k, v, bias: _cudnn_calls.forward(q, k, v, bias, None, options)  # noqa: E731
    ((target, found, text),) = calls(ours, HALF[8], HALF[2], HALF[2], bias)
    assert target == "__cudnn$fmhaScaleBiasSoftmax" and found == config
    assert text.split("->")[0].split(": (")[1] == operands.split("->")[0].split(": (")[1]


@pytest.mark.parametrize(("causal", "mask"), [(True, "PADDING_CAUSAL"), (False, "PADDING")])
def test_calls_with_documents_say_how_many_and_where(causal, mask):
    options = _cudnn_calls.Options(causal, 64 if causal else None, 0.125)

    def run(starts):
        def ours(q, k, v, of_out, *given):
            ragged = _cudnn_calls.Ragged(*given) if given else None
            y, stats = _cudnn_calls.forward(q, k, v, None, ragged, options)
            return _cudnn_calls.backward(q, k, v, None, ragged, stats, y, of_out, options)

        return calls(ours, HALF[8], HALF[2], HALF[2], HALF[8], *starts)

    found = run([jax.ShapeDtypeStruct((2 * 16 + n,), jnp.int32) for n in (1, 0)])
    for (target, config, text), (wanted, alone, _) in zip(found, run([]), strict=True):
        assert target == wanted
        differs = {"mask_type": mask, "max_seg_per_batch": 16}
        assert config == {"operation_queue_id": "0", "cudnn_fmha_backend_config": {**_attention(alone), **differs}}
        signature = text.split(": (")[1]
        assert "tensor<32xi32>, tensor<32xi32>, tensor<33xi32>, tensor<33xi32>) ->" in signature
        assert "tensor<32x8x1024xf32>" in signature


def _attention(config):
    return config["cudnn_fmha_backend_config"]


# When ----------------------------------------------------------------------------------------------------------------


@needs_target
def test_what_packing_lacks_is_said():
    mesh = gtp.make_mesh(gtp=4, tp=2, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    usual = (8, 1024, 8, 64)

    def lacks(shape=usual, *, local=True, check_vma=False, causal=True, window=None):
        said = []

        def ask(q):
            said.append(packed_lacks(q, causal=causal, window=window))
            return q

        mapped = jax.shard_map(ask, in_specs=P("gtp"), out_specs=P("gtp"), check_vma=check_vma)
        jax.eval_shape(mapped if local else ask, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        return said[0]

    with jax.set_mesh(mesh):
        assert lacks() == lacks(window=5) == ""
        for named, said in {
            "window both sides": lacks(window=5, causal=False),
            "1022 1024": lacks((8, 1022, 8, 64)),
            "2147483648 2147483647": lacks((4 * 64, 8192, 32, 128)),
            "check_vma=False": lacks(check_vma=True),
            "`shard_map`": lacks(local=False),
        }.items():
            assert re.search(naming(named), said), said


@pytest.mark.full
@needs_target
def test_program_for_h200s_has_every_way_and_no_more():
    """Compiled, so that XLA takes the calls; one conditional forward and one backward."""
    mesh = gtp.make_mesh(gtp=2, devices=hlo.topology_devices(hlo.parse_target("h200:2")))
    shapes = [array(mesh, (4, 2048, heads, 64), P("gtp")) for heads in (8, 2, 2, 8)]
    ids = array(mesh, (4, 2048), P("gtp"), jnp.int32)

    def local(ids, *given):
        return with_gradients(functools.partial(attention, causal=True, segment_ids=ids), *given)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=(P("gtp"),) * 5, out_specs=(P("gtp"),) * 4, check_vma=False)
        compiled = jax.jit(mapped).lower(ids, *shapes).compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    text = compiled.as_text()
    assert len(re.findall(r"\bconditional\(", text)) == 2
    assert sorted(re.findall(r'"max_seg_per_batch": ?(\d+)', text), key=int) == ["1"] * 4 + ["4"] * 12
