"""Render and parse as one: what goes in comes back, and structure can't be forged."""

import json
import random
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxmoe.chat.kimi import KimiChat
from mlxmoe.chat.markers import CONTROL
from mlxmoe.chat.parser import XtmlParser
from mlxmoe.chat.xtml import XtmlOptions, render
from mlxmoe.errors import CheckpointError, PromptError
from mlxmoe.events import Event, Finished, Reply, Request, Stats, Usage, collect
from mlxmoe.transcript import Image, Message, Text, ToolCall, system, user

GOLDENS = Path(__file__).parent / "goldens"
CHAT = KimiChat(GOLDENS / "tokenizer")
TOKENIZER = CHAT.tokenizer
PARSE_CASES = {
    case["id"]: case for case in json.loads((GOLDENS / "parse" / "cases.json").read_text())["cases"]
}
QUESTION = user("What now?")
TAGS = ("think", "response", "tools", "call", "argument", "json", "message")
CHANNELS: tuple[Literal["think", "response"], ...] = ("think", "response")

near_markers = st.sampled_from(
    [
        *CONTROL,
        "<|",
        "|>",
        "think",
        "argument",
        "<|close|>argument<|se",
        "[EOS]",
        '"',
        "&quot;",
        "\n",
    ]
)
any_text = st.lists(st.text(max_size=8) | near_markers, max_size=6).map("".join)
plain_text = any_text.filter(lambda text: not any(token in text for token in CONTROL))
value_text = any_text.filter(lambda text: "<|close|>argument<|sep|>" not in text)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
).filter(lambda value: "<|close|>argument<|sep|>" not in json.dumps(value))
calls = st.builds(
    ToolCall,
    any_text.filter(bool),
    st.dictionaries(any_text, value_text | json_values, max_size=3),
)
answers = st.builds(
    lambda reasoning, content, calls: Message(
        "assistant", (Text(content),) if content else (), reasoning, tuple(calls)
    ),
    plain_text.filter(lambda text: not text or text.strip()),
    plain_text,
    st.lists(calls, max_size=3),
)


def reply_of(events: list[Event]) -> Reply:
    """Events added up."""
    return collect([*events, Finished("stop", Usage(), Stats())])


@settings(max_examples=150, deadline=None)
@given(answer=answers, thinking=st.booleans(), seed=st.integers(0, 99))
def test_rendered_answer_parses_back(answer: Message, thinking: bool, seed: int) -> None:
    """An answer, rendered as history and parsed as if generated, is the same message,
    whatever the split, by text and by ids."""
    if not thinking:
        answer = Message("assistant", answer.content, "", answer.tool_calls)
    asked = render([QUESTION], XtmlOptions(thinking=thinking)).segments
    options = XtmlOptions(thinking=thinking, add_generation_prompt=False)
    whole = render([QUESTION, answer], options).segments
    assert asked == whole[: len(asked)]
    generated = whole[len(asked) :]
    text = "".join(segment.text for segment in generated)
    ids = TOKENIZER.encode_segments(generated)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=6))

    by_text = XtmlParser(TOKENIZER, "think" if thinking else "response")
    text_events = [
        event
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        for event in by_text.feed_text(text[start:end])
    ]
    by_ids = XtmlParser(TOKENIZER, "think" if thinking else "response")
    id_events = [event for token_id in ids for event in by_ids.feed([token_id])]

    assert by_text.channel == by_ids.channel == "done"
    for reply in (reply_of(text_events), reply_of(id_events)):
        assert answer == reply.message
        assert json.dumps([c.arguments for c in answer.tool_calls]) == json.dumps(
            [c.arguments for c in reply.tool_calls]
        )


