"""Runs of a small Llama, to be stopped and taken up again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import groups_of, shards_of
from gtp_jax.weights import quantize

from .meshes import SIZES, Place

RECIPES = {  # of weights alone
    "bf16": gtp.recipes.BF16(),
    "fp8": gtp.FP8(),
    "mxfp8": gtp.MXFP8(),
    "nvfp4": gtp.NVFP4(),
    "nvfp4_1d": gtp.NVFP4(block=(1, 16)),
}
ORIGINALS = {  # TransformerEngine's five, which multiply in their formats
    "delayed": gtp.recipes.FP8Delayed(history=4),
    "current": gtp.FP8(matmuls=True),
    "blocks": gtp.recipes.FP8Blocks(),
    "mxfp8": gtp.MXFP8(matmuls=True),
    "nvfp4": gtp.NVFP4(matmuls=True),
}


class Run:
    """A model's training on one mesh, one batch after another."""

    def __init__(self, place: Place, recipe: gtp.recipes.Recipe, optimizer: optax.GradientTransformation) -> None:
        self.place, self.recipe, self.optimizer = place, recipe, optimizer
        self._step = gtp.train_step(next_token_loss, optimizer, recipe=recipe)
        self._evaluate = gtp.eval_step(next_token_loss, recipe=recipe)

    def begin(self, seed: int) -> gtp.TrainState:
        """A state at step 0."""
        config = LlamaConfig(**{**SIZES, "dtype": "float32"})
        with jax.set_mesh(self.place.mesh()), gtp.layout.even_shares(False):
            model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(seed))
            return gtp.TrainState.create(model, self.optimizer, recipe=self.recipe)

    def shapes(self) -> gtp.TrainState:
        """Shapes and shardings of a state."""
        return self.place.state(self.optimizer, self.recipe)

    def go_on(self, state: gtp.TrainState, steps: int) -> tuple[gtp.TrainState, list[tuple[float, float]]]:
        """So many steps, of which the state knows the batches; loss and gradient norm of each. Consumes the state."""
        seen = []
        with jax.set_mesh(self.place.mesh()):
            for _ in range(steps):
                state, metrics = self._step(state, batch(int(state.step)))
                seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return state, seen

    def loss(self, state: gtp.TrainState) -> float:
        """On a batch that is always the same."""
        with jax.set_mesh(self.place.mesh()):
            return float(self._evaluate(state, batch(-1))["loss"])

    def wire(self, state: gtp.TrainState) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What each device has of the quantized weights: buffers of codes, and amaxes if any; `(dp, gtp, tp, ...)`."""
        mesh = self.place.mesh()

        def local(params):
            model = state.model_def.model(params)
            groups = groups_of(model, self.recipe).items()
            together = {(path, layers._replace(written_out=False)): group for (path, layers), group in groups}
            made = quantize(together, shards_of(model)).values()
            packed = [one.wire for stretches in made for one in stretches]
            return jax.tree.map(lambda x: x[None], ([p.buffer for p in packed], [p.amax for p in packed]))

        with jax.set_mesh(mesh):
            out = PartitionSpec(mesh.axis_names)
            found = jax.shard_map(local, in_specs=(state.model_def.specs,), out_specs=out, check_vma=False)
            whole = jax.jit(found)(state.params)
        by_rank = jax.tree.map(lambda x: np.asarray(x).reshape(*mesh.devices.shape, *x.shape[1:]), whole)
        return by_rank[0], jax.tree.leaves(by_rank[1])


def batch(step: int) -> dict[str, jax.Array]:
    """Tokens of a step, 24 sequences: enough for 1, 2, 3, 4 and 8 ranks."""
    tokens = jnp.asarray(np.random.default_rng(step + 1).integers(0, SIZES["vocab_size"], (24, 9)))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
