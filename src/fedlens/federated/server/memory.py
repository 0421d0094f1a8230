"""What the server remembers of earlier rounds: kind → parameter name → values.

A checkpoint holds it tensor by tensor, and gives kinds back in the order of their names.
"""

from collections.abc import Mapping

from fedlens.params import Params

Memory = Mapping[str, Params]


def last_models(memory: Memory, model: Params, count: int) -> dict[str, Params]:
    """The last `count` models, the oldest first: those in `memory`, and then `model`.

    Examples:
        >>> import torch
        >>> one, two, three = ({"w": torch.tensor(float(number))} for number in (1, 2, 3))
        >>> memory = last_models(last_models({}, one, 2), two, 2)
        >>> [float(past["w"]) for past in last_models(memory, three, 2).values()]
        [2.0, 3.0]
    """
    models = [*memory.values(), model][-count:]
    return {f"{number:06d}": one for number, one in enumerate(models)}
