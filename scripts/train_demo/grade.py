"""What the demo model did in a held-out dialogue, and whether that was right."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from mlxmoe.transcript import Message, Text, ToolCall
from train_demo.dialogues import EFFORTS, KINDS, Dialogue
from train_demo.turns import ARGUMENT
from train_demo.world import World

MOST_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """One message of the model; `whole` unless it ran into the limit of tokens or a call in it
    could not be read. `thinking_tokens` count the three that close the thinking."""

    message: Message
    thinking_tokens: int
    whole: bool


Answered = list[tuple[Dialogue, list[Answer]]]


def is_right(dialogue: Dialogue, answers: Sequence[Answer]) -> bool:
    """Message by message exactly the expected calls, arguments and text, and nothing else.

    What was thought does not count.
    """
    steps = dialogue.turns[-1].steps
    if len(steps) != len(answers) or not all(answer.whole for answer in answers):
        return False
    for step, answer in zip(steps, answers, strict=True):
        made = [(call.name, call.arguments) for call in answer.message.tool_calls]
        if made != [(tool, {ARGUMENT[tool]: given}) for tool, given in step.calls]:
            return False
        if answer.message.text != step.answer:
            return False
    return True


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


def asking_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every evaluation has: which dialogues, how many, what to show."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="dialogues of each kind and effort")
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=["high"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--wrong", type=int, default=0, help="show so many failures of each kind")
    return parser


def table_line(kind: str, effort: str, pairs: Answered) -> str:
    """`kind effort right/count (interval) thinking tokens` of a dialogue."""
    right = sum(is_right(*pair) for pair in pairs)
    low, high = wilson(right, len(pairs))
    thinking = mean(sum(answer.thinking_tokens for answer in answers) for _, answers in pairs)
    return (
        f"{kind:10} {effort:5} {right:4}/{len(pairs)} ({low:.0%} to {high:.0%}), "
        f"{thinking:.1f} thinking tokens"
    )


def failures(pairs: Answered) -> list[str]:
    """What was wrong, one text each."""
    return [_failure(*pair) for pair in pairs if not is_right(*pair)]


def _failure(case: Dialogue, answers: Sequence[Answer]) -> str:
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
    told = {"asked": case.turns[-1].text, "wanted": wanted, "said": said}
    return f"{json.dumps(told, indent=1)}\n"


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    z = 1.96
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (centre - spread) / scale, (centre + spread) / scale
