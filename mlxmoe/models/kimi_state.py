"""The state of Kimi's layers: recurrent in KDA layers, growing in full-attention ones."""

from collections.abc import Sequence

import mlx.core as mx

from mlxmoe.models.kda import KdaState
from mlxmoe.models.latent_cache import LatentCache
from mlxmoe.models.state import Snapshot

LayerState = KdaState | LatentCache


class KimiState:
    """One timeline through all layers.

    A snapshot holds the KDA layers' arrays only: latents are rows that stay where they
    are while the timeline grows, so a length says enough.
    """

    def __init__(self, layers: Sequence[LayerState]):
        self.layers = tuple(layers)
        self.offset = 0
        self._kept: dict[int, list[mx.array]] = {}

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate before the next step."""
        return [array for layer in self.layers for array in layer.arrays]

    def take(self) -> Snapshot:
        """A snapshot of now."""
        return Snapshot(self.offset, tuple(a for kda in self._kda() for a in kda.arrays))

    def keep(self, layer: KdaState, tokens: int) -> None:
        """Remember one layer as it is after `tokens` tokens; layers come in order."""
        self._kept.setdefault(tokens, []).extend(layer.arrays)

    def kept(self) -> list[Snapshot]:
        """Snapshots that all layers have kept; asking forgets them."""
        kept = [Snapshot(tokens, tuple(arrays)) for tokens, arrays in self._kept.items()]
        self._kept.clear()
        return kept

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot that lies on the present timeline."""
        self._kept.clear()
        arrays = iter(snapshot.arrays)
        for layer in self.layers:
            if isinstance(layer, LatentCache):
                layer.rewind(snapshot.tokens)
            else:
                layer.conv, layer.recurrent = next(arrays, None), next(arrays, None)
        self.offset = snapshot.tokens

    def _kda(self) -> list[KdaState]:
        return [layer for layer in self.layers if isinstance(layer, KdaState)]
