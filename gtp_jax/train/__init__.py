"""Training on plain pytrees: state, step, evaluation."""

from ._state import TrainState as TrainState
from ._step import eval_step as eval_step
from ._step import loss_and_gradients as loss_and_gradients
from ._step import train_step as train_step
