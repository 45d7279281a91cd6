"""Times the training step of gtp_jax: `python ours.py --gtp 8 --sequences 8 --recipe mxfp8 --keep-gathered all`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from deviceless import add_target, compile_only, devices_of
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from timed import time_and_report
from workload import COMMAND_BUFFERS, LEARNING_RATE, REDUCE_DTYPE, SKIPS, WEIGHT_DECAY, XLA_OPTIONS, parser, workload

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.runner.flags import Execution, ExpertOptions, Quantization, add_flags, given

# Options of experts that are part of the workload, even if the model has no experts.
_OF_WORKLOAD = ("top_k", "aux_loss_coeff", "shared_hidden")
# The names in results of the ways to sum weight gradients, by the value of --grad-reduce.
_REDUCE_DTYPES = {"float32": "float32", "bf16-wire": "bf16, sums float32", "bf16": "bfloat16"}


def main() -> None:
    flags = parser(__doc__)
    add_flags(flags, Quantization)
    add_flags(flags, ExpertOptions, but=_OF_WORKLOAD)
    add_flags(flags, Execution, but=("microbatches",))  # the workload has them
    flags.set_defaults(grad_reduce=next(name for name, dtype in _REDUCE_DTYPES.items() if dtype == REDUCE_DTYPE))
    flags.add_argument(
        "--command-buffers",
        choices=COMMAND_BUFFERS,
        default="default",
        help="what XLA records into command buffers (CUDA graphs)",
    )
    flags.add_argument(
        "--xla-options",
        choices=XLA_OPTIONS,
        default="gtp_jax",
        help="XLA options of the step: those that gtp_jax sets, or XLA's defaults",
    )
    flags.add_argument(
        "--skip-nonfinite", choices=SKIPS, default="gradients", help="what must be finite, or the update is skipped"
    )
    flags.add_argument("--trace", metavar="DIR", help="write a trace of one more step to this directory")
    add_target(flags)
    args = flags.parse_args()
    work, recipe = workload(args, all_over_tp=True), Quantization(**given(args, Quantization))
    execution = Execution(**given(args, Execution))
    options = {name: value for name, value in given(args, ExpertOptions).items() if name not in _OF_WORKLOAD}
    experts = ExpertOptions(**options)
    config = experts.of(LlamaConfig(**work.model, **execution.of_model), "of the workload")
    devices = devices_of(args.target, work)
    degrees = {"gtp": work.gtp, "cp": work.cp, "ep": work.ep, "tp": work.tp}
    mesh_in_scope = jax.set_mesh(gtp.make_mesh(**degrees, devices=None if devices == jax.devices() else devices))
    with mesh_in_scope, gtp.layout.even_shares():  # as in `gtp-jax train`
        mesh: Any = jax.sharding.get_mesh()
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        step = gtp.train_step(
            next_token_loss,
            optimizer,
            microbatches=execution.microbatches,
            recipe=recipe.to_recipe(),
            pregathered_layers=recipe.pregathered_layers,
            view="local",
            reduce_over_dp=execution.reduce_over_dp,
            skip_nonfinite=SKIPS[args.skip_nonfinite],
            compiler_options=COMMAND_BUFFERS[args.command_buffers],
        )
        if args.xla_options == "default":
            step = jax.jit(step, donate_argnums=0, compiler_options=COMMAND_BUFFERS[args.command_buffers])
        placed = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in mesh.axis_names if axis not in ("cp", "tp"))))
        if args.target:
            like: Any = jax.ShapeDtypeStruct((work.sequences, work.seq), jnp.int32, sharding=placed)
            state = gtp.TrainState.create(
                abstract_model(lambda rngs: Llama(config, rngs=rngs)),
                optimizer,
                recipe=recipe.to_recipe(),
                offload=execution.offloaded,
            )
            lowered = step.lower(state, {"tokens": like, "targets": like})  # pyright: ignore[reportFunctionMemberAccess]
            return compile_only(lowered, args.target, parameters=config.param_count())
        state = gtp.TrainState.create(
            gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0)),
            optimizer,
            recipe=recipe.to_recipe(),
            offload=execution.offloaded,
        )
        tokens = jax.random.randint(jax.random.key(1), (work.sequences, work.seq), 0, work.vocab_size)
        batch: Any = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
        batch = jax.device_put(batch, placed)
        lowered = step.lower(state, batch)  # pyright: ignore[reportFunctionMemberAccess]
        time_and_report(
            lowered,
            state,
            (batch,),
            work,
            loss_of=lambda metrics: metrics["loss"],
            trace=args.trace,
            parameters=config.param_count(),
            reduce_dtype=f"{recipe.grad_wire}, sums float32"
            if recipe.grad_wire
            else _REDUCE_DTYPES[execution.grad_reduce],
        )


if __name__ == "__main__":
    main()
