"""Held-out dialogues of every kind, answered by the torch network: a table of what was right.

    python -m train_demo.evaluate RUN_FOLDER --count 100 --efforts low high max

Nothing of a held-out dialogue was trained on: its wordings, its words and its numbers of three
digits or more (see `words` and `wordings`). `measure` does the same with the runner itself.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from mlxmoe.chat.kimi import KimiChat
from train_demo.dialogues import Dialogue, held_cases
from train_demo.grade import Answered, asking_parser, failures, table_line
from train_demo.layers import Precision, mxfp4_round
from train_demo.mla import Sparse
from train_demo.network import Network
from train_demo.solve import solve

BATCH = 128


def main() -> None:
    """Read the options, answer, print."""
    parser = asking_parser(__doc__)
    parser.add_argument("--dense", action="store_true", help="no selection, no rounding")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chat = KimiChat(given.folder)
    network = load(given.folder / "checkpoint.pt", exact=not given.dense)
    for effort in given.efforts:
        for kind in given.kinds:
            pairs = answered(network, chat, held_cases(kind, effort, given.count))
            print(table_line(kind, effort, pairs), flush=True)
            print(*failures(pairs)[: given.wrong], sep="\n", end="")


def load(path: Path, exact: bool = True) -> Network:
    """The trained network as it is shipped: attention over the selection, experts rounded."""
    network = Network()
    network.load_state_dict(torch.load(path, weights_only=False)[0])
    Precision.fast, Sparse.on, Sparse.teach = False, exact, False
    if exact:
        for moe in network.moes():
            moe.w13.data, moe.w2.data = mxfp4_round(moe.w13.data), mxfp4_round(moe.w2.data)
    return network.eval()


def answered(network: Network, chat: KimiChat, cases: Sequence[Dialogue]) -> Answered:
    """The cases with the network's messages."""
    found: Answered = []
    for start in range(0, len(cases), BATCH):
        part = cases[start : start + BATCH]
        found += zip(part, solve(network, chat, part), strict=True)
    return found


if __name__ == "__main__":
    main()
