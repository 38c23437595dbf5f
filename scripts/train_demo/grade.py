"""What the demo model did in a held-out dialogue, and whether that was right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlxmoe.transcript import Message, Text, ToolCall
from train_demo.dialogues import Dialogue
from train_demo.turns import ARGUMENT
from train_demo.world import World

MOST_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """One message of the model; `whole` unless it ran into the limit of tokens."""

    message: Message
    thinking_tokens: int
    whole: bool


def is_right(dialogue: Dialogue, answers: Sequence[Answer]) -> bool:
    """Exactly the expected calls with the expected arguments, and exactly the expected answer.

    What was thought does not count.
    """
    steps = dialogue.turns[-1].steps
    if len(steps) != len(answers) or not all(answer.whole for answer in answers):
        return False
    for step, answer in zip(steps, answers, strict=True):
        made = [(call.name, call.arguments) for call in answer.message.tool_calls]
        if made != [(tool, {ARGUMENT[tool]: given}) for tool, given in step.calls]:
            return False
    return answers[-1].message.text == steps[-1].answer


def tool_messages(world: World, calls: Sequence[ToolCall]) -> list[Message]:
    """The results of the model's calls, bad ones too."""
    return [Message("tool", (Text(_result(world, call)),), name=call.name) for call in calls]


def _result(world: World, call: ToolCall) -> str:
    wanted = ARGUMENT.get(call.name)
    given = call.arguments
    if wanted is None:
        return f"error: no tool {call.name}"
    if isinstance(given, str) or set(given) != {wanted} or not isinstance(given[wanted], str):
        return f"error: {call.name} needs {wanted}"
    return world.call(call.name, {wanted: given[wanted]})


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    z = 1.96
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (centre - spread) / scale, (centre + spread) / scale
