"""Numbers as people write them on a command line: lists, ranges, and names with a number."""

import math
from collections.abc import Sequence

from fedlens.errors import FedlensError

MOST = 1000  # points of a grid: each is a model to evaluate


def grid(text: str) -> list[float]:
    """`0,0.5,1`, or `first:last:step` with both ends; in order, each once, 0.1 + 0.2 being 0.3."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            count = (last - first) / step + 1e-9
            if not 0 <= count < MOST:
                raise ValueError
            values = [first + place * step for place in range(math.floor(count) + 1)]
        else:
            values = [float(part) for part in text.split(",")]
        if not all(map(math.isfinite, values)):
            raise ValueError
    except (ValueError, ZeroDivisionError) as error:
        raise FedlensError(
            f"'{text}' is not a grid of numbers: write 0,0.5,1 or first:last:step, with at most "
            f"{MOST} of them."
        ) from error
    return sorted({round(value, 10) + 0.0 for value in values})  # −0.0 + 0.0 is 0.0


def whole_numbers(text: str | None, option: str) -> list[int]:
    """`3,7` as numbers, each once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(","))) if text else []
    except ValueError as error:
        raise FedlensError(f"{option} takes whole numbers such as 3,7, not '{text}'.") from error


def pairs(words: Sequence[str], form: str) -> list[tuple[str, float]]:
    """`name=number`, each; the number comes after the last `=`."""
    found = []
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not name or not math.isfinite(factor):
            raise FedlensError(f"'{word}' is not of the form {form}, such as 2=0.5.")
        found.append((name, factor))
    return found
