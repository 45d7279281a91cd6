"""Tiny models of Tunix's families: their configurations, checkpoints of random weights, and what they are called with.

A checkpoint has the tensors of Hugging Face. Its weights are random throughout: Tunix's own are not (the MLPs of Qwen3
begin at zero). `rope_theta` is 1e6, which Llama 3 and Qwen3 assume whatever the configuration says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import pxla
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import gtp_jax as gtp

VOCAB, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 128, 64, 128, 8, 2, 16
BATCH, LENGTH = 8, 16
LARGE = 1024  # elements of a weight that is sharded; norms and biases have fewer

ROLES = gtp.mesh.Roles(batch=("fsdp",), weights=("fsdp",), tensor="tp")
# Tunix's embedding is called by `encode` and `decode`
OPTIONS: dict[str, Any] = dict(blocks="layers.*", roles=ROLES, min_size=LARGE, methods=("__call__", "encode", "decode"))
MESHES = {"gtp 8": (8, 1), "gtp 4 x tp 2": (4, 2)}


@dataclasses.dataclass(frozen=True)
class Family:
    """One of Tunix's models.

    Attributes:
        package: its package within `tunix.models`.
        loader: the module of the package that reads safetensors.
        config: keyword arguments of its configuration.
        layers: their number.
        tied: whether the embedding is the head too.
        biases: whether query, key and value have biases.
        head_norms: whether query and key are normalized.
        norms: the names of a layer's norms.
        unit: the weight of a norm that scales by one.
        experts: their number per layer; 0 for a dense MLP.
    """

    package: str
    loader: str = "params"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 2
    tied: bool = False
    biases: bool = False
    head_norms: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    unit: float = 1.0
    experts: int = 0

    @property
    def name(self) -> str:
        """What it is called in `FAMILIES`."""
        return next(name for name, family in FAMILIES.items() if family is self)


_SIZES = dict(embed_dim=WIDTH, hidden_dim=HIDDEN, num_heads=HEADS, head_dim=HEAD, num_kv_heads=KV_HEADS)
_COMMON = _SIZES | dict(vocab_size=VOCAB, rope_theta=1_000_000, norm_eps=1e-6)
FAMILIES = {
    "Llama 3": Family("llama3", config=_COMMON),
    "Qwen2": Family("qwen2", config=_COMMON | dict(use_tied_embedding=True), tied=True, biases=True),
    "Qwen3": Family("qwen3", config=_COMMON | dict(use_tied_embedding=True), tied=True, head_norms=True),
    "Qwen3, experts": Family(
        "qwen3", config=_COMMON | dict(num_experts=8, num_experts_per_tok=2), head_norms=True, experts=8
    ),
    # every sixth of its layers attends to all tokens, the others to a window
    "Gemma 3": Family(
        "gemma3",
        "params_safetensors",
        _SIZES | dict(num_embed=VOCAB, sliding_window_size=4, global_base_frequency=1_000_000, param_dtype=jnp.float32),
        layers=6,
        tied=True,
        head_norms=True,
        unit=0.0,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    ),
}


def model_module(family: Family) -> Any:
    """Returns the module that defines a family's model."""
    return importlib.import_module(f"tunix.models.{family.package}.model")


