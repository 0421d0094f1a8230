"""What a node needs besides its own data: the config, and a prepared head and masks as tensors."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors.torch import load, save

from fedlens.params import Params

CONFIG = "config"  # the name of the config's text among the tensors


@dataclass(frozen=True, eq=False)
class Setup:
    """Sent to every node once; its digest names it in later messages."""

    config: str
    tensors: Params

    @cached_property
    def content(self) -> bytes:
        text = torch.tensor(list(self.config.encode()), dtype=torch.uint8)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        return save({**tensors, CONFIG: text})

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def of(cls, content: bytes) -> "Setup":
        tensors = load(content)
        setup = cls(bytes(tensors.pop(CONFIG).tolist()).decode(), tensors)
        setup.__dict__["content"] = content  # so that the digest is that of the bytes received
        return setup
