"""Opens a checkpoint of a run with adapters, and finds the adapter of each array of its base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..checkpoint import Checkpoints, StoredArray
from ..mesh import make_mesh
from ..models import (
    Adapters,
    BaseArray,
    EvaluationArray,
    ModelConfig,
    Origin,
    base_arrays,
    build,
    config_of,
    evaluation_arrays,
)
from ..nn import Dense, abstract_model, weight_owners


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The low-rank matrices of a kernel, or of a stack of kernels.

    Attributes:
        a, b: the matrices with which the run evaluates: averaged, if the run averages weights.
    """

    a: EvaluationArray
    b: EvaluationArray

    def read(self, layer: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns both matrices: `a`, `(input features, rank)`, and `b`, `(rank, output features)`.

        Args:
            layer: the index of the layer; `None` if the kernel is not stacked.
        """
        if layer is None:
            return self.a.read(0, self.a.shape[0]), self.b.read(0, self.b.shape[0])
        return self.a.read(layer, layer + 1)[0], self.b.read(layer, layer + 1)[0]

    @property
    def stored(self) -> list[StoredArray]:
        """The arrays that are read, for `gtp_jax.checkpoint.check_values`."""
        return [*self.a.stored, *self.b.stored]


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A checkpoint of a run with adapters. Its arrays are not in memory until they are read.

    Attributes:
        step: the step of the checkpoint.
        config: the configuration of the model.
        adapters: the arguments of `gtp_jax.nn.lora`.
        origin: the Hugging Face model that the base comes from.
        base: the arrays of the base, by their paths joined with slashes.
        beside: the adapters, by the paths of their kernels.
    """

    step: int
    config: ModelConfig
    adapters: Adapters
    origin: Origin
    base: dict[str, BaseArray]
    beside: dict[str, Adapter]

    @property
    def values(self) -> str:
        """The formats and dtypes in which the kernels with adapters are stored, in words."""
        found = [self.base[path] for path in self.beside]
        kinds = [f"{x.format.name} codes" if x.format is not None else x.parts[""].dtype for x in found]
        return " and ".join(sorted(set(kinds)))


def read_adapted(directory: str | Path, step: int | None) -> Adapted:
    """Opens a checkpoint of a run with adapters.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if the checkpoint is damaged, does not describe its model, has no adapters, or lacks arrays of its
            model.
    """
    checkpoints = Checkpoints(directory, read_only=True)
    manifest = checkpoints.manifest(step)
    where = f"step {manifest['step']} in {directory}"
    config, adapters = config_of(manifest["extra"], where), Adapters.of(manifest["extra"], where)
    if adapters is None:
        raise ValueError(
            f"{where} has no adapters: it is a model itself, which `gtp-jax convert export` writes as it is. Give a "
            "run of `gtp-jax train --lora`."
        )
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        model = abstract_model(lambda rngs: adapters.on(build(config, rngs=rngs), rngs))
    trained, base = evaluation_arrays(checkpoints, manifest), base_arrays(checkpoints, manifest, model)
    beside: dict[str, Adapter] = {}
    for path, owner in weight_owners(model).items():
        if isinstance(owner, Dense) and owner.lora is not None:
            for name in owner.names:
                below = (name,) if name else ()
                at = f"params/{_joined((*path, 'lora', *below))}"
                if f"{at}/a" in trained:
                    beside[_joined((*path, "kernel", *below))] = Adapter(trained[f"{at}/a"], trained[f"{at}/b"])
    origin = Origin.of(manifest["extra"], checkpoints.files(manifest["step"]), where)
    lacking = sorted(beside.keys() - base.keys())
    if lacking or not beside:
        raise ValueError(
            f"{where} lacks arrays of its model: {', '.join(lacking) or 'all adapters'}. Take another step."
        )
    base = {path: array for path, array in base.items() if not path.endswith("/words")}
    return Adapted(manifest["step"], config, adapters, origin, base, beside)


def _joined(path: Any) -> str:
    return "/".join(map(str, path))
