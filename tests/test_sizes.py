"""Sizes of memory as people type them."""

import pytest

from mlxmoe.budget import parse_size
from mlxmoe.errors import UsageError

GB = 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("96GB", 96 * GB),
        ("1.5GiB", 3 * 2**29),
        ("800M", 800_000_000),
        ("1000000", 10**6),
        (" 0.1 tb ", 10**11),
        ("3kib", 3072),
        ("7b", 7),
        ("0.5k", 500),
        ("1.1GB", 1_100_000_000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    """Decimal units, binary units, plain bytes; case and blanks don't matter."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1e9", "0", "0.0001", "1.5.2G", "9" * 40, "1 PB", "12iB", "\n", "½G"]
)
def test_wrong_sizes(text: str) -> None:
    """What is no size is shown with examples of sizes."""
    with pytest.raises(UsageError, match=r"is not a size; expected like 96GB, 1\.5GiB or 800M"):
        parse_size(text)