def write(family: Family, folder: Path) -> Path:
    """Writes a checkpoint of random weights into an empty folder, and returns the folder."""
    draw = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return draw.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (family.unit + draw.normal(0, 0.1, size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": random(VOCAB, WIDTH), "model.norm.weight": norm(WIDTH)}
    if not family.tied:
        tensors["lm_head.weight"] = random(VOCAB, WIDTH)
    for i in range(family.layers):
        at = f"model.layers.{i}"
        for name in family.norms:
            tensors[f"{at}.{name}.weight"] = norm(WIDTH)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = random(heads * HEAD, WIDTH)
            if family.biases:
                tensors[f"{at}.self_attn.{name}_proj.bias"] = random(heads * HEAD)
            if family.head_norms and name != "v":
                tensors[f"{at}.self_attn.{name}_norm.weight"] = norm(HEAD)
        tensors[f"{at}.self_attn.o_proj.weight"] = random(WIDTH, HEADS * HEAD)
        if family.experts:
            tensors[f"{at}.mlp.gate.weight"] = random(family.experts, WIDTH)
        for mlp in [f"experts.{j}." for j in range(family.experts)] or [""]:
            for name in ("gate", "up"):
                tensors[f"{at}.mlp.{mlp}{name}_proj.weight"] = random(HIDDEN, WIDTH)
            tensors[f"{at}.mlp.{mlp}down_proj.weight"] = random(WIDTH, HIDDEN)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def load(family: Family, folder: Path, mesh: Any = None, dtype: Any = jnp.float32) -> Any:
    """Returns a checkpoint's model, by Tunix's own loader: on one device, or partitioned over a mesh. If the folder has
    a config.json, the sizes are those in it.

    With no mesh in scope and a CPU as the default device, what Tunix stacks before it partitions it lies on the host:
    under `jax.set_mesh` it would be whole on every device.
    """
    params = importlib.import_module(f"tunix.models.{family.package}.{family.loader}")
    config = model_module(family).ModelConfig(num_layers=family.layers, **family.config | _sizes(family, folder))
    if hasattr(config, "dtype"):
        config.dtype = dtype
    with jax.default_device(jax.devices("cpu")[0]):
        return params.create_model_from_safe_tensors(str(folder), config, mesh, dtype)


def _sizes(family: Family, folder: Path) -> dict[str, Any]:
    """Returns the arguments of a configuration that transformers has written."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    fields = json.loads(path.read_text())
    names = {
        "embed_dim": "hidden_size",
        "hidden_dim": "moe_intermediate_size" if family.experts else "intermediate_size",
        "num_heads": "num_attention_heads",
        "head_dim": "head_dim",
        "num_kv_heads": "num_key_value_heads",
        "num_embed" if "num_embed" in family.config else "vocab_size": "vocab_size",
    }
    return {ours: fields[theirs] for ours, theirs in names.items()}


def mesh_of(fsdp: int, tp: int) -> jax.sharding.Mesh:
    """Returns a mesh with the names that Tunix gives to axes."""
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def batch() -> dict[str, np.ndarray]:
    """Returns what a model, and Tunix's loss, are called with; one row begins with padding."""
    mask = np.ones((BATCH, LENGTH), bool)
    mask[0, :3] = False
    return batch_of(np.random.default_rng(1).integers(3, VOCAB, (BATCH, LENGTH)).astype(np.int32), mask)


def batch_of(tokens: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch of tokens, given which of them are no padding."""
    causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    return {
        "input_tokens": tokens,
        "input_mask": mask,
        "positions": np.maximum(mask.cumsum(-1) - 1, 0).astype(np.int32),
        "attention_mask": mask[:, None, :] & causal,
    }


def spread(values: Any, mesh: Any) -> Any:
    """Returns a batch whose rows are partitioned over a mesh."""
    return jax.tree.map(lambda value: jax.device_put(value, NamedSharding(mesh, P("fsdp"))), values)


def difference(found: Any, wanted: Any) -> float:
    """Returns the largest difference between two trees of arrays, relative to each array's largest magnitude."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)

    def one(found: Any, wanted: Any) -> float:
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        return float(np.abs(found - wanted).max() / np.abs(wanted).max())

    return max(jax.tree.leaves(jax.tree.map(one, found, wanted)))


@contextlib.contextmanager
def in_scope(mesh: Any, how: str, family: Family) -> Iterator[list[P]]:
    """Puts a mesh in scope, and yields the list of Tunix's constraints of activations as they are made.

    Args:
        mesh: with the axes fsdp and tp.
        how: "set_mesh"; or "with mesh", where Tunix constrains activations if it is on an accelerator: its constraints
            are made here too. (They are made by no model with experts, which would call a kernel for TPUs.)
        family: of the model that is called.
    """
    if how == "set_mesh":
        with jax.set_mesh(mesh):
            yield []
        return
    made: list[P] = []

    def shard(x: jax.Array, spec: Any) -> jax.Array:
        assert not pxla.thread_resources.env.physical_mesh.empty
        made.append(P(*spec))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    module = model_module(family)
    owner = module if hasattr(module, "shard") else module.sharding_utils
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not family.experts:
            patch.setattr(owner, "shard", shard)
        with mesh:
            yield made
