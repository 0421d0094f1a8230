"""One run from its config to its result: folder, log, signals, training, test.

The config decides the run's name: the same command resumes it, and once it is finished there is
nothing left to do.
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

from fedlens import plugins
from fedlens.config import compose
from fedlens.config.compose import row_of
from fedlens.config.identity import identity, run_name
from fedlens.config.schema import Config, rounds
from fedlens.data.splits import Choice
from fedlens.errors import FedlensError
from fedlens.experiments import settings
from fedlens.experiments.build import Experiment, build, with_resolution
from fedlens.experiments.clients import ClientSession, open_session
from fedlens.experiments.loops.central_loop import CentralLoop
from fedlens.experiments.loops.evaluation import Evaluator
from fedlens.experiments.loops.federated_loop import FederatedLoop
from fedlens.experiments.loops.loop import Loop, Position, Watch
from fedlens.experiments.loops.result import choose, per_client, result
from fedlens.experiments.preparation import privacy
from fedlens.experiments.preparation.head import prepare_head, tensors
from fedlens.experiments.preparation.local_data import partition_record
from fedlens.experiments.preparation.masks import find_masks
from fedlens.experiments.preparation.prefix import start_after_frozen_blocks
from fedlens.experiments.preparation.provenance import (
    record_head_digest,
    record_session,
    setting,
)
from fedlens.federated.tasks import Clients
from fedlens.files import clear_partials, replacing
from fedlens.models.architectures import onednn
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.runtime.device import choose_device
from fedlens.runtime.logs import LogFile, logging_to
from fedlens.runtime.stop import Abandoned, Interrupted, StopRequest, listening
from fedlens.store import manifest
from fedlens.store.checkpoints import Checkpoints, Journals
from fedlens.store.run_folder import RunFolder
from fedlens.store.tracking import open_tracker
from fedlens.training.step import Model

if TYPE_CHECKING:
    from flwr.serverapp import Grid

LOCK_TIMEOUT_S = 2.0  # another process may be reading the run's state
STOP_TIMEOUT_S = 60.0  # a run that was stopped at a SuperLink may not have noticed yet

log = logging.getLogger(__name__)


def start(config: Config, *, watch: Watch | None = None, grid: "Grid | None" = None) -> RunFolder:
    """Runs `config`, resuming it if an earlier process did not finish it.

    `watch` is called after every validation with (epoch or round, top-1); it may raise Abandoned.
    `grid` is given by Flower, where a SuperLink runs this.
    """
    config = with_resolution(config)
    folder = RunFolder(Path(config.run.root) / run_name(config))
    if folder.config.exists():
        stored = compose.load(folder.config)
        if identity(_without_weights(stored)) != identity(_without_weights(config)):
            raise FedlensError(
                f"{folder.path} already has a run with a different config: choose another run.name."
            )
        config = _with_stored_threads(config, stored)
    return _run(config, folder, watch, grid)


def resume(folder: RunFolder, overrides: list[str] | None = None) -> RunFolder:
    """Continues a run from its folder alone; overrides may only change where and how it runs."""
    return _run(compose.amend(compose.load(folder.config), overrides or []), folder)


def _with_stored_threads(config: Config, stored: Config) -> Config:
    """Threads, oneDNN and shortcuts decide the last bits: keep the stored ones unless set."""
    engine = stored.engine if config.engine.name == "auto" else config.engine
    kept = {
        "threads_per_client": config.engine.threads_per_client or stored.engine.threads_per_client
    }
    if "shortcuts" in engine and engine.shortcuts is None:
        kept["shortcuts"] = stored.engine.get("shortcuts")
    return replace(
        config,
        threads=config.threads or stored.threads,
        onednn=stored.onednn if config.onednn is None else config.onednn,
        engine=engine.but(**kept),
    )


def _without_weights(config: Config) -> Config:
    """Whether the weights are the same is checked by their hash in the manifest."""
    return replace(config, backbone=config.backbone.but(weights=None))


def _run(
    config: Config,
    folder: RunFolder,
    watch: Watch | None = None,
    grid: "Grid | None" = None,
) -> RunFolder:
    if folder.finished:
        log.info("%s has finished: there is nothing to do", folder.name)
        return folder
    if row_of(config, "engine").traits.get("remote"):
        from fedlens.federated.flower import require

        require()
    if config.engine.name == "flower" and grid is None:
        if watch:
            raise FedlensError("A run on a SuperLink cannot be watched: use another engine.")
        return _submit(config, folder)
    device = choose_device(config.device)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        log_file = LogFile(folder.log)
    except OSError as error:
        place = error.filename or folder.path
        raise FedlensError(f"Cannot write to {place} ({error.strerror}).") from error
    timeout = STOP_TIMEOUT_S if grid else LOCK_TIMEOUT_S
    with logging_to(log_file), folder.lock(timeout=timeout), listening() as stop:
        if RunFolder(folder.path).finished:  # by a process that held the lock until now
            return folder
        if (folder.path / "result.json").exists():
            log.warning("result.json is damaged: repeating the end of the run")
        try:
            clear_partials(folder.path)
            folder.clear_failure()
            _work(config, folder, device, stop, watch, grid)
        except Abandoned as reason:
            log.info("abandoned: %s", reason)
            raise
        except Interrupted as reason:
            log.warning("stopped by %s; all finished work is saved", reason)
            raise Interrupted(f"resume with: fedlens resume {folder.path}") from reason
        except Exception as error:
            reported = _as_sentence(error, folder)
            log.error("%s", reported, exc_info=not isinstance(reported, FedlensError))
            with suppress(Exception):  # on a full disk this may fail too; the log has it
                folder.write("failure", {"message": str(reported), "when": manifest.now()})
            raise reported from error
    return folder


def _submit(config: Config, folder: RunFolder) -> RunFolder:
    """Submits the run to the federation's SuperLink, which writes the folder where it runs."""
    from fedlens.experiments.flower.deployment import submit_run

    with listening() as stop:
        try:
            submit_run(config, stop, print_line=lambda line: log.info("%s", line))
        except Interrupted as reason:
            raise Interrupted(
                "the run is stopped; run the same command again to resume"
            ) from reason
    if folder.result is None:
        log.info("the run is finished; its folder is on the SuperLink's host")
    return folder


