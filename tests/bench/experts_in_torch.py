"""What PyTorch's mixture of experts computes, against every token through every expert; run by test_torch_experts.py.

`python experts_in_torch.py layer`, or `torchrun --nproc-per-node 4 experts_in_torch.py ranks GTP EP`: a whole model on
ranks, against the same model on one. In float32 on CPUs. `gpu` compares the kernels of a GPU, torchao's FP8 too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "contenders"))

import fsdp2  # noqa: E402
from torch_experts import ALIGNMENT, Experts, MoE, arrived_places, sorted_places  # noqa: E402
from workload import Workload  # noqa: E402

SIZES = dict(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=16, seq=24
)
EXPERTS = dict(num_experts=8, top_k=3, aux_loss_coeff=0.5, shared_hidden=24, qk_norm=True)


def through_every_expert(moe: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output of a mixture and its balance term, the mean over tokens, without sorting anything."""
    work, width = moe.work, x.shape[-1]
    h = x.float() * (x.float().square().mean(-1, keepdim=True) + work.epsilon).rsqrt() * moe.norm.weight
    h = h.to(x.dtype).float()  # a router whose input is not rounded would make other choices
    probs = (h @ moe.router.T).softmax(-1)
    taken = (probs[..., None, :] > probs[..., :, None]).sum(-1) < work.top_k
    shares = probs * taken / (probs * taken).sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(work.num_experts):
        gate, up = (h @ moe.experts.up[expert].T).split(work.intermediate_size, -1)
        y = y + shares[..., expert, None] * ((gate * gate.sigmoid() * up) @ moe.experts.down[expert].T)
    if moe.shared is not None:
        gate, up = (h.reshape(-1, width) @ moe.shared.up.weight.T).split(work.shared_hidden, -1)
        y = y + ((gate * gate.sigmoid() * up) @ moe.shared.down.weight.T).reshape(x.shape)
    load = taken.float().mean(1, keepdim=True).detach() * work.num_experts / work.top_k
    return x + y, work.aux_loss_coeff * (load * probs).sum() / probs.shape[:2].numel()


