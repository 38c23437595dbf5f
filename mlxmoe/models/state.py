"""What a network carries from token to token, and saved points of it.

Recurrent state can't be trimmed: it is reused from an exact snapshot or not at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State after the first `tokens` tokens: the arrays that growth does not keep."""

    tokens: int
    arrays: tuple[mx.array | None, ...]

    @property
    def held(self) -> list[mx.array]:
        """The arrays that are there."""
        return [array for array in self.arrays if array is not None]


class State(Protocol):
    """The state of one timeline. Two makers: `KimiState` and `ForeignState`."""

    @property
    def offset(self) -> int:
        """Tokens seen."""

    def arrays(self) -> list[mx.array]:
        """Everything to evaluate before the next step."""

    def take(self) -> Snapshot:
        """A snapshot of now."""

    def kept(self) -> list[Snapshot]:
        """Snapshots taken at the cuts of the last `hidden` call; asking forgets them."""

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this state that lies on its present timeline."""


S = TypeVar("S", bound=State)


class Network(Protocol[S]):
    """A loaded model. Two makers: Kimi's `Model` and `ForeignModel`."""

    def make_state(self) -> S:
        """Empty state."""

    def hidden(
        self, ids: mx.array, state: S, cuts: Sequence[int] = (), on_layer: OnLayer | None = None
    ) -> mx.array:
        """ids: [T], T >= 1, after the tokens in `state` -> what `logits` takes, [T, ...].

        `cuts` are counts of `ids` after which a snapshot is kept; `on_layer(done, of)`
        is called after layers and may raise to stop: the state is then spoilt.
        """

    def logits(self, hidden: mx.array) -> mx.array:
        """[T, ...] -> [T, vocabulary]."""
