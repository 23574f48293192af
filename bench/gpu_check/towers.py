"""Checks that encoders' results do not depend on the batch, and the speed of encoders and of decoding."""

import copy
import json
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5EncoderModel

import bench.encode
from bench.encode import load_encoders, save_models
from bench.gpu_check.findings import Findings
from bench.gpu_check.setup import PRECISIONS, Setup, seconds_of
from bench.pixels import BUCKETS, make_corpus
from precompute.encode.encoders import TextEncoder
from precompute.encode.quantised import check_float8, quantise
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.base.device import Precision
from shards.base.errors import UnfitNode
from shards.format.towers import Quantised

MAX_DIFFERENCE: dict[Precision, float] = {"float32": 3e-3, "float16": 0.03, "bfloat16": 0.15}
"""Maximum difference relative to the standard deviation of the values. bfloat16 alone, without compiling, differs from
float32 by 0.06."""


def batches(setup: Setup, found: Findings) -> None:
    """Compare images and captions in a full batch with the same inputs alone in a batch padded with copies, and every
    precision, compiled or not, with float32."""
    size, alone = (4, (0, 3)) if setup.small else (16, (0, 7, 15))
    precisions: tuple[Precision, ...] = ("float32", "bfloat16") if setup.small else PRECISIONS
    random = np.random.default_rng(0)
    buckets = setup.encoders.buckets
    pictures = {b: list(random.integers(0, 256, (size, b.height, b.width, 3), np.uint8)) for b in buckets}
    captions = [f"picture {i} of nothing in particular, in many colours" for i in range(size)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(setup.encoders, folder)
        exact: dict[str, Tensor] = {}
        for precision in precisions:
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
                exact = exact or made
                for name, rows in made.items() if made is not exact else ():
                    found.check(f"{name}, {how}: against float32", share(rows, exact[name]), MAX_DIFFERENCE[precision])


def states_of(text: TextEncoder, captions: list[str], size: int) -> Tensor:
    """Encode captions and return their states (N, tokens, width)."""
    made = [caption.latents.states for caption in text(captions, size)]
    return torch.stack([states for states in made if states is not None])


def share(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the standard deviation of the expected values."""
    return float((found.float() - expected.float()).abs().max() / expected.float().std())


def rates(setup: Setup, found: Findings) -> None:
    """Time images of both sizes, their mixture, and captions, first compiled and then eager."""
    precision = "float32" if setup.small else "float16"
    for compiled in (False,) if setup.small else (True, False):
        if not found.has_time:
            found.row("encoders", what="skipped for lack of time", compiled=compiled, per_second=None, tflops=None)
            continue
        torch.compiler.reset()
        options = Namespace(precision=precision, compile=compiled, batch_size=64, batches=33)
        if setup.small:
            options.batch_size, options.batches = 2, 2
        with found.tried("encoders", what="failed", compiled=compiled):
            measured = bench.encode.measure(options, setup.encoders, setup.device, setup.quiet)
            for what, (per_second, tflops) in measured.items():
                found.row("encoders", what=what, compiled=compiled, per_second=per_second, tflops=tflops)


def t5(setup: Setup, found: Findings) -> None:
    """Time layers of T5-XXL in bfloat16, eager and compiled, and in int8 and float8, compiled.

    All layers have the same shape, so a few of them, with random weights, stand for all 24.
    """
    fields = json.loads(Path("configs/text_encoder/t5-xxl.json").read_text()) | {"num_layers": 4}
    if setup.small:
        fields |= {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 1}
    batch, tokens = (2, 16) if setup.small else (64, 300)
    with torch.device(setup.device):
        ids = torch.randint(0, fields["vocab_size"], (batch, tokens))
        model = T5EncoderModel(T5Config(**fields)).eval().to(torch.bfloat16)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        exact = model(ids).last_hidden_state
    flops = counter.get_total_flops()
    quantised: list[Quantised] = ["int8"]
    try:
        check_float8(setup.device)
        quantised.append("float8")
    except UnfitNode as refusal:
        found.row("T5-XXL", weights="float8", note=f"skipped: {refusal}")
    variants = ((None, False), (None, True), *((to, True) for to in quantised))
    for to, compiled in variants:
        weights = to or "bfloat16"
        with found.tried("T5-XXL", weights=weights, compiled=compiled), torch.inference_mode():
            torch.compiler.reset()
            network = quantise(copy.deepcopy(model), to) if to else model
            run = torch.compile(network, dynamic=False) if compiled else network
            states = run(ids).last_hidden_state
            seconds = seconds_of(partial(run, ids), setup)
            whole = batch / seconds * fields["num_layers"] / 24
            found.row(
                "T5-XXL",
                weights=weights,
                compiled=compiled,
                layers=fields["num_layers"],
                ms=1e3 * seconds,
                tflops=flops / seconds / 1e12,
                captions_per_second_of_24_layers=whole,
                error=float((states - exact).norm() / exact.norm()),
            )


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
