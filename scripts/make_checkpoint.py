"""Writes a RANDOM Kimi K3 or K3.1 checkpoint of any size in the published layout.

    python scripts/make_checkpoint.py DIR --layers 8 --experts 16 --indexer

Its answers are nonsense; its names, shapes, dtypes and files are the real ones. The same
arguments give the same bytes. Streams: memory stays small whatever the size.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from checkpoint_files import BYTES, SPECIALS, small_files
from checkpoint_tensors import GROUP, Sizes, Tensor, layer_tensors, top_tensors
from checkpoint_writer import in_file_order, write_shard

INDEX = "model.safetensors.index.json"
# flag -> default, what it is
NUMBERS = {
    "layers": (8, "layers; the first has a dense MLP, the others experts"),
    "experts": (16, "routed experts a layer"),
    "top-k": (4, "routed experts a token"),
    "hidden": (128, "width of the residual stream"),
    "heads": (4, "attention heads, KDA and MLA alike"),
    "head-dim": (32, "width of a KDA head"),
    "latent": (64, "width the routed experts see, a multiple of 32"),
    "expert-width": (96, "width inside an expert, a multiple of 32"),
    "dense-width": (256, "width inside the dense MLP"),
    "shared": (2, "shared experts, fused to one MLP"),
    "kv-lora": (32, "rank of the latent keys and values"),
    "q-lora": (48, "rank of the queries"),
    "nope": (32, "width of a head's own key part"),
    "rope": (16, "width of the key part that heads share"),
    "v-dim": (32, "width of an MLA head's value"),
    "block": (3, "layers a residual block"),
    "vocab": (1024, "tokens, with 256 special ones"),
    "index-heads": (4, "heads of the indexer"),
    "index-dim": (32, "width of an index key"),
    "index-topk": (24, "keys the indexer lets through"),
}


class Meter:
    """Bytes written so far, said on stderr about once a second."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.started = self.said = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more, and say so when a second has passed."""
        self.done += nbytes
        now = time.monotonic()
        if now - self.said >= 1:
            self.said = now
            rate = self.done / (now - self.started)
            left = (self.total - self.done) / rate
            print(
                f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
                f"{rate / 1e6:.0f} MB/s, {left:.0f} s left",
                file=sys.stderr,
            )


def parser() -> argparse.ArgumentParser:
    """The command line; its defaults are a model of about 5 MB."""
    options = argparse.ArgumentParser(
        prog="make_checkpoint.py", description="Writes a random Kimi K3 checkpoint."
    )
    options.add_argument("folder", metavar="DIR", type=Path, help="where to write")
    for flag, (default, meaning) in NUMBERS.items():
        options.add_argument(
            f"--{flag}", type=int, metavar="N", default=default, help=f"{meaning} ({default})"
        )
    options.add_argument(
        "--full-attention",
        metavar="N,N",
        help="layers with full attention, counted from 1 (every 4th and the last)",
    )
    options.add_argument("--indexer", action="store_true", help="K3.1: an indexer in those layers")
    options.add_argument("--seed", type=int, default=0, metavar="N", help="other seed, other bytes")
    options.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    return options


def sizes_from(options: argparse.ArgumentParser, given: argparse.Namespace) -> Sizes:
    """The sizes asked for; leaves through `options.error` when they can't be."""
    numbers = {flag.replace("-", "_"): getattr(given, flag.replace("-", "_")) for flag in NUMBERS}
    for name, value in numbers.items():
        least = SPECIALS + BYTES if name == "vocab" else 1
        if value < least:
            options.error(f"--{name.replace('_', '-')} is {value}, it must be at least {least}")
    for name in ("latent", "expert_width"):
        if numbers[name] % GROUP:
            flag = name.replace("_", "-")
            options.error(f"--{flag} is {numbers[name]}, it must be a multiple of {GROUP}")
    if numbers["top_k"] > numbers["experts"]:
        options.error(f"--top-k {numbers['top_k']} is more than --experts {numbers['experts']}")
    layers = numbers["layers"]
    full = {*range(4, layers + 1, 4), layers}
    if given.full_attention is not None:
        words = given.full_attention.split(",")
        if not all(word.isdecimal() and 1 <= int(word) <= layers for word in words):
            options.error(f"--full-attention must be like 4,8 with each from 1 to {layers}")
        full = {int(word) for word in words}
    return Sizes(**numbers, full_attention=tuple(sorted(full)), indexer=given.indexer)


def shards_of(sizes: Sizes) -> list[list[Tensor]]:
    """The tensors of each shard in file order: one shard a layer, then the top."""
    layers = [in_file_order(layer_tensors(sizes, layer)) for layer in range(sizes.layers)]
    return [*layers, in_file_order(top_tensors(sizes))]


def make(folder: Path, sizes: Sizes, seed: int) -> int:
    """Write the whole checkpoint, its index last; returns the bytes of its tensors.

    Raises: OSError when the disk is too small or refuses.
    """
    shards = shards_of(sizes)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if total * 1.02 > free:
        raise OSError(f"{folder} has {free / 1e9:.2f} GB free, this needs {total * 1.02 / 1e9:.2f}")
    for name, text in small_files(sizes).items():
        (folder / name).write_text(text)
    meter = Meter(total)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_shard(folder / name, tensors, seed, meter.add)
        weight_map.update((tensor.name, name) for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    return total


def clear(folder: Path) -> None:
    """Take away an earlier checkpoint's index and shards, the index first."""
    (folder / INDEX).unlink(missing_ok=True)
    for shard in folder.glob("model-*-of-*.safetensors"):
        shard.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the checkpoint that the command line asks for; returns the exit code."""
    options = parser()
    given = options.parse_args(arguments)
    sizes = sizes_from(options, given)
    folder: Path = given.folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            if not given.force or not folder.is_dir():
                options.error(f"{folder} is not an empty folder; name a new one, or add --force")
            clear(folder)
        started = time.monotonic()
        total = make(folder, sizes, given.seed)
    except OSError as error:
        print(f"make_checkpoint.py: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    routed = (sizes.layers - 1) * sizes.experts
    record = 3 * sizes.latent * sizes.expert_width * (GROUP // 2 + 1) // GROUP
    print(
        f"{folder}: {total / 1e9:.3f} GB in {sizes.layers + 1} shards, trunk "
        f"{(total - routed * record) / 1e9:.3f} GB, {routed} experts of {record} bytes; "
        f"{seconds:.1f} s, {total / 1e6 / max(seconds, 1e-9):.0f} MB/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
