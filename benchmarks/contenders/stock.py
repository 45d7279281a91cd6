"""Trains the same Llama in stock Flax layers, sharded by `gtp_jax.shard`: `python stock.py --gtp 2 --sequences 2`.

Its modules are those of Flax: `nnx.Linear`, `nnx.RMSNorm` and `nnx.Embed`. RoPE, attention and the loss are functions
of gtp_jax.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from deviceless import add_target, compile_only, devices_of
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from timed import time_and_report
from workload import LEARNING_RATE, REDUCE_DTYPE, SKIPS, WEIGHT_DECAY, Workload, parser, workload

import gtp_jax as gtp
from gtp_jax.chain import REMAT
from gtp_jax.mesh import View
from gtp_jax.nn import abstract_model
from gtp_jax.ops import attention, rope
from gtp_jax.recipes import RECIPES


class Block(nnx.Module):
    """Attention and a gated MLP, each with a residual connection."""

    def __init__(self, work: Workload, *, joined: bool, rngs: nnx.Rngs) -> None:
        width, hidden = work.hidden_size, work.intermediate_size
        queries, keys = work.num_heads * work.head_dim, work.num_kv_heads * work.head_dim
        self.head_dim, self.rope_theta = work.head_dim, work.rope_theta
        self.norm1, self.norm2 = (_norm(work, width, rngs) for _ in range(2))
        self.joined, self.ends = joined, (queries, queries + keys)
        if joined:
            self.qkv, self.gate_up = (_linear(width, features, rngs) for features in (queries + 2 * keys, 2 * hidden))
        else:
            self.q, self.k, self.v = (_linear(width, features, rngs) for features in (queries, keys, keys))
            self.gate, self.up = (_linear(width, hidden, rngs) for _ in range(2))
        self.o = _linear(queries, width, rngs)
        self.down = _linear(hidden, width, rngs)
        if work.qk_norm:
            self.norm_q, self.norm_k = (_norm(work, work.head_dim, rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        parts = jnp.split(self.qkv(h), self.ends, axis=-1) if self.joined else (self.q(h), self.k(h), self.v(h))
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in parts)
        if hasattr(self, "norm_q"):
            q, k = self.norm_q(q), self.norm_k(k)
        q, k = (rope(y, theta=self.rope_theta) for y in (q, k))
        y = attention(q, k, v, causal=True)
        x = x + self.o(y.reshape(*y.shape[:2], -1))
        h = self.norm2(x)
        gate, up = jnp.split(self.gate_up(h), 2, axis=-1) if self.joined else (self.gate(h), self.up(h))
        return x + self.down(jax.nn.silu(gate) * up)


class Llama(nnx.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, work: Workload, *, joined: bool = False, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(work.vocab_size, work.hidden_size, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Block(work, joined=joined, rngs=rngs) for _ in range(work.num_layers)])
        self.norm = _norm(work, work.hidden_size, rngs)
        self.head = _linear(work.hidden_size, work.vocab_size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps `(batch, sequence)` tokens to `(batch, sequence, vocab)` logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: Llama, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of token losses and the number of tokens."""
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def _linear(into: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(into, out, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


def _norm(work: Workload, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(width, epsilon=work.epsilon, dtype=jnp.bfloat16, rngs=rngs)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--remat", choices=REMAT, default="matmuls", help="what a block saves for backward")
    flags.add_argument("--view", choices=get_args(View), default="global", help="the view of the step")
    flags.add_argument(
        "--recipe",
        choices=sorted(RECIPES),
        help="the recipe: the formats in which weights are sent and multiplied (default: bfloat16)",
    )
    flags.add_argument(
        "--joined", action="store_true", help="one matrix for query, key and value, and one for gate and up"
    )
    flags.add_argument("--offload", choices=("optimizer", "masters"), help="what of the state is kept on the host")
    flags.add_argument(
        "--skip-nonfinite", choices=SKIPS, default="gradients", help="what must be finite, or the update is skipped"
    )
    flags.add_argument("--trace", metavar="DIR", help="write a trace of one more step to this directory")
    add_target(flags)
    args = flags.parse_args()
    work = workload(args)
    if work.has_experts or work.tp > 1:
        sys.exit(
            f"error: stock.py supports only dense layers at tp 1, not tp {work.tp} with {work.num_experts} experts"
        )
    devices = devices_of(args.target, work)
    with jax.set_mesh(gtp.make_mesh(gtp=work.gtp, devices=None if devices == jax.devices() else devices)):
        mesh: Any = jax.sharding.get_mesh()
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        recipe = RECIPES[args.recipe]() if args.recipe else None
        step = gtp.train_step(
            loss,
            optimizer,
            microbatches=work.microbatches,
            recipe=recipe,
            view=args.view,
            skip_nonfinite=SKIPS[args.skip_nonfinite],
        )

        def sharded(rngs: nnx.Rngs) -> Llama:
            return gtp.shard(Llama(work, joined=args.joined, rngs=rngs), "layers.*", remat=args.remat)

        placed = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        if args.target:
            like: Any = jax.ShapeDtypeStruct((work.sequences, work.seq), jnp.int32, sharding=placed)
            state = gtp.TrainState.create(abstract_model(sharded), optimizer, offload=args.offload)
            lowered = step.lower(state, {"tokens": like, "targets": like})  # pyright: ignore[reportFunctionMemberAccess]
            return compile_only(lowered, args.target, parameters=_parameters(state))
        state = gtp.TrainState.create(gtp.init(sharded, nnx.Rngs(0)), optimizer, offload=args.offload)
        tokens = jax.random.randint(jax.random.key(1), (work.sequences, work.seq), 0, work.vocab_size)
        batch: Any = jax.device_put({"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}, placed)
        lowered = step.lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]
        time_and_report(
            lowered,
            state,
            (batch,),
            work,
            loss_of=lambda metrics: metrics["loss"],
            trace=args.trace,
            parameters=_parameters(state),
            reduce_dtype=REDUCE_DTYPE,  # the compute dtype
        )


def _parameters(state: gtp.TrainState) -> int:
    return sum(p.size for p in jax.tree.leaves(state.params))


if __name__ == "__main__":
    main()
