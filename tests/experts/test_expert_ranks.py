"""Experts that ranks divide: exact against every token through every expert, and bounded in memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.chain import with_remat
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.experts import choose_transport
from gtp_jax.nn import Routing, abstract_model

from ..parity.plain_moe import plain_experts

FEATURES, HIDDEN, EXPERTS, TOP_K, COEFF = 8, 12, 8, 3, 0.1
MXFP8 = gtp.MXFP8(matmuls=True, exclude=())


def mesh_of(degrees):
    count = math.prod(degrees.values())
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count]))


def build(degrees, features=FEATURES, hidden=HIDDEN, **options):
    """A mixture on a mesh, in pieces, and the inputs of sixteen sequences."""
    defaults = dict(num_experts=EXPERTS, top_k=TOP_K, aux_loss_coeff=COEFF, parallel=None)
    dtypes = dict(dtype="float64", param_dtype="float64")
    make = lambda rngs: gtp.nn.MoE(features, hidden, rngs=rngs, **{**defaults, **dtypes, **options})  # noqa: E731
    graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(16, 4, features))
    x[..., 0] = 3 + np.abs(x[..., 0])  # a feature by which a router can send every token to the same experts
    return graph, state, jnp.asarray(x)


def plain(state):
    params = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}
    nested = {"scale": params["scale",], "router": params["router",], "up": {"kernel": {}}, "down": {}}
    nested["up"]["kernel"] = {name: params["up", "kernel", name] for name in ("gate", "up")}
    nested["down"]["kernel"] = params["down", "kernel"]
    return nested


def routers(state):
    """Parameters with other routers: as drawn; every token to the last experts; to the first of them, evenly behind."""
    drawn = next(v.get_value() for path, v in nnx.to_flat_state(state) if path == ("router",))
    yield "as drawn", state
    for name, order in (("the last take all", np.arange(EXPERTS)), ("the first take all", -np.arange(EXPERTS))):
        router = np.asarray(drawn) * 0.01
        router[0] += order
        with_router = jax.tree.map(lambda a: a, state)
        with_router["router"] = with_router["router"].replace(jax.device_put(router, drawn.sharding))
        yield name, with_router


@functools.partial(jax.jit, static_argnames="top_k")
def oracle(params, x, top_k):
    def loss(params, x):
        y, balance = plain_experts(params, x, top_k, 1e-6)
        return jnp.sum(jnp.sin(y)) + COEFF * balance, jnp.sum(jnp.sin(y))

    gradients, value = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return value, gradients


MESHES = {
    "ep 2 x gtp 2, padded, in rounds and two chunks": (
        dict(ep=2, gtp=2),
        dict(features=9, hidden=13, round_size=0.2, exchange_chunks=2),
    ),
    "ep 2 x gtp 2, in rounds and two chunks": (dict(ep=2, gtp=2), dict(round_size=0.2, exchange_chunks=2)),
    "ep 8": (dict(ep=8), {}),
    "ep 4, all-gather in two chunks": (dict(ep=4), dict(transport="gather", exchange_chunks=2)),
    "ep 2 x gtp 2 x tp 2, features": (dict(ep=2, gtp=2, tp=2), dict(parallel="features")),
    "ep 2 x gtp 2 x tp 2, experts over both": (dict(ep=2, gtp=2, tp=2), dict(parallel="expert")),
    "ep 2 x gtp 2 x tp 2, parts of sequences": (dict(ep=2, gtp=2, tp=2), dict(round_size=0.2)),
    "ep 2 x dp 2, gathered over dp": (dict(ep=2, dp=2), dict(axes=("dp",))),
    "ep 2 x gtp 2 x tp 2, whole on their rank": (dict(ep=2, gtp=2, tp=2), dict(parallel=None, axes=())),
    "ep 2 x gtp 2 x tp 2, gathered over tp": (dict(ep=2, gtp=2, tp=2), dict(parallel=None, axes=("tp",))),
}


@pytest.mark.parametrize("name", others_full(MESHES, ["ep 2 x gtp 2, padded, in rounds and two chunks"]))
def test_every_routing_agrees_with_every_token_through_every_expert(name, x64):
    """The last two send no token to most experts, and none to most ranks."""
    degrees, options = MESHES[name]
    with mesh_of(degrees), gtp.layout.even_shares("padded" in name):
        graph, state, x = build(degrees, **options)
        stored = [v.get_raw_value().shape != v.get_value().shape for _, v in nnx.to_flat_state(state)]
        assert any(stored) == ("padded" in name)
        loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: E731
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        for routing, given in routers(state):
            value, (to_state, to_x) = run(given, x)
            expected, (to_params, to_inputs) = oracle(plain(given), x, options.get("top_k", TOP_K))
            found = {**plain(to_state), "x": np.asarray(to_x), "value": np.asarray(value)}
            wanted = {**to_params, "x": to_inputs, "value": expected}
            for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
                error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
                assert error < 1e-12, f"{routing}: {jax.tree_util.keystr(path)} is off by {error:.1e}"


def ragged_as_documented(operand, output, starts, sizes, places, arriving, *, axis_name):
    """What jax's documentation says of `ragged_all_to_all`, which XLA's CPU backend cannot run."""
    rank = jax.lax.axis_index(axis_name)
    every = jax.lax.all_gather((operand, starts, sizes, places), axis_name)
    number = jnp.arange(operand.shape[0])
    for rows, start, size, place in zip(*every, strict=True):
        to = jnp.where(number < size[rank], place[rank] + number, output.shape[0])
        output = output.at[to].set(rows[jnp.minimum(start[rank] + number, operand.shape[0] - 1)], mode="drop")
    del arriving
    return output


GROUPED = gtp.nn.Routing(num_groups=4, top_groups=2)  # of which a token goes to two ranks at most


@pytest.mark.full
@pytest.mark.parametrize(("chunks", "routing"), [(1, None), (2, None), (1, GROUPED)], ids=["1", "2", "groups"])
def test_transports_agree_bit_for_bit_and_so_do_two_runs(chunks, routing, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_as_documented)
    monkeypatch.setattr("gtp_jax.experts._transports.platform", lambda: "gpu")  # which has it
    found = []
    for transport in ("gather", "padded", "padded", "ragged"):
        with mesh_of(dict(ep=4)):
            options = dict(transport=transport, exchange_chunks=chunks, dtype="bfloat16", param_dtype="float32")
            graph, state, x = build(dict(ep=4), routing=routing, **options)
            loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: B023, E731
            found.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state, x.astype(jnp.bfloat16)))
    for other in found[1:]:
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "remat, recipe, chunks",
    pairwise(["everything", "matmuls", "nothing"], [gtp.FP8(matmuls=True, exclude=()), None, MXFP8], [2, 1], usual=1),
    ids=str,
)
def test_nothing_that_travels_is_kept_for_backward(recipe, remat, chunks, capsys):
    """Traced alone: tokens arrive in ranks x tokens rows, and no more than a round's are kept, of any width."""
    with mesh_of(dict(ep=8)), gtp.use_recipe(recipe):
        options = dict(dtype="float32", param_dtype="float32", round_size=1.0, exchange_chunks=chunks)
        sizes = (32, 32) if recipe == MXFP8 else (FEATURES, HIDDEN)  # a block at least
        graph, state, _ = build(dict(ep=8), *sizes, **options)
        x = jnp.zeros((16, 64, sizes[0]), jnp.float32)
        print_saved_residuals(with_remat(lambda state, x: nnx.merge(graph, state)(x), remat), state, x)
    printed = capsys.readouterr().out
    integers = {math.prod(map(int, dims.split(","))) for dims in re.findall(r"(?:i32|int32)\[([\d,]+)\]", printed)}
    order = 8 * (8 * 2 * 64 // chunks) * TOP_K  # of what arrives at each of 8 ranks
    assert order in integers, "which rows come first may not be computed anew: an expert could get other rows"
    shapes = re.findall(r"(?:f32|float32|u8|uint8)\[([\d,]+)\]", printed)
    shapes = [dims for dims in shapes if "," in dims]
    rows = max(math.prod(map(int, dims.split(",")[:-1])) for dims in shapes if dims.split(",")[-1] != str(TOP_K))
    tokens = 2 * 64  # of a rank; of all ranks what is kept lies side by side
    filled_up = 32 * (EXPERTS // 8 + 1) if recipe == MXFP8 else 0  # of the second matmul's input, in whole blocks
    assert rows <= 8 * (tokens * TOP_K + filled_up), "a round's rows; 8 * 8 * tokens would have arrived"


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_program_exchanges_what_is_told_and_nothing_more(chunks):
    """In a layer and pass: choices and shares once, tokens there, partial sums back, of each chunk; in backward the
    same the other way round, and the tokens again."""
    with mesh_of(dict(ep=4)):
        options = dict(num_experts=EXPERTS, top_k=TOP_K, parallel=None, exchange_chunks=chunks)
        make = lambda rngs: gtp.Stack(lambda rngs: gtp.nn.MoE(FEATURES, HIDDEN, rngs=rngs, **options), 1, rngs=rngs)  # noqa: E731
        (told,) = gtp.experts.exchanges(abstract_model(make), tokens=64)
        graph, state = nnx.split(abstract_model(make))
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2)  # noqa: E731
        x = jax.ShapeDtypeStruct((16, 4, FEATURES), jnp.bfloat16)
        text = jax.jit(jax.value_and_grad(loss)).lower(state, x).compile().as_text()
    found = [c for c in hlo.collectives(text) if c.axes == ("ep",) and c.kind in ("all-to-all", "all-gather")]
    kinds = sorted((c.kind, c.direction, c.dtype) for c in found)
    assert kinds == [
        ("all-gather", "backward", "f32"),  # shares, to weight by
        ("all-gather", "forward", "f32"),
        ("all-gather", "forward", "s32"),  # choices, which are kept
        ("all-to-all", "backward", "f32"),  # gradients of shares
        *[("all-to-all", "backward", "u16")] * 3 * chunks,  # tokens again; gradients of partial sums, and of tokens
        *[("all-to-all", "forward", "u16")] * 2 * chunks,  # tokens; partial sums
    ]
    assert sum(one.count for one in told.traffic if one.dtype == "u16") == 5 * chunks


def shards(make):
    """The whole shape of each weight, and that of a shard."""
    flat = nnx.to_flat_state(nnx.state(abstract_model(make)))
    shapes = {path: (v.get_value().shape, v.get_value().sharding) for path, v in flat}
    return {path: (whole, sharding.shard_shape(whole)) for path, (whole, sharding) in shapes.items()}


def test_axes_say_how_the_experts_of_a_rank_are_sharded_further():
    with mesh_of(dict(ep=2, gtp=2, tp=2)):
        for axes, parts in (((), 1), (("tp",), 2), (("gtp", "tp"), 4)):
            options = dict(num_experts=EXPERTS, parallel=None, axes=axes)
            found = shards(lambda rngs: gtp.nn.MoE(FEATURES, HIDDEN, rngs=rngs, **options))  # noqa: B023
            for path, (whole, shard) in found.items():
                if path[0] in ("up", "down"):
                    assert shard[0] == EXPERTS // 2 and math.prod(shard) == math.prod(whole) // (2 * parts), path


def test_dense_weights_beside_experts_are_sharded_over_gtp_and_ep_together():
    """As over gtp 4, in a model whose experts are sharded over ep 2 x gtp 2."""
    with mesh_of(dict(ep=2, gtp=2)):
        options = dict(num_experts=EXPERTS, parallel=None, shared_hidden=16)
        found = shards(lambda rngs: gtp.nn.MoE(FEATURES, HIDDEN, rngs=rngs, **options))
    dense = {path: whole for path, (whole, _) in found.items() if path[0] == "shared"}
    assert dense and all(math.prod(found[path][1]) == math.prod(whole) // 4 for path, whole in dense.items())


@pytest.mark.parametrize(
    "degrees", others_full([dict(ep=2, gtp=2), dict(ep=2, gtp=2, tp=2)], [dict(ep=2, gtp=2)]), ids=str
)
def test_an_amax_is_of_one_expert_alone(degrees, x64):
    """Experts of very different size, quantized as they travel: their gradients are those of any other mesh."""
    scaled = lambda key, shape, dtype: (  # noqa: E731
        jax.random.normal(key, shape, dtype) * 2.0 ** jnp.arange(shape[0])[:, None, None] / 4096  # small in a sine
    )
    found = []
    for sizes in (dict(gtp=2), degrees):
        with mesh_of(sizes), gtp.use_recipe(gtp.NVFP4()):
            options = dict(features=64, hidden=96, kernel_init=scaled, parallel="expert" if "tp" in sizes else None)
            graph, state, x = build(sizes, **options)
            loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: B023, E731
            gradient = jax.jit(jax.grad(loss))(state, x)
            found.append({path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(gradient)})
    for path, value in found[0].items():
        for a, b in zip(value, found[1][path], strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 * np.abs(a).max(), err_msg=str(path))


def test_choices_of_the_table(monkeypatch):
    with mesh_of(dict(ep=4)):
        assert choose_transport("ep") == "padded"  # XLA's CPU backend has no ragged one
        with pytest.raises(ValueError, match=naming("`transport` 'ragged' XLA CPUs")):
            choose_transport("ep", "ragged")
    monkeypatch.setattr("gtp_jax.experts._transports.platform", lambda: "gpu")
    for sizes, wanted in {(1, 8, 1): "gather", (4, 4, 2): "gather", (1, 16, 1): "ragged", (1, 8, 2): "ragged"}.items():
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, ("gtp", "ep", "tp"))):
            assert choose_transport("ep") == wanted, "ranks of tp lie between those of ep"


