"""Parse numbers of a command line: lists, ranges, and names with a number."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import typer

from fedlens.errors import FedlensError, shown
from fedlens.registry import Range


def within(interval: str) -> Callable[..., float | None]:
    """The callback of an option whose numbers lie in an interval; `min` of typer lets NaN pass."""
    bounds = Range(interval)

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and value not in bounds:
            raise FedlensError(f"{param.opts[0]} {shown(value)} must be {bounds}.")
        return value

    return check


def integers(text: str | None, option: str) -> list[int]:
    """`3,7` as integers, without duplicates."""
    try:
        return [] if text is None else list(dict.fromkeys(map(int, text.split(","))))
    except ValueError as error:
        raise FedlensError(f"{option} takes integers such as 3,7, not '{shown(text)}'.") from error


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
