"""Muon for the matrices, Adam for the rest; the ranks share the work and the result.

Muon: Keller Jordan's, 5 Newton-Schulz steps, Nesterov momentum. Each rank orthogonalises its part
of the matrices, and one sum gives all ranks the same update.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ADAM_LR = 0.004
BETAS = (0.9, 0.97)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
CLIP = 1.0
BY_ADAM = ("embed_tokens", "lm_head", "conv1d", "_res.proj", ".gate.weight", ".b_proj", "indexer")


def orthogonalized(gradient: Tensor) -> Tensor:
    """[N, O, I] -> nearly orthogonal matrices of the same shape (quintic Newton-Schulz)."""
    x = gradient.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimizer:
    """Averages the ranks' gradients and applies one update to all."""

    def __init__(self, network: nn.Module, lr: float, rank: int, ranks: int):
        self.lr, self.rank, self.ranks = lr, rank, ranks
        named = list(network.named_parameters())
        self.all = [parameter for _, parameter in named]
        small = [p for name, p in named if p.ndim < 2 or any(key in name for key in BY_ADAM)]
        chosen = {id(p) for p in small}
        self.adam = torch.optim.Adam(small, lr=ADAM_LR, betas=BETAS, eps=1e-9, foreach=True)
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in self.all:
            if id(parameter) not in chosen:
                self.groups.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        self.momentum = [torch.zeros_like(p) for group in self.groups.values() for p in group]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at `rate` times the full learning rates; clears the gradients."""
        self._average()
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * rate
        norm = torch.sqrt(sum((p.grad.square().sum() for p in self._small()), torch.zeros(())))
        for parameter in self._small():
            parameter.grad.mul_(min(1.0, CLIP / (norm.item() + 1e-9)))
        self.adam.step()
        for parameter, update in zip(self._matrices(), self._updates(), strict=True):
            rows, columns = parameter.shape[-2:]
            parameter.mul_(1 - self.lr * rate * WEIGHT_DECAY)
            parameter.sub_(update, alpha=self.lr * rate * max(1.0, rows / columns) ** 0.5)
        for parameter in self.all:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]

    def _small(self) -> list[Tensor]:
        return [p for group in self.adam.param_groups for p in group["params"]]

    def _matrices(self) -> list[Tensor]:
        return [p for group in self.groups.values() for p in group]

    def _average(self) -> None:
        for parameter in self.all:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.flatten() for p in self.all])
        dist.all_reduce(flat)
        flat /= self.ranks
        for parameter, part in zip(
            self.all, flat.split([p.numel() for p in self.all]), strict=True
        ):
            parameter.grad = part.view_as(parameter)

    def _updates(self) -> list[Tensor]:
        """The matrices' updates; each rank works out the groups that are its own."""
        matrices = self._matrices()
        for momentum, parameter in zip(self.momentum, matrices, strict=True):
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
        flat = torch.zeros(sum(p.numel() for p in matrices))
        parts = flat.split([p.numel() for p in matrices])
        for index, shape in enumerate(self._by_cost()):
            if index % self.ranks != self.rank:
                continue
            span = self._span(shape)
            looked = [
                torch.lerp(p.grad, m, MOMENTUM).reshape(-1, *shape)
                for p, m in zip(matrices[span], self.momentum[span], strict=True)
            ]
            done = orthogonalized(torch.cat(looked)).split([len(each) for each in looked])
            for part, update in zip(parts[span], done, strict=True):
                part.copy_(update.flatten())
        dist.all_reduce(flat)
        return [part.view_as(p) for part, p in zip(parts, matrices, strict=True)]

    def _by_cost(self) -> list[tuple[int, ...]]:
        """The groups' shapes, the dearest first, so that the ranks get about the same."""
        return sorted(
            self.groups,
            key=lambda shape: -min(shape) * sum(p.numel() for p in self.groups[shape]),
        )

    def _span(self, shape: tuple[int, ...]) -> slice:
        start = 0
        for each, group in self.groups.items():
            if each == shape:
                return slice(start, start + len(group))
            start += len(group)
        raise KeyError(shape)
