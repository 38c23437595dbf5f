"""Reads expert records from the checkpoint's files into rows of memory.

Makes no mx call: rows are memoryviews that the owner of the tables handed out.
"""

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlxmoe.errors import CheckpointError, ReadError
from mlxmoe.manifest import Extent, Manifest

MACOS_F_NOCACHE = 48
# E8M0 and E4M3 both keep this byte for NaN; MLX would read the first as infinity.
NAN_SCALE = 255


def open_uncached(path: Path) -> int:
    """Open a file for reads that should not fill the page cache where that can be said.

    macOS: F_NOCACHE. Linux: the page cache stays, but without read-ahead, since rows
    are small and O_DIRECT wants aligned offsets that published shards don't have.
    Raises ReadError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadError(f"can't open {path}: {error.strerror}. Check the file and try again") from (
            error
        )
    if sys.platform == "darwin":
        fcntl.fcntl(handle, MACOS_F_NOCACHE, 1)
    else:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    return handle


class Store:
    """The open files of a manifest. `read` may be called from any thread."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        used = {int(file) for layer in manifest.experts for file in np.unique(layer.files)}
        self._handles = {file: open_uncached(manifest.files[file].path) for file in sorted(used)}

    def close(self) -> None:
        """Close every file."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def position(self, layer: int, expert: int) -> tuple[int, int]:
        """(file, offset) where a record begins, to sort reads in disk order.

        `layer` counts MoE layers from 0, as in `Manifest.experts`.
        """
        where = self._manifest.experts[layer]
        files, offsets = where.files[expert], where.offsets[expert]
        first = int(np.lexsort((offsets, files))[0])
        return int(files[first]), int(offsets[first])

    def read(self, layer: int, expert: int, row: Sequence[memoryview]) -> int:
        """Fill `row` (one writable view of bytes a part) with a record; its size in bytes.

        Raises ReadError with file, offset, wanted and got, or CheckpointError when a
        scale is NaN. The row's content is then undefined.
        """
        where = self._manifest.experts[layer]
        for extent in where.extents(expert):
            self._fill(extent, [row[part] for part in extent.parts])
        for part, view in zip(where.parts, row, strict=True):
            if part.kind == "scales" and part.nbytes == np.prod(part.shape):
                self._check_scales(layer, expert, view)
        return where.record_bytes

    def _fill(self, extent: Extent, views: list[memoryview]) -> None:
        done = 0
        while done < extent.nbytes:
            try:
                got = os.preadv(self._handles[extent.file], views, extent.offset + done)
            except OSError as error:
                raise self._failed(extent, done, error.strerror or str(error)) from error
            if got == 0:
                raise self._failed(extent, done, "the file ends there")
            done += got
            views = _after(views, got)

    def _failed(self, extent: Extent, done: int, why: str) -> ReadError:
        path = self._manifest.files[extent.file].path
        return ReadError(
            f"{path}: wanted {extent.nbytes} bytes at {extent.offset}, got {done}: {why}. "
            "Check the disk and the file, then start again"
        )

    def _check_scales(self, layer: int, expert: int, view: memoryview) -> None:
        if np.frombuffer(view, np.uint8).max() == NAN_SCALE:
            where = self._manifest.experts[layer]
            raise CheckpointError(
                f"{where.prefix}: expert {expert} has a scale byte 255 (NaN), expected 0-254: "
                "the checkpoint is damaged. Fetch its shard again"
            )


def _after(views: list[memoryview], got: int) -> list[memoryview]:
    """What is left of `views` once their first `got` bytes are filled."""
    left = []
    for view in views:
        skip = min(got, len(view))
        got -= skip
        if skip < len(view):
            left.append(view[skip:])
    return left
