"""A program that trains until it is told to end: `python program.py PROCESS PROCESSES COORDINATOR MEET FOLDER`."""

import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp


class Block(nnx.Module):
    def __init__(self, rngs):
        # without biases: gloo aborts if collectives of different sizes meet, and waits if their kinds differ
        self.up, self.down = (nnx.Linear(32, 32, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def load(folder: Path, process: int) -> None:
    """Sleeps while a file says so, as a slow file system does."""
    while (folder / f"sleep{process}").exists():
        time.sleep(0.05)


def main(process: int, processes: int, coordinator: str, meet: str, folder: Path) -> None:
    gtp.distributed(coordinator, processes, process)
    (folder / "records").mkdir(exist_ok=True)
    mesh, rows = gtp.make_mesh(gtp=processes), np.ones((processes, 32), np.float32)
    with jax.set_mesh(mesh), gtp.recorder(folder / "records", at_least=2, factor=20, meet=meet):
        model = gtp.shard(Model(nnx.Rngs(0)), "layers.*", min_size=1)
        state = gtp.TrainState.create(model, optax.sgd(1e-3))
        step = gtp.train_step(lambda model, x: (model(x) ** 2).mean(), optax.sgd(1e-3))
        short = gtp.train_step(lambda model, x: (model.layers[1](model.layers[0](x)) ** 2).mean(), optax.sgd(1e-3))
        x = jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, jax.P("gtp")), rows.__getitem__)
        for each in (step, short):  # so that none is compiled later
            state, _ = each(state, x)
        number = 2
        while not (folder / "end").exists() or number <= int((folder / "end").read_text() or 1 << 30):
            load(folder, process)
            if (folder / f"leave{process}").exists():
                break
            state, metrics = (short if (folder / f"skip{process}").exists() else step)(state, x)
            number, loss = number + 1, float(metrics["loss"])
            (folder / f"step{process}").write_text(f"{number} {loss}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], Path(sys.argv[5]))
