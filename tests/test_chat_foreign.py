"""Chats of other models, on a tiny tokenizer made on the spot."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxmoe.chat.foreign import ForeignChat
from mlxmoe.chat.prompt import Prompt
from mlxmoe.errors import CheckpointError, PromptError
from mlxmoe.events import (
    Event,
    Finished,
    ReasoningDelta,
    Reply,
    Request,
    Stats,
    ToolArgumentDelta,
    ToolCallDropped,
    ToolCallStarted,
    Usage,
    collect,
)
from mlxmoe.transcript import Image, Message, Text, ToolCall, system, user

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for tool_call in message.tool_calls %}{% set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def write(folder: Path, template: str | None, specials: list[str] = SPECIALS) -> Path:
    """A checkpoint's tokenizer files: byte-level BPE with these specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the weather in Paris is fine today"] * 9, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["eos_token"] = "<|im_end|>"
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "eos_token_id": [1, 0]}')
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ForeignChat:
    """A model that thinks and calls tools in JSON."""
    return ForeignChat(write(tmp_path_factory.mktemp("foreign"), TEMPLATE))


def parsed(chat: ForeignChat, prompt: Prompt, text: str, cut: bool = False) -> list[Event]:
    """Events of `text`, token by token."""
    parser = chat.parser(prompt)
    ids: Iterable[int] = chat.tokenizer.encode(text, add_special_tokens=False)
    events = [event for token_id in ids for event in parser.feed([token_id])]
    events += parser.finish(cut)
    assert parser.channel == "done"
    return [*events, Finished(parser.finish_reason(cut), Usage(), Stats())]


def reply_of(chat: ForeignChat, prompt: Prompt, text: str, cut: bool = False) -> Reply:
    """The answer `text` as a whole."""
    return collect(parsed(chat, prompt, text, cut))


