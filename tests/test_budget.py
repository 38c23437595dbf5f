"""Tables of machines and models: who gets how much memory, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import Tensors, k3_config, k3_shards, nbytes
from mlxmoe.budget import Machine, Plan, Settings, default_budget, make_plan
from mlxmoe.config import DsaConfig, ForeignConfig, ModelConfig, parse_config, read_config
from mlxmoe.errors import BudgetError, CheckpointError, UsageError
from mlxmoe.experts.index import read_manifest
from mlxmoe.footprint import scratch_bytes, sequence_state, trunk_bytes
from mlxmoe.manifest import ExpertLayer, ExpertPart, Manifest, TensorEntry
from mlxmoe.untrusted import Fields

GB, GIB = 10**9, 2**30
ALL = 92 * 896


def layers_of(numbers: range, experts: int, record: int) -> tuple[ExpertLayer, ...]:
    """MoE layers whose experts have `record` bytes each."""
    part = ExpertPart("gate", "weight", "U8", (record,), record)
    places = np.zeros((experts, 1), np.int64)
    return tuple(
        ExpertLayer(n, f"layers.{n}", (part,), places.astype(np.int32), places) for n in numbers
    )


@pytest.fixture(scope="module")
def k3() -> tuple[Manifest, ModelConfig]:
    """The real K3's manifest, its trunk from the published names, and config."""
    raw = k3_config()
    tensors: Tensors = {}
    for shard in k3_shards(raw["text_config"] | {"num_experts": 896}):
        tensors |= {name: t for name, t in shard.items() if ".experts." not in name}
    trunk = tuple(
        TensorEntry(name, dtype, tuple(shape), 0, 0, nbytes(dtype, shape))
        for name, (dtype, shape) in tensors.items()
    )
    manifest = Manifest(Path("k3"), (), trunk, layers_of(range(1, 93), 896, 17_547_264))
    return manifest, parse_config(Fields("config.json", "", raw))


def other(experts: int = 8, **raw: Any) -> tuple[Manifest, ForeignConfig]:
    """A small model of mlx-lm's: 100 MB of trunk, 4 MoE layers, 1 MB a record."""
    trunk = (TensorEntry("w", "BF16", (50_000_000,), 0, 0, 100_000_000),)
    keys = {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096, "vocab_size": 1000,
    }  # fmt: skip
    manifest = Manifest(Path("other"), (), trunk, layers_of(range(4), experts, 1_000_000))
    return manifest, ForeignConfig("other", keys | raw)


def test_the_real_k3_in_numbers(k3: tuple[Manifest, ModelConfig]) -> None:
    """Sizes worked out by hand from the published shapes."""
    manifest, config = k3
    plan = make_plan(manifest, config, Machine(256 * GIB, 250 * GIB), Settings(context=1 << 20))

    assert manifest.trunk_bytes == 114_404_258_816 - 802_428_928 - 92_289_024
    assert plan.trunk_bytes == manifest.trunk_bytes + 92 * 896 * 7168 * 2
    assert plan.state_fixed_bytes == 69 * (96 * 128 * 128 * 4 + 3 * 36_864 * 2)
    assert plan.state_bytes_per_1k == 27_648 * 1024
    assert plan.state_bytes == 6 * plan.state_fixed_bytes + 27_648 * (1 << 20)
    assert plan.working_set_bytes == 25_829_572_608
    assert (plan.record_bytes, plan.experts) == (17_547_264, ALL)
    assert plan.residency == "cached"


def test_wide_floats_and_index_keys(k3: tuple[Manifest, ModelConfig]) -> None:
    """On Linux' CPU everything is float32; K3.1's index keys add 128 values a token."""
    manifest, config = k3
    raw = k3_config()
    raw["text_config"]["dsa_config"] = {"index_head_dim": 128}
    k31 = parse_config(Fields("config.json", "", raw))
    elements = sum(int(np.prod(entry.shape)) for entry in manifest.trunk)

    assert trunk_bytes(manifest, config, 4) == 4 * elements
    assert isinstance(getattr(k31, "dsa", None), DsaConfig)
    assert sequence_state(k31, 2).per_token == 27_648 + 6_144
    assert sequence_state(config, 4).per_token == 2 * 27_648
    assert sequence_state(config, 4).fixed == 69 * (6_291_456 + 3 * 36_864 * 4)


