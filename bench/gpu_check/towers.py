"""Checks that encoders' results do not depend on the batch, and the speed of encoders and of decoding."""

import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import bench.encode
from bench.encode import load_encoders, save_models
from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import Setup, seconds_of
from bench.pixels import BUCKETS, make_corpus
from precompute.encode.encoders import TextEncoder
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.base.device import Precision

MAX_DIFFERENCE: dict[Precision, float] = {"float32": 3e-3, "float16": 0.05, "bfloat16": 0.05}
"""Maximum difference relative to the standard deviation of the values."""


def batches(setup: Setup, found: Findings) -> None:
    """Compare images and captions in a full batch with the same inputs alone in a batch padded with copies."""
    size, alone = (4, (0, 3)) if setup.small else (16, (0, 7, 15))
    precisions: tuple[Precision, ...] = ("bfloat16",) if setup.small else ("float32", "bfloat16", "float16")
    random = np.random.default_rng(0)
    buckets = setup.encoders.buckets
    pictures = {b: list(random.integers(0, 256, (size, b.height, b.width, 3), np.uint8)) for b in buckets}
    captions = [f"picture {i} of nothing in particular, in many colours" for i in range(size)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(setup.encoders, folder)
        for precision in precisions:
            eager: dict[str, Tensor] = {}
            for compiled in (False, True):
                image, text = load_encoders(folder, setup.device, precision, compiled)
                how = f"{precision}{', compiled' * compiled}"
                made = {f"VAE {bucket}": image(of_bucket, size) for bucket, of_bucket in pictures.items()}
                made["captions"] = states_of(text, captions, size)
                equal = dict.fromkeys(made, 0)
                for i in alone:
                    again = {f"VAE {b}": image([of_b[i]], size) for b, of_b in pictures.items()}
                    again["captions"] = states_of(text, [captions[i]], size)
                    for name, rows in again.items():
                        apart = share(rows[0], made[name][i])
                        found.check(
                            f"{name}, {how}: number {i} alone against in its batch", apart, MAX_DIFFERENCE[precision]
                        )
                        equal[name] += bool(rows[0].equal(made[name][i]))
                for name, count in equal.items():
                    found.row("bit-equal", what=name, how=how, equal=count, of=len(alone))
                for name, rows in made.items() if compiled else ():
                    found.check(
                        f"{name}, {precision}: compiled against eager",
                        share(rows, eager[name]),
                        MAX_DIFFERENCE[precision],
                    )
                eager = made


def states_of(text: TextEncoder, captions: list[str], size: int) -> Tensor:
    """Encode captions and return their states (N, tokens, width)."""
    made = [caption.latents.states for caption in text(captions, size)]
    return torch.stack([states for states in made if states is not None])


def share(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the standard deviation of the expected values."""
    return float((found.float() - expected.float()).abs().max() / expected.float().std())


def rates(setup: Setup, found: Findings) -> None:
    """Time images of both sizes, their mixture, and captions, first eager and then compiled."""
    precision = "bfloat16" if setup.small else "float16"
    for compiled in (False,) if setup.small else (False, True):
        if not found.has_time:
            found.row("encoders", what="skipped for lack of time", compiled=compiled, per_second=None, tflops=None)
            continue
        torch.compiler.reset()
        options = Namespace(precision=precision, compile=compiled, batch_size=64, batches=33)
        if setup.small:
            options.batch_size, options.batches = 2, 2
        with found.tried("encoders", what="failed", compiled=compiled):
            measured = bench.encode.measure(options, setup.encoders, setup.device)
            for what, (per_second, tflops) in measured.items():
                found.row("encoders", what=what, compiled=compiled, per_second=per_second, tflops=tflops)


def decoding(setup: Setup, found: Findings) -> None:
    """Time the decoding of JPEGs: on one core, decoded and resized for both buckets as in stage 1, and on the device,
    decoded only."""
    corpus = make_corpus(4 if setup.small else 64, seed=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = seconds_of(
        lambda: [decode(data, BUCKETS, PixelsConfig(), LimitsConfig()) for data in corpus], setup, rounds=3
    )
    torch.set_num_threads(threads)
    found.row("decoding", what="decode", per_second=len(corpus) / seconds, note="one core, for both buckets")
    files = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in corpus]
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # no other part needs torchvision

        seconds = seconds_of(lambda: decode_jpeg(files, ImageReadMode.RGB, str(setup.device)), setup)
    except (ImportError, OSError, RuntimeError) as refusal:
        found.row("decoding", what="decode_on_gpu", per_second=None, note=str(refusal).splitlines()[0][:80])
        return
    found.row("decoding", what="decode_on_gpu", per_second=len(corpus) / seconds, note="on the device, decoding only")
