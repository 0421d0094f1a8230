"""Which client holds which images. Importing this package loads no torch."""


def node_name(number: int) -> str:
    """The name of a node's folder and of its key."""
    return f"node-{number}"