@pytest.mark.parametrize(
    ("gib", "residency", "slots", "span"),
    [
        (192, "cached", (1_000, 2_500), 32_768),
        (256, "cached", (4_000, 5_500), 32_768),
        (512, "cached", (16_000, 17_500), 32_768),
        (2_560, "resident", (ALL, ALL), 32_768),
    ],
)
def test_k3_on_machines(
    k3: tuple[Manifest, ModelConfig], gib: int, residency: str, slots: tuple[int, int], span: int
) -> None:
    """Three quarters of the memory, whole prompts in one span, experts in the rest."""
    plan = make_plan(*k3, Machine(gib * GIB, gib * GIB))

    assert (plan.residency, plan.span, plan.context) == (residency, span, 32_768)
    assert slots[0] <= plan.slots <= slots[1]
    assert plan.budget_bytes == gib * GIB * 3 // 4
    assert plan.floor_bytes <= plan.planned_bytes <= plan.budget_bytes
    leftover = plan.budget_bytes - plan.planned_bytes
    assert leftover < plan.record_bytes or plan.residency == "resident"


def test_k3_under_the_floor_is_refused_with_the_sum(k3: tuple[Manifest, ModelConfig]) -> None:
    """The refusal adds up: budget, floor, and its four parts."""
    with pytest.raises(BudgetError) as caught:
        make_plan(*k3, Machine(128 * GIB, 120 * GIB))
    message = str(caught.value)
    floor, *parts = (
        float(number)
        for number in re.findall(r"(?:floor|trunk|state|scratch|slots) ([0-9.]+)", message)
    )

    assert message.startswith("budget 103.1 GB is under the floor 11")
    assert "(trunk 114.7, state 2.8, scratch " in message
    assert message.endswith("slots 0.3). See: mlxmoe plan MODEL")
    assert sum(parts) == pytest.approx(floor, abs=0.2)


@pytest.mark.parametrize(
    ("total", "available", "expected"),
    [(64, 60, 48 * GIB), (64, 20, 19 * GIB), (64, 0.5, 0), (0, 0, 0)],
)
def test_default_budget(total: float, available: float, expected: int) -> None:
    """Three quarters of the machine or what is free less 1 GiB, never under nothing."""
    assert default_budget(Machine(int(total * GIB), int(available * GIB))) == expected


def test_ram_over_the_machine_is_refused() -> None:
    """More than there is can't be planned with, even if asked for."""
    with pytest.raises(BudgetError, match=r"--ram 70\.0 GB, this machine has 64\.0 GB"):
        make_plan(*other(), Machine(64 * GB, 60 * GB), Settings(ram=70 * GB))


MACHINE = Machine(64 * GB, 60 * GB)


def test_small_numbers_keep_their_digits() -> None:
    """A floor of megabytes is told in megabytes."""
    with pytest.raises(BudgetError, match=r"budget 50\.0 MB is under the floor 3\d\d\.\d MB"):
        make_plan(*other(), MACHINE, Settings(ram=50_000_000))


def test_slots_as_asked() -> None:
    """--slots fixes the slots, never over all experts, never under top-k."""
    plans = {n: make_plan(*other(), MACHINE, Settings(slots=n)) for n in (2, 7, 32, 10**9)}

    assert {n: plan.slots for n, plan in plans.items()} == {2: 2, 7: 7, 32: 32, 10**9: 32}
    assert [plan.residency for plan in plans.values()] == ["cached"] * 2 + ["resident"] * 2
    for slots in (1, 0, -5):
        with pytest.raises(BudgetError, match="expected at least 2"):
            make_plan(*other(), MACHINE, Settings(slots=slots))


def test_ram_and_slots_together() -> None:
    """Both given: the slots must fit, and what is left is the span's."""
    floor = make_plan(*other(), MACHINE).floor_bytes
    least = Settings(ram=floor + 5_500_000, slots=7, context=2048)
    plan = make_plan(*other(), MACHINE, least)

    assert plan.slots == 7
    assert plan.planned_bytes <= floor + 5_500_000
    with pytest.raises(BudgetError, match=r"does not hold 9 slots, which take \d+\.\d MB"):
        make_plan(*other(), MACHINE, Settings(ram=floor + 5_500_000, slots=9))


def test_the_floor_itself_is_enough() -> None:
    """At the floor to the byte there is a plan, one byte less is refused."""
    floor = make_plan(*other(), MACHINE).floor_bytes
    plan = make_plan(*other(), MACHINE, Settings(ram=floor))

    assert (plan.slots, plan.planned_bytes, plan.context) == (2, floor, 2048)
    with pytest.raises(BudgetError, match="is under the floor"):
        make_plan(*other(), MACHINE, Settings(ram=floor - 1))


