"""From a checkpoint folder to its manifest: the shard index and the headers, no weight.

`model.safetensors.index.json` says which shard holds which tensor; each shard's header
says what is in it. Both are untrusted and must agree to the last tensor.
"""

import os
import re
from pathlib import Path

from mlxmoe.config import ForeignConfig, KimiConfig, ModelConfig
from mlxmoe.errors import CheckpointError, ReadError
from mlxmoe.experts.headers import read_header
from mlxmoe.experts.kimi_check import check_kimi
from mlxmoe.experts.layout import ExpertNames, layer_of
from mlxmoe.manifest import Manifest, ShardFile, TensorEntry
from mlxmoe.untrusted import read_json, show

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_BYTES = 256 << 20
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERT_DTYPES = ("U8", "F8_E8M0", "U32", "BF16", "F16", "F32")
# The image side and draft layers are not part of the text model's trunk.
_VISION = re.compile(
    r"(model\.)?(vision_\w+|visual|mm_projector|multi_modal_projector|audio_tower|embed_vision)\."
)
_MTP = re.compile(r"(language_model\.)?(model\.)?mtp\w*\.")
_COUNTED = re.compile(r"(.*?)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


def read_manifest(folder: Path, config: ModelConfig) -> Manifest:
    """What the checkpoint in `folder` holds, checked against itself and `config`.

    Reads the index and the headers only. CheckpointError, in one line with file and
    tensor, for anything missing, extra, damaged or not supported.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder, expected a checkpoint's folder")
    places = _read_index(folder)
    names = sorted(set(places.values())) if places is not None else [SINGLE]
    files: list[ShardFile] = []
    trunk: list[TensorEntry] = []
    vision: list[TensorEntry] = []
    experts = ExpertNames()
    for number, name in enumerate(names):
        shard, entries = read_header(folder / name, number)
        files.append(shard)
        if places is not None:
            _match_index(shard, entries, places)
        for entry in entries:
            if _is_draft(entry.name, config):
                continue
            if _VISION.match(entry.name):
                vision.append(entry)
            elif not experts.take(entry, shard.path):
                trunk.append(entry)
    if places:
        name, shard_name = next(iter(places.items()))
        raise CheckpointError(
            f"{folder / shard_name}: has no tensor {show(name)}, "
            f"which {INDEX} places there ({len(places)} missing in all)"
        )
    manifest = Manifest(folder, tuple(files), tuple(trunk), experts.layers(), tuple(vision))
    if isinstance(config, KimiConfig):
        check_kimi(manifest, config)
    else:
        _check_foreign(manifest, config)
    return manifest


def check_unchanged(manifest: Manifest) -> None:
    """ReadError when a file was written, replaced or lost since its header was read."""
    for shard in manifest.files:
        try:
            status = os.stat(shard.path)
        except OSError as error:
            raise ReadError(f"{shard.path}: can't be read now ({error.strerror})") from error
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
            raise ReadError(
                f"{shard.path}: changed since it was opened ({status.st_size:,} bytes, "
                f"was {shard.size:,}); let the download or copy end, then start again"
            )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard's file name; None for a checkpoint in a single file."""
    path = folder / INDEX
    if not os.path.lexists(path):
        if os.path.lexists(folder / SINGLE):
            return None
        loose = len(list(folder.glob("*.safetensors")))
        found = f"has {loose} .safetensors files but no" if loose else "has no"
        raise CheckpointError(f"{folder}: {found} {INDEX} or {SINGLE}, expected one of them")
    places = read_json(path, INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: weight_map is {show(places)}, expected tensors' shards")
    for name in places.values():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {show(name)} is not a shard's file name")
    for name in sorted(set(places.values())):
        if not _is_file_name(name):
            raise CheckpointError(
                f"{path}: {show(name)} is not a plain name ending in .safetensors"
            )
    _check_count(path, set(places.values()))
    return places


def _is_file_name(name: str) -> bool:
    """Whether a shard's name stays in its folder (what it links to may lie elsewhere)."""
    return (
        name.endswith(".safetensors")
        and len(name) <= 255
        and name.isprintable()
        and name[0] != "."
        and "/" not in name
        and "\\" not in name
    )


def _check_count(path: Path, names: set[str]) -> None:
    """Names like model-00003-of-00096 state how many there are: all must be in the index."""
    groups: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_COUNTED.fullmatch, names)):
        groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (_, total), numbers in sorted(groups.items()):
        if int(total) != len(numbers) or max(numbers) > len(numbers) or 0 in numbers:
            raise CheckpointError(
                f"{path}: names {len(numbers)} shards of {int(total)}, expected each of them once"
            )


def _match_index(shard: ShardFile, entries: list[TensorEntry], places: dict[str, str]) -> None:
    """Takes the shard's tensors out of `places`."""
    for entry in entries:
        stated = places.pop(entry.name, None)
        if stated != shard.path.name:
            where = f"in {show(stated)}" if stated else "nowhere"
            raise CheckpointError(f"{shard.path}: holds {entry.name}, {INDEX} places it {where}")


def _is_draft(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to multi-token prediction, which is not run here."""
    if _MTP.match(name):
        return True
    if isinstance(config, KimiConfig) and not config.num_nextn_predict_layers:
        return False
    layer = layer_of(name)
    return layer is not None and layer >= (config.num_hidden_layers or layer + 1)


def _check_foreign(manifest: Manifest, config: ForeignConfig) -> None:
    # mlx-lm builds as many layers as the config says, whatever that costs.
    numbers = [layer_of(entry.name) for entry in manifest.trunk]
    numbers += [layer.layer for layer in manifest.experts]
    held = 1 + max((number for number in numbers if number is not None), default=-1)
    if 0 < held < (config.num_hidden_layers or 0):
        raise CheckpointError(
            f"{manifest.folder}: the files hold {held} layers, expected "
            f"{config.num_hidden_layers} by config.json. Fetch what is missing, or the "
            "config.json that belongs to these files"
        )
    for layer in manifest.experts:
        for part in layer.parts:
            if part.dtype not in EXPERT_DTYPES or part.nbytes % 4:
                raise CheckpointError(
                    f"{manifest.folder}: {layer.prefix}: experts' {part.projection} {part.kind} is "
                    f"{part.dtype} of {part.nbytes} bytes, expected whole words of one of "
                    f"{', '.join(EXPERT_DTYPES)}. Convert the model with mlx_lm.convert first"
                )
    stated = config.number(*EXPERT_COUNT_KEYS)
    for layer in manifest.experts:
        if stated is not None and layer.num_experts != stated:
            raise CheckpointError(
                f"{manifest.folder}: {layer.prefix} has {layer.num_experts} experts, "
                f"expected {stated} by config.json"
            )
        if (config.top_k or 0) > layer.num_experts:
            raise CheckpointError(
                f"{manifest.folder}: {layer.prefix} has {layer.num_experts} experts, "
                f"config.json takes {config.top_k} a token"
            )
