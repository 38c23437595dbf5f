"""How slots are shared out among layers: always all of them, never under the floor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.errors import BudgetError
from mlxmoe.experts.groups import MAX_WORDS, share_slots
from mlxmoe.manifest import ExpertLayer, ExpertPart


def layers(count: int, experts: int, nbytes: int = 64, shapes: int = 1) -> list[ExpertLayer]:
    """MoE layers; the first ones differ in shape from the last when `shapes` is 2."""
    made = []
    for number in range(count):
        size = nbytes * (2 if shapes == 2 and number < count // 2 else 1)
        part = ExpertPart("gate", "weight", "U8", (1, size), size)
        zeros = np.zeros((experts, 1))
        made.append(
            ExpertLayer(
                number, f"layers.{number}", (part,), zeros.astype(np.int32), zeros.astype(np.int64)
            )
        )
    return made


@given(
    st.integers(1, 12),
    st.integers(4, 20),
    st.integers(1, 4),
    st.integers(0, 300),
    st.integers(1, 2),
)
def test_slots_are_shared_out_whole(
    count: int, experts: int, top_k: int, more: int, shapes: int
) -> None:
    """Every layer has one table, layers of a table are alike, each table has at least
    top-k slots and at most its experts, and no slot is lost while there is room."""
    made = layers(count, experts, shapes=shapes)
    kinds = len({layer.parts for layer in made})
    slots = top_k * kinds + more

    groups = share_slots(made, slots, top_k)

    assert list(range(count)) == [number for group in groups for number in group.layers]
    assert all(len({made[n].parts for n in group.layers}) == 1 for group in groups)
    assert all(top_k <= group.slots <= len(group.layers) * experts for group in groups)
    assert sum(group.slots for group in groups) <= slots
    if slots >= count * experts:
        assert count * experts == sum(group.slots for group in groups)
    if slots >= 2 * top_k * count * kinds:
        assert count == len(groups)


def test_few_slots_make_one_table() -> None:
    """At the floor all layers take turns with one table."""
    assert [(tuple(range(92)), 16)] == [
        (group.layers, group.slots) for group in share_slots(layers(92, 896), 16, 16)
    ]


def test_no_table_exceeds_what_kernels_can_index() -> None:
    """K3 with half of its experts in memory: every table stays under 2^31 words."""
    size = 3072 * 1792
    groups = share_slots(layers(92, 896, size), 92 * 448, 16)

    assert 92 == len(groups)
    assert max(group.slots * size // 4 for group in groups) <= MAX_WORDS


def test_a_table_is_cut_at_what_kernels_can_index() -> None:
    """One layer of more records than a table may hold: the table has its greatest length."""
    assert [MAX_WORDS // (1 << 23)] == [
        g.slots for g in share_slots(layers(1, 512, 1 << 25), 512, 4)
    ]


def test_records_too_large_for_a_table_are_refused() -> None:
    """When top-k records exceed what a gather can index nothing can be computed."""
    with pytest.raises(BudgetError, match="16 experts of 1,073,741,824 bytes don't fit one table"):
        share_slots(layers(8, 64, 1 << 30), 40, 16)


def test_under_the_floor_is_refused_with_numbers() -> None:
    """Two shapes of expert need top-k slots each."""
    with pytest.raises(BudgetError, match=r"7 expert slots are under the floor of 8"):
        share_slots(layers(4, 16, shapes=2), 7, 4)


def test_all_experts_get_slots_even_when_they_are_few() -> None:
    """Fewer experts than twice top-k, and room for all of them: no slot is lost."""
    assert [4, 4, 4] == [group.slots for group in share_slots(layers(3, 4), 12, 3)]
