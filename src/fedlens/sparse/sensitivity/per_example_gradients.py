"""Σ_b (∂t_b/∂w)² for a batch of scalar targets t_b, exact per example, in one backward pass.

Layers with a rule compute it from their inputs and output gradients, parameters that broadcast over
the batch are copied for every example, and the rest is differentiated example by example.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from fedlens.sparse.sensitivity.layer_gradients import Sums, rule_of

Targets = Callable[[torch.Tensor], Iterable[torch.Tensor]]  # logits [B, C] → some t of shape [B]
TOLERANCE = 1e-3  # of a rule against autograd, relative to the norm
ROUNDING = 64  # units in the last place that a gradient may differ by

log = logging.getLogger(__name__)


class SquaredGradients:
    """Running sums of squared per-example gradients of the parameters `names`, in their own type.

    The way to differentiate each parameter is chosen once: every rule is compared with autograd on
    the examples of `sample`. Where no rule is right (a weight shared, used twice or used outside
    its layer; a batch not on the first axis; a layer without a rule), gradients are computed
    example by example, which is slow but exact. The model's forward takes one argument, and its
    mode is not changed: BatchNorm mixes examples in training mode, so call `model.eval()` first.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], sample: torch.Tensor) -> None:
        if len(sample) == 1:  # one example cannot show that a layer mixes two of them
            sample = torch.cat([sample, sample])
        known = dict(model.named_parameters())
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"the model has no parameter {', '.join(unknown[:3])}")
        self.model = model
        self._parameters = {name: known[name] for name in names}
        self._layers: dict[
            nn.Module, dict[str, str]
        ] = {}  # with a rule: own name → name in the model
        self._expanded: list[str] = []
        self._slow: list[str] = []
        self.sums: dict[str, torch.Tensor] = {}
        self._plan(sample)

    def add(self, inputs: torch.Tensor, targets: Targets) -> None:
        """One forward pass, and one backward pass for each of the `targets` of its logits."""
        self._by_rule(inputs, targets)
        if self._slow:
            self._one_by_one(inputs, targets, self._slow)

    def _plan(self, sample: torch.Tensor) -> None:
        def targets(logits: torch.Tensor) -> list[torch.Tensor]:
            return [logits.flatten(1) @ torch.arange(1, logits[0].numel() + 1).to(logits).cos()]

        self.clear()
        used = self._one_by_one(sample, targets, list(self._parameters))
        expected = self.sums
        self.clear()
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            own = {key: prefix + key for key, _ in module.named_parameters(recurse=False)}
            own = {key: name for key, name in own.items() if name in used}
            if own and rule_of(module):
                self._layers[module] = own
            elif own:
                self._expanded += [name for name in own.values() if self._expands(name, sample)]
        self._by_rule(sample, targets, strict=False)
        wrong = _differing(self.sums, expected, self._layers.values()) & used
        self.clear()
        for module, own in list(self._layers.items()):
            self._layers[module] = {key: name for key, name in own.items() if name not in wrong}
        self._expanded = [name for name in self._expanded if name not in wrong]
        self._slow = [name for name in self._parameters if name in wrong]
        if self._slow:
            log.warning(
                "No fast rule gives the per-example gradients of %d of %d parameters (%s): "
                "these take one backward pass per example.",
                len(self._slow),
                len(self._parameters),
                ", ".join(self._slow[:3]) + (", …" if len(self._slow) > 3 else ""),
            )

    def clear(self) -> None:
        """Sets the sums to zero; the plan stays."""
        self.sums = {
            name: torch.zeros_like(value, memory_format=torch.contiguous_format)
            for name, value in self._parameters.items()
        }

    def _expands(self, name: str, sample: torch.Tensor) -> bool:
        """Whether the model still runs with one copy of this parameter per example."""
        value = self._parameters[name].detach()
        if value.ndim < 2 or value.shape[0] != 1:
            return False
        copies = {name: value.expand(len(sample), *value.shape[1:])}
        try:
            with torch.no_grad():
                functional_call(self.model, copies, (sample,))
        except (RuntimeError, ValueError, AssertionError):
            return False
        return True

    def _by_rule(self, inputs: torch.Tensor, targets: Targets, *, strict: bool = True) -> None:
        leaves: list[torch.Tensor] = []  # where differentiation ends
        handles = []
        copies: dict[str, torch.Tensor] = {}
        with _differentiating(self.model, ()):
            for name in self._expanded:
                value = self._parameters[name].detach()
                copies[name] = value.expand(len(inputs), *value.shape[1:]).requires_grad_()
                copies[name].register_hook(  # type: ignore[no-untyped-call]
                    partial(self._take_copies, name)
                )
                leaves.append(copies[name])
            try:
                for module, own in self._layers.items():
                    if own:
                        watch = partial(self._watch, leaves, own, strict)
                        handles.append(module.register_forward_hook(watch))
                if not handles and not leaves:
                    return
                _backward(targets(functional_call(self.model, copies, (inputs,))), leaves)
            finally:
                for handle in handles:
                    handle.remove()

    def _watch(
        self,
        leaves: list[torch.Tensor],
        own: dict[str, str],
        strict: bool,
        module: nn.Module,
        args: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        """A forward hook: applies the layer's rule once the gradient of `output` is known."""
        if not args:
            return None
        begins = not output.requires_grad
        if begins:  # no parameter below is scored
            leaves.append(output.detach().requires_grad_())
            output = leaves[-1].clone()  # an activation may overwrite it, unlike a leaf
        sums = {key: self.sums[name] for key, name in own.items()}
        rule, x = rule_of(module), args[0].detach()

        def take(g: torch.Tensor) -> None:
            assert rule is not None
            try:
                rule(module, x, g, sums)
            except (RuntimeError, ValueError, IndexError):
                if strict:
                    raise

        output.register_hook(take)  # type: ignore[no-untyped-call]
        return output if begins else None

    def _take_copies(self, name: str, g: torch.Tensor) -> None:
        self.sums[name].add_(g.square().sum(0, keepdim=True))

    def _one_by_one(self, inputs: torch.Tensor, targets: Targets, names: Sequence[str]) -> set[str]:
        """Plain autograd; returns the names of parameters that the targets depend on."""
        wanted = [self._parameters[name] for name in names]
        used = set()
        with _differentiating(self.model, wanted):
            for target in targets(self.model(inputs)):
                for one in target.unbind():
                    if not one.requires_grad:
                        continue
                    gradients = torch.autograd.grad(
                        one, wanted, retain_graph=True, allow_unused=True
                    )
                    for name, gradient in zip(names, gradients, strict=True):
                        if gradient is not None:
                            used.add(name)
                            self.sums[name].addcmul_(gradient, gradient)
        return used


def _differing(sums: Sums, expected: Sums, layers: Iterable[dict[str, str]]) -> set[str]:
    """Names whose sums differ by more than the tolerance and the rounding error of their layer.

    The gradient of the bias of attention's keys is zero but for rounding errors, which never agree.
    """
    norms = {name: float(torch.linalg.vector_norm(value)) for name, value in expected.items()}
    allowed = {name: TOLERANCE * norm for name, norm in norms.items()}
    for own in layers:
        largest = max(norms[name] for name in own.values())
        for name in own.values():
            rounding = (ROUNDING * torch.finfo(expected[name].dtype).eps) ** 2 * largest
            allowed[name] = max(allowed[name], rounding)
    return {
        name
        for name, value in expected.items()
        if not float(torch.linalg.vector_norm(sums[name] - value)) <= allowed[name]
    }


def _backward(targets: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    totals = [target.sum() for target in targets]  # examples are independent: one pass for all
    for number, total in enumerate(totals, start=1):
        if total.requires_grad:
            torch.autograd.grad(total, leaves, retain_graph=number < len(totals), allow_unused=True)


@contextmanager
def _differentiating(model: nn.Module, wanted: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enables gradients of the parameters `wanted` only, and restores the flags afterwards."""
    before = [(value, value.requires_grad) for value in model.parameters()]
    identities = {id(value) for value in wanted}
    try:
        for value, _ in before:
            value.requires_grad_(id(value) in identities)
        with torch.enable_grad():
            yield
    finally:
        for value, required in before:
            value.requires_grad_(required)
