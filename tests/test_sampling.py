"""Drawing tokens against a float64 oracle, and stop strings at every split of a text."""

import math
from collections import Counter
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxmoe.errors import CheckpointError, UsageError
from mlxmoe.events import Sampling
from mlxmoe.sampling import Sampler, StopStrings, check_sampling

DRAWS = 400
PLAIN = Sampling(temperature=1.0, top_p=1.0, seed=7)


def oracle(logits: npt.NDArray[np.float64], sampling: Sampling) -> npt.NDArray[np.float64]:
    """Probabilities after temperature, then top_k, then top_p and min_p of what is left."""
    scaled = logits / sampling.temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0.0
    p /= p.sum()
    if sampling.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0.0
    p[p < sampling.min_p * p.max()] = 0.0
    kept: npt.NDArray[np.float64] = p / p.sum()
    return kept


def draw(logits: npt.NDArray[np.float64], sampling: Sampling, times: int = DRAWS) -> Counter[int]:
    """How often each token came."""
    sampler, array = Sampler(sampling), mx.array(logits.astype(np.float32))
    return Counter(sampler(array) for _ in range(times))


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        Sampling(temperature=0.5, top_p=1.0, seed=1),
        Sampling(temperature=3.0, top_p=1.0, seed=2),
        Sampling(top_p=0.9, seed=3),
        Sampling(top_p=0.5, seed=4),
        Sampling(top_p=1.0, top_k=3, seed=5),
        Sampling(top_p=1.0, min_p=0.3, seed=6),
        Sampling(temperature=2.0, top_p=0.7, top_k=5, min_p=0.4, seed=8),
        Sampling(temperature=5.0, top_p=0.6, top_k=2, seed=9),
        Sampling(temperature=1.5, top_p=0.95, top_k=11, min_p=0.05, seed=10),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling) -> None:
    """Only kept tokens come, every likely one of them does, as often as it should."""
    logits = np.random.default_rng(5).normal(0, 1.5, 12)
    wanted = oracle(logits, sampling)

    seen = draw(logits, sampling, 1000)

    assert set(seen) <= set(np.flatnonzero(wanted))
    assert set(np.flatnonzero(wanted > 0.01)) <= set(seen)
    for token, p in enumerate(wanted):
        assert abs(seen[token] / 1000 - p) < 5 * math.sqrt(p * (1 - p) / 1000) + 1e-9, token


@given(
    scores=st.lists(st.integers(-60, 60), min_size=1, max_size=9, unique=True),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_p=st.sampled_from([0.0, 0.15, 0.35, 0.55, 0.85, 1.0]),
    top_k=st.integers(0, 10),
    min_p=st.sampled_from([0.0, 0.07, 0.33, 1.0]),
)
@settings(max_examples=40)
def test_nothing_but_the_kept_set_is_drawn(
    scores: list[int], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """For any mix of filters the drawn tokens are in the oracle's set, the likeliest in it."""
    logits = np.array(scores) / 20.0
    sampling = Sampling(temperature, top_p, top_k, min_p, seed=11)
    wanted = oracle(logits, sampling) if top_p else np.eye(len(scores))[np.argmax(logits)]

    seen = draw(logits, sampling, 60)

    assert set(seen) <= set(np.flatnonzero(wanted))
    if wanted.max() > 0.3:
        assert int(wanted.argmax()) in seen


def test_filters_work_on_a_flat_distribution() -> None:
    """A top_p of what top_k left, not of the whole: 10,000 equal tokens, 3 kept, 0.5 of these."""
    logits = np.zeros(10_000)
    logits[[4, 40, 400]] = 0.001 * np.array([3, 2, 1])

    seen = draw(logits, Sampling(top_k=3, top_p=0.5, seed=1), 100)

    assert {4, 40} == set(seen)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-7])
def test_no_temperature_takes_the_likeliest(temperature: float) -> None:
    """The highest logit wins, of equal ones the lower id; also when nothing else is filtered."""
    logits = np.array([0.0, 8.0, -3.0, 8.0, 1e30])

    assert {4: 5} == draw(logits, Sampling(temperature), 5)
    assert {1: 5} == draw(logits[:4], Sampling(temperature, top_p=1.0), 5)


def test_top_p_zero_takes_the_likeliest() -> None:
    """top_p 0 is the most likely token alone, the lower id of equal ones."""
    assert {1: 50} == draw(np.array([0.0, 1.0, 1.0, 0.5]), Sampling(top_p=0.0, seed=1), 50)


