"""Dialogues as token ids: rows that share one preamble, with a mask of what the model says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mlxmoe.agent.toolbox import own_tools
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.events import Request
from mlxmoe.transcript import Message, Text
from train_demo.dialogues import (
    SYSTEM_SHARE,
    SYSTEM_WORDS,
    Dialogue,
    make_scene,
    make_turn,
)
from train_demo.turns import Effort, Scene

# (length of a row, how often): many rows hold one or two turns only
LENGTHS = ((96, 0.12), (160, 0.22), (256, 0.27), (416, 0.21), (672, 0.1), (1120, 0.08))
ROW_TOKENS = 1536
# Rows whose first turn had another effort, as after /tier in a chat; it is not learned from.
MIXED_SHARE = 0.12
THINKING: tuple[Effort, ...] = ("low", "high", "max")
DECLARATIONS = own_tools(Path()).declarations

Encoded = tuple[list[int], list[bool]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One preamble and rows of equal length after it; `said` marks the model's own tokens."""

    preamble: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    said: tuple[tuple[bool, ...], ...]


def request(dialogue: Dialogue) -> Request:
    """The dialogue as the runner would get it."""
    return _request(dialogue.messages(), dialogue.effort, dialogue.tools)


def encode(chat: KimiChat, messages: Sequence[Message], effort: Effort) -> Encoded:
    """Ids of messages without a preamble, and which of them the model says.

    Segments are encoded apart, so the ids of a turn do not depend on what stands before it.
    """
    prompt = chat.render(_request(messages, effort, False))
    skipped = len(prompt.ends) - len(messages)
    first = prompt.ends[skipped - 1] if skipped else 0
    ends = [end - first for end in prompt.ends[skipped:]]
    ids = list(prompt.ids[first : prompt.ends[-1]])
    opened = prompt.ids[prompt.ends[-1] :]
    said = [False] * len(ids)
    for index, message in enumerate(messages):
        if message.role == "assistant":
            start = ends[index - 1]
            own = start + len(opened)
            if tuple(ids[start:own]) != tuple(opened):
                raise ValueError(f"message {index} does not begin like an answer")
            said[own : ends[index]] = [True] * (ends[index] - own)
    return ids, said


def preamble(chat: KimiChat, effort: Effort, tools: bool) -> tuple[int, ...]:
    """Ids of the system messages that declare tools and effort; empty without both."""
    prompt = chat.render(_request((Message("user", (Text("x"),)),), effort, tools))
    return prompt.ids[: prompt.ends[-2]] if len(prompt.ends) > 1 else ()


def make_batch(chat: KimiChat, random: Random, length: int) -> Batch:
    """Rows of `length` tokens, all with the same effort and tools."""
    first = make_scene(random)
    pairs = [
        _row(chat, random, first.effort, first.tools, length)
        for _ in range(max(1, ROW_TOKENS // length))
    ]
    return Batch(
        preamble(chat, first.effort, first.tools),
        tuple(tuple(ids) for ids, _ in pairs),
        tuple(tuple(said) for _, said in pairs),
    )


def choose_length(random: Random) -> int:
    """The length of a batch's rows."""
    return random.choices([length for length, _ in LENGTHS], [share for _, share in LENGTHS])[0]


def _row(chat: KimiChat, random: Random, effort: Effort, tools: bool, length: int) -> Encoded:
    """Turns until `length` tokens are full; the last one is cut."""
    scene = make_scene(random, effort)
    scene.tools = tools
    ids: list[int] = []
    said: list[bool] = []
    if random.random() < SYSTEM_SHARE:
        words = Message("system", (Text(random.choice(SYSTEM_WORDS)),))
        ids, said = encode(chat, [words], effort)
    if effort != "off" and random.random() < MIXED_SHARE:
        more = _other_effort(chat, scene, effort)
        if len(more) < length // 2:
            ids, said = ids + more, said + [False] * len(more)
        else:
            scene.result, scene.seen = None, {}
    while len(ids) < length:
        more, own = encode(chat, make_turn(scene).messages(scene.world), effort)
        ids, said = ids + more, said + own
    return ids[:length], said[:length]


def _other_effort(chat: KimiChat, scene: Scene, effort: Effort) -> list[int]:
    """A turn that was thought about more, or less, than the rest will be."""
    scene.effort = scene.random.choice([other for other in THINKING if other != effort])
    ids = encode(chat, make_turn(scene).messages(scene.world), effort)[0]
    scene.effort = effort
    return ids


def _request(messages: Sequence[Message], effort: Effort, tools: bool) -> Request:
    return Request(
        messages=tuple(messages),
        tools=DECLARATIONS if tools else (),
        tier="max" if effort == "off" else effort,
        thinking=effort != "off",
    )
