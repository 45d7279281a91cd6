"""Trains the same Llama with PyTorch FSDP2 and compiled blocks; with --tp above 1, also tensor and sequence parallel.

Run it with `torchrun --nproc-per-node 8 fsdp2.py --gtp 8 --sequences 8`. `--keep-gathered` sets
`reshard_after_forward=False`; `--float8 tensorwise` and `--float8 rowwise` use torchao's FP8 matmuls. With
`--num-experts`, blocks have experts (torch_experts.py), which `--ep` divides among ranks. `--offload` keeps parameters,
gradients and moments in host memory, where AdamW runs; `--recompute` keeps only the inputs of blocks for backward.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import float8
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_experts import ALIGNMENT, Experts, MoE
from workload import LEARNING_RATE, REDUCE_DTYPE, WEIGHT_DECAY, Workload, parser, report, workload

# PyTorch's CUDA kernel sums the rows of a bfloat16 embedding's gradient in float32, and rounds each sum to bfloat16.
EMBEDDING_DTYPE = "float32"


def rope(x: torch.Tensor, theta: float, places: Any = None) -> torch.Tensor:
    half = x.shape[-1] // 2
    if places is None:
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angle = places[:, None] * theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work
        self.qkv = nn.Linear(work.hidden_size, (work.num_heads + 2 * work.num_kv_heads) * work.head_dim, bias=False)
        self.out = nn.Linear(work.num_heads * work.head_dim, work.hidden_size, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(work.head_dim, eps=work.epsilon) for _ in range(2 * work.qk_norm))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self.work
        fused = self.qkv(x)
        # over tp, each rank uses its part of the fused kernel for its own heads; this is the same model with the output
        # features permuted
        heads, kv_heads = work.num_heads // work.tp * work.head_dim, work.num_kv_heads // work.tp * work.head_dim
        q, k, v = (t.reshape(*t.shape[:2], -1, work.head_dim) for t in fused.split([heads, kv_heads, kv_heads], dim=-1))
        if work.qk_norm:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        q, k = rope(q, work.rope_theta), rope(k, work.rope_theta)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, work: Workload, ep_group: Any, fp8: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(work.hidden_size, eps=work.epsilon)
        self.attention = Attention(work)
        self.moe = None
        if work.num_experts:
            shared = MLP(work.hidden_size, work.shared_hidden) if work.shared_hidden else None
            multiply, alignment = (float8.grouped_matmul(), ALIGNMENT["fp8"]) if fp8 else (torch._grouped_mm, 1)
            self.moe = MoE(work, ep_group, multiply, alignment, shared)
        else:
            self.norm2 = nn.RMSNorm(work.hidden_size, eps=work.epsilon)
            self.mlp = MLP(work.hidden_size, work.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return self.moe(x) if self.moe else x + self.mlp(self.norm2(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm1(x))


class Llama(nn.Module):
    def __init__(self, work: Workload, ep_group: Any = None, fp8: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(work.vocab_size, work.hidden_size)
        self.blocks = nn.ModuleList(Block(work, ep_group, fp8) for _ in range(work.num_layers))
        self.norm = nn.RMSNorm(work.hidden_size, eps=work.epsilon)
        self.head = nn.Linear(work.hidden_size, work.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def reset(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            elif parameter.ndim == 3:  # DTensor's generator would give the experts of all ep ranks the same numbers
                own = parameter.detach().to_local()
                own.normal_(
                    std=parameter.shape[-1] ** -0.5,
                    generator=torch.Generator(own.device).manual_seed(1 + dist.get_rank()),
                )
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def over_tp(model: Llama, mesh) -> None:
    """Applies tensor parallelism to attention, MLPs, embedding and head, and sequence parallelism between them."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": gather,
            "mlp": gather,
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def compile_blocks(model: Llama, work: Workload) -> None:
    """Compiles every block as a whole or, if tokens are exchanged, the parts of it that exchange nothing."""
    for block in model.blocks:
        if not work.divides_experts:
            block.compile()
        else:
            block.attend = torch.compile(block.attend)
            block.moe.compile_parts()


