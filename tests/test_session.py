"""A session against a cold run: the same logits after any edit of the prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreign_checkpoints import KIMI_LINEAR, make_checkpoint
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.footprint import SNAPSHOTS
from mlxmoe.loader import load
from mlxmoe.models.state import Network
from mlxmoe.session import Session
from networks import plain_network, quiet
from scripted import ScriptedNetwork

TOLERANCE = 2e-4
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Turn:
    """A prompt, its message ends, and how many tokens are stepped after it."""

    ids: list[int]
    ends: list[int]
    steps: list[int]


@st.composite
def edits(draw: st.DrawFn, longest: int = 24) -> list[Turn]:
    """Prompts that share prefixes: each goes on from a random cut of what was before."""
    turns: list[Turn] = []
    timeline: list[int] = []
    token = st.integers(0, 4)
    for _ in range(draw(st.integers(1, 5))):
        kept = draw(st.integers(0, len(timeline)))
        room = max(longest - kept, 1)
        fresh = draw(st.lists(token, min_size=0 if kept else 1, max_size=room))
        ids = timeline[:kept] + fresh
        ends = draw(st.lists(st.integers(0, len(ids) + 2), max_size=3))
        steps = draw(st.lists(token, max_size=2))
        turns.append(Turn(ids, ends, steps))
        timeline = ids + steps
    return turns


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first ids agree."""
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


def cold(network: Network[Any], ids: Sequence[int]) -> Logits:
    """Logits after the last of `ids`, from an empty state in one piece."""
    hidden = network.hidden(mx.array(list(ids)), network.make_state())
    return np.array(network.logits(hidden)[-1].astype(mx.float32))


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-k31", "kimi-linear"])
def network(
    request: pytest.FixtureRequest, goldens: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Network[Any]]:
    """Networks with recurrent layers: two of Kimi's, and mlx-lm's Kimi-Linear."""
    if request.param == "kimi-linear":
        folder = make_checkpoint(tmp_path_factory.mktemp("linear"), KIMI_LINEAR, None)
        checkpoint = open_checkpoint(folder)
        loaded = load(checkpoint.manifest, checkpoint.config, 24, quiet)
        yield loaded.network
        loaded.close()
    else:
        yield plain_network(goldens / request.param)


@given(turns=edits(), span=st.integers(1, 9))
@settings(max_examples=8)
def test_sync_equals_a_cold_run(network: Network[Any], turns: list[Turn], span: int) -> None:
    """After any edits the logits are those of a run from nothing, also while stepping."""
    session = Session(network, span)
    timeline: list[int] = []
    for turn in turns:
        logits, reused = session.sync(turn.ids, turn.ends)

        np.testing.assert_allclose(cold(network, turn.ids), np.array(logits), atol=TOLERANCE)
        assert reused <= min(common(timeline, turn.ids), len(turn.ids) - 1)
        timeline = [*turn.ids]
        for token in turn.steps:
            logits = session.step(token)
            timeline.append(token)
        assert timeline == session.tokens
        np.testing.assert_allclose(cold(network, timeline), np.array(logits), atol=TOLERANCE)


@given(turns=edits(longest=60), span=st.integers(1, 70))
@settings(max_examples=150)
def test_state_is_never_of_another_prefix(turns: list[Turn], span: int) -> None:
    """The state's own history is always the prompt, and nothing is computed twice."""
    network = ScriptedNetwork(5, lambda timeline: sum(timeline) % 5)
    session = Session(network, span)
    timeline: list[int] = []
    for turn in turns:
        network.spans.clear()

        logits, reused = session.sync(turn.ids, turn.ends)

        state = network.states[-1]
        assert turn.ids == state.ids == session.tokens
        assert sum(turn.ids) % 5 == int(mx.argmax(logits).item())  # type: ignore[arg-type]
        shared = common(timeline, turn.ids)
        assert reused <= min(shared, len(turn.ids) - 1)
        if shared == len(timeline) < len(turn.ids):
            assert reused == shared
        assert len(turn.ids) - reused == sum(network.spans)
        assert max(network.spans) <= max(span, 1)
        for token in turn.steps:
            session.step(token)
        timeline = turn.ids + turn.steps
        assert timeline == state.ids == session.tokens


def test_an_extension_reuses_everything(network: Network[Any]) -> None:
    """A prompt that begins with the timeline goes on from its end, bit for bit as `extend`."""
    ids = [7, 3, 9, 1, 4, 4, 2, 8, 5, 6]
    by_sync, by_extend = Session(network, 4), Session(network, 4)
    for session in (by_sync, by_extend):
        session.sync(ids, [5])

    logits, reused = by_sync.sync([*ids, 11, 12, 13])
    extended = by_extend.extend([11, 12, 13])

    assert len(ids) == reused
    assert np.array_equal(np.array(extended), np.array(logits))
    assert by_extend.tokens == by_sync.tokens


def test_a_repeat_goes_on_from_the_last_snapshot(network: Network[Any]) -> None:
    """The same prompt again starts at the last message end and gives the same bits, since
    its spans are those of the first time."""
    ids, ends = list(range(20, 44)), [8, 16]
    session = Session(network, 8)

    first, fresh = session.sync(ids, ends)
    again, reused = session.sync(ids, ends)

    assert (0, 16) == (fresh, reused)
    assert np.array_equal(np.array(first), np.array(again))