def _as_sentence(error: Exception, folder: RunFolder) -> Exception:
    """The error as a sentence, where the user can do something about it."""
    if isinstance(error, OSError):  # a full disk can fail any write
        return FedlensError(
            f"{folder.name} could not continue ({error}); its last checkpoint is kept: free some "
            "space or check the permissions, then run the same command again."
        )
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
    asked = config.onednn
    if folder.config.exists():  # a run that began without this choice goes on without
        asked = bool(asked)
    by_onednn = onednn.chosen(asked, device)
    config = replace(config, threads=torch.get_num_threads(), onednn=by_onednn)
    _keep_plugins(config, folder)
    _write_config(config, folder)
    log.info("run %s", folder.name)
    with open_session(config, stop, grid) as session:
        _train(config, folder, device, stop, watch, began, session)


def _train(
    config: Config,
    folder: RunFolder,
    device: torch.device,
    stop: StopRequest,
    watch: Watch | None,
    began: float,
    session: ClientSession,
) -> None:
    stored = folder.choice if config.evaluate.test else None
    with folder.named_in_errors():
        opened = None if stored is None else Choice(**stored)
    experiment = build(config, device, stop, session.data, opened=opened)
    clients = session.clients(experiment)
    experiment = prepare_head(
        experiment, clients, settings.head(config, experiment.precision), stop, folder
    )
    record_session(config, folder, experiment.input_hashes, device)
    record_head_digest(folder, tensors(experiment.model.head))
    masks = settings.masks(config, experiment)
    experiment = find_masks(experiment, clients, masks, folder, stop)
    started = start_after_frozen_blocks(experiment, settings.prefix(config, experiment), stop)
    if started is not experiment:
        experiment, clients = started, session.clients(started)
        clients.share(masks=experiment.masks)
    checkpoints = Checkpoints(
        folder.checkpoints,
        keep_best=config.checkpoint.keep_best,
        keep_last=config.checkpoint.keep_last,
    )
    model: Model = torch.compile(experiment.model) if config.train.compile else experiment.model
    evaluator = Evaluator(
        model,
        experiment,
        batch_size=config.evaluate.batch_size,
        stop=stop,
        bounded=not (clients.repeatable or config.federated.fail_on_bad_update),
    )
    with open_tracker(config.tracker.name, folder.path, project=config.tracker.project,
                      mode=config.tracker.mode, config=asdict(config)) as tracker:  # fmt: skip
        journals = Journals(folder, checkpoints)
        make_loop = partial(
            Loop, settings.loop(config), evaluator, journals, tracker, began=began, watch=watch
        )
        if experiment.partition is None:
            position = _train_centrally(config, experiment, model, make_loop, stop)
        else:
            position = _train_federated(config, folder, experiment, make_loop, stop, clients)
        choice = choose(
            experiment,
            folder,
            checkpoints,
            position,
            select_best=config.evaluate.select == "best",
            early_stopping=config.train.early_stopping is not None,
        )
        unit = settings.loop(config).unit
        records = {record[unit]: record for record in folder.journal("metrics").read()}
        test = config.evaluate.test
        content = {
            **setting(config),
            **result(choice, experiment, evaluator, records, units=position.done, test=test),
            **privacy.spent(config, records.values()),
            "seconds": round(position.seconds, 1),
            "finished": manifest.now(),
        }
        folder.write("result", content)
        if test:
            tracker.log(position.done, {"test/top1": content["test"]["top1"]})
            log.info("test accuracy %.2f%%", 100 * content["test"]["top1"])


