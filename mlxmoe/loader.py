"""From a checkpoint folder to a network whose experts stream.

The trunk is read whole; routed experts never are: every `SwitchGLU` is swapped for a
`StreamedExperts` before weights are loaded. Nothing is converted, no code of the
checkpoint's is run.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxmoe.config import ForeignConfig, KimiConfig
from mlxmoe.errors import CheckpointError
from mlxmoe.events import Progress
from mlxmoe.experts.groups import share_slots
from mlxmoe.experts.index import check_unchanged
from mlxmoe.experts.prefetch import DEFAULT_THREADS, Readers
from mlxmoe.experts.published import LANGUAGE
from mlxmoe.experts.slots import Slots
from mlxmoe.experts.store import Store
from mlxmoe.experts.tables import SlotTable
from mlxmoe.footprint import kept_float32
from mlxmoe.foreign_loader import load_foreign
from mlxmoe.layers import Packing, StreamedExperts
from mlxmoe.manifest import Manifest, TensorEntry
from mlxmoe.models.kimi_k3 import Model
from mlxmoe.models.mla import IndexerConfig
from mlxmoe.models.state import Network

# Freed buffers MLX may keep; its own default on Metal is most of the memory.
CACHE_BYTES = 64 << 20

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network ready to run, and what it streams from. Close it when done."""

    network: Network[Any]
    slots: Slots
    manifest: Manifest
    readers: Readers
    store: Store

    def close(self) -> None:
        """End the reader threads and close the files."""
        self.slots.abandon()
        self.readers.close()
        self.store.close()


def stream_dtype() -> mx.Dtype:
    """bfloat16 on Metal; float32 elsewhere, since MLX's CPU experts are only usable there."""
    return mx.bfloat16 if mx.metal.is_available() else mx.float32


def hold_memory(planned_bytes: int) -> None:
    """Keep MLX within the plan: little is kept for reuse, and on Metal what is planned is
    wired, up to what the GPU recommends, so that the system does not page the trunk out."""
    mx.set_cache_limit(CACHE_BYTES)
    if mx.metal.is_available():
        limit = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(planned_bytes, limit))


def load(
    manifest: Manifest,
    config: KimiConfig | ForeignConfig,
    num_slots: int,
    on_progress: OnProgress,
    dtype: mx.Dtype | None = None,
    threads: int = DEFAULT_THREADS,
) -> Loaded:
    """Read the trunk and make room for `num_slots` experts in all.

    Raises CheckpointError, ReadError (files changed meanwhile), BudgetError (slots under
    the floor).
    """
    dtype = dtype or stream_dtype()
    store = Store(manifest)
    readers = Readers(store, threads)
    try:
        slots = make_slots(manifest, num_slots, config.top_k or 0, readers)
        if isinstance(config, KimiConfig):
            network: Network[Any] = _load_kimi(manifest, config, slots, dtype, on_progress)
        else:
            network = load_foreign(manifest, slots, dtype, on_progress)
        check_unchanged(manifest)
    except BaseException:
        readers.close()
        store.close()
        raise
    return Loaded(network, slots, manifest, readers, store)


def make_slots(manifest: Manifest, num_slots: int, top_k: int, readers: Readers) -> Slots:
    """Tables for `num_slots` experts, shared out among the MoE layers."""
    layers = manifest.experts
    groups = share_slots(layers, num_slots, top_k) if layers else ()
    return Slots(
        [(g.layers, SlotTable(layers[g.layers[0]].parts, g.slots)) for g in groups], readers
    )


def indexer_config(config: KimiConfig, trunk: tuple[TensorEntry, ...]) -> IndexerConfig | None:
    """The indexer as its tensors are, None when there are none (dense K3)."""
    shapes = {
        entry.name.partition(".indexer.")[2]: entry.shape
        for entry in trunk
        if ".indexer." in entry.name
    }
    if not shapes:
        return None
    assert config.dsa is not None, "the index settles the indexer's numbers"
    return IndexerConfig(
        heads=shapes["weights_proj.weight"][0],
        head_dim=shapes["wk.weight"][0],
        topk=config.dsa.topk,
        norm_eps=config.dsa.norm_eps,
        query_width=shapes["wq_b.weight"][1],
        norm_bias="k_norm.bias" in shapes,
    )


def _load_kimi(
    manifest: Manifest,
    config: KimiConfig,
    slots: Slots,
    dtype: mx.Dtype,
    on_progress: OnProgress,
) -> Model:
    model = Model(config, indexer_config(config, manifest.trunk))
    for position, layer in enumerate(manifest.experts):
        packing, packed = Packing(None), config.quantization
        if packed and any(part.kind == "scales" for part in layer.parts):
            packing = Packing(packed.mode, packed.bits, packed.group_size)
        moe = model.layers[layer.layer].block_sparse_moe
        moe.experts = StreamedExperts(position, slots, layer.parts, packing, moe.experts.activation)
    weights = []
    for entry, array in read_trunk(manifest, on_progress):
        if entry.name.endswith(".A_log"):
            array = array[: config.kda.num_heads]
        array = array.astype(mx.float32 if kept_float32(entry) else dtype)
        mx.eval(array)
        weights.append((LANGUAGE + entry.name.removeprefix(LANGUAGE), array))
    model.load_weights(weights, strict=True)
    model.eval()
    return model


def read_trunk(
    manifest: Manifest, on_progress: OnProgress
) -> Iterator[tuple[TensorEntry, mx.array]]:
    """Every trunk tensor as stored, file by file, not yet evaluated.

    Raises CheckpointError when a file no longer holds a tensor as its header said.
    """
    by_file: dict[int, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.trunk:
        by_file[entry.file].append(entry)
    begin, done = time.monotonic(), 0
    for file in sorted(by_file):
        arrays = _open_shard(manifest.files[file].path)
        for entry in sorted(by_file[file], key=lambda entry: entry.offset):
            array = arrays.pop(entry.name, None)
            if array is None or array.shape != entry.shape:
                raise CheckpointError(
                    f"{manifest.files[file].path}: {entry.name} changed while it was loaded. "
                    "Start again once the folder is complete"
                )
            yield entry, array
            done += entry.nbytes
            on_progress(
                Progress("load", done, manifest.trunk_bytes, "bytes", time.monotonic() - begin)
            )


def _open_shard(path: Path) -> dict[str, mx.array]:
    try:
        arrays = mx.load(str(path), format="safetensors")
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{path}: can't be loaded: {error}") from error
    assert isinstance(arrays, dict)
    return arrays
