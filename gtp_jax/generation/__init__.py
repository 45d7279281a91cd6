"""Text from a trained model: prompts are computed once, and new tokens one after another with cached keys and values.

[Note: generation]
A cache is a pytree of arrays, `(batch, slots, kv_heads, head_dim)` for each attention module; where a `Stack` stays in
one piece, with a leading dimension of layers. Programs put it into a copy of the model as variables (`nn.Cache`), call
the model, and take out what its layers have written: so the model's own code, a `Stack` and a mesh work as in training.

Two programs compute everything. `prefill` is the forward pass over the prompts; its caches hold each row's tokens.
`decode` adds up to 16 tokens to each row in a loop on the devices, with its caches donated. Before both, weights are
gathered, cast and fused once, where a copy fits, and stacks are taken apart (`nn.with_gathered_weights`): a token then
reads each weight and each cache once, and copies none. In a `Stack` every layer would be a copy of a part of its
arrays.
"""

from ._generate import Generated as Generated
from ._generate import generate as generate
from ._generate import generate_stream as generate_stream
from ._sampling import sampling_of as sampling_of
from ._weights import Gather as Gather
