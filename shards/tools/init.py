"""latentmill: encode images and captions once, then train latent diffusion models on the latents.

`init` copies the example configs that come with the package, for you to edit.

examples:
  latentmill init .          ./configs/
  latentmill init runs/one   runs/one/configs/

then, in that folder:
  latentmill-precompute --config configs/precompute.yaml --shards all
  latentmill-train --config configs/phase1.yaml

The other commands are latentmill-select, latentmill-download, latentmill-evaluate, latentmill-shards and
latentmill-plan.
"""

import argparse
import shutil
from pathlib import Path

from shards.base.errors import RequestError, console

PACKAGED = Path(__file__).with_name("configs")
"""Location of the configs in an installed wheel."""
CHECKOUT = Path(__file__).parents[2] / "configs"
"""Location of the configs in a git checkout."""


def write_configs(folder: Path) -> Path:
    """Copy the configs to FOLDER/configs, and return that path. Raises RequestError if it exists or cannot be
    written."""
    target = folder / "configs"
    try:
        # copyfile drops the mode bits: an installed package may be read-only, but the copies must be editable
        shutil.copytree(PACKAGED if PACKAGED.is_dir() else CHECKOUT, target, copy_function=shutil.copyfile)
    except FileExistsError:
        raise RequestError(f"{target} already exists and was not changed. Choose a different folder.") from None
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)  # do not leave a partial copy
        raise RequestError(f"{target} cannot be written: {error}. Choose a different folder.") from None
    return target


def run(arguments: list[str]) -> None:
    """Run the `latentmill` command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="latentmill", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    example = "example: latentmill init runs/one"
    command = commands.add_parser("init", help="write DIR/configs", description="Write DIR/configs.", epilog=example)
    command.add_argument("folder", metavar="DIR", type=Path, help="folder in which to create configs/")
    target = write_configs(parser.parse_args(arguments).folder)
    print(
        f"Wrote {target}. Next, change to the folder {target.parent.resolve()}, set `input` and `output` in "
        f"configs/precompute.yaml, and run `latentmill-precompute --config configs/precompute.yaml --shards all`."
    )


main = console(run)
