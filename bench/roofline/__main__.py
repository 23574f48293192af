"""Predict a GPU's work and time without having one: `python -m bench.roofline`.

Each network is traced and lowered as Inductor would for an H200, which takes minutes. The share of a matrix product's
rate that a network reaches cannot be traced, so it is calibrated on a published throughput.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.kit.common import bench_file, encoder_rates, section, table, write_bench_file
from bench.roofline.kernels import ASSUMED_EFFICIENCY, DeviceRates, DeviceWork, KernelClass
from bench.roofline.networks import TrainingStep, encoder_work, training_work
from plan.config import Networks
from plan.measured import Measurement

RATES = {
    "H200": DeviceRates(790.0, 1.0, 4.3),
    "H100": DeviceRates(790.0, 1.0, 3.0),
    "A100": DeviceRates(250.0, 1.0, 1.83),
}
"""Rates of large bfloat16 products (0.8 of the datasheet's), and 0.9 of the datasheet's bandwidth."""
PUBLISHED = {
    "H200": [(TrainingStep("512x512", 64, compiled=True), 64, 129.25)],
    "A100": [
        (TrainingStep("512x512", 16, low_precision_norms=True), 256, 36.25),
        (TrainingStep("256x256", 64, low_precision_norms=True), 256, 137.5),
    ],
}
"""Published steps: microbatch, images per GPU and step, and images per second and GPU on 8 GPUs (configs/plan). The
first of each GPU serves for calibration, and the others are predicted. MosaicML's microbatch sizes are assumed."""
GIGA, TERA = 1e9, 1e12


def main() -> None:
    """Print a Markdown section, and write the planner's benchmark file if requested."""
    options = parse(sys.argv[1:])
    steps = [
        TrainingStep(bucket, size, options.compile)
        for bucket, size in zip(options.buckets, options.microbatches, strict=True)
    ]
    works = {step: training_work(options.unet, step) for step in steps}
    rates, lines = replace(RATES[options.gpu], efficiency=options.efficiency), []
    if options.calibrate:
        found, text = calibrated(options.unet, options.calibrate)
        rates, lines = replace(rates, efficiency=found), [text]
    lines.insert(0, describe(works, rates))
    encoders = encoder_work(Networks(), options.buckets) if options.encoders else {}
    lines += [predicted(works, rates, options), *([encoders_predicted(encoders, rates)] if encoders else [])]
    print(section("The device's work", "bench.roofline", "\n\n".join(lines)))
    if options.json:
        write_plan_file(options.json, options, works, encoders, rates)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(prog="bench.roofline", description=__doc__)
    parser.add_argument("--unet", type=Path, default=Path("configs/unet/sd2-base.json"))
    parser.add_argument("--buckets", nargs="*", default=["512x512", "256x256"])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[64, 256], help="microbatch size of each bucket")
    parser.add_argument("--gpu", choices=RATES, default="H200")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="predict the compiled step"
    )
    parser.add_argument("--encoders", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--calibrate", choices=PUBLISHED, help="calibrate on the published throughput of these GPUs")
    parser.add_argument(
        "--efficiency", type=float, default=ASSUMED_EFFICIENCY, help="efficiency to assume without calibration"
    )
    parser.add_argument("--batch", type=int, default=256, help="images of one optimizer step on one GPU")
    parser.add_argument("--json", type=Path, help="benchmark file to write for the planner, marked as modelled")
    return parser.parse_args(arguments)


def describe(works: dict[TrainingStep, DeviceWork], rates: DeviceRates) -> str:
    """Tabulate kernels, bytes, FLOPs and predicted time of each class."""
    rows = []
    for step, work in works.items():
        parts: dict[str, KernelClass | DeviceWork] = {**work.classes, "all": work}
        for kind, part in parts.items():
            size = [f"{part.kernels:,}", f"{part.bytes / GIGA:.1f}", f"{part.flops / TERA:.1f}"]
            seconds = rates.seconds(part) if isinstance(part, DeviceWork) else rates.seconds_of(part)
            rows.append([step.words, kind, *size, f"{1000 * seconds:.1f}"])
    notes = [
        f"{step.words}: {work.other_layouts} convolution tensors are not channels last"
        + (f"; {work.saved_bytes / GIGA:.1f} GB are saved for the backward pass." if work.saved_bytes else ".")
        for step, work in works.items()
    ]
    return table(["step", "class", "kernels", "GB", "TFLOP", "predicted ms"], rows) + "\n\n" + "\n".join(notes)


def calibrated(unet: Path, gpu: str) -> tuple[float, str]:
    """Find the efficiency that reproduces the first published throughput, and compare the others with predictions."""
    (first, batch, rate), *others = PUBLISHED[gpu]
    parameters = first.num_parameters(unet)
    efficiency = efficiency_of(RATES[gpu], training_work(unet, first).step_of(batch, parameters), rate)
    text = (
        f"At an efficiency of {efficiency:.3f}, the model reproduces the published {rate:g} images/s of {first.words}."
    )
    for step, batch, published in others:
        rates = replace(RATES[gpu], efficiency=efficiency)
        found = step_rate(training_work(unet, step), rates, parameters, batch)
        off = f"{found / published - 1:+.0%}"
        text += f" It then predicts {found:.1f} images/s for {step.words}, against {published:g} published ({off})."
    return efficiency, text


def efficiency_of(rates: DeviceRates, work: DeviceWork, images_per_second: float) -> float:
    """Find by bisection the efficiency that gives a throughput.

    Raises:
        ValueError: memory traffic alone is too slow for it.
    """
    low, high = 0.0, 2.0
    if replace(rates, efficiency=high).images_per_second(work) < images_per_second:
        raise ValueError(f"{images_per_second} images/s exceed what {rates.terabytes} TB/s allow at any efficiency.")
    for _ in range(60):
        middle = (low + high) / 2
        too_slow = replace(rates, efficiency=middle).images_per_second(work) < images_per_second
        low, high = (middle, high) if too_slow else (low, middle)
    return high


def step_rate(work: DeviceWork, rates: DeviceRates, num_parameters: int, batch: int) -> float:
    """Return the images per second of whole optimizer steps of `batch` images on a GPU."""
    return rates.images_per_second(work.step_of(batch, num_parameters))


def predicted(works: dict[TrainingStep, DeviceWork], rates: DeviceRates, options: argparse.Namespace) -> str:
    """Tabulate the rate and upper bound of each step."""
    rows = []
    for step, work in works.items():
        parameters = step.num_parameters(options.unet)
        bound = replace(rates, efficiency=1.0).images_per_second(work)
        rate = step_rate(work, rates, parameters, options.batch)
        rows.append([step.words, f"{bound:.0f}", f"{rate:.0f}"])
    header = ["step", "bound, images/s", "predicted, images/s"]
    return table(header, rows) + (
        f"\n\nPredicted for one {options.gpu}, with {rates.tflops:g} TFLOP/s × {rates.efficiency:.3f} for products, "
        f"convolutions and attention, and {rates.terabytes:g} TB/s for the rest. The bound assumes an efficiency of 1. "
        f"The host and communication are not included."
    )


def encoders_predicted(encoders: dict[str, DeviceWork], rates: DeviceRates) -> str:
    """Tabulate the rate of each compiled encoder."""
    rows = []
    for name, work in encoders.items():
        size = [f"{work.kernels:,}", f"{work.bytes / GIGA:.1f}", f"{work.flops / TERA:.1f}"]
        rows.append([name, work.images, *size, f"{rates.images_per_second(work):.0f}"])
    return table(["encoder", "batch", "kernels", "GB", "TFLOP", "predicted, per second"], rows)


def write_plan_file(
    path: Path,
    options: argparse.Namespace,
    works: dict[TrainingStep, DeviceWork],
    encoders: dict[str, DeviceWork],
    rates: DeviceRates,
) -> None:
    """Write the predictions as a benchmark file for plan/measured.py."""
    unet, batch = options.unet, options.batch
    found = [
        Measurement(
            stage="train",
            bucket=step.bucket,
            images_per_second_per_gpu=round(step_rate(work, rates, step.num_parameters(unet), batch), 3),
            global_batch_size=batch,
            microbatch_size=step.microbatch_size,
        )
        for step, work in works.items()
    ]
    found += encoder_rates((name, round(rates.images_per_second(work), 3)) for name, work in encoders.items())
    write_bench_file(path, bench_file("bench.roofline", f"NVIDIA {options.gpu}", found, modelled=True))


if __name__ == "__main__":
    main()
