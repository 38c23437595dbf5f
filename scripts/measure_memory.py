"""Holds the plan against the truth: peak memory of a run whose experts don't fit.

    python scripts/measure_memory.py DIR [--over 1.5GB] [--prompt-tokens N]

Makes a random K3.1 checkpoint of about 4 GB in DIR unless one is there, runs it with a
budget of the trunk and `--over` more, and prints the peak resident memory of the process
(as the system counted it) beside the planned one. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import make_checkpoint
from mlxmoe.budget import parse_size
from mlxmoe.checkpoint import open_checkpoint, stream_width
from mlxmoe.footprint import trunk_bytes

SIZES = {
    "layers": 9,
    "experts": 320,
    "top-k": 8,
    "hidden": 1024,
    "heads": 16,
    "head-dim": 64,
    "latent": 512,
    "expert-width": 1536,
    "dense-width": 4096,
    "shared": 1,
    "kv-lora": 256,
    "q-lora": 384,
    "nope": 64,
    "rope": 32,
    "v-dim": 64,
    "vocab": 8192,
    "index-heads": 8,
    "index-dim": 64,
    "index-topk": 512,
}
RUN = [sys.executable, "-c", "from mlxmoe.cli import main; main()", "run"]


def measure(folder: Path, over: int, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Run once; planned and peak bytes, and what was read."""
    checkpoint = open_checkpoint(folder)
    trunk = trunk_bytes(checkpoint.manifest, checkpoint.config, stream_width())
    prompt = " ".join(f"{n % 977}" for n in range(prompt_tokens // 4))
    options = ["--ram", str(trunk + over), "--max-tokens", str(new_tokens), "--seed", "1", "--json"]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [*RUN, str(folder), "-", *options], stdin=subprocess.PIPE, stdout=out
        )
        assert process.stdin is not None
        process.stdin.write(prompt.encode())
        process.stdin.close()
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit("the run failed; its message stands above")
        out.seek(0)
        reply = json.load(out)
    stats = reply["stats"]
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "planned_bytes": stats["planned_memory_bytes"],
        "peak_bytes": peak,
        "ratio": peak / stats["planned_memory_bytes"],
        "prompt_tokens": reply["usage"]["prompt_tokens"],
        "prefill_seconds": stats["prefill_seconds"],
        "decode_tokens": stats["decode_tokens"],
        "decode_seconds": stats["decode_seconds"],
        "evictions": stats["experts"]["evictions"],
        "gigabytes_read": stats["experts"]["bytes_read"] / 1e9,
    }


def main() -> None:
    """Make what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--over", type=parse_size, default=parse_size("1.5GB"))
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    if not (args.folder / "config.json").exists():
        sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
        make_checkpoint.main([str(args.folder), "--indexer", *sizes])
    result = measure(args.folder, args.over, args.prompt_tokens, args.new_tokens)
    for name, value in result.items():
        shown = f"{value / 1e9:.3f} GB" if name.endswith("_bytes") else f"{value:.3f}"
        print(f"{name:<16} {shown}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
