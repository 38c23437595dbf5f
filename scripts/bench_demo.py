"""How soon the demo model answers, and how fast: from typing the command to its first token.

    python scripts/bench_demo.py [--repeats 7]

Prints medians and spreads. A plain `import mlx_lm`, timed in turn with the runs, is the
yardstick: it is most of a start and moves with the load of the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MLXMOE = str(Path(sys.executable).with_name("mlxmoe"))


def main() -> None:
    """Read the options, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    first, yardstick, rates = [], [], []
    for _ in range(repeats):
        yardstick.append(seconds_of([sys.executable, "-c", "import mlx_lm"]))
        first.append(seconds_to_first([MLXMOE, "run", "demo", "hello", "--tier", "low"]))
        rates.append(decode_rate([MLXMOE, "run", "demo", "what is 12 + 7?", "--json"]))
    show("first token", "s", first)
    show("import mlx_lm", "s", yardstick)
    ratio = statistics.median(a / b for a, b in zip(first, yardstick, strict=True))
    print(f"first token / import mlx_lm: {ratio:.2f}")
    show("decode", "tokens/s", rates)


def seconds_of(command: Sequence[str]) -> float:
    """How long a command runs."""
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - begin


def seconds_to_first(command: Sequence[str]) -> float:
    """From the start of a command to the first byte of its answer, the only thing on stdout."""
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        seconds = time.monotonic() - begin
        run.stdout.read()
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {run.returncode}")
    return seconds


def decode_rate(command: Sequence[str]) -> float:
    """Tokens a second after the first."""
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    stats = json.loads(ran.stdout)["stats"]
    return float(stats["decode_tokens"] / stats["decode_seconds"])


def show(what: str, unit: str, values: Sequence[float]) -> None:
    """Median, least and most."""
    print(
        f"{what}: median {statistics.median(values):.2f} {unit}, "
        f"{min(values):.2f} to {max(values):.2f}, {len(values)} runs"
    )


if __name__ == "__main__":
    main()
