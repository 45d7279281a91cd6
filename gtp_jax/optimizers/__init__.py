"""Optax optimizers for training in low precision."""

from ._low_precision import LowPrecisionState as LowPrecisionState
from ._low_precision import low_precision as low_precision
from ._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from ._stochastic_rounding import stochastic_rounding as stochastic_rounding
