"""The whole of stage 2 in one loop."""

import signal
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shards.base.errors import Preempted, RequestError, WorkError, say
from shards.base.stop import SignalFlag, StopSignal
from train.data.batch import Batch
from train.data.draws import Draws
from train.data.loader import Loader
from train.model.ema import SNAPSHOT_DTYPES, Ema, ema_decay
from train.model.optimizer import Optimizer
from train.objective.alignment import Aligned
from train.objective.loss import DiffusionLoss, Noised
from train.objective.sums import LossSums
from train.objective.validation import Validation
from train.run.health.endpoint import Figures, served
from train.run.health.heartbeat import Heart
from train.run.health.meter import Interval, Meter, peak_memory
from train.run.launches import Launch, Pace
from train.run.processes import Leaving, expect_answers, lost_processes_named
from train.run.saving.snapshot import Snapshot, average_files, take_snapshot
from train.run.saving.writer import CheckpointWriter, too_slow_to_leave
from train.run.state import StepResults, TrainState
from train.run.telling.log import Log


@dataclass
class Run:
    """Everything that a run touches, as `assemble` put it together."""

    accelerator: Accelerator
    launch: Launch
    heart: Heart
    seed: int
    max_steps: int
    global_batch_size: int
    microbatch_size: int
    """At most what this rank has of a batch."""
    compiled: bool
    """The network runs as a graph for each shape: microbatches, and those of validation, are all of one size."""
    collective_timeout: float
    """Of all steps but those whose batch is a loader process's first."""
    unet: Any
    aligned: Aligned | None
    """`unet` with its projection head, where a layer is aligned (REPA)."""
    model: Any
    """`unet`, or `aligned`, as accelerate wrapped it, or split."""
    casts: AbstractContextManager[object]
    """Around all microbatches of a step, so that autocast's copies of the weights serve until these are stepped."""
    optimizer: Optimizer
    averages: dict[str, Ema]
    """`ema`, and those that snapshots are taken of."""
    loss: DiffusionLoss
    loader: Loader
    steps_per_epoch: int
    validation: Validation | None
    state: TrainState
    results: StepResults
    writer: CheckpointWriter
    snapshots: CheckpointWriter
    """Of the averages that are rebuilt afterwards."""
    log: Log
    meter: Meter
    peak_tflops: float | None


def train(run: Run) -> None:
    """Train until `max_steps`, saving on the way.

    Raises:
        Preempted: the run was told to leave; it saved first.
        RequestError: another launch took the run over, since this one was silent for too long.
        WorkError: a batch did not come, too many steps were not finite, or a process was lost.
    """
    try:
        _train(run)
    except BaseException:
        for writer in (run.writer, run.snapshots):
            try:
                writer.finish()  # while the run is still held: what is on its way arrives
            except (RequestError, WorkError) as error:
                say(error)
        raise


def _train(run: Run) -> None:
    state, first = run.state, run.state.step
    metrics_at = run.log.config.metrics_at if run.log.main else None
    leaving = Leaving(run.accelerator, run.launch, StopSignal(), SignalFlag(signal.SIGUSR2), state.step)
    with (
        lost_processes_named(run.heart),
        closing(iter(run.loader)) as batches,
        run.log,
        served(metrics_at, Figures(run.heart, run.log, run.writer, state.step)),
    ):
        while state.step < run.max_steps:
            run.heart.at(state.step, "loading")
            with run.meter.waiting_for_data():
                batch = next(batches)
            run.heart.at(state.step, "training")
            if state.step == first:
                with leaving.aside():
                    order_buckets(run, batch)
            take_step(run, batch)
            if state.step == first + run.loader.num_first:
                expect_answers(run.heart, run.collective_timeout)
            run.writer.check()
            run.snapshots.check()
            if state.step % run.snapshots.config.every == 0:
                snapshot_averages(run)
            told = leaving.agreed(state.step)
            last = told.leave or state.step == run.max_steps
            if told.save:
                run.accelerator.print(f"told to save (SIGUSR2): a checkpoint of step {state.step} is written.")
            if last or told.save or state.step % run.writer.config.every == 0:
                with leaving.aside():
                    save(run, last)
                hold_against_grace(run, leaving.step_seconds)
            if told.leave and state.step < run.max_steps:
                raise Preempted(f"told to leave, saved after step {state.step}. The same command again resumes.")
    run.log.close()


def take_step(run: Run, batch: Batch) -> None:
    """One step of the run: trained, averaged, counted, and told of where a line is due."""
    run.log.samples(batch, run.state.step + 1)
    grad_norm = train_step(run, batch)
    run.state.step += 1
    for ema in run.averages.values():
        ema.update(run.unet.named_parameters(), run.state.step)
    run.meter.count(batch)
    run.log.advance()
    if run.log.is_due(run.state.step):
        write_line(run, grad_norm)


def order_buckets(run: Run, batch: Batch) -> None:
    """Have DDP put gradients into the order in which they come, before the launch's first step.

    It does so once, after the first backward pass, and on three processes and more another order adds up a gradient's
    summands in another order. The first step after a resume would differ by a rounding from the same step of a run that
    was never stopped; so that pass is one of which nothing is kept.
    """
    # accelerate may have compiled what it wrapped
    if isinstance(getattr(run.model, "_orig_mod", run.model), DistributedDataParallel):
        microbatch = next(noised(run, batch).microbatches(run.microbatch_size, filled=run.compiled))
        with run.casts:
            run.loss(run.model, microbatch).total.sum().backward()
        run.optimizer.forget_gradients()


