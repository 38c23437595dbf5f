"""Loads an mlx-lm model through mlx-lm's own loader, with its experts left on disk.

mlx-lm builds the model and sanitises the trunk; a subclass made here swaps every
`SwitchGLU` before weights come, and takes the experts' tensors out of their way.
"""

import re
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import _get_classes, load_model

from mlxmoe.errors import CheckpointError, MlxmoeError
from mlxmoe.events import Progress
from mlxmoe.experts.slots import Slots
from mlxmoe.layers import Packing, StreamedExperts
from mlxmoe.manifest import ExpertLayer, ExpertPart, Manifest
from mlxmoe.models.foreign import ForeignModel

LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# (bits, group size) of the formats whose scales are one byte.
BYTE_SCALED = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
EVAL_BYTES = 256 << 20


def load_foreign(
    manifest: Manifest, slots: Slots, dtype: mx.Dtype, on_progress: Any
) -> ForeignModel:
    """The model with `StreamedExperts` in place of every `SwitchGLU`.

    `dtype` float32 casts the trunk's floats (CPU); else they stay as stored. Raises
    CheckpointError when mlx-lm can't build the model or its experts are not the files'.
    """

    _check_files(manifest)

    def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
        model_class, args_class = _get_classes(config)
        return _streaming(model_class, manifest, slots), args_class

    try:
        model, _ = load_model(manifest.folder, lazy=True, get_model_classes=classes)
    except MlxmoeError:
        raise
    except Exception as error:  # mlx-lm trusts a config: a stranger's may make it raise anything
        raise CheckpointError(
            f"{manifest.folder}: mlx-lm can't build this model "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Compare its "
            "config.json with the published one, or try it with mlx_lm.generate"
        ) from error
    if dtype == mx.float32:
        model.update(tree_map(_to_float32, model.parameters()))
    _evaluate(model, on_progress)
    return ForeignModel(model)


def _check_files(manifest: Manifest) -> None:
    """mlx-lm reads every `model*.safetensors` of a folder, and no other file: refuse a folder
    where those are not just the shards that were checked."""
    checked = {file.path.name for file in manifest.files}
    read = {path.name for path in manifest.folder.glob("model*.safetensors")}
    for name in sorted(checked ^ read):
        found = "is not in the index" if name in read else "is a shard that mlx-lm would not read"
        raise CheckpointError(
            f"{manifest.folder / name}: {found}; expected shards to be all files that are called "
            "model*.safetensors, and no others. Move or rename it"
        )


def _streaming(model_class: type[nn.Module], manifest: Manifest, slots: Slots) -> type[nn.Module]:
    prefixes = tuple(layer.prefix + "." for layer in manifest.experts)
    trunk = {entry.name for entry in manifest.trunk}

    class Streaming(model_class):  # type: ignore[misc, valid-type]
        """`model_class` with experts on disk."""

        def __init__(self, args: Any):
            super().__init__(args)
            swap_experts(self, manifest, slots)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """The trunk's weights as the model names them."""
            kept = {
                name: array
                for name, array in weights.items()
                if name in trunk or not name.startswith(prefixes)
            }
            return super().sanitize(kept) if hasattr(super(), "sanitize") else kept

    return Streaming


def swap_experts(model: nn.Module, manifest: Manifest, slots: Slots) -> None:
    """Put `StreamedExperts` where the model has `SwitchGLU`s, matched by layer number."""
    places = {layer.layer: position for position, layer in enumerate(manifest.experts)}
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, SwitchGLU)]
    swapped = []
    for path, switch in found:
        match = LAYER_NUMBER.search(path)
        number = int(match.group(1)) if match else -1
        if number not in places or type(switch) is not SwitchGLU:
            raise CheckpointError(
                f"{manifest.folder}: the model has experts at {path} ({type(switch).__name__}), "
                "but the files hold no experts for it that mlxmoe knows how to stream"
            )
        layer = manifest.experts[places[number]]
        experts = StreamedExperts(
            places[number], slots, layer.parts, packing_of(layer, switch), switch.activation
        )
        swapped.append((path, experts))
    if len(swapped) != len(places):
        raise CheckpointError(
            f"{manifest.folder}: the files hold experts for {len(places)} layers, "
            f"the model has {len(swapped)}"
        )
    for path, experts in swapped:
        owner: Any = model
        *parents, last = path.split(".")
        for name in parents:
            owner = owner[int(name)] if isinstance(owner, list) else getattr(owner, name)
        setattr(owner, last, experts)


def packing_of(layer: ExpertLayer, switch: SwitchGLU) -> Packing:
    """How a layer's experts are quantised, told from shapes as mlx-lm tells it.

    Raises CheckpointError when shapes don't fit the model or name no format.
    """
    parts = {(part.projection, part.kind): part for part in layer.parts}
    weight, scales = parts["gate", "weight"], parts.get(("gate", "scales"))
    inputs = switch.gate_proj.input_dims
    if scales is None:
        packing, packed_inputs = Packing(None), weight.shape[1]
    else:
        bits, group = _row_bits(weight) // inputs, inputs // scales.shape[1]
        mode = "affine" if ("gate", "biases") in parts else BYTE_SCALED.get((bits, group))
        if mode is None:
            raise CheckpointError(
                f"{layer.prefix}: MLX has no format of {bits} bits in groups of {group}"
            )
        packing, packed_inputs = Packing(mode, bits, group), _row_bits(weight) // bits
    wanted = (switch.gate_proj.num_experts, switch.gate_proj.output_dims, inputs)
    if wanted != (layer.num_experts, weight.shape[0], packed_inputs):
        raise CheckpointError(
            f"{layer.prefix}: experts are {(layer.num_experts, weight.shape[0], packed_inputs)}, "
            f"the config says {wanted}"
        )
    return packing


def _row_bits(weight: ExpertPart) -> int:
    return 8 * weight.nbytes // weight.shape[0]


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _evaluate(model: nn.Module, on_progress: Any) -> None:
    """Read the lazy trunk in pieces, with progress."""
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    arrays = [array for _, array in flat]
    total, done, begin = sum(a.nbytes for a in arrays), 0, time.monotonic()
    batch: list[mx.array] = []
    for array in arrays:
        batch.append(array)
        if sum(a.nbytes for a in batch) >= EVAL_BYTES or array is arrays[-1]:
            mx.eval(batch)
            done += sum(a.nbytes for a in batch)
            batch = []
            on_progress(Progress("load", done, total, "bytes", time.monotonic() - begin))
