"""Durations, sizes and counts as people write them: 3 h 10 min, 1.4 GB, 2 runs."""

import re

from fedlens.errors import FedlensError, shown

SECONDS = {
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
}
LONGEST_S = 3653 * 86400.0  # ten years
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


def duration_text(seconds: float) -> str:
    """Two units at most: 45 s, 12 min, 3 h 10 min, 2 days 4 h."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _two(*divmod(minutes, 60), "h", "min")
    days, hours = divmod(round(seconds / 3600), 24)
    return _two(days, hours, "day" if days == 1 else "days", "h")


def parse_duration(text: str) -> float:
    """Seconds of 90s, 20m, 1.5h, 2h30m, 2d or 3 h 10 min."""
    compact = text.strip().lower()
    parts = _PART.findall(compact)
    known = all(unit in SECONDS for _, unit in parts)
    if not parts or not known or _PART.sub("", compact).strip():
        raise FedlensError(f"'{shown(text)}' is not a duration: write 20m, 12h, 2h30m or 3d.")
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= LONGEST_S:
        raise FedlensError(
            f"'{shown(text)}' must be above 0 and at most 10 years: write 20m, 12h, 2h30m or 3d."
        )
    return seconds


def size_text(size: float) -> str:
    """Bytes in decimal units: 820 kB, 15.5 MB, 1.4 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            value = size / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{size:.0f} bytes"


def counted(count: int, noun: str) -> str:
    """'1 run', '2 runs', '3 analyses', '4 classes'."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("is"):
        return f"{count} {noun[:-2]}es"
    return f"{count} {noun}es" if noun.endswith("ss") else f"{count} {noun}s"


def _two(large: int, small: int, large_unit: str, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")