def rows_that_leave(ranks, num_experts, top_k, tokens):
    """How many tokens leave a rank for others in dispatch, and how many sums in combine, where each token chooses
    different experts at random: means of all ranks, which are the same."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((ranks, tokens, num_experts)), axis=-1)[..., :top_k]
    goes = (chosen[..., None] // (num_experts // ranks) == np.arange(ranks)).any(axis=2)  # (from, tokens, to)
    pairs = goes.sum(axis=1)
    return (pairs.sum() - np.trace(pairs)) / ranks


@pytest.mark.parametrize(
    "ranks, num_experts, top_k, chunks, recipe",
    [
        (4, 8, 2, 1, None),
        (8, 64, 6, 2, gtp.FP8(matmuls=True, exclude=())),
        (4, 8, 2, 2, gtp.recipes.FP8Blocks(exclude=())),
    ],
    ids=["bfloat16", "FP8", "FP8 in blocks"],
)
def test_bytes_of_a_ragged_exchange_are_those_of_random_choices(ranks, num_experts, top_k, chunks, recipe, monkeypatch):
    """Within a hundredth. Counted by choices, or as if a token could choose an expert twice, they would be more than
    two off."""
    monkeypatch.setattr("gtp_jax.experts._transports.platform", lambda: "gpu")  # CPUs have no ragged one
    tokens, features = 4096, 32
    options = dict(num_experts=num_experts, top_k=top_k, transport="ragged", exchange_chunks=chunks, parallel=None)
    with mesh_of(dict(ep=ranks)):
        model = abstract_model(lambda rngs: gtp.nn.MoE(features, HIDDEN, **options, rngs=rngs))
        (found,) = gtp.experts.exchanges(model, recipe, tokens=tokens)
    assert (found.ranks, found.transport, found.tokens) == (ranks, "ragged", tokens)
    blocks = isinstance(recipe, gtp.recipes.FP8Blocks)
    leave = rows_that_leave(ranks, num_experts, top_k, tokens)
    of_choices = 4 * (ranks - 1) * tokens * top_k
    codes = recipe is not None
    rows = "ragged-all-to-all", chunks
    row_of = {"u8": leave * (features + 4 * blocks), "u16": leave * 2 * features}  # a float32 for up to 128 codes
    tokens_as = "u8" if codes else "u16"
    assert found.dispatched_bytes == pytest.approx(row_of[tokens_as], rel=0.01)
    amax = ("forward", "amax of tokens", "all-reduce", 1, "f32", 8 * (ranks - 1) // ranks)
    wanted = [
        ("forward", "choices", "all-gather", 1, "s32", of_choices),
        ("forward", "shares", "all-gather", 1, "f32", of_choices),
        *([amax] if codes and not blocks else []),
        ("forward", "dispatch of tokens", *rows, tokens_as, row_of[tokens_as]),
        ("forward", "combine of partial sums", *rows, "u16", row_of["u16"]),
        ("backward", "dispatch of tokens, again", *rows, tokens_as, row_of[tokens_as]),
        ("backward", "dispatch of gradients of partial sums", *rows, "u16", row_of["u16"]),
        ("backward", "combine of gradients of tokens", *rows, "u16", row_of["u16"]),
        ("backward", "gradients of shares", "all-to-all", 1, "f32", of_choices),
    ]
    for one, (*what, size) in zip(found.traffic, wanted, strict=True):
        assert [one.direction, one.what, one.kind, one.count, one.dtype] == what
        of_rows = one.kind == "ragged-all-to-all"
        assert one.bytes == (pytest.approx(size, rel=0.01) if of_rows else size), one


def test_groups_bound_the_ranks_of_a_token_and_the_bytes_of_a_ragged_exchange(monkeypatch):
    """Of 256 experts a token chooses 8, in 4 of 8 groups; with 8 ranks, seven of which are others."""
    routing = Routing(num_groups=8, top_groups=4)
    logits = np.random.default_rng(0).normal(size=(1000, 256)).astype(np.float32)
    chosen = np.asarray(routing.choose(routing.scores(jnp.asarray(logits)), None, 8))
    for experts, free in ((32, 8), (64, 4), (16, 8)):
        ranks = max(len(set(row)) for row in chosen // experts)
        assert ranks == routing.most_ranks(256, 8, experts)
        assert Routing().most_ranks(256, 8, experts) == free
    monkeypatch.setattr("gtp_jax.experts._transports.platform", lambda: "gpu")  # CPUs have no ragged one
    options = dict(num_experts=256, top_k=8, transport="ragged", parallel=None, routing=routing)
    with mesh_of(dict(ep=8)):
        model = abstract_model(lambda rngs: gtp.nn.MoE(32, HIDDEN, **options, rngs=rngs))
        (found,) = gtp.experts.exchanges(model, tokens=4096)
    assert found.dispatched_bytes == 7 * 4 * 4096 // 8 * 32 * 2


@pytest.mark.parametrize("special, score", pairwise([-np.inf, np.nan, np.inf, 0.5], ["sigmoid", "softmax"], usual=2))
def test_no_score_takes_a_token_out_of_its_groups(score, special):
    """A ragged exchange has no room for it. A third of the scores are infinite, no numbers of either sign, or equal."""
    rng = np.random.default_rng(0)
    for num_experts, groups, taken, top_k, experts in ((32, 8, 2, 8, 4), (24, 4, 2, 9, 3), (24, 8, 3, 4, 4)):
        routing = gtp.nn.Routing(num_groups=groups, top_groups=taken, score=score)
        scores = rng.random((500, num_experts), dtype=np.float32)
        scores[rng.random(scores.shape) < 0.3] = special
        for seen in (jnp.asarray(scores), None):
            given, bias = (seen, None) if seen is not None else (jnp.full(scores.shape, 0.5), jnp.asarray(scores[0]))
            chosen = np.asarray(routing.choose(given, bias, top_k))
            assert all(len(set(row)) == top_k for row in chosen)
            assert max(len(set(row)) for row in chosen // (num_experts // groups)) <= taken
            most = routing.most_ranks(num_experts, top_k, experts)
            assert max(len(set(row)) for row in chosen // experts) <= most


REFUSED = {
    "experts": (dict(num_experts=6), "6 4 ep"),
    "axes": (dict(axes=("ep",)), "`axes` ('ep',) 'ep'"),
    "transport": (dict(transport="ring"), "`transport` 'ring' 'gather' 'padded' 'ragged'"),
    "endless rounds": (dict(round_size=float("inf")), "`round_size` inf finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_argument_is_named(name):
    options, message = REFUSED[name]
    with mesh_of(dict(ep=4)), pytest.raises(ValueError, match=naming(message)):
        build(dict(ep=4), dtype="float32", param_dtype="float32", **options)


@pytest.mark.full
def test_checkpoints_move_between_degrees_of_ep_bit_for_bit(tmp_path):
    optimizer = optax.adamw(1e-2)
    make = lambda rngs: gtp.nn.MoE(  # noqa: E731
        FEATURES, HIDDEN, num_experts=EXPERTS, routing=Routing(score="sigmoid", bias_rate=0.1), rngs=rngs
    )
    with mesh_of(dict(ep=4)):
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optimizer)
        loss = lambda model, x: (jnp.sum(model(x) ** 2), x.shape[0] * x.shape[1])  # noqa: E731
        state, _ = gtp.train_step(loss, optimizer)(state, np.ones((8, 4, FEATURES), np.float32))
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
        wanted = jax.tree.map(np.asarray, state)
    for degrees in (dict(ep=2, gtp=2), dict(gtp=4), dict(ep=8)):
        with mesh_of(degrees):
            like = gtp.TrainState.create(abstract_model(make), optimizer)
            found, _ = Checkpoints(tmp_path).restore(like)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(np.asarray(a), b)
