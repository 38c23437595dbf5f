"""The made-up dialogues the demo model learns from, and those it is tested on."""

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest

from mlxmoe.agent.toolbox import own_tools
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.demo import FOLDER
from mlxmoe.transcript import Text, ToolCall
from train_demo.batches import encode, make_batch, preamble, request
from train_demo.dialogues import (
    EFFORTS,
    KINDS,
    Dialogue,
    held_cases,
    held_dialogue,
    make_scene,
    make_turn,
)
from train_demo.grade import Answer, is_right
from train_demo.turns import ARGUMENT
from train_demo.wordings import AFTER, BEFORE, HELD, SEEN
from train_demo.words import HELD_WORDS, SEEN_WORDS, WORDS, Lexicon, held
from train_demo.world import make_world


@pytest.fixture(scope="module")
def chat() -> KimiChat:
    """The demo's own tokenizer."""
    return KimiChat(FOLDER)


def seen_dialogues(count: int) -> list[Dialogue]:
    """Dialogues of the kind training draws."""
    random, found = Random(3), []
    for _ in range(count):
        scene = make_scene(random)
        turns = tuple(make_turn(scene) for _ in range(3))
        found.append(Dialogue(scene.effort, scene.tools, "", scene.world, turns))
    return found


def every(wording: str) -> set[str]:
    """All that a wording with `(a|b)` can become."""
    parts = re.split(r"\(([^()]*\|[^()]*)\)", wording)
    choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    return {"".join(chosen) for chosen in product(*choices)}


def test_no_wording_of_the_evaluation_is_trained_on() -> None:
    """No held-out wording is a trained one, of any kind, with a word before or after it."""
    trained = {text for wordings in SEEN.values() for each in wordings for text in every(each)}
    for text in {text for wordings in HELD.values() for each in wordings for text in every(each)}:
        for before, after in product(set(BEFORE), set(AFTER)):
            if text.startswith(before) and text.endswith(after):
                assert text[len(before) : len(text) - len(after)] not in trained


def test_no_question_of_the_evaluation_is_trained_on() -> None:
    """Questions that training draws and held-out ones have none in common."""
    trained = {turn.text.lower() for case in seen_dialogues(1500) for turn in case.turns}
    random = Random(4)
    asked = {
        held_dialogue(random, kind, "high").turns[-1].text.lower()
        for kind in KINDS
        for _ in range(60)
    }
    assert set() == trained & asked


def test_words_and_numbers_are_held_out() -> None:
    """Training draws no held-out word or number, the evaluation only those."""
    assert set() == set(SEEN_WORDS) & set(HELD_WORDS)
    assert set(WORDS) == set(SEEN_WORDS) | set(HELD_WORDS)
    for fresh in (False, True):
        lexicon = Lexicon(Random(5), fresh)
        drawn = {lexicon.word() for _ in range(500)} | {lexicon.whole(4) for _ in range(500)}
        assert {fresh} == {held(each) for each in drawn}


def test_dialogues_of_training_hold_no_word_that_is_held_out() -> None:
    """Questions, answers, calls and files of training dialogues have no held-out word."""
    for case in seen_dialogues(300):
        texts = [*case.world.files, *case.world.files.values(), *(t.text for t in case.turns)]
        texts += [step.answer for turn in case.turns for step in turn.steps]
        said = set(re.findall("[a-z]+", " ".join(texts).lower()))
        assert set() == said & set(HELD_WORDS)


def test_the_made_up_folder_answers_like_the_tools(tmp_path: Path) -> None:
    """What a dialogue says a tool returned is what the tool returns on that folder."""
    for number in range(40):
        lexicon = Lexicon(Random(number))
        world = make_world(lexicon)
        root = tmp_path / str(number)
        world.write(root)
        tools = own_tools(root)
        calls = [("list_files", folder) for folder in (".", *world.folders(), "nowhere")]
        calls += [("read_file", path) for path in (*world.files, "nowhere.txt")]
        words = sorted({word for text in world.files.values() for word in text.split()})
        calls += [("find_word", word) for word in (*words, "nowhere") if word.isalnum()]
        calls += [("calculator", "2 * (3 + 4)"), ("calculator", "1 / 0"), ("calculator", "1 / 3")]
        for tool, given in calls:
            arguments = {ARGUMENT[tool]: given}
            assert tools.answer(ToolCall(tool, arguments)) == world.call(tool, arguments), given


