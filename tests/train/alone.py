"""A trainer without stage 1 and streaming: `run` takes the folders that it must not read, and a config."""

import sys
from importlib import import_module
from unittest.mock import patch

from tests.forks import import_again

OF_STAGE_1 = (
    "PIL.Image.open",
    "PIL.ImageFile.ImageFile.load",
    "diffusers.AutoencoderKL.__init__",
    "diffusers.AutoencoderKL.from_pretrained",
    "transformers.CLIPTextModel.__init__",
    "transformers.CLIPTextModel.from_pretrained",
    "transformers.CLIPTokenizer.__init__",
    "transformers.CLIPTokenizer.from_pretrained",
)


def run(arguments: list[str]) -> None:
    """Train, and raise an error if training decodes an image, builds a VAE, a text encoder or a tokenizer, or opens a
    file in one of the folders."""
    *folders, config = arguments

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("only stage 1 may do this")

    def watch(event: str, opened: tuple[object, ...]) -> None:
        if event == "open" and str(opened[0]).startswith(tuple(folders)):
            raise AssertionError(f"training must not read {opened[0]}")

    import_again("precompute", "ray", "img2dataset", "streaming")
    for name in OF_STAGE_1:
        patch(name, refuse).start()
    sys.addaudithook(watch)
    import_module("train.__main__").run(["--config", config])
