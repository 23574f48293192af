"""latentmill: encode once, train lean. `init` writes the configs that come with the package, to be edited.

examples:
  latentmill init .          ./configs/
  latentmill init runs/one   runs/one/configs/

then, in that folder:
  latentmill-precompute --config configs/precompute.yaml --shards all
  latentmill-train --config configs/phase1.yaml

latentmill-select, latentmill-download, latentmill-evaluate, latentmill-shards and latentmill-plan are the others.
"""

import argparse
import shutil
from pathlib import Path

from shards.base.errors import RequestError, console

PACKAGED = Path(__file__).with_name("configs")
"""Where a wheel has them."""
CHECKOUT = Path(__file__).parents[2] / "configs"
"""Where a clone has them."""


def write_configs(folder: Path) -> Path:
    """Write FOLDER/configs, and return it.

    Raises:
        RequestError: it is there already, or cannot be written.
    """
    target = folder / "configs"
    try:
        # without the mode bits: packages may be read-only, and these are to be edited
        shutil.copytree(PACKAGED if PACKAGED.is_dir() else CHECKOUT, target, copy_function=shutil.copyfile)
    except FileExistsError:
        raise RequestError(f"{target} is there already, and is left as it is. Give another folder.") from None
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)  # not half of them
        raise RequestError(f"{target} cannot be written: {error}. Give another folder.") from None
    return target


def run(arguments: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="latentmill", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    example = "example: latentmill init runs/one"
    command = commands.add_parser("init", help="write DIR/configs", description="Write DIR/configs.", epilog=example)
    command.add_argument("folder", metavar="DIR", type=Path)
    target = write_configs(parser.parse_args(arguments).folder)
    print(
        f"Wrote {target}. In {target.parent.resolve()}, set `input` and `output` in configs/precompute.yaml, then: "
        f"latentmill-precompute --config configs/precompute.yaml --shards all"
    )


main = console(run)
