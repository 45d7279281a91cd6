"""Optax optimizers for training in low precision, and Muon with its work shared among ranks."""

from ._low_precision import LowPrecisionState as LowPrecisionState
from ._low_precision import low_precision as low_precision
from ._muon import muon as muon
from ._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from ._stochastic_rounding import stochastic_rounding as stochastic_rounding
