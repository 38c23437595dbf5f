"""The text of a kernel and the names of its arguments, ready to be dispatched."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

FOLDER = Path(__file__).resolve().parent

Maker = Callable[..., Callable[..., list[mx.array]]]
Shaped = tuple[tuple[int, ...], mx.Dtype]


@dataclass(frozen=True, slots=True)
class Body:
    """A kernel: NAME.metal beside this file is the body of its function.

    `inputs` and `outputs` are the names the body uses, in order; `header`, another
    HEADER.metal, holds functions that the body calls.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str = ""

    def __call__(
        self,
        inputs: Sequence[mx.array | int | float],
        outputs: Sequence[Shaped],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Mapping[str, int | bool | mx.Dtype],
    ) -> list[mx.array]:
        """One dispatch. outputs: shape and dtype each; grid: threads, not threadgroups."""
        kernel = _made(self, mx.fast.metal_kernel)
        return kernel(
            inputs=list(inputs),
            output_shapes=[shape for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            grid=grid,
            threadgroup=threadgroup,
            template=list(template.items()),
        )


@functools.cache
def _made(body: Body, maker: Any) -> Callable[..., list[mx.array]]:
    make: Maker = maker
    return make(
        name=body.name,
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=text(body.name),
        header=text(body.header) if body.header else "",
    )


def text(name: str) -> str:
    """NAME.metal, which must be ASCII (MLX hands it to Metal as such)."""
    return (FOLDER / f"{name}.metal").read_text("ascii")
