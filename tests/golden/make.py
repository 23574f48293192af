"""Golden records: latents roots, a checkpoint and loss curves, whose numbers commit 8cb740e computed.

Stage 1 encoded `roots/` once with the random models of `tests.tiny`: two tars of 16 images, and one root for each
storage of captions. The roots cannot be made again, because their latents depend on the machine and every curve depends
on them. When the format changed, `shards derive` rewrote them with the same arrays.

`python -m tests.golden.make curves` trains the cases below on them, and writes `curves.json` and `checkpoint/`. Run it
only for a deliberate change of a curve, and give the reason in the commit.
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.runs import UNET, run_module, train_fields, write_config

HERE = Path(__file__).parent
RESUMED = "epsilon"
"""Case whose checkpoint after `CHECKPOINT_STEP` steps is kept."""
CHECKPOINT_STEP, STEPS = 4, 10
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: root, changes to the config of `tests.runs`
    "epsilon": ("float16", {"checkpoint": {"every": CHECKPOINT_STEP, "keep": 9}}),
    "v-min-snr-offset-zero-snr": (
        "float8",
        {
            "objective": {
                "prediction": "v_prediction",
                "min_snr_gamma": 5.0,
                "offset_noise": 0.1,
                "zero_terminal_snr": True,
                "caption_dropout": 0.3,
            },
        },
    ),
    "flow-logit-normal": (
        "trim",
        {"objective": {"prediction": "flow_matching", "timestep_sampling": "logit_normal", "logit_mean": 0.2}},
    ),
    "sample-several-captions": (
        "several",
        {"objective": {"prediction": "sample", "beta_schedule": "squaredcos_cap_v2"}, "schedule": {"kind": "cosine"}},
    ),
    "two-buckets-filter-validation": (
        "float16",
        {
            "data": {
                "streams": [
                    {"root": "ROOT", "bucket": "64x64", "filter": {"aesthetic": {"min": 3.0}}, "weight": 2.0},
                    {"root": "ROOT", "bucket": "128x128"},
                ]
            },
            "validation": {"root": "ROOT", "bucket": "64x64", "samples": 8, "batch_size": 4, "every": 5},
            "ema": {"kind": "power", "start_step": 3},
        },
    ),
}


def train_case(name: str, folder: Path) -> Path:
    """Train a case in a new process, and return its run folder."""
    root, changes = CASES[name]
    changes = json.loads(json.dumps(changes).replace('"ROOT"', json.dumps(str(HERE / "roots" / root))))
    fields = train_fields(HERE / "roots" / root, folder / name, UNET, **({"max_steps": STEPS} | changes))
    result = run_module("train", "--config", str(write_config(folder, fields)))
    assert result.returncode == 0, result.stderr
    return folder / name


def curve_of(run_dir: Path) -> dict[str, list[str]]:
    """Return the losses and validation losses of a run as exact hexadecimal floats."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {key: [row[key].hex() for row in rows if key in row] for key in ("loss", "grad_norm", "val_loss")}


def machine() -> dict[str, str]:
    """Describe everything that the last bits of a curve depend on, including the processor's vendor."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    (vendor,) = set(re.findall(r"^vendor_id\s*: (.+)$", cpuinfo, re.MULTILINE)) or {"unknown"}
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "vendor": vendor}


def make_curves(folder: Path) -> None:
    """Write the curve of every case, and one checkpoint."""
    curves = {name: curve_of(train_case(name, folder)) for name in CASES}
    (HERE / "curves.json").write_text(
        json.dumps({"machine": machine(), "recorded_elsewhere": {}, "curves": curves}, indent=1) + "\n"
    )
    kept = HERE / "checkpoint"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / RESUMED / "checkpoints" / f"step-{CHECKPOINT_STEP:08d}", kept)


if __name__ == "__main__":
    if sys.argv[1:] != ["curves"]:
        sys.exit("error: this overwrites the golden records. To do so, pass `curves`")
    with tempfile.TemporaryDirectory() as temporary:
        make_curves(Path(temporary))
