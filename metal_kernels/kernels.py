"""The one place the model takes its kernels from."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace

import mlx.core as mx

from metal_kernels import dsa_scores, dsa_topk, kda_chunk, kda_step, sparse_mla


@dataclass(frozen=True, slots=True)
class Kernels:
    """A choice for every kernel: its Metal form, or its reference in plain mx."""

    dsa_scores: Callable[..., mx.array]
    dsa_topk: Callable[[mx.array, int], mx.array]
    sparse_mla: Callable[..., mx.array]
    kda_step: Callable[..., tuple[mx.array, mx.array]]
    kda_chunk: Callable[..., tuple[mx.array, mx.array]]


REFERENCE = Kernels(
    dsa_scores.reference,
    dsa_topk.reference,
    sparse_mla.reference,
    kda_step.reference,
    kda_chunk.reference,
)
METAL = REFERENCE
KERNEL_NAMES = tuple(field.name for field in fields(Kernels))


def choose(failed: Collection[str] = ()) -> Kernels:
    """The Metal kernels but those that `failed` on this GPU; all references without Metal."""
    if not mx.metal.is_available():
        return REFERENCE
    return replace(METAL, **{name: getattr(REFERENCE, name) for name in failed})


CHOSEN = choose()
