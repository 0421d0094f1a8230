"""The life of a run: its folder, its log, its signals, its loop, its result.

A run is found by its name, which its config decides: the same command continues it, and once it
is finished there is nothing left to do.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedlens.config import compose
from fedlens.config.identity import essence, run_name
from fedlens.config.schema import Config, rounds
from fedlens.data.splits import Choice
from fedlens.errors import FedlensError
from fedlens.experiments import privacy
from fedlens.experiments.build import Parts, build, resolved
from fedlens.experiments.central_loop import Central
from fedlens.experiments.engine import choose_engine
from fedlens.experiments.evaluation import Measure
from fedlens.experiments.federated_loop import Federation
from fedlens.experiments.flower.clients import opened_crowd, settled
from fedlens.experiments.local_data import Holding, described
from fedlens.experiments.loop import Loop, Position, Watch
from fedlens.experiments.masks import masked
from fedlens.experiments.result import conclude, per_client, sign
from fedlens.federated.flower import require
from fedlens.federated.tasks import Crowd
from fedlens.files import clear_partials, replacing
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.logs import logging_to
from fedlens.runtime.stop import Abandoned, Interrupted, StopRequest, listening
from fedlens.store import manifest
from fedlens.store.checkpoints import Checkpoints
from fedlens.store.ledger import Ledger
from fedlens.store.run_folder import RunFolder
from fedlens.store.tracking import open_tracker
from fedlens.training.step import Model

if TYPE_CHECKING:
    from flwr.serverapp import Grid

BRIEFLY = 2.0  # seconds, for somebody's look at a run's state
LEAVING = 60.0  # seconds, for a run that was stopped at a SuperLink and has yet to hear of it

log = logging.getLogger(__name__)


def start(config: Config, *, watch: Watch | None = None, grid: "Grid | None" = None) -> RunFolder:
    """Runs `config`, continuing where an earlier session of the same run stopped.

    `watch` is called after every validation with (epoch or round, top-1); it may raise Abandoned.
    `grid` is given by Flower, where a SuperLink runs this.
    """
    config = resolved(config)
    folder = RunFolder(Path(config.run.root) / run_name(config))
    if folder.config.exists():
        stored = compose.load(folder.config)
        if essence(_without_weights(stored)) != essence(_without_weights(config)):
            raise FedlensError(
                f"{folder.path} holds a run with another config: choose another run.name."
            )
        config = _as_begun(config, stored)
    return _run(config, folder, watch, grid)


def resume(folder: RunFolder, overrides: list[str] | None = None) -> RunFolder:
    """Continues a run from its folder alone; overrides may only say where and how it runs."""
    return _run(compose.amend(compose.load(folder.config), overrides or []), folder)


def _as_begun(config: Config, stored: Config) -> Config:
    """The number of threads decides the last bits, so what was not told anew is kept."""
    engine = stored.engine if config.engine.name == "auto" else config.engine
    each = config.engine.threads_per_client or stored.engine.threads_per_client
    return replace(
        config,
        threads=config.threads or stored.threads,
        engine=replace(engine, threads_per_client=each),
    )


def _without_weights(config: Config) -> Config:
    """Whether the weights are the same is for their hash in the manifest to say."""
    return replace(config, backbone=replace(config.backbone, weights=None))


def _run(
    config: Config,
    folder: RunFolder,
    watch: Watch | None = None,
    grid: "Grid | None" = None,
) -> RunFolder:
    if folder.result is not None:
        log.info("%s is finished: nothing to do", folder.name)
        return folder
    if config.engine.name.startswith("flower"):
        require()
    if config.engine.name == "flower" and grid is None:
        if watch:
            raise FedlensError("What a SuperLink runs cannot be watched: use another engine.")
        return _submit(config, folder)
    device = choose_device(config.device)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        log_file = logging.FileHandler(folder.log, encoding="utf-8")
    except OSError as error:
        raise FedlensError(f"Cannot write to {folder.path} ({error.strerror}).") from error
    patience = LEAVING if grid else BRIEFLY
    with logging_to(log_file), folder.lock(patience=patience), listening() as stop:
        if (folder.path / "result.json").exists():  # of a process that held the lock until now
            return folder
        try:
            clear_partials(folder.path)
            folder.forget_failure()
            _work(config, folder, device, stop, watch, grid)
        except Abandoned as reason:
            log.info("abandoned: %s", reason)
            raise
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


def _submit(config: Config, folder: RunFolder) -> RunFolder:
    """Leaves the run to the federation's SuperLink, which writes the folder where it runs."""
    from fedlens.experiments.flower.deployment import run_by_superlink

    with listening() as stop:
        try:
            run_by_superlink(config, stop, say=lambda line: log.info("%s", line))
        except Interrupted as reason:
            raise Interrupted("the run is stopped: the same command goes on with it") from reason
    if folder.result is None:
        log.info("the run is finished; its folder is where the SuperLink runs")
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


def _work(
    config: Config,
    folder: RunFolder,
    device: torch.device,
    stop: StopRequest,
    watch: Watch | None,
    grid: "Grid | None",
) -> None:
    began = time.monotonic()
    keep_large_blocks()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = settled(replace(config, threads=torch.get_num_threads()))
    _write_config(config, folder)
    log.info("run %s", folder.name)

    with opened_crowd(config, stop, grid) as (crowd, holding):
        _learn(config, folder, device, stop, watch, began, crowd, holding)


def _learn(
    config: Config,
    folder: RunFolder,
    device: torch.device,
    stop: StopRequest,
    watch: Watch | None,
    began: float,
    crowd: Crowd | None,
    holding: Holding | None,
) -> None:
    opened = Choice(**folder.choice) if folder.choice and config.evaluate.test else None
    parts = build(config, device, stop, opened=opened, holding=holding, crowd=crowd)
    sign(config, folder, parts, device)
    parts = masked(config, parts, folder, stop, crowd=crowd)
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
        make_loop = partial(Loop, config, measure, ledger, tracker, began=began, watch=watch)
        if parts.partition is None:
            position = _train_centrally(config, parts, model, make_loop, stop)
        else:
            position = _train_federated(config, folder, parts, make_loop, stop, crowd)
        result = conclude(config, folder, parts, measure, checkpoints, position)
        folder.write("result", result)
        if test := result.get("test"):
            tracker.log(position.done, {"test/top1": test["top1"]})
            log.info("test accuracy %.2f %%", 100 * test["top1"])


def _train_centrally(
    config: Config, parts: Parts, model: Model, make_loop: Callable[..., Loop], stop: StopRequest
) -> Position:
    epochs = config.train.epochs if parts.trains else 0
    return Central(config, parts, model, make_loop(total=epochs), stop).run()


def _train_federated(
    config: Config,
    folder: RunFolder,
    parts: Parts,
    make_loop: Callable[..., Loop],
    stop: StopRequest,
    crowd: Crowd | None,
) -> Position:
    assert parts.partition is not None
    held = described(config.partition, parts.held_classes)
    folder.write("partition", held, indent=None)  # thousands of numbers
    loop = make_loop(
        total=rounds(config) if parts.trains else 0, remarks=partial(per_client, parts)
    )
    privacy.advise(config)
    engine, chosen = choose_engine(config, parts, crowd)
    try:
        _write_config(replace(config, engine=chosen), folder)
        return Federation(config, parts, engine, loop, stop, folder).run()
    finally:
        engine.close()


def _write_config(config: Config, folder: RunFolder) -> None:
    with replacing(folder.config) as temporary:
        temporary.write_text(compose.to_yaml(config), encoding="utf-8")
