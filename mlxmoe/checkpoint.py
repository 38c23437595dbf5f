"""A checkpoint folder, checked and planned for this machine, before anything is loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxmoe.budget import Machine, Plan, Settings, make_plan
from mlxmoe.config import KimiConfig, ModelConfig, read_config
from mlxmoe.errors import CheckpointError
from mlxmoe.experts.index import read_manifest
from mlxmoe.experts.kimi_check import settle_indexer
from mlxmoe.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What is in a folder."""

    config: ModelConfig
    manifest: Manifest

    def plan(self, settings: Settings) -> Plan:
        """How this machine's memory would be shared out. Raises BudgetError, UsageError."""
        return make_plan(self.manifest, self.config, this_machine(), settings)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a folder's config and headers. Raises CheckpointError, ReadError."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"{folder}: found {found}, expected a checkpoint's folder (with config.json)"
        )
    _check_kinds(folder)
    config = read_config(folder)
    manifest = read_manifest(folder, config)
    if isinstance(config, KimiConfig):
        config = settle_indexer(config, manifest)
    return Checkpoint(config, manifest)


def _check_kinds(folder: Path) -> None:
    """Refuse pipes, sockets and devices: reading one may never end."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: can't be read ({error.strerror}). Check its permissions"
        ) from error
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: is no regular file. Take it out of the folder")


def this_machine() -> Machine:
    """Memory of this machine, in bytes."""
    memory = psutil.virtual_memory()
    return Machine(memory.total, memory.available)


def stream_width() -> int:
    """Bytes of an element of trunk and caches here: bfloat16 on a Mac, float32 elsewhere,
    since MLX's CPU experts are only usable in float32."""
    return 2 if sys.platform == "darwin" else 4
