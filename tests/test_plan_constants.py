"""The plan counts with the same numbers that the code works with."""

from mlxmoe import footprint, layers
from mlxmoe.experts import groups, tables
from mlxmoe.models import attention, kimi_k3


def test_the_plan_counts_with_the_codes_own_numbers() -> None:
    """A constant that is changed in one place and not in the other breaks the plan."""
    assert footprint.CHUNK_TOKENS == kimi_k3.CHUNK_TOKENS
    assert footprint.PAIR_BYTES == layers.PAIR_BYTES
    assert footprint.EXPERT_ROWS == layers.SWEEP_ROWS
    assert footprint.BLOCK_BYTES == 4 * attention.BLOCK_ELEMENTS
    assert groups.MAX_WORDS <= tables.MAX_TABLE_WORDS - tables.WORDS_PER_PAGE
