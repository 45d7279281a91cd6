"""Trains the same Llama with PyTorch's `context_parallel`, its weights sharded over the same ranks by FSDP2.

Run it with `torchrun --nproc-per-node 2 context_parallel.py --cp 2 --seq 65536`. `--around` compiles what is before and
after attention; by default, blocks are compiled as a whole. cuDNN computes the attention, as in gtp_jax.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2 import EMBEDDING_DTYPE, Attention, Llama, rope, shard, timed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import LEARNING_RATE, REDUCE_DTYPE, WEIGHT_DECAY, parser, report, workload


class AttentionOfParts(nn.Module):
    """Attention whose queries and keys are at given places, as `context_parallel` reorders each sequence."""

    def __init__(self, whole: Attention, places: torch.Tensor, around: bool, *, repeat: bool) -> None:
        super().__init__()
        self.work, self.qkv, self.out = whole.work, whole.qkv, whole.out
        self.places, self.repeat = places, repeat
        self.attend = torch.compiler.disable(self._attend) if around else self._attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.work
        sizes = [work.num_heads * work.head_dim, *[work.num_kv_heads * work.head_dim] * 2]
        q, k, v = (t.reshape(*t.shape[:2], -1, work.head_dim) for t in self.qkv(x).split(sizes, dim=-1))
        places = self.places[0].float()
        q, k = rope(q, work.rope_theta, places), rope(k, work.rope_theta, places)
        mixed = self.attend(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.repeat:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--around", action="store_true", help="compile only what is before and after attention")
    flags.add_argument("--eager", action="store_true", help="do not compile")
    flags.add_argument("--rotate", choices=("allgather", "alltoall"), default="allgather", help="how keys travel")
    flags.add_argument("--repeat-kv", action="store_true", help="repeat key-value heads for all query heads")
    args = flags.parse_args()
    work = workload(args, all_over_tp=True)
    if work.tp > 1 or work.gtp > 1 or work.ep > 1 or work.has_experts or work.qk_norm or work.microbatches > 1:
        flags.error("only --cp is supported here, without experts, norms of queries and keys, or microbatches")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (work.cp, 1), mesh_dim_names=("gtp", "ep"))
    set_rotate_method(args.rotate)
    torch.manual_seed(0)
    places = torch.arange(work.seq, device=device)[None].repeat(work.sequences, 1)
    with torch.device("meta"):
        model = Llama(work)
    for block in model.blocks:
        part: Any = block
        part.attention = AttentionOfParts(part.attention, places, args.around, repeat=args.repeat_kv)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if not args.eager:
        for block in model.blocks:
            block.compile()
        loss_of = torch.compile(loss_of)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, REDUCE_DTYPE))
    shard(model, work, mesh, policy, keep_gathered=False)
    model.to_empty(device=device)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    tokens = torch.randint(
        0, work.vocab_size, (work.sequences, work.seq), generator=torch.Generator().manual_seed(1)
    ).to(device)
    targets = tokens.roll(-1, -1)

    def step() -> torch.Tensor:
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / work.cp

    divided: Any = contextlib.nullcontext()
    if work.cp > 1:
        divided = context_parallel(
            mesh["gtp"],
            buffers=[tokens, targets, places],
            buffer_seq_dims=[1, 1, 1],
            no_restore_buffers={tokens, targets, places},
        )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), divided:
        seconds, losses = timed(step, work)
    if dist.get_rank() == 0:
        report(
            seconds[work.warmup :],
            compile_s=seconds[0] - min(seconds),
            peak_bytes=torch.cuda.max_memory_allocated(),
            loss=losses[0],
            last_loss=losses[-1],
            parameters=sum(p.numel() for p in model.parameters()),
            reduce_dtype=REDUCE_DTYPE,
            embedding_dtype=EMBEDDING_DTYPE,
            versions={"torch": version("torch")},
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
