"""A search for hyper-parameters: TPE suggests, the median stops what falls behind, validation says.

Trial n draws from (seed, n) and from the trials before it, and a trial is a run that is found by
its config: so a search that is killed at any moment goes on with the same command and ends as if it
never had been. Optuna: Akiba et al. 2019; TPE: Bergstra et al. 2011.
"""

import logging
import time
from collections.abc import Callable

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from fedlens import rng
from fedlens.config.schema import unit
from fedlens.errors import FedlensError
from fedlens.files import clear_partials, discard
from fedlens.runtime.progress import bar
from fedlens.runtime.stop import Abandoned, Interrupted, StopRequest, listening
from fedlens.store.run_folder import RunFolder
from fedlens.suites.launch import in_a_sentence
from fedlens.tuning.search import STATES, Search, alone, counted, failures, opened, settled
from fedlens.tuning.trial_records import Record, percent, said, write

Start = Callable[..., RunFolder]  # run.start: it takes a config, and a `watch` by name

TELLING = 4  # complete trials from which it may be told which parameters matter

log = logging.getLogger(__name__)


def search(
    asked: Search, *, trials: int, start: Start, minutes: float | None = None, command: str = ""
) -> Record:
    """Makes trials until so many are complete or pruned, or the minutes are over; its record.

    Failed ones do not count; a session gives up when as many fail in a row as it was to make.
    """
    if asked.config.data.validation == 0:
        raise FedlensError("data.validation=0 leaves nothing to compare trials on.")
    deadline = time.monotonic() + 60 * minutes if minutes else None
    with alone(asked.folder), opened(asked) as study, listening() as stop:
        session = _Session(asked, study, start, trials, command, deadline)
        try:
            session.work(stop)
        except Interrupted as reason:
            raise Interrupted("run the same command again to go on.") from reason
        return session.record()


class _Session:
    """From one start of the command to its end."""

    def __init__(
        self,
        asked: Search,
        study: optuna.Study,
        start: Start,
        trials: int,
        command: str,
        deadline: float | None,
    ) -> None:
        self.asked = asked
        self.study = study
        self.start = start
        self.trials = trials
        self.command = command
        self.deadline = deadline

    def work(self, stop: StopRequest) -> None:
        self._take_up()
        past = settled(self.study)
        if counted(past) >= self.trials:
            log.info("%s is finished: it has %d trials", self.asked.folder, counted(past))
        if past:
            self._write()  # the session before may have been killed just before it did
        missing, in_a_row = self.trials - counted(past), 0
        with bar("trials", stop) as update:
            while (done := counted(past)) < self.trials and not self._late():
                if in_a_row == missing:
                    log.warning("giving up: the last %d trials failed", in_a_row)
                    break
                update(done, self.trials)
                if not self._one(past):
                    break
                past = settled(self.study)
                in_a_row = in_a_row + 1 if past[-1].state == TrialState.FAIL else 0
                self._write()

    def _write(self) -> None:
        write(self.asked.folder, self.record(), self.asked.best)

    def record(self) -> Record:
        """Of all trials so far, as it goes to trials.json."""
        past = settled(self.study)
        told = [_told(number, trial) for number, trial in enumerate(past, 1)]
        complete = [one for one in told if one["state"] == "complete"]
        best = max(complete, key=lambda one: one["value"], default=None)  # of equals the first
        config = self.asked.config
        return {
            "name": self.asked.folder.name,
            "experiment": config.experiment,
            "command": self.command,
            "unit": unit(config),
            **{key: self.asked.told[key] for key in ("space", "seed", "pruner")},
            "best": best["number"] if best else None,
            "importance": _importance(self.study) if len(complete) >= TELLING else None,
            "trials": told,
        }

    def _take_up(self) -> None:
        """What a killed session left: its trial is made again, and its run goes on."""
        clear_partials(self.asked.folder)
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            # A kill just here is no loss: the sampler suggests the same again.
            known = trial.params.keys() == self.asked.distributions.keys()
            if known and "failure" not in trial.user_attrs:
                self.study.enqueue_trial(trial.params)
        for trial in settled(self.study):
            _drop(self._folder(trial))

    def _one(self, past: list[FrozenTrial]) -> bool:
        """Asks for a trial, makes its run, and tells the outcome; False if the time is over."""
        place = len(past) + 1
        seed = rng.address(self.asked.seed, "trial", place) % 2**32
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = self.study.ask(self.asked.distributions)
        of = self.trials + failures(past)
        log.info("trial %d of %d: %s%s", place, of, said(trial.params), self._outlook(past))
        try:
            config = self.asked.trial(trial.params)
            trial.set_user_attr("run", config.run.name)
            curve = _Curve(trial, self._late)
            folder = self.start(config, watch=curve)
        except Abandoned:
            self.study.tell(trial, state=TrialState.PRUNED)
            log.info("trial %d is stopped: it is below the median", place)
        except Interrupted:
            if self._late():
                return False
            raise
        except Exception as error:
            failure = in_a_sentence(error)
            trial.set_user_attr("failure", failure)
            self.study.tell(trial, state=TrialState.FAIL)
            log.warning("trial %d failed: %s", place, failure)
        else:
            value = curve.complete(folder, unit(config))
            self.study.tell(trial, value)
            log.info("trial %d: validation accuracy %s", place, percent(value))
        _drop(self._folder(settled(self.study)[-1]))
        return True

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _folder(self, trial: FrozenTrial) -> RunFolder | None:
        name = trial.user_attrs.get("run")
        return RunFolder(self.asked.folder / "runs" / name) if name else None

    def _outlook(self, past: list[FrozenTrial]) -> str:
        """The best so far, and how long the rest will take at the pace so far."""
        values = [t.value for t in past if t.state == TrialState.COMPLETE and t.value is not None]
        seconds = [t.duration.total_seconds() for t in past if t.duration]
        if not values or not seconds:
            return ""
        left = sum(seconds) / len(seconds) * (self.trials - counted(past))
        time_left = f"{left / 60:.0f} min" if left > 100 else f"{left:.0f} s"
        return f" | best so far {percent(max(values))} | about {time_left} left"