def _train_centrally(
    config: Config,
    experiment: Experiment,
    model: Model,
    make_loop: Callable[..., Loop],
    stop: StopRequest,
) -> Position:
    epochs = config.train.epochs if experiment.trains else 0
    central = settings.central(config, experiment.precision)
    return CentralLoop(central, experiment, model, make_loop(total=epochs), stop).run()


def _train_federated(
    config: Config,
    folder: RunFolder,
    experiment: Experiment,
    make_loop: Callable[..., Loop],
    stop: StopRequest,
    clients: Clients,
) -> Position:
    record = partition_record(config, experiment.class_counts)
    folder.write("partition", record, indent=None)  # thousands of numbers
    loop = make_loop(
        total=rounds(config) if experiment.trains else 0,
        more_metrics=partial(per_client, experiment),
    )
    privacy.advise(config)
    engine = clients.engine("rounds")
    try:
        chosen = getattr(engine, "settings", None)
        if chosen and chosen != config.engine:  # a resumed run keeps what `auto` chose
            _write_config(replace(config, engine=chosen), folder)
        federated = settings.federated(config, experiment.precision)
        refit = settings.refit(config, experiment, stop)
        return FederatedLoop(
            federated, experiment, clients, engine, loop, stop, folder, refit=refit
        ).run()
    finally:
        engine.close()


def _keep_plugins(config: Config, folder: RunFolder) -> None:
    """Copies the plugins that the run uses, so that it can be resumed without them."""
    for plugin in compose.plugins_of(config).values():
        copy = plugins.copy_path(folder.path, plugin.word)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copy) as temporary:
                temporary.write_bytes(plugin.source)


def _write_config(config: Config, folder: RunFolder) -> None:
    with replacing(folder.config) as temporary:
        temporary.write_text(compose.to_yaml(config), encoding="utf-8")
