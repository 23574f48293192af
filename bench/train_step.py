"""Time the trainer's step against a bare loop, and for each setting: `python -m bench.train_step`.

The default is SD2 base at 256 and 512 px on a GPU, and small sizes on a CPU. `--json FILE` writes a benchmark file for
`make plan`. Settings that run out of memory are listed as such.
"""

import argparse
import copy
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import Tensor

from bench.kit.common import (
    Pair,
    bench_file,
    best_rates,
    device_name,
    is_out_of_memory,
    matmul_tflops,
    section,
    synchronize,
    table,
    timed,
    timed_in_turn,
    write_bench_file,
)
from bench.kit.roots import encoding_record
from plan.measured import Measurement
from shards.base.pool import configure_malloc
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT
from train.data.batch import Batch
from train.data.spec import DataSpec
from train.metrics import peak_memory
from train.model.config import AdamWConfig, EmaConfig, OptimizerConfig, ScheduleConfig
from train.model.ema import make_averages
from train.model.fit import dry_call
from train.model.flops import peak_tflops, training_flops
from train.model.network import build_network, compile_network
from train.model.optimizer import Optimizer, build_optimizer
from train.objective.config import ObjectiveConfig
from train.objective.loss import DiffusionLoss
from train.start import ACCELERATE_PRECISION
from train.step import StepResult, TrainStep, place_network

TEXT_LENGTH = 77
DOWNSAMPLING = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepSetting:
    """A variant of the training step."""

    bucket: str
    microbatch_size: int
    channels_last: bool = False
    low_precision_norms: bool = False
    compile: bool = False

    @property
    def words(self) -> str:
        """The optional features that are on, as text."""
        names = ("channels_last", "low_precision_norms", "compile")
        return " + ".join(name.replace("_", " ") for name in names if getattr(self, name)) or "plain"


@dataclass(frozen=True)
class Result:
    """Measurements of a setting. The rate is None if memory ran out."""

    setting: StepSetting
    images_per_second: float | None
    memory_gb: float = 0.0
    tflops: float = 0.0


def main() -> None:
    """Measure, print a section, and write the planner's benchmark file if requested."""
    options = parse(sys.argv[1:])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    accelerator = Accelerator(mixed_precision=ACCELERATE_PRECISION[options.precision], cpu=device.type == "cpu")
    if device.type == "cpu":
        configure_malloc()  # like `train`
    unet = build_network(options.unet, seed=0)
    matrix_rate = matmul_tflops(device, DTYPES[options.precision])
    parts = []
    if options.rounds:
        pair = compare_with_bare_loop(options, accelerator, unet)
        parts.append(describe_pair(pair, options))
    results = [measure(setting, options, accelerator, unet) for setting in settings(options)]
    # the higher of two measurements, so that a disturbance does not inflate the shares
    matrix_rate = max(matrix_rate, matmul_tflops(device, DTYPES[options.precision]))
    parts.append(describe_results(results, matrix_rate, device, options))
    print(section("Training step", "bench.train_step", "\n\n".join(parts)))
    if options.json:
        write_plan_file(options.json, results, device, options.batch)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options, whose defaults depend on the device."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="bench.train_step", description=__doc__)
    unet = "configs/unet/sd2-base.json" if cuda else "bench/kit/unet.json"
    parser.add_argument("--unet", type=Path, default=Path(unet))
    parser.add_argument("--buckets", nargs="*", default=["256x256", "512x512"] if cuda else ["64x64", "128x128"])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[16, 32, 64, 128, 256] if cuda else [8, 16, 32])
    parser.add_argument("--batch", type=int, default=256 if cuda else 32, help="samples of one optimizer step")
    parser.add_argument("--precision", choices=DTYPES, default="bfloat16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    parser.add_argument("--seconds", type=float, default=10.0 if cuda else 3.0, help="duration of each measurement")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds of the trainer and a bare loop in turn; 0: skip this comparison"
    )
    parser.add_argument(
        "--json", type=Path, help="benchmark file to write for the planner, with each bucket's best rate"
    )
    return parser.parse_args(arguments)