class _Curve:
    """Watches a run: passes each validation on, and stops what falls behind or comes too late."""

    def __init__(self, trial: Trial, late: Callable[[], bool]) -> None:
        self.trial = trial
        self.late = late
        self.reported: set[int] = set()

    def __call__(self, number: int, top1: float) -> None:
        self._report(number, top1)
        if self.trial.should_prune():
            raise Abandoned("it is below the median of the trials before")
        if self.late():
            raise Interrupted("the time limit")

    def complete(self, folder: RunFolder, unit: str) -> float:
        """The accuracy a finished run is judged by; one that had been finished is read."""
        for record in folder.journal("metrics").read():
            if "validation" in record:
                self._report(record[unit], record["validation"]["top1"])
        assert folder.result is not None
        return float(folder.result["validation"]["top1"])

    def _report(self, number: int, top1: float) -> None:
        if number not in self.reported:
            self.reported.add(number)
            self.trial.report(top1, number)


def _told(number: int, trial: FrozenTrial) -> Record:
    failure = trial.user_attrs.get("failure")
    return {
        "number": number,
        "state": STATES[trial.state],
        "params": dict(sorted(trial.params.items())),
        "value": trial.value,
        "curve": sorted(trial.intermediate_values.items()),
        "run": trial.user_attrs.get("run"),
        "seconds": round(trial.duration.total_seconds(), 1) if trial.duration else None,
        **({"failure": failure} if failure else {}),
    }


def _importance(study: optuna.Study) -> dict[str, float] | None:
    """Each parameter's share in what sets the best trials apart; None where that cannot be told."""
    found = optuna.importance.PedAnovaImportanceEvaluator().evaluate(study)
    whole = sum(found.values())
    return {key: value / whole for key, value in found.items()} if whole > 0 else None


def _drop(folder: RunFolder | None) -> None:
    """What only resuming and analyses need."""
    for path in (folder.checkpoints, folder.updates, folder.path / "clients") if folder else ():
        discard(path)
