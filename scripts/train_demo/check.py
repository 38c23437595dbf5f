"""Hold the runner's own model against the torch network on the trained weights.

    python -m train_demo.check RUN_FOLDER CHECKPOINT_FOLDER

Logits of held-out dialogues within 1e-4, and the same greedy answers: reasoning, text and calls.
Where two index scores are so near that rounding swaps the keys, the numbers part; what follows
such a place in a dialogue is not compared, and how much was compared is said.
"""

import argparse
import json
import os
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
import torch

from mlxmoe.budget import Settings
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.checkpoint import open_checkpoint, stream_width
from mlxmoe.engine import engine_for
from mlxmoe.events import Request, Sampling, collect
from mlxmoe.loader import load
from train_demo.batches import encode, preamble, request
from train_demo.dialogues import KINDS, held_dialogue
from train_demo.evaluate import load as load_torch
from train_demo.network import Network
from train_demo.turns import Effort

LIMIT = 1e-4
NEAR = 1e-6
EXPERTS = 80
EFFORTS: tuple[Effort, ...] = ("low", "high", "max")
MOST_TOKENS = 240


def main() -> None:
    """Read the options, compare, exit with 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("checkpoint", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    torch.set_num_threads(1)
    network = as_shipped(given.run / "checkpoint.pt")
    worst, share = logits_apart(network, given.checkpoint)
    print(f"largest difference of logits: {worst:.2e}, expected at most {LIMIT:.0e}")
    print(f"compared: {share:.1%} of the positions, the rest follows a tie of index scores")
    same, total = greedy_same(network, given.checkpoint)
    print(f"greedy answers the same: {same} of {total}")
    raise SystemExit(0 if worst <= LIMIT and same == total else 1)


def as_shipped(path: Path) -> Network:
    """The torch network with its trunk rounded to bfloat16 too, as the file has it."""
    network = load_torch(path)
    kept = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "w13", "w2")
    for name, parameter in network.named_parameters():
        if not name.endswith(kept):
            parameter.data = parameter.data.bfloat16().float()
    return network


def logits_apart(network: Network, folder: Path) -> tuple[float, float]:
    """(largest difference over a dialogue of each kind and effort, share of the positions that
    was compared), in float32."""
    chat, worst = KimiChat(folder), 0.0
    compared = total = 0
    checkpoint = open_checkpoint(folder)
    loaded = load(checkpoint.manifest, checkpoint.config, EXPERTS, lambda _: None, mx.float32, 2)
    for kind in KINDS:
        for effort in EFFORTS:
            dialogue = held_dialogue(Random(f"check/{kind}/{effort}"), kind, effort)
            ids = [*preamble(chat, effort, True), *encode(chat, dialogue.messages(), effort)[0]]
            with torch.no_grad():
                expected = network.logits(network(torch.tensor([ids]))[0])[0].numpy()
            runner = loaded.network
            hidden = runner.hidden(mx.array(ids), runner.make_state())
            found = np.array(runner.logits(hidden).astype(mx.float32))
            safe = before_a_tie(network, len(ids))
            worst = max(worst, float(np.abs(found - expected)[:safe].max()))
            compared, total = compared + safe, total + len(ids)
    return worst, compared / total


def before_a_tie(network: Network, tokens: int) -> int:
    """How many tokens come before the first whose selection rounding could change."""
    gaps = torch.stack([mla.gaps[0] for mla in network.mlas()])
    # Equal scores are zeros, which rounding leaves alone: the lower index wins on both sides.
    near = ((gaps > 0) & (gaps < NEAR)).any(0)
    return int(near.nonzero()[0]) if near.any() else tokens


def greedy_same(network: Network, folder: Path) -> tuple[int, int]:
    """(first answers with the same reasoning, text and calls, answers)."""
    chat = KimiChat(folder)
    checkpoint = open_checkpoint(folder)
    settings = Settings(None, EXPERTS // 2, None, None, stream_width())
    engine = engine_for(checkpoint, checkpoint.plan(settings))
    engine.start(lambda _: None)
    same = total = 0
    for kind in KINDS:
        for effort in EFFORTS:
            dialogue = held_dialogue(Random(f"greedy/{kind}/{effort}"), kind, effort)
            asked = request(dialogue)
            first = dialogue.turns[-1].messages(dialogue.world)[0]
            before = dialogue.messages(len(dialogue.turns) - 1)
            sampling = Sampling(temperature=0.0, max_tokens=MOST_TOKENS)
            asked = Request((*before, first), asked.tools, tier=asked.tier, sampling=sampling)
            reply = collect(engine.submit(asked))
            prompt = chat.render(asked)
            expected = _greedy(network, list(prompt.ids), next(iter(chat.stop_ids)))
            parser = chat.parser(prompt)
            wanted = collect([*parser.feed(expected), *parser.finish(cut=False)])
            total += 1
            same += reply.message == wanted.message
            if reply.message != wanted.message:
                print(json.dumps([kind, effort, str(reply.message), str(wanted.message)]))
    engine.close()
    return same, total


@torch.no_grad()
def _greedy(network: Network, ids: list[int], end: int) -> list[int]:
    hidden, state = network(torch.tensor([ids]))
    found: list[int] = []
    while len(found) < MOST_TOKENS:
        token = int(network.logits(hidden[:, -1]).argmax())
        found.append(token)
        if token == end:
            break
        hidden, state = network(torch.tensor([[token]]), state)
    return found


if __name__ == "__main__":
    main()
