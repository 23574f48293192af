"""`python -m bench.outputs.checkpoint`: what saving a checkpoint adds to a run's memory, at SD2's full size.

It takes 20 GB: weights, gradients, AdamW's two moments and the moving average, float32 each. The network takes two
steps on one 64x64 picture; the peak of memory is read, set back, and read again after a save.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from accelerate import Accelerator

from bench.kit.common import section, status_mb, table
from bench.kit.roots import make_root
from train.assemble import assemble
from train.config import TrainConfig
from train.loop import save, take_step
from train.prepare import prepare, take_run
from train.run.launches import Launch


def main() -> None:
    """Measure, and print a section of the figures."""
    parser = argparse.ArgumentParser(prog="bench.outputs.checkpoint", description=__doc__)
    parser.add_argument("--unet", type=Path, default=Path("configs/unet/sd2-base.json"))
    parser.add_argument("--text", type=int, nargs=2, default=(77, 1024), help="tokens and width of a caption")
    parser.add_argument("--asynchronous", action="store_true", help="copy first, and write in the background")
    options = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        root = make_root(Path(folder) / "root", {"64x64": [4]}, text=tuple(options.text))
        config = TrainConfig.model_validate(
            {
                "run_dir": f"{folder}/run",
                "max_steps": 100,
                "global_batch_size": 1,
                "microbatch_size": 1,
                "data": {"streams": [{"root": root, "bucket": "64x64"}], "num_workers": 0, "num_canonical_nodes": 1},
                "unet": options.unet,
                "ema": {"start_step": 1},
                "log": {"tracker": "none"},
                "checkpoint": {"asynchronous": options.asynchronous},
            }
        )
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = prepare(config, accelerator)
        run = assemble(config, prepared, accelerator, Launch(take_run(config, prepared)))
        batches = iter(run.loader)
        for _ in range(2):
            take_step(run, next(batches))
        step = status_mb("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is held now
        start = time.perf_counter()
        save(run, last=True)
        seconds, peak = time.perf_counter() - start, status_mb("VmHWM")
        size = sum(path.stat().st_size for path in Path(config.run_dir).rglob("*") if path.is_file()) / 2**30
    rows = [["a step", f"{step / 1024:.2f}"], ["a save", f"{peak / 1024:.2f}"]]
    kind = "asynchronous" if options.asynchronous else "synchronous"
    body = f"A {kind} save of {size:.1f} GB took {seconds:.0f} s.\n\n" + table(["peak of", "GB"], rows)
    print(section("Memory of a checkpoint", "bench.outputs.checkpoint", body))


if __name__ == "__main__":
    main()
