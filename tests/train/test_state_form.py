"""A step keeps the form of a model's variables, and refuses by name what would change it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import pairwise

import gtp_jax as gtp


class Writes(nnx.Module):
    def __init__(self, seen, rngs):
        self.linear = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)
        self.seen = seen

    def __call__(self, x):
        y = self.linear(x)
        before = self.seen.get_value()
        self.seen.set_value(y.mean() if before is None or before.ndim == 0 else jnp.concatenate([before, y[:1]]))
        return y


def loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def step(model, **options):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(model, optimizer)
    return gtp.train_step(loss, optimizer, **options)(state, np.ones((4, 4)))


CASES = {
    "nothing yet": (lambda: nnx.Variable(None), "seen: from None to float64[]"),
    "another dtype": (lambda: gtp.AuxLoss(jnp.zeros((), "float32")), "seen: from float32[] to float64[]"),
    "longer": (lambda: nnx.Cache(jnp.zeros((0, 4))), "seen: from float64[0, 4] to float64[1, 4]"),
}


@pytest.mark.parametrize("case, microbatches", pairwise(CASES, [1, 2], usual=2))
def test_a_call_that_changes_the_form_of_a_variable_is_refused_by_name(case, microbatches, x64):
    make, line = CASES[case]
    with pytest.raises(ValueError, match=naming("variables", "Create shape dtype")) as error:
        step(Writes(make(), nnx.Rngs(0)), microbatches=microbatches, skip_nonfinite=microbatches == 1)
    assert f"\n  {line}\n" in str(error.value)


def test_sown_values_are_dropped_by_a_step_and_refused_if_an_earlier_call_left_some(x64):
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", y.mean())
            return y

    assert step(Sows(nnx.Rngs(0)))[0].model_state == {}
    model = Sows(nnx.Rngs(0))
    model(np.ones((4, 4)))
    with pytest.raises(ValueError, match=naming("hidden.1 float64 nnx.pop nnx.Intermediate")):
        step(model)


def test_without_a_branch_or_a_mesh_a_step_returns_the_new_form(x64):
    state, _ = step(Writes(nnx.Cache(jnp.zeros((0, 4))), nnx.Rngs(0)), skip_nonfinite=False)
    assert jax.tree.map(jnp.shape, state.model_state) == {"seen": (1, 4)}