@pytest.mark.parametrize("top_k", [1, 5, 6, 1 << 40])
def test_top_k_may_be_any_number(top_k: int) -> None:
    """1 is the likeliest token; as many as there are, or more, are all of them."""
    logits = np.array([0.1, 0.5, 0.4, 0.3, 0.2])

    seen = draw(logits, Sampling(top_k=top_k, top_p=1.0, seed=2))

    assert set(range(5)) if top_k > 1 else {1} == set(seen)


def test_a_seed_repeats_and_another_does_not() -> None:
    """The same seed draws the same tokens, whatever else was drawn meanwhile."""
    logits = mx.array(np.random.default_rng(0).normal(0, 1, 50).astype(np.float32))
    drawn = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4), ("low", -1), ("high", 2**64 - 1)):
        sampler = Sampler(Sampling(seed=seed))
        drawn[name] = [sampler(logits) for _ in range(20)]
        mx.random.uniform(shape=(3,))

    assert drawn["a"] == drawn["b"] != drawn["c"]
    assert drawn["low"] == drawn["high"]


def test_without_a_seed_answers_differ() -> None:
    """No seed is a new one each time."""
    logits = mx.zeros((1000,))
    first, second = Sampler(Sampling()), Sampler(Sampling())

    assert [first(logits) for _ in range(8)] != [second(logits) for _ in range(8)]


def test_half_precision_logits_are_drawn_in_float32() -> None:
    """bfloat16 logits filter as their float32 values do."""
    logits = mx.array([1.0, 2.0, 3.0, 4.0], mx.bfloat16)

    seen = {Sampler(Sampling(top_p=0.85, seed=seed))(logits) for seed in range(200)}

    assert {2, 3} == seen


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(top_k=1, seed=1)])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [math.inf, 0.0], [-math.inf] * 3])
def test_logits_that_are_no_numbers_are_an_error(bad: list[float], sampling: Sampling) -> None:
    """Damaged weights are named, not turned into the first tokens of the vocabulary."""
    with pytest.raises(CheckpointError, match="not finite numbers, so weights are damaged"):
        Sampler(sampling)(mx.array(bad))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "temperature is -0.1, expected 0 to 100"),
        (Sampling(temperature=101), "temperature is 101, expected 0 to 100"),
        (Sampling(temperature=math.nan), "temperature is nan"),
        (Sampling(temperature=math.inf), "temperature is inf"),
        (Sampling(top_p=1.1), "top_p is 1.1, expected 0 to 1"),
        (Sampling(top_p=-1.0), "top_p is -1.0"),
        (Sampling(top_p=math.nan), "top_p is nan"),
        (Sampling(min_p=2.0), "min_p is 2.0, expected 0 to 1"),
        (Sampling(top_k=-1), "top_k is -1, expected 0"),
        (Sampling(max_tokens=0), "max_tokens is 0, expected 1"),
        (Sampling(stop=("x", "")), "a stop string is empty"),
    ],
)
def test_numbers_out_of_range_are_refused(sampling: Sampling, words: str) -> None:
    """Each is named with what was given and what is expected."""
    with pytest.raises(UsageError, match=f"^{words}"):
        check_sampling(sampling)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.0, 0.0, 0, 0.0), Sampling(100.0, 1.0, 10**9, 1.0, -5, ("a",), 1)],
)
def test_numbers_in_range_are_taken(sampling: Sampling) -> None:
    """The ends of the ranges belong to them."""
    check_sampling(sampling)


def before_stops(text: str, stops: tuple[str, ...]) -> str:
    """The text before the stop string that is whole first; of those, the longest."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(
    text=st.text("abc<", max_size=12),
    stops=st.lists(st.text("abc<", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=12),
)
@settings(max_examples=300)
def test_stops_cut_at_any_split(text: str, stops: list[str], cuts: list[int]) -> None:
    """However the text comes in pieces, what is shown is the text before the first stop."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder, shown = StopStrings(tuple(stops)), ""
    for start, end in pairwise(borders):
        shown += finder.feed(text[start:end])

    if not finder.found:
        shown += finder.finish()
    assert before_stops(text, tuple(stops)) == shown
    assert finder.found == any(stop in text for stop in stops)


def test_text_is_not_held_back_for_nothing() -> None:
    """Only what may still become a stop string waits."""
    finder = StopStrings(("END", "<stop>"))

    assert ["hello ", "", "ENX", " and ", "<", ""] == [
        finder.feed(piece) for piece in ("hello E", "N", "X", " and <", "<sto", "p>")
    ]
    assert finder.found
    assert "" == finder.feed("more")
