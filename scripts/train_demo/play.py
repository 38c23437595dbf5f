"""One held-out dialogue through the runner itself: engine, loop, and tools on real files."""

from collections.abc import Callable
from pathlib import Path

from mlxmoe.agent.loop import Conversation
from mlxmoe.agent.toolbox import Toolbox, own_tools
from mlxmoe.events import Finished, Request, Sampling, Stream, ToolCallDropped
from train_demo.dialogues import Dialogue
from train_demo.grade import Answer

MOST_TOKENS = 240


def play(submit: Callable[[Request], Stream], dialogue: Dialogue, root: Path) -> list[Answer]:
    """The model's messages in the last turn; the dialogue's folder is made real in `root`."""
    dialogue.world.write(root)
    form = Request(
        messages=dialogue.messages(len(dialogue.turns) - 1),
        tier="max" if dialogue.effort == "off" else dialogue.effort,
        thinking=dialogue.effort != "off",
        sampling=Sampling(temperature=0.0, max_tokens=MOST_TOKENS),
    )
    conversation = Conversation(submit, own_tools(root) if dialogue.tools else Toolbox(), form)
    events = list(conversation.turn(dialogue.turns[-1].text))
    rounds = [event for event in events if isinstance(event, Finished)]
    dropped = any(isinstance(event, ToolCallDropped) for event in events)
    said = [m for m in conversation.messages[len(form.messages) :] if m.role == "assistant"]
    return [
        Answer(message, done.usage.reasoning_tokens, done.reason != "length" and not dropped)
        for message, done in zip(said, rounds, strict=True)
    ]
