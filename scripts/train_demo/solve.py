"""Greedy answers of the torch network to many dialogues at once, with real tool results.

After the shared preamble every sequence moves one token a step, its prompt too, so all have the
same position and nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mlxmoe.chat.kimi import KimiChat
from mlxmoe.chat.parser import XtmlParser
from mlxmoe.events import Event, ToolCallDropped, collect
from mlxmoe.transcript import Message
from train_demo.batches import encode, preamble
from train_demo.dialogues import Dialogue
from train_demo.grade import MOST_ROUNDS, Answer, tool_messages
from train_demo.network import Network, State, expand
from train_demo.turns import Effort

MOST_TOKENS = 240


@dataclass(slots=True)
class _Talk:
    """One dialogue in progress: `ids` so far, `at` the next to feed, `start` of the answer."""

    dialogue: Dialogue
    ids: list[int]
    at: int = 0
    start: int = 0
    answers: list[Answer] = field(default_factory=list)
    done: bool = False


@torch.no_grad()
def solve(network: Network, chat: KimiChat, dialogues: Sequence[Dialogue]) -> list[list[Answer]]:
    """The model's messages in the last turn of each dialogue; all of one effort and toolset."""
    effort, tools = dialogues[0].effort, dialogues[0].tools
    opened = _opened(chat, effort)
    talks = [_start(chat, dialogue, opened) for dialogue in dialogues]
    state: State | None = None
    if first := preamble(chat, effort, tools):
        _, state = network(torch.tensor([first]))
        state = expand(state, len(talks))
    (end,) = chat.stop_ids
    everyone = talks
    while talks:
        fed = [talk.ids[talk.at] if talk.at < len(talk.ids) else end for talk in talks]
        hidden, state = network(torch.tensor(fed).unsqueeze(1), state)
        likeliest = network.logits(hidden[:, 0]).argmax(-1).tolist()
        for talk, token in zip(talks, likeliest, strict=True):
            talk.at += 1
            if talk.done or talk.at < len(talk.ids):
                continue
            talk.ids.append(token)
            if token == end or len(talk.ids) - talk.start >= MOST_TOKENS:
                _answered(chat, talk, opened, token == end)
        if 2 * sum(talk.done for talk in talks) >= len(talks):
            left = torch.tensor(
                [at for at, talk in enumerate(talks) if not talk.done], dtype=torch.long
            )
            talks, state = (
                [talk for talk in talks if not talk.done],
                [one.keep(left) for one in state],
            )
    return [talk.answers for talk in everyone]


def _start(chat: KimiChat, dialogue: Dialogue, opened: Sequence[int]) -> _Talk:
    """All turns but the last, and the last question."""
    said = list(dialogue.messages(len(dialogue.turns) - 1))
    said.append(dialogue.turns[-1].messages(dialogue.world)[0])
    ids = [*encode(chat, said, dialogue.effort)[0], *opened]
    return _Talk(dialogue, ids, start=len(ids))


def _opened(chat: KimiChat, effort: Effort) -> Sequence[int]:
    """The ids that open an answer."""
    question = [Message("user")]
    from_user = encode(chat, question, effort)[0]
    both = encode(chat, [*question, Message("assistant")], effort)
    return both[0][len(from_user) : both[1].index(True)]


def _answered(chat: KimiChat, talk: _Talk, opened: Sequence[int], whole: bool) -> None:
    off = talk.dialogue.effort == "off"
    parser = XtmlParser(chat.tokenizer, "response" if off else "think")
    events: list[Event] = []
    thinking = 0
    for token in talk.ids[talk.start :]:
        thinking += parser.channel == "think"
        events += parser.feed([token])
    events += parser.finish(cut=not whole)
    reply = collect(events)
    dropped = any(isinstance(event, ToolCallDropped) for event in events)
    talk.answers.append(Answer(reply.message, thinking, whole and not dropped))
    if not reply.tool_calls or not whole or len(talk.answers) == MOST_ROUNDS:
        talk.done = True
        return
    results = tool_messages(talk.dialogue.world, reply.tool_calls)
    talk.ids += [*encode(chat, results, talk.dialogue.effort)[0], *opened]
    talk.start = len(talk.ids)