def test_a_changed_question_goes_on_from_the_message_before(network: Network[Any]) -> None:
    """Another last message reuses all before it; bit for bit a cold run in these spans."""
    head, first, second = list(range(16)), [30, 31, 32], [40, 41, 42, 43]
    session, fresh = Session(network, 8), Session(network, 8)
    session.sync([*head, *first], [8, 16])

    logits, reused = session.sync([*head, *second], [8, 16])

    assert len(head) == reused
    expected, _ = fresh.sync([*head, *second], [8, 16])
    assert np.array_equal(np.array(expected), np.array(logits))


def test_a_shorter_prompt_is_no_trimming(network: Network[Any]) -> None:
    """A prefix of the timeline without a snapshot starts anew: KDA can't be cut back."""
    ids = list(range(50, 62))
    session = Session(network, 6)
    session.sync(ids)

    logits, reused = session.sync(ids[:7])

    assert 0 == reused
    np.testing.assert_allclose(cold(network, ids[:7]), np.array(logits), atol=TOLERANCE)


def test_reset_forgets(network: Network[Any]) -> None:
    """After a reset nothing is reused and the logits are the same bits again."""
    ids = [9, 8, 7, 6, 5, 4]
    session = Session(network, 4)
    first, _ = session.sync(ids, [2, 4])
    session.reset()

    again, reused = session.sync(ids, [2, 4])

    assert (0, ids) == (reused, session.tokens)
    assert np.array_equal(np.array(first), np.array(again))


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize("known", [0, 5])
def test_a_stopped_prefill_goes_back_to_what_was_there(
    network: Network[Any], calls: int, known: int
) -> None:
    """Whenever `on_tokens` raises, `recover` leaves the timeline as before the prompt, or at
    a point of it that was reached and saved, and nothing of the spoilt state behind."""
    session = Session(network, 4)
    heard: list[float] = []

    def stop(done: float, reused: int) -> None:
        heard.append(done)
        if len(heard) > calls:
            raise TimeoutError

    before = [1, 2, 3, 4, 5]
    session.sync(before, [2, 4])
    stopped = [*before[:known], *range(10, 22)]
    with pytest.raises(TimeoutError):
        session.sync(stopped, [known + 6], stop)
    session.recover()
    assert known <= len(session.tokens)
    assert stopped[: len(session.tokens)] == session.tokens

    following = [*before[:known], 7, 8, 9]
    logits, reused = session.sync(following)

    assert known == reused
    np.testing.assert_allclose(cold(network, following), np.array(logits), atol=TOLERANCE)


def test_on_tokens_hears_of_every_layer() -> None:
    """Ids done rise to the prompt's length, with the reused ones told apart."""
    network = ScriptedNetwork(5, lambda timeline: 0)
    session = Session(network, 4)
    session.sync([1, 2, 3])
    heard: list[tuple[float, int]] = []

    session.sync([1, 2, 3, *[4] * 9], (), lambda done, reused: heard.append((done, reused)))

    spans = [(3, 4), (7, 4)]
    expected = [(start + size * n / 4, 3) for start, size in spans for n in (1, 2, 3, 4)]
    assert [*expected, (12, 3)] == heard


def test_the_first_and_the_latest_snapshots_stay() -> None:
    """Of many points three stay within reach: the first message end, where the timeline
    stood before the last prompt, and the last message end."""
    network = ScriptedNetwork(5, lambda timeline: 0)
    ends, reached = list(range(4, 44, 4)), set()
    before = ends[-2] + 2
    for end in (*ends, before):
        session = Session(network, 8)
        for turn, until in enumerate(ends, 1):
            session.sync([n % 5 for n in range(until + 2)], ends[:turn])
        _, reused = session.sync([*(n % 5 for n in range(end)), (end + 1) % 5])
        reached.add(reused)

    assert {ends[0], before, ends[-1]} == reached
    assert SNAPSHOTS == len(reached)


def test_a_rewind_under_grown_caches(network: Network[Any]) -> None:
    """Going back from 300 tokens to 20, and then past 256 again, is a cold run too."""
    ids = [(n * n + 3 * n) % 300 for n in range(300)]
    other = ids[:20] + [299 - id for id in ids[20:]]
    session = Session(network, 64)
    session.sync(ids, [20])

    logits, reused = session.sync(other, [20])

    assert 20 == reused
    np.testing.assert_allclose(cold(network, other), np.array(logits), atol=TOLERANCE)


def test_two_sessions_of_one_network_do_not_mix(network: Network[Any]) -> None:
    """Sessions that take turns give what each gives alone."""
    left, right = [5, 6, 7, 8, 9, 10], [11, 12, 13, 14]
    one, two = Session(network, 4), Session(network, 4)
    one.sync(left, [4])
    two.sync(right, [2])

    after_left, after_right = one.step(3), two.step(4)

    np.testing.assert_allclose(cold(network, [*left, 3]), np.array(after_left), atol=TOLERANCE)
    np.testing.assert_allclose(cold(network, [*right, 4]), np.array(after_right), atol=TOLERANCE)
