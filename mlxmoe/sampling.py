"""Drawing the next token, and finding stop strings in what was drawn."""

import math
import os

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlxmoe.errors import CheckpointError, UsageError
from mlxmoe.events import Sampling

# Under it logits divided by the temperature may overflow; the draw is certain anyway.
LEAST_TEMPERATURE = 1e-5


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError when a number is out of its range."""
    limits = {
        "temperature": (sampling.temperature, 0.0, 100.0),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
    }
    for name, (value, low, high) in limits.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise UsageError(f"{name} is {value}, expected {low:g} to {high:g}")
    if sampling.top_k < 0:
        raise UsageError(f"top_k is {sampling.top_k}, expected 0 (off) or more")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise UsageError(f"max_tokens is {sampling.max_tokens}, expected 1 or more")
    if any(not stop for stop in sampling.stop):
        raise UsageError("a stop string is empty, expected at least one character")


class Sampler:
    """Draws tokens by one request's settings; the same seed draws the same tokens.

    Temperature first, then top_k, top_p and min_p on what it leaves (mlx-lm's filters).
    A temperature under `LEAST_TEMPERATURE` and top_p 0 take the most likely token.
    """

    def __init__(self, sampling: Sampling):
        self._sampling = sampling
        seed = sampling.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        self._key = mx.random.key(seed % 2**64)

    def __call__(self, logits: mx.array) -> int:
        """logits: [V] -> one token id. Of equally likely ones, nothing drawn: the lower id.

        Raises CheckpointError when the logits are no numbers.
        """
        token = self._draw(logits)
        finite = mx.isfinite(mx.logsumexp(logits.astype(mx.float32)))
        mx.eval(token, finite)
        if not finite.item():
            raise CheckpointError(
                "the model's logits are not finite numbers, so weights are damaged. "
                "Fetch the checkpoint again"
            )
        drawn = token.item()
        assert isinstance(drawn, int)
        return drawn

    def _draw(self, logits: mx.array) -> mx.array:
        settings = self._sampling
        if settings.temperature < LEAST_TEMPERATURE or settings.top_p == 0:
            return mx.argmax(logits)
        scaled = logits[None].astype(mx.float32) / settings.temperature
        logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        if 0 < settings.top_k < logits.shape[0]:
            logprobs = apply_top_k(logprobs, settings.top_k)
        if settings.top_p < 1:
            logprobs = apply_top_p(logprobs, settings.top_p)
        if settings.min_p > 0:
            logprobs = apply_min_p(logprobs, settings.min_p)
        self._key, draw = mx.random.split(self._key)
        return mx.random.categorical(logprobs, key=draw)


class StopStrings:
    """Holds text back while it may be the start of a stop string, and cuts at the first that
    is whole, however the text comes in pieces."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """More text in; what may be shown now, without any stop string."""
        if self.found:
            return ""
        self._held += text
        # The one that ends first, as if characters came one by one; of those, the longest.
        places = [
            (place + len(stop), place)
            for stop in self._stops
            if (place := self._held.find(stop)) >= 0
        ]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)[1]], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be plain text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
