"""The whole of stage 2 in one loop."""

import time
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor

from shards.base.errors import Preempted
from shards.base.stop import StopSignal
from train.config import TrainConfig
from train.data.batch import Batch
from train.data.draws import Draws
from train.data.loader import global_batches, make_loader
from train.model.optimizer import learning_rate
from train.model.sharding import whole
from train.objective.loss import NUM_QUARTERS
from train.run.assemble import Run, assemble, save, update_ema
from train.run.log import Log
from train.run.processes import lost_processes_named
from train.run.request import Request

SIGNAL_EVERY = 10
"""Steps between looks at whether some rank was told to leave: each look makes the host wait for the device."""


def train(config: TrainConfig, request: Request, accelerator: Accelerator) -> None:
    """Train until `max_steps`, from the newest checkpoint of `run_dir` where there is one."""
    run = assemble(config, request, accelerator)
    if run.state.step >= config.max_steps:
        accelerator.print(f"{config.run_dir} has done its {config.max_steps} steps; there is nothing to do.")
        return
    loader = make_loader(config.data, request.spec, config.global_batch_size, config.seed, run.state.step, run.slots)
    batches = global_batches(loader, request.spec, run.state.step, config.data)
    log = Log(run)
    stop = StopSignal()
    with lost_processes_named(lambda: f"After step {run.state.step}", config.collective_timeout):
        while run.state.step < config.max_steps:
            waited = time.perf_counter()
            batch = next(batches)
            log.data_seconds += time.perf_counter() - waited
            log.samples(batch)

            grad_norm = train_step(run, batch)

            run.state.step += 1
            update_ema(run)
            log.step(batch, grad_norm)
            run.writer.check()
            leave = run.state.step % SIGNAL_EVERY == 0 and stop_agreed(run, stop)
            last = leave or run.state.step == config.max_steps
            if last or run.state.step % config.checkpoint.every == 0:
                save(run, last)
            if leave and run.state.step < config.max_steps:
                raise Preempted(f"told to leave, saved after step {run.state.step}. The same command again resumes.")
    log.close()


def train_step(run: Run, batch: Batch) -> Tensor:
    """One optimizer step on this rank's share of a global batch; returns the gradient's norm before clipping."""
    config, accelerator = run.config, run.accelerator
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.state.step, config.optimizer.lr, config.schedule, config.max_steps)
    quarters = torch.zeros(2, NUM_QUARTERS, device=accelerator.device)
    # on the CPU, so that only the caption that each sample is trained with moves to the device
    batch = batch.draw_captions(Draws(config.seed, run.state.step, batch.slots))
    microbatches = list(batch.to(accelerator.device).microbatches(config.microbatch_size))
    for microbatch in microbatches:
        draws = Draws(config.seed, run.state.step, microbatch.slots)
        last = microbatch is microbatches[-1]
        # gradients cross ranks once, with the last microbatch; parts of them with each
        with nullcontext() if last else accelerator.no_sync(run.model):
            losses = run.loss(run.model, microbatch, draws)
            accelerator.backward(losses.sum() / len(batch))
        quarters += run.loss.by_quarter(losses.detach(), draws)
    grad_norm = whole(accelerator.clip_grad_norm_(run.model.parameters(), config.optimizer.max_grad_norm))
    # all ranks hold the same gradient; the fused kernel leaves everything as it is where this is 1, and nobody waits
    bad = (~torch.isfinite(grad_norm)).float()
    run.optimizer.optimizer.found_inf = bad
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.pending.append(torch.cat([bad[None], quarters.flatten()]))
    return grad_norm


def stop_agreed(run: Run, stop: StopSignal) -> bool:
    """Whether any rank was told to leave; all ranks get the same answer."""
    flag = torch.tensor(float(stop.received), device=run.accelerator.device)
    return bool(run.accelerator.reduce(flag, "sum"))
