"""Parse numbers of a command line: lists, ranges, and names with a number."""

import math
from collections.abc import Sequence
from typing import Any

from fedlens.errors import FedlensError

MAX_POINTS = 1000  # of a grid: each is a model to evaluate


def grid(text: str) -> list[float]:
    """`0,0.5,1`, or `first:last:step` with both ends; sorted, without duplicates or 0.1 + 0.2."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            count = (last - first) / step + 1e-9
            if not 0 <= count < MAX_POINTS:
                raise ValueError
            values = [first + place * step for place in range(math.floor(count) + 1)]
        else:
            values = [float(part) for part in text.split(",")]
        if not all(map(math.isfinite, values)):
            raise ValueError
    except (ValueError, ZeroDivisionError) as error:
        raise FedlensError(
            f"'{text}' is not a grid of numbers: write 0,0.5,1 or first:last:step, with at most "
            f"{MAX_POINTS} of them."
        ) from error
    return sorted({round(value, 10) + 0.0 for value in values})  # −0.0 + 0.0 is 0.0


def integers(text: str | None, option: str) -> list[int]:
    """`3,7` as integers, without duplicates."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(","))) if text else []
    except ValueError as error:
        raise FedlensError(f"{option} takes integers such as 3,7, not '{text}'.") from error


def pairs(words: Sequence[str], form: str) -> list[tuple[str, float]]:
    """Parse each `name=number`; the number follows the last `=`."""
    parsed = []
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not name or not math.isfinite(factor):
            raise FedlensError(f"'{word}' is not of the form {form}, such as 2=0.5.")
        parsed.append((name, factor))
    return parsed


def assignment(word: str, option: str) -> tuple[str, Any]:
    """`key=value`, the value an integer, a number, true, false, null or text."""
    key, equals, text = word.partition("=")
    if not (key and equals and text):
        raise FedlensError(f"{option} {word} is not of the form KEY=VALUE, such as density=0.1.")
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return key, constants[text]
    for number in (int, float):
        try:
            return key, number(text)
        except ValueError:
            continue
    return key, text