def check_layer(alignment: int, shared: bool, microbatches: int) -> None:
    """Compares output and gradients of a layer, with the rows of groups padded or not."""
    work = Workload(**SIZES, **EXPERTS, sequences=4, microbatches=microbatches)
    seen: list[int] = []

    def multiply(x: torch.Tensor, kernels: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.extend(offs.tolist())
        y = torch._grouped_mm(x, kernels, offs=offs)
        y.data[offs[-1] :] = torch.nan  # nothing is written there, and nothing may read it
        return y

    mlp = fsdp2.MLP(work.hidden_size, work.shared_hidden) if shared else None
    moe = MoE(work, None, multiply, alignment, mlp)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(4 // microbatches, work.seq, work.hidden_size, requires_grad=True)
    wanted = [x, *moe.parameters()]
    y, weights = moe(x), torch.randn_like(x)
    expected, term = through_every_expert(moe, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((y * weights).sum(), wanted)
    true = torch.autograd.grad((expected * weights).sum() + term / microbatches, wanted)
    for gradient, other in zip(found, true, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)
    assert all(end % alignment == 0 for end in seen) and moe.router.grad is None


def check_places() -> None:
    """Rows from several ranks stand where the same rows stand once they are sorted."""
    for alignment in (1, 16):
        counts = torch.tensor([[3, 0, 5], [0, 0, 2], [17, 0, 1]])
        experts = torch.arange(3).repeat(3).repeat_interleave(counts.flatten())
        arrived = arrived_places(counts, len(experts), alignment)
        wanted = sorted_places(experts, counts.sum(0), alignment)
        for name in ("ends", "source", "place"):
            assert torch.equal(getattr(arrived, name), getattr(wanted, name)), (alignment, name)


def check_gpu(fp8: bool, compiled: bool) -> None:
    """Compares the kernels of a GPU with float32, by relative error of the whole array."""
    sizes = SIZES | dict(hidden_size=256, intermediate_size=128, seq=500)
    work = Workload(**sizes, num_experts=16, top_k=3, aux_loss_coeff=0.5, sequences=2)
    kernels = (fsdp2.float8.grouped_matmul(), ALIGNMENT["fp8"]) if fp8 else (torch._grouped_mm, ALIGNMENT["bf16"])
    moe = MoE(work, None, *kernels, None).cuda()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=parameter.shape[-1] ** -0.5)
    moe = moe.bfloat16()
    wide = copy.deepcopy(moe).float()
    x = torch.randn(2, work.seq, work.hidden_size, device="cuda").bfloat16().requires_grad_()
    weights = torch.randn_like(x)
    expected, term = through_every_expert(wide, x)
    true = torch.autograd.grad((expected * weights).sum() + term, [x, *wide.parameters()])
    if compiled:
        moe.compile()
    y = moe(x)
    found = torch.autograd.grad((y * weights).sum(), [x, *moe.parameters()])
    pairs = zip(["y", "x", *dict(wide.named_parameters())], [y, *found], [expected, *true], strict=True)
    errors = {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}
    print("fp8" if fp8 else "bf16", "compiled" if compiled else "eager", errors)
    # compiled, activations are rounded less often, and a few tokens choose other experts than the oracle's
    assert max(errors.values()) < (0.1 if fp8 or compiled else 0.02), errors


def check_ranks(gtp: int, ep: int) -> None:
    """Compares loss and gradients of a model on ranks with those of one process that has all sequences."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), gtp * ep
    work = Workload(**SIZES, **EXPERTS, sequences=2 * ranks, gtp=gtp, ep=ep)
    alone = Workload(**SIZES, **EXPERTS, sequences=2 * ranks)
    mesh = init_device_mesh("cpu", (gtp, ep, 1), mesh_dim_names=("gtp", "ep", "tp"))
    torch.manual_seed(0)
    whole = fsdp2.Llama(alone)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.device("meta"):
        model = fsdp2.Llama(work, mesh.get_group("ep"))
    fsdp2.shard(model, work, mesh, MixedPrecisionPolicy(), keep_gathered=False)
    model.to_empty(device="cpu")
    own = mesh.get_local_rank("ep")

    def part(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.chunk(ep)[own] if parameter.ndim == 3 else parameter

    for parameter, full in zip(model.parameters(), whole.parameters(), strict=True):
        placed = distribute_tensor(part(full.detach()).contiguous(), parameter.device_mesh, parameter.placements)
        parameter.detach().to_local().copy_(placed.to_local())
    tokens = torch.randint(0, work.vocab_size, (2 * ranks, work.seq))

    def loss_of(llama: fsdp2.Llama, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(llama(rows).flatten(0, 1), rows.roll(-1, -1).flatten())

    wanted = loss_of(whole, tokens)
    wanted.backward()
    loss = loss_of(model, tokens[2 * rank : 2 * rank + 2])
    loss.backward()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    torch.testing.assert_close(mean, wanted.detach(), rtol=1e-5, atol=1e-5)
    for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.full_tensor(), part(full.grad), rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text
        )
    grouped = fsdp2.groups_of(model)
    experts = [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]
    assert len(grouped[1]["params"]) == len(experts) == 2 * work.num_layers
    dist.destroy_process_group()


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1] == "ranks":
        return check_ranks(*map(int, sys.argv[2:]))
    if sys.argv[1] == "gpu":
        forms = (False, True) if fsdp2.float8._has_grouped_matmul() else (False,)
        for fp8 in forms:
            for compiled in (False, True):
                check_gpu(fp8, compiled)
        return print("torchao's grouped FP8 is not here" if len(forms) == 1 else "all compared")
    check_places()
    for case in ((1, False, 1), (1, True, 2), (16, True, 1)):
        check_layer(*case)


if __name__ == "__main__":
    main()
