"""The values of α or λ that an analysis tries: `0,0.5,1` or `first:last:step`. No torch."""

import math

from fedlens.errors import FedlensError

MAX_POINTS = 1000  # each is a model to evaluate


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
        if not all(map(math.isfinite, values)) or len(values) > MAX_POINTS:
            raise ValueError
    except (ValueError, ZeroDivisionError) as error:
        raise FedlensError(
            f"'{text}' is not a grid of numbers: write 0,0.5,1 or first:last:step, with at most "
            f"{MAX_POINTS} of them."
        ) from error
    return sorted({round(value, 10) + 0.0 for value in values})  # −0.0 + 0.0 is 0.0
