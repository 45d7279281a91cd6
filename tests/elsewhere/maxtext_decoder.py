"""Trains a tiny Llama 2 of MaxText on one device and through `gtp.shard`, and prints the losses.

Install MaxText 0.2.5 without its dependencies (`pip install --no-deps maxtext==0.2.5`) in the environment that
`environment.sh` makes, and run `PYTHONPATH=. DIR/bin/python -m tests.elsewhere.maxtext_decoder`.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gtp_jax as gtp

EMPTY = {"aqt", "drjax", "pathwaysutils", "tiktoken", "tokamax"}  # imported, but not used by this model
OPTIONS = dict(
    run_name="tiny",
    base_output_directory="unused",
    decoder_block="llama2",
    base_num_decoder_layers=2,
    base_emb_dim=64,
    base_mlp_dim=128,
    base_num_query_heads=8,
    base_num_kv_heads=8,
    head_dim=16,
    vocab_size=128,
    max_target_length=16,
    per_device_batch_size=1,
    dtype="float32",
    weight_dtype="float32",
    attention="dot_product",
    scan_layers=False,
    enable_checkpointing=False,
    hardware="cpu",
    skip_jax_distributed_system=True,
    dataset_type="synthetic",
)
MESHES = ({}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2})


class _Anything:
    """A name of an empty module: a decorator, a base class, a type in an annotation."""

    def __call__(self, *args, **_):
        return args[0] if args and callable(args[0]) else _Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __mro_entries__(self, _):
        return (object,)

    def __or__(self, _):
        return object

    __ror__ = __or__


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        setattr(module, "__getattr__", _Anything().__getattr__)  # noqa: B010
        return module

    def exec_module(self, module):
        pass


def losses(config, degrees, transformer) -> list[float]:
    """Returns the losses of three steps on a mesh with these axes; with none, on one device and without `gtp.shard`."""
    axes = tuple(config.mesh_axes)
    sizes = tuple(degrees.get(axis, 1) for axis in axes)
    devices = jax.devices()[: 8 if degrees else 1]
    mesh = jax.make_mesh(sizes, axes, devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, 128)
    positions = jnp.broadcast_to(jnp.arange(16), (8, 16))

    def loss(model, tokens):
        logits = model(tokens, positions, jnp.ones((8, 16), jnp.int32), enable_dropout=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    @nnx.jit
    def step(model, optimizer, tokens):
        value, gradients = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, gradients)
        return value

    with jax.set_mesh(mesh), nnx.logical_axis_rules(config.logical_axis_rules):
        model = transformer(config, mesh, None, rngs=nnx.Rngs(0))
        if degrees:
            roles = gtp.mesh.Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor="tensor")
            model = gtp.shard(model, "decoder.layers_*", min_size=1024, roles=roles)
            tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("fsdp")))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        return [float(step(model, optimizer, tokens)) for _ in range(3)]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    sys.meta_path.append(_EmptyModules())
    import maxtext
    from maxtext.configs import pyconfig
    from maxtext.models import models

    base = pathlib.Path(maxtext.__path__[0]) / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base), *(f"{name}={value}" for name, value in OPTIONS.items())])
    for degrees in MESHES:
        print(degrees or "one device", losses(config, degrees, models.Transformer))


if __name__ == "__main__":
    main()
