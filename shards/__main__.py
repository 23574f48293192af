"""Look after a latents root, on a disk or at an address such as s3://bucket/latents.

examples:
  python -m shards verify runs/data/latents
  python -m shards stats runs/data/latents --plot stats.png
"""

import argparse
import json
import sys
from pathlib import Path

from shards.base.durable import DamagedFile
from shards.base.errors import WorkError, exit_code_of
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.index import write_indexes
from shards.tools.card import dataset_card
from shards.tools.stats import plot_stats, root_stats, stats_table
from shards.tools.verify import verify_root
from shards.tools.where import describe_sample, find_sample

RAW = argparse.RawDescriptionHelpFormatter


def run(arguments: list[str]) -> None:
    """Parse, and do what was asked."""
    parser = argparse.ArgumentParser(prog="python -m shards", description=__doc__, formatter_class=RAW)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about, example in (
        ("verify", "check every byte, shape and count; exit code 1 if anything is wrong", ""),
        ("stats", "counts, bytes, rejects and latent statistics", " --json"),
        ("index", "write every bucket's index.json anew from the receipts", ""),
        ("card", "a dataset card: what it is, what made it, how to read it", " --output runs/data/latents/README.md"),
        ("where", "of one sample: its tar, part, weights and settings, or why it was rejected", " 000420017"),
    ):
        example = f"example: python -m shards {name} runs/data/latents{example}"
        command = commands.add_parser(name, help=about, description=about, epilog=example, formatter_class=RAW)
        command.add_argument("root", help="folder, or address such as s3://bucket/latents")
        if name == "stats":
            command.add_argument("--json", action="store_true", help="print JSON")
            command.add_argument("--plot", type=Path, help="write a PNG here")
            command.add_argument("--max-samples", type=int, default=10_000, help="read this many of each bucket")
        if name == "card":
            command.add_argument("--output", type=Path, help="write here, say ROOT/README.md; default: print")
        if name == "where":
            command.add_argument("key")
            command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    options.root = open_store(options.root)  # not by argparse, which would keep the reason to itself
    try:
        COMMANDS[options.command](options)
    except DamagedFile as error:
        raise WorkError(str(error)) from error


def verify(options: argparse.Namespace) -> None:
    """Print what is wrong, or that nothing is."""
    wrong = 0
    for line in verify_root(options.root):
        wrong += 1
        print(line)
    if wrong:
        raise WorkError(f"{wrong} things are wrong with {options.root.where()}; each is named above.")
    print(f"{options.root.where()} is sound: every file, sample and count is as its receipt says.")


def stats(options: argparse.Namespace) -> None:
    """Print the table or JSON; draw the plot."""
    found = root_stats(options.root, options.max_samples)
    print(json.dumps(found, indent=2) if options.json else stats_table(found))
    if options.plot:
        plot_stats(found, options.plot)


def index(options: argparse.Namespace) -> None:
    """Write the indexes."""
    EncodingRecord.load(options.root)
    for bucket, samples in write_indexes(options.root).items():
        print(f"{bucket}: {samples} samples")


def card(options: argparse.Namespace) -> None:
    """Print the card, or write it."""
    text = dataset_card(options.root)
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")


def where(options: argparse.Namespace) -> None:
    """Print what made a sample."""
    found = find_sample(options.root, options.key)
    print(json.dumps(found, indent=2, allow_nan=False) if options.json else "\n\n".join(map(describe_sample, found)))


COMMANDS = {"verify": verify, "stats": stats, "index": index, "card": card, "where": where}


def main() -> None:
    """Console entry point."""
    sys.exit(exit_code_of(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
