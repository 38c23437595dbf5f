"""Pieces of the network in torch: linear maps, norms, SiTU, residual mixing, MXFP4 rounding.

Parameters are named as in the checkpoint. Matrix products of the trunk run in bfloat16 (3 times
float32 on an AVX-512 CPU), everything between them in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

E2M1_EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


class Precision:
    """Whether matrix products run in bfloat16 (training) or float32 (checks)."""

    fast = True


class _Product(torch.autograd.Function):
    """x W^T in bfloat16, gradients too; float32 in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x16, w16 = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x16, w16)
        return (x16 @ w16.t()).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x16, w16 = ctx.saved_tensors
        d16 = grads[0].bfloat16()
        return (d16 @ w16).float(), (d16.t() @ x16).float()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I] times weight [O, I] transposed -> [..., O]."""
    if not Precision.fast:
        return functional.linear(x, weight)
    flat: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[0])


class Weight(nn.Module):
    """One parameter called `weight`."""

    def __init__(self, *shape: int, std: float | None = None, value: float | None = None):
        super().__init__()
        if value is not None:
            self.weight = nn.Parameter(torch.full(shape, value))
        else:
            scale = std if std is not None else shape[-1] ** -0.5
            self.weight = nn.Parameter(torch.randn(*shape) * scale)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        return product(x, self.weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


class _Situ(torch.autograd.Function):
    """beta tanh(g / beta) sigmoid(g) * lambda tanh(u / lambda), with its own derivative.

    tanh is written as a sigmoid, which torch computes 5 times faster on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear: float) -> Tensor:
        s = torch.sigmoid(gate)
        t = torch.sigmoid(gate * (2 / beta)).mul_(2).sub_(1)
        v = torch.sigmoid(up * (2 / linear)).mul_(2).sub_(1)
        a = (s * t).mul_(beta)
        ctx.save_for_backward(s, t, v, a)
        ctx.linear = linear
        return (a * v).mul_(linear)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        s, t, v, a = ctx.saved_tensors
        inner = s * (1 - t * t) + (1 - s) * a
        return (
            inner.mul_(v).mul_(ctx.linear).mul_(grads[0]),
            (1 - v * v).mul_(a).mul_(grads[0]),
            None,
            None,
        )


def situ(both: Tensor, beta: float, linear: float) -> Tensor:
    """K3's activation of [..., 2I], gate before up -> [..., I]."""
    gate, up = both.chunk(2, -1)
    found: Tensor = _Situ.apply(gate, up, beta, linear)
    return found


def mxfp4_round(weight: Tensor) -> Tensor:
    """`weight` as MXFP4 with MLX's rule would give it back; groups of 32 along the last axis.

    MLX (0.32.4, `fp_quantize`): scale = 2^ceil(log2(amax / 6)), then the nearest of the
    eight magnitudes. The gradient passes straight through.
    """
    groups = weight.detach().unflatten(-1, (-1, GROUP))
    scale = mxfp4_scale(groups)
    scaled = (groups / scale).clamp(-6, 6)
    codes = torch.bucketize(scaled.abs(), E2M1_EDGES)
    rounded = (E2M1[codes] * scaled.sign() * scale).flatten(-2)
    return weight + (rounded - weight).detach()


def mxfp4_scale(groups: Tensor) -> Tensor:
    """The power of two of each group [..., 32] -> [..., 1]."""
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return torch.exp2(torch.ceil(torch.log2(largest / 6)))


class ResidualMix(nn.Module):
    """Attention residuals: a softmax over the stored blocks and the running sum."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.norm = Weight(hidden, value=1.0)
        self.proj = Weight(1, hidden, value=0.0)
        self.eps = eps

    def forward(self, blocks: list[Tensor], running: Tensor) -> Tensor:
        """blocks and running: [..., D] each -> [..., D]."""
        if not blocks:
            return running
        stacked = torch.stack([*blocks, running])
        direction = self.norm.weight * self.proj.weight[0]
        inverse = torch.rsqrt(stacked.square().mean(-1) + self.eps)
        weights = torch.softmax((stacked @ direction) * inverse, 0)
        return (weights.unsqueeze(-1) * stacked).sum(0)
