"""Whole dialogues: an effort, tools or none, and turns that may go back to earlier ones."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import get_args

from mlxmoe.transcript import Message, Text
from train_demo.files import (
    find_turn,
    has_settings,
    list_turn,
    no_folder_turn,
    read_turn,
    recall_value,
    retry_turn,
    two_reads,
    value_turn,
)
from train_demo.sums import follow_sum, recall_sum, sum_turn, two_sums
from train_demo.talk import fallback, talk
from train_demo.turns import Effort, Scene, Turn
from train_demo.words import Lexicon
from train_demo.world import World, make_world

EFFORTS: tuple[Effort, ...] = get_args(Effort)
EFFORT_SHARES = (0.24, 0.4, 0.3, 0.06)
NO_TOOLS_SHARE = 0.12
HELD_SEED = "held-out 1"
SYSTEM_SHARE = 0.04
SYSTEM_WORDS = (
    "You are a helpful assistant.",
    "You are helpful.",
    "Be short.",
    "You are the demo.",
    "Answer in one line.",
)
# kind -> how often, and what makes a turn of it
KINDS: dict[str, tuple[float, Callable[[Scene], Turn]]] = {
    "greet": (3.0, lambda scene: talk(scene, "greet")),
    "self": (4.0, lambda scene: talk(scene, "self")),
    "can": (4.0, lambda scene: talk(scene, "can")),
    "thanks": (4.0, lambda scene: talk(scene, "thanks")),
    "bye": (4.0, lambda scene: talk(scene, "bye")),
    "fallback": (7.0, fallback),
    "easy_sum": (9.0, lambda scene: sum_turn(scene, easy=True)),
    "sum": (14.0, lambda scene: sum_turn(scene, easy=False)),
    "list": (10.0, list_turn),
    "read": (11.0, read_turn),
    "value": (11.0, value_turn),
    "find": (10.0, find_turn),
    "retry": (10.0, lambda scene: _either(scene, retry_turn, no_folder_turn)),
    "two": (10.0, lambda scene: _either(scene, two_sums, two_reads)),
    "follow": (10.0, follow_sum),
    "recall": (8.0, lambda scene: _recall(scene)),
}
NEEDS_TOOLS = {"retry", "two", "follow"}
PLAIN = ("greet", "self", "can", "thanks", "bye", "fallback")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns in one folder at one effort ("off" is no thinking at all)."""

    effort: Effort
    tools: bool
    system: str
    world: World
    turns: tuple[Turn, ...]

    def messages(self, turns: int | None = None) -> tuple[Message, ...]:
        """All that was said in the first `turns` turns."""
        first = [Message("system", (Text(self.system),))] if self.system else []
        said = [each for turn in self.turns[:turns] for each in turn.messages(self.world)]
        return (*first, *said)


def can_ask(scene: Scene, kind: str) -> bool:
    """Whether a turn of `kind` makes sense now."""
    if kind in NEEDS_TOOLS and not scene.tools:
        return False
    match kind:
        case "follow":
            return scene.result is not None and not scene.result.startswith("error")
        case "recall":
            return bool(scene.seen) or scene.result is not None
        case "value":
            return has_settings(scene)
        case "two":
            return len(scene.world.files) > 1
    return True


def make_scene(random: Random, effort: Effort | None = None, fresh: bool = False) -> Scene:
    """A new folder; tools most of the time."""
    lexicon = Lexicon(random, fresh)
    effort = effort or random.choices(EFFORTS, EFFORT_SHARES)[0]
    return Scene(lexicon, make_world(lexicon), effort, random.random() >= NO_TOOLS_SHARE)


def make_turn(scene: Scene) -> Turn:
    """A turn of a random kind that makes sense now."""
    kinds = [kind for kind in KINDS if can_ask(scene, kind)]
    kind = scene.random.choices(kinds, [KINDS[each][0] for each in kinds])[0]
    return KINDS[kind][1](scene)


def held_dialogue(random: Random, kind: str, effort: Effort, tools: bool = True) -> Dialogue:
    """A held-out dialogue whose last turn is of `kind`; the first turn where it can be.

    `follow` and `recall` have three turns: one that finds something, another, the question.
    """
    while True:
        scene = make_scene(random, effort, fresh=True)
        scene.tools = tools
        turns: list[Turn] = []
        if kind == "follow" or (kind == "recall" and random.random() < 0.5):
            turns.append(sum_turn(scene, easy=False))
        elif kind == "recall" and can_ask(scene, "value"):
            turns.append(value_turn(scene))
        if kind in ("follow", "recall"):
            turns.append(KINDS[random.choice((*PLAIN, "list"))][1](scene))
        if can_ask(scene, kind):
            turns.append(KINDS[kind][1](scene))
            return Dialogue(effort, tools, "", scene.world, tuple(turns))


def held_cases(kind: str, effort: Effort, count: int) -> list[Dialogue]:
    """The first `count` of the evaluation's dialogues; the same ones each time."""
    random = Random(f"{HELD_SEED}/{kind}/{effort}")
    return [held_dialogue(random, kind, effort) for _ in range(count)]


def _either(scene: Scene, first: Callable[[Scene], Turn], other: Callable[[Scene], Turn]) -> Turn:
    return first(scene) if scene.random.random() < 0.6 else other(scene)


def _recall(scene: Scene) -> Turn:
    if scene.result is None or (scene.seen and scene.random.random() < 0.5):
        return recall_value(scene)
    return recall_sum(scene)
