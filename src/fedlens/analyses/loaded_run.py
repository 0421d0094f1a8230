"""A finished run, opened again: its parts, what it began from, and what it learned.

Parameters are whole maps, frozen ones included, so that runs which trained different parts of one
model can be subtracted from each other.
"""

from dataclasses import dataclass, replace

import torch

from fedlens import params
from fedlens.config import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.build import Parts, build
from fedlens.experiments.evaluation import Measure
from fedlens.experiments.masks import masked
from fedlens.federated.client import trained
from fedlens.params import Params
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.stop import StopRequest
from fedlens.sparse.packing import Packing
from fedlens.store import manifest, model_state
from fedlens.store.analysis_records import result_of
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.run_folder import RunFolder
from fedlens.training.evaluate import Evaluation


@dataclass(frozen=True)
class OpenedRun:
    folder: RunFolder
    config: Config
    parts: Parts
    measure: Measure
    start: dict[str, torch.Tensor]  # θ before training: pretrained, with the head as prepared
    tuned: dict[str, torch.Tensor]  # θ as chosen

    def whole(self, packed: Params) -> dict[str, torch.Tensor]:
        """All parameters, where the trained ones are as in an update that travelled."""
        found = params.copy(self.start)
        learned = {name: found[name] for name in trained(self.parts.model)}
        packing = Packing(learned, self.parts.masks)
        packing.unpack(packed, learned)
        return found

    def assign(self, parameters: Params) -> None:
        """The model gets these parameters."""
        params.assign(dict(self.parts.model.named_parameters()), parameters)

    def validated(self, parameters: Params) -> Evaluation:
        self.assign(parameters)
        found = self.measure.validation()
        if found is None:
            raise FedlensError(
                f"{self.folder.name} has no validation images (data.validation=0), and nothing "
                "may be chosen on test images."
            )
        return found


def open_run(
    folder: RunFolder, stop: StopRequest, *, overrides: list[str] | None = None
) -> OpenedRun:
    """`overrides` may say where things are and what to run on, as for `resume`."""
    result = result_of(folder)
    config = compose.amend(compose.load(folder.config), overrides or [])
    keep_large_blocks()
    if config.threads:
        torch.set_num_threads(config.threads)
    parts = build(config, choose_device(config.device), stop)
    manifest.check_inputs(folder.manifest or {}, parts.inputs)
    parts = masked(config, parts, folder, stop)
    start = params.copy(dict(parts.model.named_parameters()))
    chosen = result["choice"]
    name = f"{result['unit']}-{chosen['unit']:06d}"
    model_state.put_back(Checkpoints(folder.checkpoints).load(name).tensors, parts.model)
    if params.digest(model_state.learned(parts.model)) != chosen["parameters"]:
        raise FedlensError(
            f"The checkpoint {name} of {folder.name} does not hold the parameters its result was "
            "measured with: run it anew under another run.name."
        )
    measure = Measure(parts.model, parts, batch_size=config.evaluate.batch_size, stop=stop)
    tuned = params.copy(dict(parts.model.named_parameters()))
    return OpenedRun(folder, config, parts, measure, start, tuned)


def ridge_headed(opened: OpenedRun, stop: StopRequest) -> dict[str, torch.Tensor]:
    """What `opened` began from, but with a ridge head on the frozen backbone."""
    config = opened.config
    head = replace(config.head, name="ridge", freeze=True, temperature=None, ridge_lambda=None)
    device = opened.parts.model.head.weight.device
    parts = build(replace(config, head=head), device, stop)
    return params.copy(dict(parts.model.named_parameters()))
