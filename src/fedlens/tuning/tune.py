"""A search: TPE (Bergstra et al., 2011) suggests trials, a median pruner stops those behind.

Trial n depends on (seed, n) and the trials before it, and its run is found by its config: a search
that is killed at any moment resumes to the same result. Optuna: Akiba et al., 2019.
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
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import Abandoned, Interrupted, StopRequest, listening
from fedlens.runtime.units import duration_text
from fedlens.store.run_folder import RunFolder
from fedlens.suites.launch import describe
from fedlens.tuning.search import (
    STATES,
    Search,
    count_failed,
    count_scored,
    finished_trials,
    locked,
    open_study,
)
from fedlens.tuning.trial_records import Record, parameters_text, percent, write

Start = Callable[..., RunFolder]  # run.start(config, watch=...)

MIN_TRIALS_FOR_IMPORTANCE = 4  # complete ones

log = logging.getLogger(__name__)


def run_search(
    search: Search, *, trials: int, start: Start, minutes: float | None = None, command: str = ""
) -> Record:
    """Run trials until `trials` are complete or pruned, or the time is over; return the record.

    Failed trials do not count; the search gives up when as many fail in a row as were missing.
    """
    if search.config.data.validation == 0:
        raise FedlensError(
            "A search compares trials on validation images: set data.validation above 0."
        )
    deadline = time.monotonic() + 60 * minutes if minutes else None
    with locked(search.folder), open_study(search) as study, listening() as stop:
        session = _Session(search, study, start, trials, command, deadline)
        try:
            session.run(stop)
        except Interrupted as reason:
            raise Interrupted("run the same command again to resume.") from reason
        return session.record()


class _Session:
    """From one start of the command to its end."""

    def __init__(
        self,
        search: Search,
        study: optuna.Study,
        start: Start,
        trials: int,
        command: str,
        deadline: float | None,
    ) -> None:
        self.search = search
        self.study = study
        self.start = start
        self.trials = trials
        self.command = command
        self.deadline = deadline

    def run(self, stop: StopRequest) -> None:
        self._recover()
        past = finished_trials(self.study)
        if count_scored(past) >= self.trials:
            log.info("%s is finished: it has %d trials", self.search.folder, count_scored(past))
        if past:
            self._write()  # an earlier session may have been killed before it did
        missing, failed_in_a_row = self.trials - count_scored(past), 0
        with progress_bar("trials", stop) as update:
            while (done := count_scored(past)) < self.trials and not self._is_over_time():
                if failed_in_a_row == missing:
                    log.warning("giving up: the last %d trials failed", failed_in_a_row)
                    break
                update(done, self.trials)
                if not self._run_trial(past):
                    break
                past = finished_trials(self.study)
                failed = past[-1].state == TrialState.FAIL
                failed_in_a_row = failed_in_a_row + 1 if failed else 0
                self._write()

    def _write(self) -> None:
        write(self.search.folder, self.record(), self.search.best)

    def record(self) -> Record:
        """All trials so far, as in trials.json."""
        past = finished_trials(self.study)
        trials = [_trial_record(number, trial) for number, trial in enumerate(past, 1)]
        complete = [one for one in trials if one["state"] == "complete"]
        best = max(complete, key=lambda one: one["value"], default=None)  # the first of equals
        config, enough = self.search.config, len(complete) >= MIN_TRIALS_FOR_IMPORTANCE
        return {
            "name": self.search.folder.name,
            "experiment": config.experiment,
            "command": self.command,
            "unit": unit(config),
            **{key: self.search.identity[key] for key in ("space", "seed", "pruner")},
            "best": best["number"] if best else None,
            "importance": _importance(self.study) if enough else None,
            "trials": trials,
        }

    def _recover(self) -> None:
        """Queue the trial of a killed session again; its run then resumes."""
        clear_partials(self.search.folder)
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            # A kill at this line loses nothing: the sampler suggests the same values again.
            known = trial.params.keys() == self.search.distributions.keys()
            if known and "failure" not in trial.user_attrs:
                self.study.enqueue_trial(trial.params)
        for trial in finished_trials(self.study):
            _discard_state(self._folder(trial))

    def _run_trial(self, past: list[FrozenTrial]) -> bool:
        """Ask Optuna for a trial, run it, and report its outcome; False if the time is over."""
        number = len(past) + 1
        seed = rng.address(self.search.seed, "trial", number) % 2**32
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = self.study.ask(self.search.distributions)
        total = self.trials + count_failed(past)
        values = parameters_text(trial.params)
        log.info("trial %d of %d: %s%s", number, total, values, self._progress_text(past))
        try:
            config = self.search.trial(trial.params)
            trial.set_user_attr("run", config.run.name)
            curve = _Curve(trial, self._is_over_time)
            folder = self.start(config, watch=curve)
        except Abandoned:
            self.study.tell(trial, state=TrialState.PRUNED)
            log.info("trial %d is stopped early: it is below the median", number)
        except Interrupted:
            if self._is_over_time():
                return False
            raise
        except Exception as error:
            failure = describe(error)
            trial.set_user_attr("failure", failure)
            self.study.tell(trial, state=TrialState.FAIL)
            log.warning("trial %d failed: %s", number, failure)
        else:
            value = curve.complete(folder, unit(config))
            self.study.tell(trial, value)
            log.info("trial %d: validation accuracy %s", number, percent(value))
        _discard_state(self._folder(finished_trials(self.study)[-1]))
        return True

    def _is_over_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _folder(self, trial: FrozenTrial) -> RunFolder | None:
        name = trial.user_attrs.get("run")
        return RunFolder(self.search.folder / "runs" / name) if name else None

    def _progress_text(self, past: list[FrozenTrial]) -> str:
        """The best accuracy so far, and the time left at the average duration of a trial."""
        values = [t.value for t in past if t.state == TrialState.COMPLETE and t.value is not None]
        seconds = [t.duration.total_seconds() for t in past if t.duration]
        if not values or not seconds:
            return ""
        left = sum(seconds) / len(seconds) * (self.trials - count_scored(past))
        return f" | best so far {percent(max(values))} | about {duration_text(left)} left"


class _Curve:
    """Reports each validation of a run to Optuna; stops a run that lags behind or is over time."""

    def __init__(self, trial: Trial, is_over_time: Callable[[], bool]) -> None:
        self.trial = trial
        self.is_over_time = is_over_time
        self.reported: set[int] = set()

    def __call__(self, number: int, top1: float) -> None:
        self._report(number, top1)
        if self.trial.should_prune():
            raise Abandoned("it is below the median of the earlier trials")
        if self.is_over_time():
            raise Interrupted("the time limit")

    def complete(self, folder: RunFolder, unit: str) -> float:
        """The validation accuracy of a finished run; a run of an earlier session is read."""
        for record in folder.journal("metrics").read():
            if "validation" in record:
                self._report(record[unit], record["validation"]["top1"])
        assert folder.result is not None
        return float(folder.result["validation"]["top1"])

    def _report(self, number: int, top1: float) -> None:
        if number not in self.reported:
            self.reported.add(number)
            self.trial.report(top1, number)


def _trial_record(number: int, trial: FrozenTrial) -> Record:
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
    """How much each parameter matters, as fractions (PED-ANOVA); None if it cannot be computed."""
    importance = optuna.importance.PedAnovaImportanceEvaluator().evaluate(study)
    total = sum(importance.values())
    return {key: value / total for key, value in importance.items()} if total > 0 else None


def _discard_state(folder: RunFolder | None) -> None:
    """Delete what only resuming and analyses need."""
    for path in (folder.checkpoints, folder.updates, folder.path / "clients") if folder else ():
        discard(path)
