"""The growing cache of a gated MLA layer: latents, and index keys with DSA."""

import mlx.core as mx


class LatentCache:
    """Rows of [c | k_rot] and, in DSA layers, index keys, one per token seen.

    Capacity is a power of two, so that n tokens cost at most 2n row copies in all. Rows below
    `offset` are never rewritten while `offset` only grows; `rewind` forgets the tail.
    """

    FIRST_CAPACITY = 256

    def __init__(self) -> None:
        self.offset = 0
        self._buffers: list[mx.array] = []

    def append(self, *rows: mx.array) -> tuple[mx.array, ...]:
        """Add rows (each [T, width]) and return every array's rows, [S, width] each."""
        start, tokens = self.offset, rows[0].shape[0]
        self._reserve(start + tokens, rows)
        self.offset = start + tokens
        for buffer, new in zip(self._buffers, rows, strict=True):
            buffer[start : self.offset] = new
        return tuple(buffer[: self.offset] for buffer in self._buffers)

    def rewind(self, offset: int) -> None:
        """Forget all rows from `offset` on."""
        assert 0 <= offset <= self.offset, f"rewind to {offset} from {self.offset}"
        self.offset = offset

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate before anything that reads them later."""
        return self._buffers

    def _reserve(self, needed: int, rows: tuple[mx.array, ...]) -> None:
        capacity = self._buffers[0].shape[0] if self._buffers else 0
        if needed <= capacity:
            return
        capacity = max(1 << (needed - 1).bit_length(), self.FIRST_CAPACITY)
        grown = [mx.zeros((capacity, new.shape[1]), new.dtype) for new in rows]
        for old, buffer in zip(self._buffers, grown, strict=False):
            buffer[: self.offset] = old[: self.offset]
        self._buffers = grown
