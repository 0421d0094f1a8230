"""The life of a run: its folder, its log, its signals, its loop, its result.

A run is found by its name, which its config decides: the same command continues it, and once it
is finished there is nothing left to do.
"""

import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedlens import params
from fedlens.data.splits import Choice
from fedlens.errors import FedlensError
from fedlens.experiments import compose, manifest, snapshot
from fedlens.experiments.build import Parts, build, resolved
from fedlens.experiments.central import Central, Position
from fedlens.experiments.checkpoint import Checkpoints
from fedlens.experiments.config import Config, essence, run_name
from fedlens.experiments.ledger import Ledger
from fedlens.experiments.logs import logging_to
from fedlens.experiments.measure import Measure
from fedlens.experiments.records import RunFolder
from fedlens.experiments.signals import Interrupted, StopRequest, listening
from fedlens.experiments.tracking import open_tracker
from fedlens.files import clear_partials, replacing
from fedlens.memory import keep_large_blocks
from fedlens.training.local import Model

log = logging.getLogger(__name__)


def start(config: Config) -> RunFolder:
    """Runs `config`, continuing where an earlier session of the same run stopped."""
    config = resolved(config)
    folder = RunFolder(Path(config.run.root) / run_name(config))
    if folder.config.exists():
        stored = compose.load(folder.config)
        if essence(_without_weights(stored)) != essence(_without_weights(config)):
            raise FedlensError(
                f"{folder.path} holds a run with another config: choose another run.name."
            )
        config = replace(config, threads=config.threads or stored.threads)
    return _run(config, folder)


def resume(folder: RunFolder, overrides: list[str] | None = None) -> RunFolder:
    """Continues a run from its folder alone; overrides may only say where and how it runs."""
    return _run(compose.amend(compose.load(folder.config), overrides or []), folder)


def _without_weights(config: Config) -> Config:
    """Whether the weights are the same is for their hash in the manifest to say."""
    return replace(config, backbone=replace(config.backbone, weights=None))


def _run(config: Config, folder: RunFolder) -> RunFolder:
    if folder.result is not None:
        log.info("%s is finished: nothing to do", folder.name)
        return folder
    device = choose_device(config.device)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        log_file = logging.FileHandler(folder.log, encoding="utf-8")
    except OSError as error:
        raise FedlensError(f"Cannot write to {folder.path} ({error.strerror}).") from error
    with logging_to(log_file), folder.lock(), listening() as stop:
        try:
            clear_partials(folder.path)
            folder.forget_failure()
            _work(config, folder, device, stop)
        except Interrupted as reason:
            log.warning("stopped by %s; what was done is saved", reason)
            raise Interrupted(f"go on with: fedlens resume {folder.path}") from reason
        except Exception as error:
            fault = _in_words(error, folder)
            log.error("%s", fault, exc_info=not isinstance(fault, FedlensError))
            with suppress(Exception):  # on a full disk this may fail too; the log has it
                folder.write("failure", {"message": str(fault), "when": manifest.now()})
            raise fault from error
    return folder


def _in_words(error: Exception, folder: RunFolder) -> Exception:
    """The error as a sentence, where the user can do something about it."""
    if isinstance(error, OSError):  # a full disk shows itself wherever it likes
        return FedlensError(f"{folder.name} could not go on: {error}.")
    if isinstance(error, torch.OutOfMemoryError):
        return FedlensError("The device is out of memory: set train.micro_batch, or a smaller "
                            "train.batch_size or evaluate.batch_size.")  # fmt: skip
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = str(error).strip().splitlines()[0]
        return FedlensError(f"The model could not be compiled ({reason}): use train.compile=false.")
    return error


