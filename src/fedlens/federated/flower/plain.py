"""Text from another party: JSON within limits, and words that are safe to show.

Whoever sends a text chooses every byte of it, so it is bounded before it is parsed, and parsed into
plain values only: null, booleans, numbers, strings, lists and dictionaries.
"""

import json
import math
import unicodedata
from typing import Any

LARGEST = 2**63 - 1  # of integers
DEPTH = 8  # of lists and dictionaries within each other
SHOWN = 300  # characters of a text that are shown


class NotPlain(ValueError):
    """A text that is not JSON, or is beyond the limits."""


def parsed(text: str, *, limit: int) -> Any:
    """The JSON value of a text of at most `limit` characters; every number in it is finite."""
    if len(text) > limit:
        raise NotPlain(f"it has {len(text)} characters, and {limit} are allowed")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotPlain("it is not JSON") from error
    _check(value, DEPTH)
    return value


def _check(value: Any, depth: int) -> None:
    if isinstance(value, list | dict):
        if depth == 0:
            raise NotPlain(f"it is nested deeper than {DEPTH} levels")
        for one in value.values() if isinstance(value, dict) else value:
            _check(one, depth - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise NotPlain("it has a number that is not finite")
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise NotPlain("it has a number that is too large")


def one_line(text: object) -> str:
    """The text without control characters, in one line, cut after `SHOWN` characters."""
    start = str(text)[: 4 * SHOWN]
    visible = (" " if _is_control(letter) else letter for letter in start)
    line = " ".join("".join(visible).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def printable(line: str) -> str:
    """A line of a log with spaces in place of control characters; tabs stay."""
    return "".join(" " if _is_control(one) and one != "\t" else one for one in line)


def _is_control(letter: str) -> bool:
    """Control and format characters, surrogates, unassigned ones, and ends of lines."""
    category = unicodedata.category(letter)
    return category.startswith("C") or category in ("Zl", "Zp")
