"""Held-out dialogues of every kind, answered by the torch network: a table of what was right.

    python -m train_demo.evaluate RUN_FOLDER --count 100 --efforts high

Nothing of a held-out dialogue was trained on: its wordings, its words and its numbers of three
digits or more (see `words` and `wordings`).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean

import torch

from mlxmoe.chat.kimi import KimiChat
from train_demo.dialogues import EFFORTS, KINDS, Dialogue, held_dialogue
from train_demo.grade import Answer, is_right, wilson
from train_demo.layers import Precision, mxfp4_round
from train_demo.mla import Sparse
from train_demo.network import Network
from train_demo.solve import solve
from train_demo.turns import Effort

SEED = "held-out 1"
BATCH = 128


def main() -> None:
    """Read the options, answer, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="dialogues of each kind and effort")
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=["high"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dense", action="store_true", help="no selection, no rounding")
    parser.add_argument("--wrong", type=int, default=0, help="show so many failures of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chat = KimiChat(given.folder)
    network = load(given.folder / "checkpoint.pt", exact=not given.dense)
    for effort in given.efforts:
        score(network, chat, effort, given)


def load(path: Path, exact: bool = True) -> Network:
    """The trained network as it is shipped: attention over the selection, experts rounded."""
    network = Network()
    network.load_state_dict(torch.load(path, weights_only=False)[0])
    Precision.fast, Sparse.on, Sparse.teach = False, exact, False
    if exact:
        for moe in network.moes():
            moe.w13.data, moe.w2.data = mxfp4_round(moe.w13.data), mxfp4_round(moe.w2.data)
    return network.eval()


def cases(kind: str, effort: Effort, count: int) -> list[Dialogue]:
    """The held-out dialogues of a kind; the same ones each time."""
    random = Random(f"{SEED}/{kind}/{effort}")
    return [held_dialogue(random, kind, effort) for _ in range(count)]


def score(network: Network, chat: KimiChat, effort: Effort, given: argparse.Namespace) -> None:
    """Answer all kinds at one effort, in batches, and print a line for each."""
    dialogues = [(kind, case) for kind in given.kinds for case in cases(kind, effort, given.count)]
    # Those of like length together: a batch lasts as long as its longest.
    dialogues.sort(key=lambda pair: len(pair[1].turns[-1].steps) + 3 * len(pair[1].turns))
    found: dict[str, list[tuple[Dialogue, list[Answer]]]] = {kind: [] for kind in given.kinds}
    for start in range(0, len(dialogues), BATCH):
        part = dialogues[start : start + BATCH]
        for (kind, case), answers in zip(
            part, solve(network, chat, [c for _, c in part]), strict=True
        ):
            found[kind].append((case, answers))
    for kind, pairs in found.items():
        print(line(kind, effort, pairs), flush=True)
        wrong = [pair for pair in pairs if not is_right(*pair)]
        for case, answers in wrong[: given.wrong]:
            print(failure(case, answers))


def line(kind: str, effort: str, pairs: Sequence[tuple[Dialogue, Sequence[Answer]]]) -> str:
    """`kind effort right/count (interval) thinking tokens` of a dialogue."""
    right = sum(is_right(*pair) for pair in pairs)
    low, high = wilson(right, len(pairs))
    thinking = mean(sum(answer.thinking_tokens for answer in answers) for _, answers in pairs)
    return (
        f"{kind:10} {effort:5} {right:4}/{len(pairs)} ({low:.0%} to {high:.0%}), "
        f"{thinking:.1f} thinking tokens"
    )


def failure(case: Dialogue, answers: Sequence[Answer]) -> str:
    """What was asked, wanted and said."""
    wanted = [(step.calls, step.answer) for step in case.turns[-1].steps]
    said = [
        (
            answer.message.reasoning,
            [(call.name, call.arguments) for call in answer.message.tool_calls],
            answer.message.text,
        )
        for answer in answers
    ]
    return json.dumps({"asked": case.turns[-1].text, "wanted": wanted, "said": said}, indent=1)


if __name__ == "__main__":
    main()
