"""Held-out dialogues of every kind, answered by the runner itself: the figures of the README.

    python -m train_demo.measure mlxmoe/demo --count 100 --efforts high

The same dialogues and the same rule as `evaluate`, but all of it real: the engine with its default
slots, the chat's loop, the tools on files in a folder. About a second a dialogue.
"""

import tempfile
from pathlib import Path

import mlx.core as mx

from mlxmoe import demo
from mlxmoe.budget import Settings
from mlxmoe.checkpoint import open_checkpoint, stream_width
from mlxmoe.engine import engine_for
from train_demo.dialogues import held_cases
from train_demo.grade import Answered, asking_parser, failures, table_line
from train_demo.play import play


def main() -> None:
    """Read the options, answer, print."""
    given = asking_parser(__doc__).parse_args()
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
