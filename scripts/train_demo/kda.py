"""Kimi Delta Attention in torch, in chunks for training and one step at a time for decoding."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from train_demo.layers import Weight, product, rms_norm

CHUNK = 32
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KdaState:
    """The last three inputs of the convolution [B, 3, 3P] and the memory [B, H, Dk, Dv]."""

    tail: Tensor
    memory: Tensor

    def expand(self, batch: int) -> "KdaState":
        """The state of one timeline as that of `batch` equal ones."""
        return KdaState(self.tail.expand(batch, -1, -1), self.memory.expand(batch, -1, -1, -1))

    def keep(self, rows: Tensor) -> "KdaState":
        """Only these timelines."""
        return KdaState(self.tail[rows], self.memory[rows])


class Kda(nn.Module):
    """One KDA layer of `heads` heads of `dim`."""

    def __init__(self, hidden: int, heads: int, dim: int, eps: float):
        super().__init__()
        width = heads * dim
        self.heads, self.dim, self.width, self.eps = heads, dim, width, eps
        for name in "qkvg":
            setattr(self, f"{name}_proj", Weight(width, hidden))
        self.f_a_proj = Weight(dim, hidden)
        self.f_b_proj = Weight(width, dim)
        self.b_proj = Weight(heads, hidden)
        self.o_proj = Weight(hidden, width, std=0.3 * width**-0.5)
        for name in "qkv":
            conv = Weight(width, 1, 4, std=0.1)
            conv.weight.data[:, 0, 3] += 0.7
            setattr(self, f"{name}_conv1d", conv)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.linspace(-7.0, -1.5, width)[torch.randperm(width)])
        self.o_norm = Weight(dim, value=1.0)
        self._look_back()

    def _look_back(self) -> None:
        """Start all heads but the last as n-gram memories.

        k is q one token later, so q_t meets k_s where the tokens before s equal those up to t.
        """
        n = (self.heads - 1) * self.dim
        self.k_proj.weight.data[:n] = self.q_proj.weight.data[:n]
        lag, channel = torch.randint(0, 3, (n,)), torch.arange(n)
        for conv, more in ((self.q_conv1d, 0), (self.k_conv1d, 1)):
            conv.weight.data[:n] = 0.03 * torch.randn(n, 1, 4)
            conv.weight.data[channel, 0, 3 - lag - more] += 1.0
        self.dt_bias.data[:n] = torch.linspace(-9.0, -6.0, n)[torch.randperm(n)]

    def forward(self, x: Tensor, state: KdaState | None) -> tuple[Tensor, KdaState]:
        """x [B, T, D] after `state` -> [B, T, D] and the state after it."""
        weights = [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj]
        mixed = product(x, torch.cat([each.weight for each in weights]))
        sizes = [3 * self.width, self.width, self.dim, self.heads]
        taps, gate, low, beta = mixed.split(sizes, -1)
        if state is None:
            tail = taps.new_zeros(x.shape[0], 3, 3 * self.width)
            state = KdaState(tail, taps.new_zeros(x.shape[0], self.heads, self.dim, self.dim))
        taps = torch.cat([state.tail, taps], 1)
        conv = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        y = functional.conv1d(taps.transpose(1, 2), conv, groups=3 * self.width).transpose(1, 2)
        q, k, v = functional.silu(y).unflatten(-1, (3, self.heads, self.dim)).unbind(-3)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * self.dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
        z = (self.f_b_proj(low) + self.dt_bias).unflatten(-1, (self.heads, self.dim))
        log_decay = -5 * torch.sigmoid(z * self.A_log.exp()[:, None])
        run = self._step if x.shape[1] == 1 else self._chunks
        out, memory = run(q, k, v, log_decay, torch.sigmoid(beta), state.memory)
        out = rms_norm(out, self.o_norm.weight, self.eps)
        out = out * torch.sigmoid(gate.unflatten(-1, (self.heads, self.dim)))
        return self.o_proj(out.flatten(-2)), KdaState(taps[:, -3:], memory)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, beta = (each[:, 0] for each in (q, k, v, log_decay, beta))
        memory = memory * log_decay.exp().unsqueeze(-1)
        delta = (v - (memory * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
        memory = memory + k.unsqueeze(-1) * delta.unsqueeze(-2)
        return (memory * q.unsqueeze(-1)).sum(-2).unsqueeze(1), memory

    def _chunks(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Chunks of 32; decays are taken from the middle of a chunk, so no exp overflows
        (32 tokens at -5 each: at most e^80)."""
        batch, tokens = q.shape[:2]
        more = -tokens % CHUNK

        def rows(x: Tensor) -> Tensor:
            # Padding has no decay and writes nothing, so the memory passes through it.
            x = functional.pad(x, (0, 0, 0, 0, 0, more)) if more else x
            return x.transpose(1, 2).reshape(batch * self.heads, -1, CHUNK, x.shape[-1])

        q, k, v, log_decay, beta = (rows(each) for each in (q, k, v, log_decay, beta.unsqueeze(-1)))
        total = log_decay.cumsum(2)
        middle = total[:, :, CHUNK // 2 - 1 : CHUNK // 2]
        centred = total - middle
        up = centred.exp()
        k_down = k * (-centred).exp()
        k_up, q_up = k * up, q * up
        k_down_t = k_down.transpose(-1, -2)
        inner = torch.tril(k_up @ k_down_t, -1) * beta
        attend = torch.tril(q_up @ k_down_t)
        start = middle.exp()
        right = torch.cat([v * beta, k_up * start * beta], -1)
        eye = torch.eye(CHUNK)
        solved = torch.linalg.solve_triangular(inner + eye, right, upper=False, unitriangular=True)
        end = total[:, :, -1:]
        parts = (
            solved[..., : self.dim],
            solved[..., self.dim :],
            q_up * start,
            attend,
            (k_down * (end - middle).exp()).transpose(-1, -2),
            end.exp().transpose(-1, -2),
        )
        memory = memory.reshape(batch * self.heads, self.dim, self.dim)
        outs = []
        # unbind: the gradient of a slice would fill a whole zero tensor each time
        for u, w, q_start, near, k_end, decay in zip(*(x.unbind(1) for x in parts), strict=True):
            fresh = torch.baddbmm(u, w, memory, alpha=-1)
            outs.append(torch.baddbmm(q_start @ memory, near, fresh))
            memory = torch.baddbmm(memory * decay, k_end, fresh)
        out = torch.stack(outs, 1).reshape(batch, self.heads, -1, self.dim)[:, :, :tokens]
        return out.transpose(1, 2), memory.view(batch, self.heads, self.dim, self.dim)