def noised(run: Run, batch: Batch) -> Noised:
    """This rank's share of a global batch as the next step trains on it, on the device."""
    # captions are drawn on the CPU, so that only the one that each sample is trained with moves to the device
    batch = batch.draw_captions(Draws(run.seed, run.state.step, batch.slots)).to(run.accelerator.device)
    return run.loss.noised(batch, Draws(run.seed, run.state.step, batch.slots, fused=run.compiled))


def train_step(run: Run, batch: Batch) -> Tensor:
    """One optimizer step on this rank's share of a global batch; returns the gradient's norm before clipping."""
    accelerator, step = run.accelerator, run.state.step
    whole = noised(run, batch)
    microbatches = list(whole.microbatches(run.microbatch_size, filled=run.compiled))
    done = []
    with run.casts:
        for microbatch in microbatches:
            # gradients cross ranks once, with the last microbatch; of weights that are split, with each
            with nullcontext() if microbatch is microbatches[-1] else accelerator.no_sync(run.model):
                losses = run.loss(run.model, microbatch)
                accelerator.backward(losses.total.sum() / len(batch))
            done.append(losses)
    errors = torch.cat([losses.per_sample.detach() for losses in done])
    sums = LossSums.of(errors, whole.timesteps, run.loss.path.num_train_timesteps, run.microbatch_size)
    aligned = [losses.aligned.detach().sum() for losses in done if losses.aligned is not None]
    grad_norm, skipped = run.optimizer.step(run.model, step)
    run.results.add(skipped, sums, sum(aligned[1:], aligned[0]) if aligned else None)
    return grad_norm


def write_line(run: Run, grad_norm: Tensor) -> None:
    """Log the steps since the last line. Only here does the host wait for the device."""
    run.results.collect(run.state)
    run.heart.at(run.state.step, "logging")
    fields = describe(run, run.meter.close(), float(grad_norm))
    if run.validation is not None and run.state.step % run.validation.every == 0:
        with run.validation.averaged(run.averages["ema"], run.unet):
            size = run.microbatch_size if run.compiled else None
            fields |= run.validation(run.aligned or run.unet, run.loss, run.accelerator, size)
    run.state.begin_line()
    run.meter.restart()
    run.log.write(run.state.step, fields)


def describe(run: Run, interval: Interval, grad_norm: float) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    state = run.state
    rate, mfu = interval.rate(run.global_batch_size), interval.mfu(run.peak_tflops)
    ema = run.averages["ema"]
    holds_ema = ema.average is not None
    return {
        "loss": sum(state.losses) / len(state.losses) if state.losses else None,
        "loss_by_quarter": state.sums.means(run.loss.path.num_train_timesteps),
        "loss_z": state.alarm.highest,
        "alarms": len(state.alarm.steps),
        "alarm_step": state.alarm.steps[-1] if state.alarm.steps else None,
        **(alignment_fields(run) if run.aligned else {}),
        "skipped_steps": state.skipped,
        "grad_norm": grad_norm,
        "lr": run.optimizer.lr,
        "images_per_second": round(rate, 3),
        "images_per_second_per_gpu": round(rate / run.accelerator.num_processes, 3),
        "mfu": None if mfu is None else round(mfu, 4),
        "memory_gb": round(peak_memory(run.accelerator.device) / 2**30, 3),
        "data_wait": round(interval.data_seconds / interval.seconds, 4),
        "epoch": round(state.step / run.steps_per_epoch, 4),
        "ema": holds_ema,
        "ema_decay": ema_decay(ema.config, state.step) if holds_ema else None,
    }


def alignment_fields(run: Run) -> dict[str, float | None]:
    """Of the alignment: its mean loss since the last line, and its coefficient in the step just done."""
    assert run.aligned is not None
    losses = run.state.alignments
    coefficient = run.aligned.config.coefficient(run.state.step - 1)
    return {"repa_loss": sum(losses) / len(losses) if losses else None, "repa_weight": coefficient}


def save(run: Run, last: bool) -> None:
    """Write a checkpoint of the step just done; it is there on return if it is the `last`."""
    run.heart.at(run.state.step, "saving")
    run.results.collect(run.state)
    lines = run.log.keep()
    if run.accelerator.scaler is not None:
        run.state.scaler = run.accelerator.scaler.state_dict()
    head = run.aligned.head if run.aligned else None
    run.writer.write(take_snapshot(run.state, run.unet, run.optimizer.torch_optimizer, run.averages, head, lines))
    if last:
        run.writer.finish()
        run.snapshots.finish()
        run.heart.at(run.state.step, "saved")
        run.accelerator.wait_for_everyone()


def hold_against_grace(run: Run, step_seconds: float) -> None:
    """Note what leaving would take, for the next launch too; warn where it is the first time that it is too long."""
    if run.writer.seconds is not None:
        known, now = run.launch.pace, Pace(run.writer.seconds, step_seconds)
        run.launch.note(save_seconds=now.save, step_seconds=now.step)
        warning = too_slow_to_leave(now, run.writer.config)
        if warning is not None and not too_slow_to_leave(known, run.writer.config):
            run.accelerator.print(warning)


def snapshot_averages(run: Run) -> None:
    """Keep for good the averages from which any width is rebuilt afterwards, where they are held."""
    averages = {name: ema for name, ema in run.averages.items() if name != "ema"}
    if averages:
        dtype = SNAPSHOT_DTYPES[run.averages["ema"].config.snapshot_dtype]
        run.snapshots.write(Snapshot(run.state.copy(), average_files(run.unet, averages, dtype)))
