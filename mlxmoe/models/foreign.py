"""Any mlx-lm model behind the same `Network` face as Kimi's.

mlx-lm's models return logits for all tokens at once, so spans are kept short, and only
caches whose past can be restored exactly are taken back: growing ones by their length,
recurrent ones by their arrays.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from mlxmoe.errors import CheckpointError
from mlxmoe.models.state import OnLayer, Snapshot


class ForeignState:
    """mlx-lm's caches of one timeline."""

    def __init__(self, caches: list[Any]):
        self.caches = caches
        self.offset = 0
        self._kept: list[Snapshot] = []
        self._leaves = [leaf for cache in caches for leaf in _flat(cache)]

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate before the next step."""
        held: list[mx.array] = []
        for leaf in self._leaves:
            parts: list[Any] = [*leaf.cache] if _recurs(leaf) else [leaf.keys, leaf.values]
            held.extend(part for part in parts if part is not None)
        return held

    def take(self) -> Snapshot:
        """A snapshot of now: recurrent arrays; a growing cache needs only the length."""
        recurrent = [leaf for leaf in self._leaves if _recurs(leaf)]
        return Snapshot(self.offset, tuple(array for leaf in recurrent for array in leaf.cache))

    def keep(self) -> None:
        """Take a snapshot for `kept`."""
        self._kept.append(self.take())

    def kept(self) -> list[Snapshot]:
        """Snapshots since the last time asked."""
        kept, self._kept = self._kept, []
        return kept

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot that lies on the present timeline."""
        arrays = iter(snapshot.arrays)
        for leaf in self._leaves:
            if _recurs(leaf):
                leaf.cache = [next(arrays) for _ in leaf.cache]
            else:
                leaf.trim(leaf.offset - snapshot.tokens)
        self.offset = snapshot.tokens


def _recurs(cache: Any) -> bool:
    return isinstance(cache, ArraysCache)


def _flat(cache: Any) -> list[Any]:
    if isinstance(cache, CacheList):
        return [leaf for part in cache.caches for leaf in _flat(part)]
    if type(cache) in (KVCache, ArraysCache):
        return [cache]
    raise CheckpointError(
        f"the model keeps a {type(cache).__name__}, expected KVCache or ArraysCache: "
        "its state can't be saved and restored exactly, so mlxmoe does not run it"
    )


class ForeignModel:
    """A model of mlx-lm's, loaded by `loader`."""

    def __init__(self, model: nn.Module):
        self.model = model

    def make_state(self) -> ForeignState:
        """Empty caches."""
        return ForeignState(make_prompt_cache(self.model))

    def hidden(
        self,
        ids: mx.array,
        state: ForeignState,
        cuts: Sequence[int] = (),
        on_layer: OnLayer | None = None,
    ) -> mx.array:
        """ids: [T] -> logits [T, vocabulary], lazy; the whole model counts as one layer."""
        tokens = ids.shape[0]
        borders = [0, *sorted({cut for cut in cuts if 0 < cut < tokens}), tokens]
        outs = []
        for start, end in pairwise(borders):
            outs.append(self.model(ids[None, start:end], cache=state.caches)[0])
            state.offset += end - start
            if end in cuts:
                mx.eval(state.arrays())
                state.keep()
        if on_layer:
            on_layer(1, 1)
        return mx.concatenate(outs) if len(outs) > 1 else outs[0]

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, vocabulary] as it is."""
        return hidden
