"""One timeline of tokens and the state they left, with saved points of it.

A new prompt extends the timeline when it begins with it; else it goes on from the
nearest snapshot on a common prefix; else it starts anew. State is never reused for a
prefix it was not computed from.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxmoe.footprint import SNAPSHOTS
from mlxmoe.models.state import Network, Snapshot

OnTokens = Callable[[float, int], None]


class Session:
    """Tokens seen so far and the network's state after them.

    Used by the thread that owns MLX. After an exception out of `sync` or `step` the
    state is spoilt: call `recover`.
    """

    def __init__(self, network: Network[Any], max_span: int):
        self._network, self._max_span = network, max_span
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self._state = self._network.make_state()
        self._snapshots: list[Snapshot] = [self._state.take()]

    def recover(self) -> None:
        """After an exception: back to the latest saved point, at worst to nothing.

        Snapshots hold evaluated arrays, and rows below their length were never rewritten,
        so what a broken step left behind them does no harm.
        """
        latest = max(self._snapshots, key=lambda snapshot: snapshot.tokens)
        self._state.restore(latest)
        del self.tokens[latest.tokens :]

    def sync(
        self, ids: Sequence[int], ends: Sequence[int] = (), on_tokens: OnTokens | None = None
    ) -> tuple[mx.array, int]:
        """Make the timeline equal `ids` (not empty).

        Returns the logits after the last id [V], and how many ids were reused. `ends`
        are positions worth a snapshot (message ends): the first and the last of those
        ahead are kept. `on_tokens(done, reused)` hears of ids done, fractions inside a
        span, and of how many of them were reused; it may raise to stop.
        """
        reused = self._rewind(ids)
        if all(snapshot.tokens != reused for snapshot in self._snapshots):
            self._keep(self._state.take())
        cuts = {end for end in ends if reused < end < len(ids)}
        cuts = {min(cuts), max(cuts)} if cuts else set()
        last = len(ids) - 1
        while len(self.tokens) < last:
            span = ids[len(self.tokens) : min(len(self.tokens) + self._max_span, last)]
            self._fill(span, cuts, on_tokens, reused)
        logits = self.step(ids[last])
        if on_tokens:
            on_tokens(len(ids), reused)
        return logits, reused

    def step(self, token: int) -> mx.array:
        """One more token; the logits after it [V], evaluated."""
        hidden = self._network.hidden(mx.array([token]), self._state)
        logits = self._network.logits(hidden)[0]
        mx.eval(logits, *self._state.arrays())
        self.tokens.append(token)
        return logits

    def extend(self, ids: Sequence[int]) -> mx.array:
        """More tokens (not empty); the logits after the last [V]."""
        return self.sync([*self.tokens, *ids])[0]

    def _fill(
        self, span: Sequence[int], cuts: set[int], on_tokens: OnTokens | None, reused: int
    ) -> None:
        start = len(self.tokens)

        def on_layer(done: int, of: int) -> None:
            if on_tokens:
                on_tokens(start + len(span) * done / of, reused)

        # The span's own logits are never asked for, so they stay lazy and cost nothing.
        self._network.hidden(
            mx.array(list(span)), self._state, [cut - start for cut in cuts], on_layer
        )
        mx.eval(self._state.arrays())
        self.tokens.extend(span)
        for snapshot in self._state.kept():
            mx.eval(snapshot.held)
            self._keep(snapshot)

    def _keep(self, snapshot: Snapshot) -> None:
        """Add a snapshot. When there are too many, the first (what every conversation
        begins with) and the latest stay."""
        self._snapshots = [s for s in self._snapshots if s.tokens != snapshot.tokens]
        self._snapshots.append(snapshot)
        if len(self._snapshots) > SNAPSHOTS + 1:
            del self._snapshots[2]

    def _rewind(self, ids: Sequence[int]) -> int:
        """Go to the longest state whose tokens `ids` begin with, but the last id's; its length."""
        common = _common_prefix(self.tokens, ids)
        if common == len(self.tokens) < len(ids):
            return common
        reachable = min(common, len(ids) - 1)
        self._snapshots = [s for s in self._snapshots if s.tokens <= common]
        best = max((s for s in self._snapshots if s.tokens <= reachable), key=lambda s: s.tokens)
        self._state.restore(best)
        del self.tokens[best.tokens :]
        return best.tokens


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first ids agree."""
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))
