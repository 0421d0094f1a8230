"""Problems the user can act on: one sentence each, shown without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedlensError(Exception):
    """A problem that the user can solve; the message says what is wrong and what to do.

    Examples:
        >>> import fedlens as fl
        >>> try:
        ...     fl.partition([0, 1, 0, 1], clients=5)
        ... except fl.FedlensError as error:
        ...     print(error)
        clients=5 is more than the 4 samples: choose clients=4 or fewer.
    """


LISTED = 30  # options in one sentence
SHOWN = 80  # characters of a value in one sentence


def shown(value: object) -> str:
    """A value as a message quotes it: on one line, without control characters, not too long."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:SHOWN])
    return f"{line}…" if len(text) > SHOWN else line


def suggest(word: str, options: Iterable[str]) -> str:
    """The tail of a refusal: the nearest option if one is near, else all of them, or many."""
    options = sorted(options)
    near = get_close_matches(word, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    more = f" and {len(options) - LISTED} more" if len(options) > LISTED else ""
    return f"choose from {', '.join(options[:LISTED])}{more}."
