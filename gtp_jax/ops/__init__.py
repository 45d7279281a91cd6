"""Numeric operations on plain arrays."""

from ._attention import causal_attention as causal_attention
from ._cross_entropy import token_cross_entropy as token_cross_entropy
from ._linear import linear as linear
from ._norm import layer_norm as layer_norm
from ._norm import rms_norm as rms_norm
from ._rope import rope as rope
