"""Train the demo model: two processes, gradients averaged, checkpoints that it goes on from.

    python -m train_demo.train RUN_FOLDER --steps 3400
    python -m train_demo.train RUN_FOLDER --more 9000

Three phases, by share of the steps: dense attention; then the indexer learns beside it; then
attention runs over the indexer's selection and the experts are rounded to MXFP4, as they will be.
`--more` goes on from a finished run with the same phases and a learning rate that rises again and
then falls to the end.
"""

import argparse
import csv
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn import functional

from mlxmoe.chat.kimi import KimiChat
from train_demo.batches import Batch, choose_length, make_batch
from train_demo.mla import Sparse
from train_demo.moe import Moe
from train_demo.network import Network, expand, set_seed
from train_demo.optimizer import Optimizer

RANKS = 2
SAVE_EVERY = 100
LOG_EVERY = 20
BIAS_STEP = 0.005
COLUMNS = ("step", "seconds", "tokens", "said", "loss", "accuracy", "teach", "lr", "max_load")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of: `steps` after the first `begin`.

    `teach_from`, `sparse_from` and `decay_from` are shares of these steps.
    """

    folder: Path
    steps: int
    seed: int
    lr: float
    begin: int = 0
    teach_from: float = 0.45
    sparse_from: float = 0.7
    decay_from: float = 0.35
    warmup: int = 40

    def share(self, step: int) -> float:
        """How much of the steps is done at `step`, 0 to 1."""
        return (step - self.begin) / self.steps

    def rate(self, step: int) -> float:
        """The learning rate at `step`, as a share of the full one."""
        rising = min(1.0, (step - self.begin + 1) / self.warmup)
        return rising * min(1.0, (1 - self.share(step)) / (1 - self.decay_from))


def main() -> None:
    """Read the options and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--more", type=int, help="steps to add to a finished run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    given = parser.parse_args()
    settings = Settings(given.folder, given.steps, given.seed, given.lr)
    if given.more:
        settings = Settings(
            given.folder,
            given.more,
            given.seed,
            given.lr,
            begin=given.steps,
            teach_from=0.5,
            sparse_from=0.65,
            decay_from=0.0,
        )
    multiprocessing.spawn(_rank, (settings,), nprocs=RANKS)


def _rank(rank: int, settings: Settings) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    set_seed(settings.seed)
    Trainer(rank, settings).run()
    dist.destroy_process_group()


class Trainer:
    """One rank of a run."""

    def __init__(self, rank: int, settings: Settings):
        self.rank, self.settings = rank, settings
        self.chat = KimiChat(settings.folder)
        self.network = Network()
        self.optimizer = Optimizer(self.network, settings.lr, rank, RANKS)
        self.step, self.tokens, self.said, self.seconds = 0, 0, 0, 0.0
        self.path = settings.folder / "checkpoint.pt"
        if self.path.exists():
            self._load()
        if self.step < settings.begin:
            raise SystemExit(
                f"{self.path}: step {self.step} of {settings.begin}. Finish the run first, "
                "without --more"
            )
        self.recent: list[tuple[float, float, float]] = []

    def run(self) -> None:
        """Train to the last step."""
        begin = time.monotonic() - self.seconds
        last = self.settings.begin + self.settings.steps
        while self.step < last:
            self._one()
            self.seconds = time.monotonic() - begin
            if self.step % LOG_EVERY == 0:
                self._log()
            if self.step % SAVE_EVERY == 0 or self.step == last:
                self._save()

    def _one(self) -> None:
        s, share = self.settings, self.settings.share(self.step)
        Sparse.teach = share >= s.teach_from
        Sparse.on = Moe.rounded = share >= s.sparse_from
        rate = s.rate(self.step)
        length = choose_length(Random(f"{s.seed}/{self.step}"))
        batch = make_batch(self.chat, Random(f"{s.seed}/{self.step}/{self.rank}"), length)
        for moe in self.network.moes():
            moe.load = torch.zeros_like(moe.load)
        loss, accuracy = batch_loss(self.network, batch)
        teach = torch.zeros(())
        for mla in self.network.mlas() if Sparse.teach else ():
            teach = teach + mla.teaching
        (loss + teach).backward()
        self.optimizer.step(rate)
        self._balance(rate)
        self.step += 1
        self.tokens += RANKS * sum(map(len, batch.rows))
        self.said += RANKS * sum(map(sum, batch.said))
        self.recent.append((loss.item(), accuracy, teach.item()))
        self.rate = rate

    @torch.no_grad()
    def _balance(self, rate: float) -> None:
        """Selection biases move against the load of their expert (no auxiliary loss)."""
        loads = torch.stack([moe.load for moe in self.network.moes()])
        dist.all_reduce(loads)
        self.max_load = (loads.max(-1).values / loads.sum(-1)).max().item()
        for moe, load in zip(self.network.moes(), loads, strict=True):
            moe.gate.e_score_correction_bias += BIAS_STEP * rate * torch.sign(load.mean() - load)

    def _log(self) -> None:
        if self.rank:
            return
        loss, accuracy, teach = torch.tensor(self.recent).mean(0).tolist()
        self.recent = []
        values = (self.step, self.seconds, self.tokens, self.said, loss, accuracy, teach)
        row = [*values, self.settings.lr * self.rate, self.max_load]
        path = self.settings.folder / "loss.csv"
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            writer.writerow([round(value, 5) for value in row])
        print(
            f"step {self.step} {self.seconds:.0f} s, {self.tokens / self.seconds:.0f} tokens/s, "
            f"loss {loss:.4f} accuracy {accuracy:.4f} teach {teach:.3f} load {self.max_load:.2f}",
            flush=True,
        )

    def _save(self) -> None:
        parts = self.optimizer.state()
        if self.rank:
            return
        temporary = self.path.with_suffix(".part")
        counts = (self.step, self.tokens, self.said, self.seconds)
        torch.save((self.network.state_dict(), parts, counts), temporary)
        temporary.replace(self.path)

    def _load(self) -> None:
        network, parts, counts = torch.load(self.path, weights_only=False)
        self.network.load_state_dict(network)
        self.optimizer.load(parts)
        self.step, self.tokens, self.said, self.seconds = counts


def batch_loss(network: Network, batch: Batch) -> tuple[torch.Tensor, float]:
    """(mean cross entropy of the model's own tokens, share of them that is the likeliest)."""
    state = None
    if batch.preamble:
        _, state = network(torch.tensor([batch.preamble]))
        state = expand(state, len(batch.rows))
    ids = torch.tensor(batch.rows)
    hidden, _ = network(ids[:, :-1], state)
    said = torch.tensor(batch.said)[:, 1:].flatten()
    target = ids[:, 1:].flatten()[said]
    logits = network.logits(hidden.flatten(0, 1)[said])
    accuracy = (logits.argmax(-1) == target).float().mean().item()
    return functional.cross_entropy(logits, target), accuracy


if __name__ == "__main__":
    main()
