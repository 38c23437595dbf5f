"""Held-out dialogues of every kind, answered by the runner itself: the figures of the README.

    python -m train_demo.measure mlxmoe/demo --count 100 --efforts high

The same dialogues and the same rule as `evaluate`, but all of it real: the engine with its default
slots, the chat's loop, the tools on files in a folder. About a second a dialogue.
"""

import argparse
import tempfile
from pathlib import Path

import mlx.core as mx

from mlxmoe import demo
from mlxmoe.budget import Settings
from mlxmoe.checkpoint import open_checkpoint, stream_width
from mlxmoe.engine import engine_for
from train_demo.dialogues import EFFORTS, KINDS, held_cases
from train_demo.grade import Answered, failures, table_line
from train_demo.play import play


def main() -> None:
    """Read the options, answer, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="dialogues of each kind and effort")
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=["high"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--wrong", type=int, default=0, help="show so many failures of each kind")
    given = parser.parse_args()
    mx.disable_compile()
    checkpoint = open_checkpoint(given.folder)
    settings = Settings(None, demo.SLOTS, None, demo.CONTEXT, stream_width())
    engine = engine_for(checkpoint, checkpoint.plan(settings))
    engine.start(lambda _: None)
    for effort in given.efforts:
        for kind in given.kinds:
            pairs: Answered = []
            for case in held_cases(kind, effort, given.count):
                with tempfile.TemporaryDirectory() as root:
                    pairs.append((case, play(engine.submit, case, Path(root))))
            print(table_line(kind, effort, pairs), flush=True)
            print(*failures(pairs)[: given.wrong], sep="\n", end="")
    engine.close()


if __name__ == "__main__":
    main()
