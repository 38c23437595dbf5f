"""Options that the environment may give: a default that the command line overrides."""

import json
import sys
from pathlib import Path

import pytest

from mlxmoe import cli


@pytest.mark.parametrize(
    ("variable", "value", "field", "option"),
    [
        ("MLXMOE_SLOTS", "28", "slots", "--slots"),
        ("MLXMOE_MAX_SPAN", "28", "span", "--max-span"),
        ("MLXMOE_CONTEXT", "28", "context", "--context"),
        ("MLXMOE_RAM", "1.5GB", "budget_bytes", "--ram"),
    ],
)
def test_the_environment_gives_a_default(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    goldens: Path,
    variable: str,
    value: str,
    field: str,
    option: str,
) -> None:
    """The plan takes the variable, and the option before it."""
    monkeypatch.setenv(variable, value)
    given, typed = (1_500_000_000, "1.6GB") if variable == "MLXMOE_RAM" else (28, "40")
    expected = 1_600_000_000 if variable == "MLXMOE_RAM" else 40
    found = []
    for more in ([], [option, typed]):
        command = ["mlxmoe", "plan", str(goldens / "tiny-k31"), "--json", *more]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert 0 == left.value.code
        found.append(json.loads(capsys.readouterr().out)[field])

    assert [given, expected] == found