def test_render_follows_the_template(chat: ForeignChat) -> None:
    """The prompt is the template's text, with tools, opened where the template opens."""
    prompt = chat.render(Request((system("Be brief."), user("Hi")), tools=(TOOL,)))

    assert chat.decode(prompt.ids) == (
        f"<|im_start|>system\n{json.dumps(TOOL)}<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert prompt.channel == "think"
    assert chat.decode(prompt.ids[: prompt.ends[-1]]).endswith("Hi<|im_end|>\n")


def test_render_without_thinking_and_tools(chat: ForeignChat) -> None:
    """Thinking off opens the answer; tool_choice none leaves the tools out."""
    request = Request((user("Hi"),), tools=(TOOL,), tool_choice="none", thinking=False)
    prompt = chat.render(request)

    assert prompt.channel == "response"
    assert "weather" not in chat.decode(prompt.ids)


def test_history_keeps_reasoning_calls_and_results(chat: ForeignChat) -> None:
    """Assistant messages and tool results reach the template as OpenAI-style dicts."""
    call = ToolCall("weather", {"city": "Paris"}, "c1")
    history = (
        user("Hi"),
        Message("assistant", (Text("Wait."),), "hm", (call,)),
        Message("tool", (Text("18C"),), tool_call_id="c1"),
    )
    assert (
        '<|im_start|>assistant\n<think>hm</think>Wait.<tool_call>\n{"name": "weather", '
        '"arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n<|im_start|>tool\n18C'
    ) in chat.decode(chat.render(Request(history)).ids)


def test_stop_ids_and_closing_of_thinking(chat: ForeignChat) -> None:
    """Stop ids come from config.json and the tokenizer; thinking ends with one token."""
    assert {0, 1} == chat.stop_ids
    assert chat.close_thinking == (3,)


def test_parse_reasoning_content_and_calls(chat: ForeignChat) -> None:
    """Reasoning, content in any bytes, and two calls."""
    prompt = chat.render(Request((user("Hi"),), tools=(TOOL,)))
    reply = reply_of(
        chat,
        prompt,
        "the 天気 🤔</think>\n\nLet's <look> at €.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call><|im_end|>ignored',
    )

    assert reply.reasoning == "the 天気 🤔"
    assert reply.content == "Let's <look> at €.\n"
    assert reply.tool_calls == (ToolCall("weather", {"city": "Paris"}), ToolCall("now", {}))
    assert reply.finish_reason == "tool_calls"


def test_call_events(chat: ForeignChat) -> None:
    """A call comes when it is whole, as one JSON block; a broken one is dropped."""
    prompt = chat.render(Request((user("Hi"),), thinking=False))
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    events = parsed(
        chat, prompt, f'<tool_call>{{"name": </tool_call><tool_call>3</tool_call>{good}'
    )

    assert [type(event) for event in events[:2]] == [ToolCallDropped, ToolCallDropped]
    assert events[2:4] == [
        ToolCallStarted(2, "f"),
        ToolArgumentDelta(2, "", "object", '{"a": 1}'),
    ]


def test_the_end_inside_a_call(chat: ForeignChat) -> None:
    """A call that the limit cut is dropped; one that lacks only its marker counts."""
    prompt = chat.render(Request((user("Hi"),), thinking=False))
    text = 'So:<tool_call>{"name": "f", "arguments": {}}'

    assert reply_of(chat, prompt, text, cut=True).tool_calls == ()
    assert reply_of(chat, prompt, text, cut=True).finish_reason == "length"
    assert reply_of(chat, prompt, text).tool_calls == (ToolCall("f", {}),)


def test_the_model_opens_thinking_itself(chat: ForeignChat) -> None:
    """Reasoning is found when the prompt did not open it, and a tool call ends it;
    later in the answer the marker is only text."""
    prompt = chat.render(Request((user("Hi"),), thinking=False))
    reply = reply_of(chat, prompt, "\n<think>why</think>so <think> it is")
    called = reply_of(chat, prompt, '<think>why<tool_call>{"name": "f"}</tool_call>')

    assert (reply.reasoning, reply.content) == ("why", "so <think> it is")
    assert (called.reasoning, called.tool_calls) == ("why", (ToolCall("f", {}),))


def test_cut_in_thinking_is_reasoning(chat: ForeignChat) -> None:
    """Text before the thinking ends is reasoning, also half a marker at the end."""
    prompt = chat.render(Request((user("Hi"),)))
    parser = chat.parser(prompt)
    ids = chat.tokenizer.encode("so </thi", add_special_tokens=False)
    events = [*parser.feed(ids), *parser.finish(cut=True)]

    reasoning = [event.text for event in events if isinstance(event, ReasoningDelta)]

    assert "".join(reasoning) == "so </thi"


def test_plain_text_for_scoring_has_no_control_ids(chat: ForeignChat) -> None:
    """`encode_text` treats names of control tokens as text."""
    ids = chat.encode_text("a <think> b<|im_end|>")

    assert min(ids) >= len(SPECIALS)
    assert chat.decode(ids) == "a <think> b<|im_end|>"


def test_a_model_that_neither_thinks_nor_calls(tmp_path: Path) -> None:
    """Without thinking tokens and tool markers all is content."""
    chat = ForeignChat(write(tmp_path, "{{ messages[0].content }}", SPECIALS[:2]))
    prompt = chat.render(Request((user("Hi"),)))

    assert prompt.channel == "response"
    assert chat.close_thinking == ()
    assert reply_of(chat, prompt, "<think>x</think>").content == "<think>x</think>"


def test_no_chat_template(tmp_path: Path) -> None:
    """Without a template the error says what to do."""
    chat = ForeignChat(write(tmp_path, None))
    with pytest.raises(PromptError, match=r"chat_template\.jinja"):
        chat.render(Request((user("Hi"),)))


UNASKABLE = {
    "no messages": Request(()),
    "image": Request((Message("user", (Image(1, 1),)),)),
    "tools midway": Request((Message("system", tools=(TOOL,)),)),
    "forced tools": Request((user("Hi"),), tool_choice="required"),
    "JSON": Request((user("Hi"),), response_format={"type": "json_object"}),
    "what the template refuses": Request((Message("refused", (Text(""),)),)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("request_", UNASKABLE.values(), ids=UNASKABLE.keys())
def test_what_cannot_be_asked(chat: ForeignChat, request_: Request) -> None:
    """What a template can't say is refused, not left out."""
    with pytest.raises(PromptError) as caught:
        chat.render(request_)
    assert "\n" not in str(caught.value)


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    """Files that can't be loaded, or want their own code run, are one CheckpointError."""
    with pytest.raises(CheckpointError, match="can't be loaded"):
        ForeignChat(tmp_path)
    folder = write(tmp_path / "damaged", TEMPLATE)
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match="can't be loaded"):
        ForeignChat(folder)


def test_no_code_from_the_checkpoint_is_run(tmp_path: Path) -> None:
    """A tokenizer class in the folder is never imported."""
    folder = write(tmp_path, TEMPLATE)
    trace = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    with contextlib.suppress(CheckpointError):
        ForeignChat(folder)

    assert not trace.exists()
