"""Recorders around the parts of a network, to see what goes in and comes out."""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from mlxmoe.models.kimi_k3 import Model


class Recorder(nn.Module):
    """Stands around a module and keeps what it returned."""

    def __init__(self, inner: Callable[..., Any]):
        super().__init__()
        around: tuple[Callable[..., Any], list[Any], list[Any]] = (inner, [], [])
        object.__setattr__(self, "_around", around)

    @property
    def given(self) -> list[Any]:
        """What it was called with, call by call."""
        given: list[Any] = self._around[2]
        return given

    @property
    def kept(self) -> list[Any]:
        """What it returned, call by call."""
        kept: list[Any] = self._around[1]
        return kept

    def __call__(self, *args: Any) -> Any:
        """Call through."""
        out = self._around[0](*args)
        self.given.append(args)
        self.kept.append(out)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._around[0], name)


def record(model: Model, attribute: str) -> dict[int, Recorder]:
    """Recorders around one attribute of every layer that has it."""
    recorders = {}
    for number, layer in enumerate(model.layers):
        owner, _, last = attribute.rpartition(".")
        holder = getattr(layer, owner) if owner and owner in layer else layer
        if last in holder and (not owner or owner in layer):
            recorders[number] = Recorder(getattr(holder, last))
            setattr(holder, last, recorders[number])
    return recorders
