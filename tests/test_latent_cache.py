"""The growing cache: right rows after any appends and rewinds, and few copies."""

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.models.latent_cache import LatentCache


@given(st.lists(st.tuples(st.sampled_from(["append", "rewind"]), st.integers(0, 400)), max_size=12))
def test_rows_are_what_was_appended(steps: list[tuple[str, int]]) -> None:
    """Against plain lists of rows: two arrays of different widths grow and shrink together."""
    cache, wanted, count = LatentCache(), np.zeros((0, 3), np.float32), 0.0
    for how, size in steps:
        if how == "rewind":
            keep = min(size, cache.offset)
            cache.rewind(keep)
            wanted = wanted[:keep]
            continue
        fresh = count + np.arange((size + 1) * 3, dtype=np.float32).reshape(-1, 3)
        count += size + 1
        wide, narrow = cache.append(mx.array(fresh), mx.array(fresh[:, :1]))
        wanted = np.concatenate([wanted, fresh])
        assert np.array_equal(wanted, np.array(wide))
        assert np.array_equal(wanted[:, :1], np.array(narrow))

    assert len(wanted) == cache.offset


def test_capacity_doubles_so_growth_copies_little() -> None:
    """Token by token to 5,000 rows the buffer moves five times, and holds less than twice
    what is in it."""
    cache = LatentCache()
    capacities: list[int] = []
    for _ in range(5000):
        cache.append(mx.zeros((1, 2)))
        capacity = cache.arrays[0].shape[0]
        if not capacities or capacities[-1] != capacity:
            capacities.append(capacity)
        mx.eval(cache.arrays)

    assert [256, 512, 1024, 2048, 4096, 8192] == capacities