def test_turns_are_encoded_as_the_runner_renders_them(chat: KimiChat) -> None:
    """Preamble and turns, encoded apart, are the ids of the whole prompt."""
    for dialogue in seen_dialogues(60):
        prompt = chat.render(request(dialogue))
        ids = [*preamble(chat, dialogue.effort, dialogue.tools)]
        for turn in dialogue.turns:
            ids += encode(chat, turn.messages(dialogue.world), dialogue.effort)[0]
        assert prompt.ids[: prompt.ends[-1]] == tuple(ids)


def test_only_what_the_model_says_is_learned(chat: KimiChat) -> None:
    """The mask covers the assistant's text from its first own token to its end mark."""
    for dialogue in seen_dialogues(40):
        ids, said = encode(chat, dialogue.messages(), dialogue.effort)
        (end,) = chat.stop_ids
        runs = [at for at, (before, now) in enumerate(pairwise([False, *said])) if now > before]
        opened = 'message role="assistant"<|sep|><|open|>'
        for start in runs:
            assert opened in chat.decode(ids[:start])[-60:]
        ends = [at for at, (now, after) in enumerate(pairwise([*said, False])) if now > after]
        assert {end} == {ids[at] for at in ends}
        assert sum(len(turn.steps) for turn in dialogue.turns) == len(runs)


def test_words_split_alike_wherever_they_stand(chat: KimiChat) -> None:
    """A word that may be copied has the same tokens after a space, a newline and a slash."""
    plain = [word for word in WORDS if word not in ("list", "order")]
    for word in plain:
        ids = chat.encode_text(word)
        for before in (" ", "\n", "/"):
            assert [*chat.encode_text(before), *ids] == chat.encode_text(before + word), word


def test_rows_share_a_preamble(chat: KimiChat) -> None:
    """All rows of a batch have its length, and there is something to learn in each."""
    for seed in range(12):
        batch = make_batch(chat, Random(seed), 160)
        assert {160} == {len(row) for row in batch.rows} | {len(said) for said in batch.said}
        assert all(any(said) for said in batch.said)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_asked_at_each_effort(kind: str) -> None:
    """A held-out dialogue ends with a turn of its kind; only max takes more than high."""
    lengths = {}
    for effort in EFFORTS:
        random = Random(6)
        cases = [held_dialogue(random, kind, effort) for _ in range(20)]
        assert all(case.turns[-1].steps[-1].answer for case in cases)
        lengths[effort] = sum(
            len(step.reasoning) for case in cases for step in case.turns[-1].steps
        )
    assert 0 == lengths["low"] == lengths["off"]
    assert 0 < lengths["high"] < lengths["max"]


def test_grading_looks_at_every_message() -> None:
    """Right are just the expected messages: a word beside a call, another argument, a message
    more or less, or one that broke off make it wrong."""
    for kind in KINDS:
        (case,) = held_cases(kind, "high", 1)
        said = [m for m in case.turns[-1].messages(case.world) if m.role == "assistant"]
        right = [Answer(message, 0, True) for message in said]
        assert is_right(case, right)
        for at, answer in enumerate(right):
            talking = replace(answer.message, content=(Text(f"{answer.message.text} so"),))
            for wrong in (replace(answer, message=talking), replace(answer, whole=False)):
                assert not is_right(case, [*right[:at], wrong, *right[at + 1 :]])
        assert not is_right(case, right[:-1])
        assert not is_right(case, [*right, right[-1]])