def _work(config: Config, folder: RunFolder, device: torch.device, stop: StopRequest) -> None:
    began = time.monotonic()
    keep_large_blocks()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = replace(config, threads=torch.get_num_threads())
    with replacing(folder.config) as temporary:
        temporary.write_text(compose.to_yaml(config), encoding="utf-8")
    log.info("run %s", folder.name)

    parts = build(config, device, stop, opened=Choice(**folder.choice) if folder.choice else None)
    _sign(config, folder, parts, device)
    checkpoints = Checkpoints(
        folder.checkpoints,
        keep_best=config.checkpoint.keep_best,
        keep_last=config.checkpoint.keep_last,
    )
    model: Model = torch.compile(parts.model) if config.train.compile else parts.model
    measure = Measure(model, parts, batch_size=config.evaluate.batch_size, stop=stop)
    with open_tracker(config.tracker.name, folder.path, project=config.tracker.project,
                      mode=config.tracker.mode, config=asdict(config)) as tracker:  # fmt: skip
        ledger = Ledger(folder, checkpoints)
        position = Central(config, parts, model, measure, ledger, tracker, stop, began).run()
        result = _conclude(config, folder, parts, measure, checkpoints, position)
        folder.write("result", result)
        tracker.log(position.epoch, {"test/top1": result["test"]["top1"]})
    log.info("test accuracy %.2f %%", 100 * result["test"]["top1"])


def _what(config: Config) -> dict[str, Any]:
    """What every record names, so that no number is taken for another world's."""
    return {
        "experiment": config.experiment,
        "data": config.data.name,
        "backbone": config.backbone.name,
        "resolution": config.backbone.resolution,
        "pretrained": config.backbone.pretrained,
        "seed": config.seed,
    }


def _sign(config: Config, folder: RunFolder, parts: Parts, device: torch.device) -> None:
    """Adds this session to the manifest; refuses to go on with other data or weights."""
    session = manifest.session(device)
    signed = folder.manifest or {
        "name": folder.name,
        **_what(config),
        "inputs": parts.inputs,
        "sessions": [],
    }
    for what, found in parts.inputs.items():
        if signed["inputs"].get(what) != found:
            raise FedlensError(
                f"{folder.name} began with other {what} than are here now (the hashes differ): "
                f"bring the same {what} back, or start another run under another run.name."
            )
    if signed["sessions"] and (changed := manifest.differences(signed["sessions"][0], session)):
        log.warning("%s differ from the first session: the last bits may too", ", ".join(changed))
    folder.write("manifest", {**signed, "sessions": [*signed["sessions"], session]})


def _conclude(
    config: Config,
    folder: RunFolder,
    parts: Parts,
    measure: Measure,
    checkpoints: Checkpoints,
    position: Position,
) -> dict[str, Any]:
    """Fixes the choice, then opens the test split for it."""
    by_validation = config.evaluate.select == "best" and position.best is not None
    epoch = position.epoch
    if by_validation and position.best:
        snapshot.put_back(checkpoints.load(position.best).tensors, parts.model)
        epoch = position.best_epoch
    choice = Choice(
        parameters=params.digest(snapshot.learned(parts.model)),
        # An early stop on validation is a choice too, even of the last parameters.
        chosen_on="validation" if by_validation or config.train.early_stopping else "last",
        unit=epoch,
    )
    if parts.test.opened is None:  # else a second choice is refused when the split is opened
        folder.write("choice", asdict(choice))
    records = {record["epoch"]: record for record in folder.journal("metrics").read()}
    return {
        **_what(config),
        "choice": asdict(choice),
        "epochs": position.epoch,
        "validation": records[epoch].get("validation"),
        "test": asdict(measure.test(choice)),
        "facts": parts.facts,
        "seconds": round(position.seconds, 1),
        "finished": manifest.now(),
    }


def choose_device(name: str) -> torch.device:
    """`auto` is the best there is; a device that is not there is refused."""
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available()), "cpu": 1}
    if name == "auto":
        name = next(kind for kind, count in there.items() if count)
    kind, _, number = name.partition(":")
    if int(number or 0) >= there[kind]:
        raise FedlensError(f"device={name} is not available here: use device=auto.")
    if name.startswith("cuda"):  # the same bits every time, where CUDA can
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(name)
