"""A message from the objects it was sent in, of which the sender chose every byte.

Flower's arrays list their chunks by number, and may list one of them any number of times, as for an
array of zeros. So a few bytes can stand for more than any memory: they are counted first.
"""

import json

from flwr.app import Array, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

MOST_BYTES = 2**33  # of one message


class TooLarge(ValueError):
    """A message is larger than any that is expected."""


def inflated(identity: str, contents: dict[str, bytes]) -> Message:
    """The message of that name; what is none raises any kind of exception.

    `contents` are its objects; they are removed as they are read.
    """
    if _array_bytes(contents) > MOST_BYTES:
        raise TooLarge(f"its arrays have more than {MOST_BYTES} bytes")
    message = inflate_object_from_contents(identity, contents)
    if not isinstance(message, Message):
        raise TypeError("it is not a message")
    if not message.has_error() and not isinstance(message.content, RecordDict):
        raise TypeError("the content is not a RecordDict")
    return message


def _array_bytes(contents: dict[str, bytes]) -> int:
    """The bytes of all arrays, with every chunk as often as it is listed."""
    total = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            listed = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[children[number]]) for number in listed)
    return total
