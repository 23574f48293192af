"""`python -m bench.outputs.checkpoint`: how long a save keeps training waiting, and what it adds to a run's memory.

By default at a tenth of SD2's size; `--widths 320 640 1280 1280` is SD2, and takes 33 GB (20 with `--synchronous`). The
network takes steps on one 64x64 picture. A step is timed, the saves after it, and the steps beside which
they are written; the peak of memory is read, set back, and read again after a save.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from accelerate import Accelerator

from bench.kit.common import section, status_mb, table
from bench.kit.roots import make_root
from train.config import TrainConfig
from train.prepare import prepare
from train.run.launches import Launch
from train.setup import build_trainer
from train.takeover import take_run

SD2 = Path("configs/unet/sd2-base.json")
STEPS, HEAD = 2, 32


def network(folder: Path, widths: list[int]) -> Path:
    """SD2's U-Net with other widths."""
    heads = [width // HEAD for width in widths]
    config = json.loads(SD2.read_text()) | {"block_out_channels": widths, "attention_head_dim": heads}
    path = folder / "unet.json"
    path.write_text(json.dumps(config))
    return path


def main() -> None:
    """Measure, and print a section of the figures."""
    parser = argparse.ArgumentParser(prog="bench.outputs.checkpoint", description=__doc__)
    parser.add_argument("--widths", type=int, nargs=4, default=[96, 192, 384, 384], help="channels of blocks")
    parser.add_argument("--synchronous", action="store_true", help="checkpoint.asynchronous: false")
    options = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        root = make_root(Path(folder) / "root", {"64x64": [64]}, text=(77, 1024))
        config = TrainConfig.model_validate(
            {
                "run_dir": f"{folder}/run",
                "max_steps": 100,
                "global_batch_size": 1,
                "microbatch_size": 1,
                "data": {"streams": [{"root": root, "bucket": "64x64"}], "num_workers": 0, "num_canonical_nodes": 1},
                "backbone": {"config": network(Path(folder), options.widths)},
                "ema": {"start_step": 1},
                "log": {"tracker": "none"},
                "checkpoint": {"asynchronous": not options.synchronous},
            }
        )
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = prepare(config, accelerator)
        trainer = build_trainer(config, prepared, accelerator, Launch(take_run(config, prepared)))
        batches = iter(trainer.loader)

        def steps() -> float:
            """Seconds of one, of a few."""
            start = time.perf_counter()
            for _ in range(STEPS):
                trainer.train_step(next(batches), trainer.state.step)
                trainer.state.step += 1
            return (time.perf_counter() - start) / STEPS

        steps()
        alone, held = steps(), status_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is held now
        steps()
        peak_of_steps = status_mb("VmHWM")
        stalls, beside, whole = [], [], []
        for _ in range(4):
            start = time.perf_counter()
            trainer.save(is_last=False)
            stalls.append(time.perf_counter() - start)
            beside.append(steps())
            trainer.checkpoints.finish()
            whole.append(trainer.checkpoints.seconds or 0.0)
        size = sum(path.stat().st_size for path in max(config.work.glob("checkpoints/*")).rglob("*") if path.is_file())
        rows = [
            ["a step, nothing being written", f"{alone:.2f} s"],
            ["a step, the first of a few while one is written", f"{median(beside):.2f} s"],
            ["training waits for the first save", f"{stalls[0]:.2f} s"],
            ["for a later one", f"{median(stalls[1:]):.2f} s"],
            ["until it is on the disk", f"{median(whole):.1f} s"],
            ["memory held after steps", f"{held / 1024:.2f} GB"],
            ["its peak in steps", f"{peak_of_steps / 1024:.2f} GB"],
            ["its peak in steps and saves", f"{status_mb('VmHWM') / 1024:.2f} GB"],
        ]
    kind = "synchronous" if options.synchronous else "asynchronous"
    body = f"Saves are {kind}. A checkpoint is {size / 2**30:.2f} GB.\n\n" + table(["", ""], rows)
    print(section("A checkpoint", "bench.outputs.checkpoint", body))


if __name__ == "__main__":
    main()