def settings(options: argparse.Namespace) -> Iterator[StepSetting]:
    """Yield the settings of each bucket.

    One feature is added at a time, at the middle microbatch size. Then all features are on, at every microbatch size.
    """
    for bucket in options.buckets:
        middle = options.microbatches[(len(options.microbatches) - 1) // 2]
        ladder: list[tuple[bool, ...]] = [(), (True,), (True, True)]
        if options.compile:
            ladder += [(True, True, True), (True, False, True)]
        found = [StepSetting(bucket, middle, *features) for features in ladder]
        found += [StepSetting(bucket, size, True, True, options.compile) for size in options.microbatches]
        yield from dict.fromkeys(found)


def measure(
    setting: StepSetting,
    options: argparse.Namespace,
    accelerator: Accelerator,
    unet: UNet2DConditionModel,
    quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Result:
    """Time whole optimizer steps of the trainer, after compiling it with one microbatch.

    Args:
        quiet: returns a context in which nothing else uses the device.
    """
    print(f"{setting.bucket}, microbatch {setting.microbatch_size}, {setting.words} …", file=sys.stderr, flush=True)
    device = accelerator.device
    release(device)
    try:
        with training(setting, options, accelerator, unet) as (train_step, step):
            train_step(make_batch(setting.bucket, train_step.microbatch_size, unet), 0)  # compiles
            with quiet():
                rate = options.batch / seconds_of_steps(step, device, options.seconds)
            encoding = encoding_record(TEXT_LENGTH, unet.config.cross_attention_dim)
            flops = training_flops(dry_call(unet, train_step.loss.backbone, encoding, latent_hw(setting.bucket))[1])
            return Result(setting, rate, peak_memory(device) / 2**30, rate * flops / 1e12)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return Result(setting, None)


def seconds_of_steps(step: Callable[[], object], device: torch.device, least: float) -> float:
    """Return the seconds of a step: the median over windows of two steps each, after two steps of warm-up.

    The host waits for the device only between windows.

    Args:
        least: minimum duration of all windows in seconds. There are at least three.
    """

    def two_steps() -> None:
        step()
        step()
        synchronize(device)

    two_steps()
    seconds: list[float] = []
    while sum(seconds) < least or len(seconds) < 3:
        seconds.append(timed(two_steps)[0])
    return statistics.median(seconds) / 2


def release(device: torch.device) -> None:
    """Free the memory of the previous setting, whose stack frames may have survived until now after an error, and
    measure the peak anew."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def training(
    setting: StepSetting,
    options: argparse.Namespace,
    accelerator: Accelerator,
    unet: UNet2DConditionModel,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
) -> Iterator[tuple[TrainStep, Callable[[], StepResult]]]:
    """Yield the trainer's own step on a copy of `unet`, and a function that takes the next step on a batch in memory.

    There is no run folder, launcher or log: this is all that a training step needs.
    """
    network = copy.deepcopy(unet)
    norms, is_cuda = setting.low_precision_norms, accelerator.device.type == "cuda"
    place_network(network, accelerator.device, channels_last=setting.channels_last, low_precision_norms=norms)
    optimizer, schedule = optimizer or AdamWConfig(), schedule or ScheduleConfig()
    torch_optimizer = build_optimizer(dict(network.named_parameters()), optimizer)
    if setting.compile:
        compile_network(network, num_shapes=1)
    train_step = TrainStep(
        accelerator=accelerator,
        network=network,
        loss=DiffusionLoss(ObjectiveConfig(), data_spec(unet), accelerator.device),
        optimizer=Optimizer(torch_optimizer, accelerator, optimizer, schedule, max_steps=10**9),
        microbatch_size=min(setting.microbatch_size, options.batch),
        model=accelerator.prepare_model(network, device_placement=False),
        averages=make_averages(EmaConfig()),
        compiled=setting.compile,
    )
    batch, numbers = make_batch(setting.bucket, options.batch, unet, pin=is_cuda), count()
    try:
        yield train_step, lambda: train_step(batch, next(numbers))
    finally:
        accelerator.free_memory()


def compare_with_bare_loop(
    options: argparse.Namespace, accelerator: Accelerator, unet: UNet2DConditionModel
) -> Pair | None:
    """Time the trainer's step and a bare loop that trains the same model, in turn. Return None if memory ran out."""
    setting = StepSetting(options.buckets[0], options.microbatches[-1], channels_last=accelerator.device.type == "cuda")
    try:
        bare = bare_loop(setting, options, unet, accelerator.device)
        with training(setting, options, accelerator, unet) as (_, step):

            def trained() -> None:
                step()
                synchronize(accelerator.device)

            return timed_in_turn(trained, bare, options.rounds)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def bare_loop(
    setting: StepSetting, options: argparse.Namespace, original: UNet2DConditionModel, device: torch.device
) -> Callable[[], None]:
    """Make a step on float32 latents and text on the device, without posterior sampling, caption dropout or logging."""
    unet = copy.deepcopy(original).to(device)
    if setting.channels_last:
        unet.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    scheduler = DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear")
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(device)
    batch = make_batch(setting.bucket, options.batch, unet).to(device)
    latents = batch.columns["image_latents"].float().chunk(2, dim=1)[0].contiguous()
    text = batch.columns[f"text_latents.{ONLY_TEXT}"].float()
    dtype = DTYPES[options.precision]

    def step() -> None:
        for start in range(0, options.batch, setting.microbatch_size):
            part: Tensor = latents[start : start + setting.microbatch_size]
            noise = torch.randn_like(part)
            timesteps = torch.randint(0, 1000, (len(part),), device=device)
            noisy = scheduler.add_noise(part, noise, timesteps)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                states = text[start : start + setting.microbatch_size]
                prediction = unet(noisy, timesteps, states).sample
            (F.mse_loss(prediction.float(), noise) * (len(part) / options.batch)).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)

    return step


def data_spec(unet: UNet2DConditionModel) -> DataSpec:
    """Make the data spec of a latents root with SD's VAE."""
    width = unet.config.cross_attention_dim
    encoding = encoding_record(TEXT_LENGTH, width)
    uncond = {ONLY_TEXT: TextLatents(torch.zeros(TEXT_LENGTH, width).half(), 2)}
    return DataSpec(encoding.image, encoding.texts, {}, uncond, streams=(), steps_per_epoch=1)


def latent_hw(bucket: str) -> tuple[int, int]:
    """Return the height and width of a bucket's latents."""
    return Bucket.parse(bucket).latent_hw(DOWNSAMPLING)


def make_batch(bucket: str, size: int, unet: UNet2DConditionModel, pin: bool = False) -> Batch:
    """Make a batch of random moments and text latents like the loader's."""
    generator = torch.Generator().manual_seed(0)
    shape = (size, unet.config.in_channels, *latent_hw(bucket))
    mean, log_variance = torch.randn(shape, generator=generator), torch.full(shape, -10.0)
    text_shape = (size, TEXT_LENGTH, unet.config.cross_attention_dim)
    batch = Batch(
        keys=[str(slot) for slot in range(size)],
        slots=torch.arange(size),
        columns={
            "image_latents": torch.cat([mean, log_variance], dim=1).half(),
            f"text_latents.{ONLY_TEXT}": torch.randn(text_shape, generator=generator).half(),
            "size": torch.tensor([[*latent_hw(bucket)[::-1], 0, 0]]).mul(DOWNSAMPLING).repeat(size, 1),
            f"num_tokens.{ONLY_TEXT}": torch.full((size,), TEXT_LENGTH),
        },
    )
    return batch.pin_memory() if pin else batch


def describe_pair(pair: Pair | None, options: argparse.Namespace) -> str:
    """Describe the comparison of the trainer with the bare loop in a sentence."""
    if pair is None:
        return (
            f"The comparison with a bare loop ran out of memory ({options.unet}, {options.buckets[0]}, microbatches of "
            f"{options.microbatches[-1]}). It uses the last value of `--microbatches`; pass a smaller one."
        )
    return (
        f"The trainer's step (posterior and noise draws, caption dropout, moving average, skipping) runs at "
        f"**{pair.ratio:.3f} ×** the rate of a bare loop over float32 tensors in memory (`torch.randn`, `add_noise`, "
        f"autocast, clip, fused AdamW): median of {options.rounds} rounds in turn, {pair.spread}; "
        f"{options.unet}, {options.buckets[0]}, batch {options.batch} in microbatches of {options.microbatches[-1]}, "
        f"{options.precision}."
    )


def describe_results(
    results: list[Result], matrix_rate: float, device: torch.device, options: argparse.Namespace
) -> str:
    """Format a table of all settings, with the rates that its shares refer to."""
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def row(result: Result) -> list[object]:
        setting = result.setting
        start: list[object] = [setting.bucket, setting.microbatch_size, setting.words]
        if result.images_per_second is None:
            return [*start, "out of memory", "", "", "", ""]
        shares = [f"{result.tflops / of:.1%}" if of else "unknown" for of in (matrix_rate, peak)]
        return [*start, f"{result.images_per_second:.1f}", f"{result.tflops:.3g}", *shares, f"{result.memory_gb:.2f}"]

    header = ["bucket", "microbatch", "with", "img/s", "TFLOP/s", "share of the matrix rate", "MFU", "memory, GiB"]
    measured = f"In the same run, a {options.precision} matrix product reaches {matrix_rate:.3g} TFLOP/s."
    against = (
        f"MFU is relative to {peak:g} TFLOP/s, the datasheet's dense bf16 peak."
        if peak
        else "This device's peak is unknown."
    )
    memory = "Memory is the peak allocation." if device.type == "cuda" else "Memory is the process's peak so far."
    batch = f"A step trains {options.unet} on {options.batch} images."
    return table(header, map(row, results)) + f"\n\n{measured} {against} {memory} {batch}"


def write_plan_file(path: Path, results: list[Result], device: torch.device, batch: int) -> None:
    """Write each bucket's best rate as a benchmark file for plan/measured.py."""
    measurements = [
        Measurement(
            stage="train",
            bucket=result.setting.bucket,
            images_per_second_per_gpu=round(result.images_per_second, 3),
            global_batch_size=batch,
            microbatch_size=result.setting.microbatch_size,
        )
        for result in results
        if result.images_per_second
    ]
    write_bench_file(path, bench_file("bench.train_step", device_name(device), best_rates(measurements)))


if __name__ == "__main__":
    main()
