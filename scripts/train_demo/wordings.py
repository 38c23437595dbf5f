"""How people ask, by kind (`wordings.toml`), and the demo model's fixed answers.

`HELD` are the wordings that only the evaluation uses. `(a|b)` stands for either; `{name}` is
filled in by the dialogue.
"""

import re
import tomllib
from pathlib import Path
from random import Random

_LISTS = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text())
SEEN: dict[str, list[str]] = _LISTS["seen"]
HELD: dict[str, list[str]] = _LISTS["held"]
TOPICS: list[str] = _LISTS["topics"]
BEFORE: list[str] = _LISTS["before"]
AFTER: list[str] = _LISTS["after"]
LISTED = "I can do sums, list a folder, read a file and find a word."
ANSWERS = {
    "greet": f"Hello! I'm the demo model. {LISTED}",
    "self": "I'm the mlxmoe demo model: a tiny Kimi K3 network, trained on made-up dialogues.",
    "can": LISTED,
    "thanks": "You're welcome!",
    "bye": "Goodbye!",
    "fallback": f"I'm only the demo model and can't help with that. {LISTED}",
    "no_calculator": "I have no calculator here, so I can't work that out.",
    "no_files": "I have no file tools here, so I can't look.",
}


def spin(random: Random, wording: str) -> str:
    """Choose one of each `(a|b)`."""
    return re.sub(
        r"\(([^()]*\|[^()]*)\)", lambda found: random.choice(found[1].split("|")), wording
    )


def dress(random: Random, text: str) -> str:
    """The same request as other people would type it: a word before or after, capitals."""
    if random.random() < 0.65:
        text = random.choice(BEFORE) + text
    if random.random() < 0.65 and text[-1] not in "?!.":
        text += random.choice(AFTER)
    roll = random.random()
    if roll < 0.4:
        return text[0].upper() + text[1:]
    return text
