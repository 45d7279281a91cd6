"""Generates text with a trained model: processes the prompts in one pass, then adds tokens one by one with a KV cache.

[Note: generation]
The caches are a pytree with keys and values, each `(batch, slots, kv_heads, head_dim)`, for every attention module; in
a `Stack` that is kept in one piece, they have a leading dimension of layers. The programs put the caches into a copy of
the model as variables (`nn.Cache`), call the model, and take out what its layers wrote. The model's own code, `Stack`s
and meshes therefore work as in training.

Two programs compute the tokens. `prefill` runs the forward pass over the prompts and fills the caches. `decode` adds up
to 16 tokens to each row in a loop on the devices, with its caches donated. Before both, by default and if a copy fits
in memory, the weights are gathered, cast and fused once, and stacks are split into layers
(`nn.with_gathered_weights`). Each step of the loop then copies no weight; with a `Stack`, every layer would have to be
copied out of the stacked arrays. Models with quantized weights keep their stacks: their weights are gathered once, but
not fused.
"""

from ._generate import Generated as Generated
from ._generate import generate as generate
from ._generate import generate_stream as generate_stream
from ._programs import STEPS as STEPS
from ._sampling import sampling_of as sampling_of
from ._text_stop import Decoder as Decoder
from ._weights import Gather as Gather