def test_spans_and_contexts_are_bounded() -> None:
    """A span is at most --max-span, the context, and what the model takes at a time."""

    def span(**settings: Any) -> tuple[int, int]:
        plan = make_plan(*other(), MACHINE, Settings(**settings))
        return plan.span, plan.context

    assert span() == (2048, 4096)
    assert span(max_span=7) == (7, 4096)
    assert span(context=100) == (100, 100)
    for wrong in ({"max_span": 0}, {"context": 0}, {"context": 4097}):
        with pytest.raises(UsageError, match=r"expected at least 1|takes 1 to 4,096"):
            span(**wrong)


def test_floor_counts_shapes_of_experts() -> None:
    """Layers whose experts differ in shape can't share a table: top-k slots for each run."""
    manifest, config = other()
    mixed = (*layers_of(range(2), 8, 1_000_000), *layers_of(range(2, 4), 8, 2_000_000))
    plan = make_plan(Manifest(Path(), (), manifest.trunk, mixed), config, MACHINE)
    alike = make_plan(manifest, config, MACHINE)

    assert plan.record_bytes == 2_000_000
    assert plan.floor_bytes - alike.floor_bytes == 4 * 2_000_000 - 2 * 1_000_000
    assert plan.working_set_bytes == 2 * (2 + 4) * 1_000_000


def test_other_models_state() -> None:
    """Keys and values of the heads, a latent, or recurrent layers as in Kimi-Linear."""
    latent = other(kv_lora_rank=512, qk_rope_head_dim=64)[1]
    linear = {"kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 64}
    mixed = other(linear_attn_config=linear)[1]

    assert sequence_state(other()[1], 2).per_token == 4 * 2 * 2 * 64 * 2
    assert sequence_state(other()[1], 2).fixed == 0
    assert sequence_state(latent, 2).per_token == 4 * 576 * 2
    assert sequence_state(mixed, 2).per_token == 2 * 2 * 64 * 2
    assert sequence_state(mixed, 2).fixed == 3 * 4 * (64 * 64 * 4 + 9 * 64 * 2)


def test_a_model_without_experts_or_without_a_word_of_them() -> None:
    """Dense models are resident with no slot; experts need a number a token."""
    manifest, config = other()
    dense = make_plan(Manifest(Path(), (), manifest.trunk, ()), config, MACHINE)

    assert (dense.slots, dense.slot_bytes, dense.residency) == (0, 0, "resident")
    with pytest.raises(CheckpointError, match="does not say how many experts a token takes"):
        make_plan(*other(num_experts_per_tok=None), MACHINE)


def test_scratch_grows_with_the_span(k3: tuple[Manifest, ModelConfig]) -> None:
    """A token of a span costs K3 its 8 residual blocks and four more streams, and latents."""
    config = k3[1]
    one, two = (scratch_bytes(config, span, 1 << 20, 2) for span in (20_000, 20_001))

    assert two - one == 12 * 7168 * 2 + 3584 * 8 + 16 * 8


def outcome(manifest: Manifest, config: ModelConfig, settings: Settings) -> Plan | str:
    """The plan, or the words of the refusal."""
    try:
        return make_plan(manifest, config, MACHINE, settings)
    except BudgetError as error:
        return str(error)


@given(
    ram=st.integers(0, 70 * GB),
    slots=st.none() | st.integers(-1, 40),
    max_span=st.none() | st.integers(1, 40_000),
    context=st.none() | st.integers(1, 4096),
    experts=st.integers(2, 300),
    width=st.sampled_from([2, 4]),
)
def test_no_plan_exceeds_its_budget(
    ram: int, slots: int | None, max_span: int | None, context: int | None, experts: int, width: int
) -> None:
    """Whatever is asked for: a plan within the budget and the request, or a refusal."""
    plan = outcome(*other(experts), Settings(ram, slots, max_span, context, width))
    if isinstance(plan, str):
        assert plan.isprintable()
        assert slots in (-1, 0, 1) or ram > MACHINE.total or ram < 10 * GB
        return
    assert plan.floor_bytes <= plan.budget_bytes == ram
    assert plan.planned_bytes <= ram
    assert 2 <= plan.slots <= 4 * experts
    assert slots is None or plan.slots == min(slots, 4 * experts)
    assert 1 <= plan.span <= min(max_span or 2048, 2048, plan.context)
    assert context is None or plan.context == context


def test_tiny_goldens_fit_anywhere(goldens: Path) -> None:
    """The tiny K3.1 is resident with the defaults, and cached when told."""
    folder = goldens / "tiny-k31"
    config = read_config(folder)
    manifest = read_manifest(folder, config)

    assert make_plan(manifest, config, MACHINE).residency == "resident"
    quarter = make_plan(manifest, config, MACHINE, Settings(slots=28))
    assert (quarter.slots, quarter.experts, quarter.residency) == (28, 112, "cached")
