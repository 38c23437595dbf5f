"""A program that ends without closing its engine."""

from pathlib import Path

import pytest

from processes import python

PROGRAM = """
import sys, time
from pathlib import Path
from mlxmoe.budget import Settings
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.engine import engine_for
from mlxmoe.events import Request, Sampling, collect
from mlxmoe.transcript import user

checkpoint = open_checkpoint(Path(sys.argv[1]))
engine = engine_for(checkpoint, checkpoint.plan(Settings(slots=30, width=4)))
engine.start()
stream = engine.submit(Request((user("x"),), sampling=Sampling(max_tokens=int(sys.argv[2]))))
if sys.argv[2] == "2":
    collect(stream)
else:
    time.sleep(0.4)
print("left")
"""


@pytest.mark.parametrize("tokens", ["2", "20000"])
def test_a_program_may_end_without_closing(goldens: Path, tokens: str) -> None:
    """Idle or in the middle of an answer: exit 0 at once, and nothing on stderr."""
    done = python(PROGRAM, str(goldens / "tiny-k31"), tokens)

    assert (0, "left\n", "") == (done.returncode, done.stdout, done.stderr)
