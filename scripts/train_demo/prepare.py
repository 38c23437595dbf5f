"""Make the folder of a training run: the vocabulary, from dialogues like those to be learned.

python -m train_demo.prepare RUN_FOLDER
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from mlxmoe.chat.xtml import XtmlOptions, render
from train_demo.batches import DECLARATIONS
from train_demo.dialogues import Dialogue, make_scene, make_turn
from train_demo.vocabulary import make_vocabulary, vocabulary_files

SEED = 5
DIALOGUES = 2500
TURNS = 3


def main() -> None:
    """Read the options and write the tokenizer's two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in vocabulary_files(make_vocabulary(texts())).items():
        (folder / name).write_text(text)


def texts() -> Iterator[str]:
    """The texts of many dialogues, piece by piece, without control tokens."""
    random = Random(SEED)
    for _ in range(DIALOGUES):
        scene = make_scene(random)
        turns = tuple(make_turn(scene) for _ in range(TURNS))
        dialogue = Dialogue(scene.effort, scene.tools, "", scene.world, turns)
        options = XtmlOptions(
            tools=DECLARATIONS if dialogue.tools else (),
            thinking=dialogue.effort != "off",
            effort=None if dialogue.effort == "off" else dialogue.effort,
        )
        rendered = render(dialogue.messages(), options)
        yield from (segment.text for segment in rendered.segments if not segment.special)


if __name__ == "__main__":
    main()
