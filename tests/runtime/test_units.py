"""Durations, sizes and counts in words, and durations read from words."""

import pytest

from fedlens.errors import FedlensError
from fedlens.runtime.units import counted, duration_text, parse_duration, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599, "1 h"),
        (3600 * 3 + 600, "3 h 10 min"),
        (86399, "1 day"),
        (86400 * 2, "2 days"),
        (86400 * 2 + 3600 * 4, "2 days 4 h"),
    ],
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("2h30m", 9000), ("3d", 259200), ("1 H", 3600)],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("seconds", [1, 59, 60, 119 * 60, 3600, 86400, 86400 * 3 + 7200])
def test_a_printed_duration_can_be_read(seconds: float) -> None:
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "12", "h", "-3h", "12 parsecs", "3h nonsense", "0h", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(FedlensError, match="12h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 bytes"), (15_500_000, "15.5 MB"), (2.4e11, "240 GB")]
)
def test_size_text(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "run", "0 runs"),
        (1, "run", "1 run"),
        (2, "run", "2 runs"),
        (1, "analysis", "1 analysis"),
        (3, "analysis", "3 analyses"),
        (100, "class", "100 classes"),
        (2, "training image", "2 training images"),
    ],
)
def test_counted(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text