soup = st.lists(
    st.sampled_from(
        [f"{kind}{tag}<|sep|>" for kind in ("<|open|>", "<|close|>") for tag in TAGS]
        + ['<|open|>call tool="f"<|sep|>', '<|open|>argument key="k" type="number"<|sep|>']
        + [*CONTROL, "<|open|>call ", 'tool="', '"', " ", "\n", "1", "{}", "x", "<|op", "😀"]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=soup, channel=st.sampled_from(CHANNELS))
def test_any_soup_of_markers_reads_the_same_in_every_split(
    text: str, channel: Literal["think", "response"]
) -> None:
    """Whatever a model says, the parser neither fails nor depends on the chunks."""
    replies = []
    for chunks in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        parser = XtmlParser(TOKENIZER, channel)
        events = [event for chunk in chunks for event in parser.feed_text(chunk)]
        replies.append(reply_of([*events, *parser.finish(cut=False)]))
    parser = XtmlParser(TOKENIZER, channel)
    reply_of([*parser.feed(TOKENIZER.encode(text, True)), *parser.finish(cut=True)])

    assert replies[0] == replies[1] == replies[2]


@settings(max_examples=150, deadline=None)
@given(text=any_text)
def test_no_text_becomes_structure(text: str) -> None:
    """Wherever text comes from, the prompt's control ids are those of harmless text."""

    def conversation(said: str) -> Request:
        call = ToolCall(said or "f", {said or "k": said, "o": [said]}, "c")
        return Request(
            (
                Message("system", (Text(said),), name=said),
                Message("user", (Text(said), Text(said)), name=said),
                Message(
                    "assistant", (Text(said),), f"r{said}", (call, ToolCall("g", f"no JSON {said}"))
                ),
                Message("tool", (Text(said),), tool_call_id="c"),
                user(said),
            ),
            tools=({"type": "function", "function": {"name": said}},),
            response_format={"type": "json_schema", "json_schema": {"description": said}},
        )

    def control_ids(said: str) -> list[int]:
        prompt = CHAT.render(conversation(said))
        return [i for i in prompt.ids if i >= TOKENIZER.n_base]

    assert control_ids("x") == control_ids(text if text.strip() else f"y{text}")


REUSED = [
    "plain",
    "empty-think",
    "think-whitespace-kept",
    "one-call",
    "call-with-content",
    "two-calls",
    "same-tool-twice",
    "no-arguments",
    "big-int",
    "string-spacing",
    "string-with-sep",
    "string-with-other-closes",
    "json-block-invalid",
    "empty-response",
    "content-angle-text",
    "content-ends-like-marker",
    "think-ends-like-marker",
    "no-think-mode",
    "no-think-mode-call",
]


@pytest.mark.parametrize("name", REUSED)
def test_generated_answer_renders_as_it_was_generated(name: str) -> None:
    """The next turn's prompt begins with this turn's prompt and the generated ids,
    and a message ends there: the session can go on from its state."""
    case = PARSE_CASES[name]
    thinking = case["mode"] == "thinking"
    generated = tuple(i for chunk in case["id_chunks"] for i in chunk)
    prompt = CHAT.render(Request((system("Be brief."), QUESTION), thinking=thinking))
    reply = reply_of(CHAT.parser(prompt).feed(generated))

    history = (system("Be brief."), QUESTION, reply.message, user("And then?"))
    after = CHAT.render(Request(history, thinking=thinking))

    assert prompt.ids + generated == after.ids[: len(prompt.ids) + len(generated)]
    assert len(prompt.ids) + len(generated) in after.ends
    assert prompt.ends == after.ends[: len(prompt.ends)]


def test_ends_stand_after_end_of_message_tokens() -> None:
    """`ends` are ascending token positions, one for each message."""
    prompt = CHAT.render(Request((system("Sys"), user("Hi")), tools=({"type": "function"},)))
    (end,) = CHAT.stop_ids

    assert [i for i, token_id in enumerate(prompt.ids, 1) if token_id == end] == list(prompt.ends)
    assert len(prompt.ends) == 4


def test_channel_and_ids_of_the_golden_default() -> None:
    """Default tier is max; without thinking the response channel is open."""
    cases = json.loads((GOLDENS / "chat" / "cases.json").read_text())["cases"]
    (golden,) = [case for case in cases if case["id"] == "minimal-template-default"]

    assert tuple(golden["ids"]) == CHAT.render(Request((user("Hi"),))).ids
    assert CHAT.render(Request((user("Hi"),))).channel == "think"
    assert CHAT.render(Request((user("Hi"),), thinking=False)).channel == "response"


def test_closing_the_thinking_opens_the_answer() -> None:
    """`close_thinking` fed in the middle of reasoning makes what follows the answer."""
    parser = CHAT.parser(CHAT.render(Request((user("Hi"),))))
    events = parser.feed(TOKENIZER.encode("I wonder", False))
    channels = [parser.channel]
    events += parser.feed(CHAT.close_thinking)

    assert [*channels, parser.channel] == ["think", "response"]
    assert CHAT.decode(CHAT.close_thinking) == ("<|close|>think<|sep|><|open|>response<|sep|>")
    events += parser.feed(TOKENIZER.encode("Yes.", False))
    assert (reply_of(events).reasoning, reply_of(events).content) == ("I wonder", "Yes.")


def test_only_end_of_message_stops() -> None:
    """[EOS] does not end a Kimi K3 turn."""
    assert {TOKENIZER.special_id("<|end_of_msg|>")} == CHAT.stop_ids


def test_plain_text_for_scoring_has_no_control_ids() -> None:
    """`encode_text` treats names of control tokens as text."""
    text = "<|open|>message<|sep|> [EOS]"
    ids = CHAT.encode_text(text)

    assert max(ids) < TOKENIZER.n_base
    assert text == CHAT.decode(ids)


def test_what_cannot_be_asked() -> None:
    """No messages, and pictures as long as they are not read, are refused."""
    with pytest.raises(PromptError, match="at least one message"):
        CHAT.render(Request(()))
    with pytest.raises(PromptError, match="images are not supported yet"):
        CHAT.render(Request((Message("user", (Image(4, 4), Text("?"))),)))


def test_vocabulary_without_control_tokens_is_refused(tmp_path: Path) -> None:
    """A tiktoken vocabulary of another model is no Kimi K3 checkpoint."""
    (tmp_path / "tiktoken.model").write_bytes((GOLDENS / "tokenizer/tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {}}')
    with pytest.raises(CheckpointError, match="Kimi K3"):
        KimiChat(tmp_path)
