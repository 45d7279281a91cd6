"""`train_step` takes the step that `replicas` bring, whoever they are."""

import jax.numpy as jnp
import optax
import pytest

import gtp_jax as gtp


def loss(model, batch):
    return jnp.mean(model(batch))


class Brings:
    """Remembers what was requested."""

    def __init__(self, step):
        self.step = step

    def own_step(self, request, optimizer, **limits):
        self.request, self.optimizer, self.limits = request, optimizer, limits
        return self.step


def test_a_step_that_replicas_bring_is_returned_as_it_is_and_is_told_what_was_asked_for():
    step, optimizer = lambda state, batch: (state, {}), optax.sgd(0.1)
    brings = Brings(step)
    found = gtp.train_step(
        loss, optimizer, replicas=brings, microbatches=2, seed=3, view="local", max_grad_norm=2.0, skip_nonfinite=False
    )
    assert found is step and brings.optimizer is optimizer
    request = brings.request
    assert (request.loss, request.view, request.microbatches, request.seed) == (loss, "local", 2, 3)
    assert brings.limits.pop("options")() == gtp.train.compile_options("cpu", None, tp=1, fp8=False)
    assert brings.limits == {"max_grad_norm": 2.0, "skip_nonfinite": False}


def test_replicas_without_a_step_of_their_own_take_that_of_one_mesh():
    found = gtp.train_step(loss, optax.sgd(0.1), replicas=Brings(None))
    assert type(found) is type(gtp.train_step(loss, optax.sgd(0.1)))


def test_what_is_wrong_for_any_step_is_refused_ahead_of_theirs():
    brings = Brings(None)
    with pytest.raises(ValueError, match="`microbatches` is 0"):
        gtp.train_step(loss, optax.sgd(0.1), replicas=brings, microbatches=0)
    assert not hasattr(brings, "request")
