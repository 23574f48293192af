"""Prediction of the profiled step by the model in bench/roofline, per kernel class, at the measured rates."""

import json
import os
import subprocess
import sys

import torch

from bench.gpu_check.findings import COPY_RATE, Findings, Parts
from bench.gpu_check.setup import Setup
from bench.roofline.kernels import ASSUMED_EFFICIENCY, DeviceRates, KernelClass


def predicting(setup: Setup, found: Findings) -> None:
    """Count kernels, bytes and FLOPs of the step that `profile` times, in a process that does not see the device."""
    words = [sys.executable, "-W", "ignore", "-m", "bench.gpu_check.prediction", *["--small"] * setup.small]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for row in json.loads(subprocess.run(words, env=hidden, stdout=subprocess.PIPE, check=True).stdout):
        found.row("prediction", **row)


def main() -> None:
    """Print the counts of each kernel class as JSON."""
    from bench.roofline.networks import TrainingStep, training_work  # imports Inductor, which takes seconds

    setup = Setup(torch.device("cpu"), "--small" in sys.argv)
    setting, batch = setup.profiled
    step = TrainingStep(setting.bucket, setting.microbatch_size, setting.compile, setting.low_precision_norms)
    work = training_work(setup.unet, step).step_of(batch, step.num_parameters(setup.unet))
    rows = [
        {"what": kind, "launches": part.kernels, "bytes": part.bytes, "flops": part.flops}
        for kind, part in work.classes.items()
    ]
    print(json.dumps(rows))


def with_prediction(parts: Parts) -> Parts:
    """Add the predicted time of each kernel class to the profile.

    This needs the profile, the prediction, and the rates of a matrix product and of a copy. If one of them is missing,
    the parts are returned unchanged.
    """
    profile, machine = parts.get("profile", {}), parts.get("machine", {})
    rows = profile.get("tables", {}).get("kernels")
    step, gigabytes = (part.get("figures", {}).get(name) for part, name in ((profile, "step"), (machine, COPY_RATE)))
    predicted = parts.get("prediction", {}).get("tables", {}).get("prediction")
    if not (rows and step and gigabytes and predicted):
        return parts
    rates = DeviceRates(step["matrix TFLOP/s"], ASSUMED_EFFICIENCY, gigabytes / 1e3)
    measured = {row["what"]: row for row in rows}
    nothing = {"ms": 0.0, "launches": 0, "at_the_matrix_rate_ms": 0.0}
    for row in predicted:
        of = KernelClass(row["launches"], row["bytes"], row["flops"])
        predictions = {"predicted_ms": 1e3 * rates.seconds_of(of), "predicted_launches": of.kernels}
        measured[row["what"]] = {"what": row["what"], **nothing, **measured.get(row["what"], {}), **predictions}
    tables = profile["tables"] | {"kernels": list(measured.values())}
    return parts | {"profile": profile | {"tables": tables}}


if __name__ == "__main__":
    main()
