"""The training loop of stage 2."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from shards.base.errors import Preempted, RequestError, say
from shards.base.stop import SignalFlag, StopSignal
from train.data.batch import Batch
from train.data.loader import Loader
from train.metrics import Metrics
from train.objective.validation import Validation
from train.run.checkpoints.writer import CheckpointWriter, warn_if_slow_to_stop
from train.run.health.endpoint import RunCollector, serve_metrics
from train.run.health.heartbeat import LOADING, HeartbeatReporter
from train.run.lease.lease import Lease
from train.run.lease.owner import Pace
from train.run.processes import ShutdownCoordinator, explain_lost_processes, print_once, set_collective_timeout
from train.run.reporting.log import Log
from train.run.state import TrainState
from train.step import TrainStep


@dataclass
class Trainer:
    """The training loop around a `TrainStep`. Tests replace individual fields with fakes."""

    accelerator: Accelerator
    train_step: TrainStep
    state: TrainState
    loader: Loader
    metrics: Metrics
    log: Log
    validation: Validation | None
    checkpoints: CheckpointWriter
    average_snapshots: CheckpointWriter
    """Writer of the averages from which an average of any width can be rebuilt later (`ema.snapshot_every`)."""
    lease: Lease
    heartbeat: HeartbeatReporter
    max_steps: int
    collective_timeout: float
    """Timeout of collectives in seconds, which applies once each loader worker has delivered its first batch. First
    batches may take longer than later batches."""

    def fit(self) -> None:
        """Train until `max_steps`, saving checkpoints along the way.

        Raises:
            Preempted: the run received a stop signal, and saved first.
            LeaseLost: another launch took over the run, because this launch sent no heartbeat for too long.
            WorkError: no batch arrived in time, too many steps had non-finite gradients, or a process was lost.
        """
        try:
            self._fit()
        except BaseException:
            # pending writes must finish before this launch releases the run
            for writer in (self.checkpoints, self.average_snapshots):
                try:
                    writer.finish()
                except (
                    RequestError,
                    RuntimeError,
                ) as error:  # torch raises the latter if the store of the ranks is gone
                    say(error)
            raise

    def _fit(self) -> None:
        state, first_step = self.state, self.state.step
        signals = StopSignal(), SignalFlag(signal.SIGUSR2)
        shutdown = ShutdownCoordinator(self.accelerator, self.lease, *signals, state.step)
        with (
            explain_lost_processes(self.heartbeat),
            closing(iter(self.loader)) as batches,
            self.log,
            self._metrics_endpoint(),
        ):
            while state.step < self.max_steps:
                batch = self._next_batch(batches)
                if state.step == first_step:
                    self.heartbeat.enter(state.step, "training")
                    with shutdown.untimed():
                        self.train_step.settle_gradient_order(batch, first_step)
                self._train(batch)
                if self.log.is_due(state.step):
                    self._write_line()
                if state.step == first_step + self.loader.num_first:
                    set_collective_timeout(self.heartbeat, self.collective_timeout, self.train_step.groups)
                self.snapshot_averages()
                self.checkpoints.check()
                agreed = shutdown.check(state.step)
                is_last = agreed.stop or state.step == self.max_steps
                if agreed.save:
                    print_once(self.accelerator, f"SIGUSR2 received: writing a checkpoint after step {state.step}.")
                if is_last or agreed.save or state.step % self.checkpoints.config.every == 0:
                    with shutdown.untimed():
                        self.save(is_last)
                    self._record_pace(shutdown.step_seconds)
                if agreed.stop and state.step < self.max_steps:
                    raise Preempted(
                        f"The run received a stop signal and saved a checkpoint after step {state.step}. Run the same "
                        f"command again to resume."
                    )
            if state.step == first_step:  # a launch after the last step, which only uploads its checkpoint
                self._finish_writes()
        self.log.close()

    def _next_batch(self, batches: Iterator[Batch]) -> Batch:
        self.heartbeat.enter(self.state.step, LOADING)
        with self.metrics.waiting_for_data():
            return next(batches)

    def _train(self, batch: Batch) -> None:
        self.heartbeat.enter(self.state.step, "training")
        self.log.write_samples(batch, self.state.step + 1)
        result = self.train_step(batch, self.state.step)
        self.state.step += 1
        self.metrics.add(batch, result)
        self.log.advance()

    def _write_line(self) -> None:
        """Write a log line for the steps since the previous line.

        Only logging, saving and signal checks make the host wait for the device.
        """
        self.metrics.collect()
        self.heartbeat.enter(self.state.step, "logging")
        fields = self.metrics.line_fields() | self._validate()
        self.metrics.begin_line()
        self.log.write_metrics(self.state.step, fields)

    def _validate(self) -> dict[str, Any]:
        """Validate if it is due, and return the fields to log."""
        validation, step = self.validation, self.train_step
        if validation is None or self.state.step % validation.config.every:
            return {}
        size = step.microbatch_size if step.compiled else None
        with validation.averaged(step.averages["ema"], step.network):
            return validation(step.aligned or step.network, step.loss, self.accelerator, size)

    def snapshot_averages(self) -> None:
        """Write a snapshot of the averages if it is due."""
        self.average_snapshots.check()
        if self.state.step % self.average_snapshots.config.every == 0:
            snapshot = self.train_step.snapshot_averages(self.state)
            if snapshot is not None:
                self.average_snapshots.write(snapshot)

    def save(self, is_last: bool) -> None:
        """Write a checkpoint of the current step. If it is the launch's last checkpoint, wait until it is complete."""
        self.heartbeat.enter(self.state.step, "saving")
        self.metrics.collect()
        self.checkpoints.write(self.train_step.snapshot(self.state, self.log.sync()))
        if is_last:
            self._finish_writes()

    def _finish_writes(self) -> None:
        """Wait until all processes have finished writing and uploading."""
        self.checkpoints.finish()
        self.average_snapshots.finish()
        self.heartbeat.enter(self.state.step, "finishing")
        self.accelerator.wait_for_everyone()

    def _record_pace(self, step_seconds: float) -> None:
        """Record the durations of a save and a step for the next launch. Warn once if stopping may take too long."""
        if self.checkpoints.seconds is None:
            return
        before, now = self.lease.pace, Pace(self.checkpoints.seconds, step_seconds)
        self.lease.note(now)
        warning = warn_if_slow_to_stop(now, self.checkpoints.config)
        if warning is not None and not warn_if_slow_to_stop(before, self.checkpoints.config):
            print_once(self.accelerator, warning)

    def _metrics_endpoint(self) -> AbstractContextManager[None]:
        """Serve metrics to Prometheus from the main process, if `log.metrics_at` is set."""
        address = self.log.config.metrics_at if self.log.is_main else None
        return serve_metrics(address, RunCollector(self.heartbeat, self.log, self.checkpoints, self.state.step))