def shard(
    model: Llama,
    work: Workload,
    mesh: Any,
    policy: MixedPrecisionPolicy,
    *,
    keep_gathered: bool,
    offload: bool = False,
) -> None:
    """Shards the weights of a model over gtp and ep; those of experts that ep divides are sharded only over gtp.

    Args:
        model: the model, on any device.
        work: the sizes of the model.
        mesh: the mesh, with the axes `gtp`, `ep` and `tp`.
        policy: the dtypes of compute and of gradients.
        keep_gathered: whether blocks and the embedding keep gathered weights for backward. The head always does.
        offload: whether parameters, gradients and moments are kept in pinned host memory.
    """
    data = mesh["gtp"] if work.ep == 1 else mesh["gtp", "ep"]._flatten("data")
    kept = CPUOffloadPolicy() if offload else OffloadPolicy()
    options = {"mesh": data, "mp_policy": policy, "offload_policy": kept}
    blocks: Any = model.blocks
    fully_shard(model.embed, **options, reshard_after_forward=not keep_gathered)
    for block in blocks:
        if work.divides_experts:
            experts: Any = fully_shard(
                block.moe.experts, **{**options, "mesh": mesh["gtp"]}, reshard_after_forward=not keep_gathered
            )
            # these experts received the tokens of all ep ranks, so their gradients are already sums over ep
            experts.set_gradient_divide_factor(float(work.gtp * work.ep))
            if mesh.device_type == "cpu" and work.gtp > 1:
                experts.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied sums
        fully_shard(block, **options, reshard_after_forward=not keep_gathered)
    fully_shard([model.norm, model.head], **options, reshard_after_forward=False)  # their backward follows immediately
    fully_shard(model, **options)
    if work.divides_experts:  # the host waits for split sizes, so it would prefetch too late
        units = [[block, block.moe.experts] for block in blocks]
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch([block.moe.experts, *(units[i + 1] if i + 1 < len(units) else [])])
            block.set_modules_to_backward_prefetch([block.moe.experts, *(units[i - 1] if i else [])])


def groups_of(model: Llama) -> list[dict[str, Any]]:
    """Returns the parameter groups of the optimizer: parameters with the same mesh are updated together."""
    experts = [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]
    ids = set(map(id, experts))
    dense = [p for p in model.parameters() if id(p) not in ids]
    return [{"params": group} for group in (dense, experts) if group]


def timed(step: Callable[[], torch.Tensor], work: Workload) -> tuple[list[float], list[float]]:
    """Runs the warm-up steps and the timed steps of a workload, and returns the seconds and the loss of each."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds, losses = [], []
    for _ in range(work.warmup + work.steps):
        wait()
        begin = time.perf_counter()
        loss = step()
        wait()
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    return seconds, losses


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--keep-gathered", action="store_true", help="keep gathered weights for backward")
    flags.add_argument(
        "--async-tp", action="store_true", help="over tp, send activations in parts that overlap with matmuls"
    )
    flags.add_argument("--float8", choices=float8.SCALINGS, help="FP8 matmuls of torchao with this scaling")
    flags.add_argument("--eager", action="store_true", help="do not compile")
    flags.add_argument("--offload", action="store_true", help="keep parameters, gradients and moments on the host")
    flags.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks for backward")
    args = flags.parse_args()
    if args.async_tp and args.eager:
        flags.error("--async-tp is done by the compiler; remove --eager")
    work = workload(args)
    cuda = torch.cuda.is_available()
    float8.check(args.float8, tp=work.tp, experts=work.has_experts, cuda=cuda)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (work.gtp, work.ep, work.tp), mesh_dim_names=("gtp", "ep", "tp"))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(work, mesh.get_group("ep"), fp8=bool(args.float8))
    update_scales = float8.convert(model, args.float8, emulate=not cuda) if args.float8 else lambda: None
    if work.tp > 1:
        over_tp(model, mesh["tp"])
        if args.async_tp:
            torch._inductor.config._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh["tp"].get_group().group_name)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    if not args.eager:
        compile_blocks(model, work)
        if work.tp == 1:
            loss_of = torch.compile(loss_of)
    if args.recompute:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, REDUCE_DTYPE))
    shard(model, work, mesh, policy, keep_gathered=args.keep_gathered, offload=args.offload)
    model.to_empty(device="cpu" if args.offload else device)
    model.reset()
    update_scales()  # also before the first step, so that all steps run the same compiled program
    optimizer = torch.optim.AdamW(groups_of(model), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=cuda)
    rows = work.sequences // work.microbatches // (work.gtp * work.ep)
    # each rank of gtp and ep has its own sequences; the ranks of a tp group share theirs
    source = torch.Generator().manual_seed(1 + dist.get_rank() // work.tp)
    tokens = torch.randint(0, work.vocab_size, (work.microbatches, rows, work.seq), generator=source).to(device)
    targets = tokens.roll(-1, -1)
    cut_loss = loss_parallel if work.tp > 1 else contextlib.nullcontext

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for part in range(work.microbatches):
            with cut_loss():
                loss = loss_of(model(tokens[part]), targets[part]) / work.microbatches
                loss.backward()
            total += loss.detach().full_tensor() if work.tp > 1 else loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        update_scales()
        return total

    seconds, losses = timed(step, work)
    if dist.get_rank() == 0:
        report(
            seconds[work.warmup :],
            compile_s=seconds[0] - min(seconds),
            peak_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            loss=losses[0],
            last_loss=losses[-1],
            parameters=sum(p.numel() * (work.ep if p.ndim == 3 else 1) for p in model.parameters()),
            reduce_dtype=REDUCE_DTYPE,
            embedding_dtype=EMBEDDING_DTYPE if cuda else "",
            versions={name: version(name) for name in ("torch", *(("torchao",) if args.float8 else ()))},
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
