"""Inspect and maintain a latents root: a local folder, or a URL such as s3://bucket/latents.

examples:
  python -m shards verify runs/data/latents
  python -m shards stats runs/data/latents --plot runs/stats.png
"""

import shards.base.interrupt  # noqa: F401

# isort: split

import argparse
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from shards.base.device import available_cores
from shards.base.durable import write_output
from shards.base.errors import RequestError, WorkError, console
from shards.base.store import LocalStore, parse_local, parse_place
from shards.base.table import counted
from shards.derive.conversion import Changes
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.commit import recall
from shards.root.exclusions import KINDS, make_exclusion
from shards.root.index import write_indexes
from shards.root.manifest import FOLDER as MANIFESTS
from shards.root.publish import Publisher
from shards.tools.card import dataset_card
from shards.tools.clean import clean, parse_age
from shards.tools.exclude import exclude
from shards.tools.push import push_folder
from shards.tools.recall import RecallFilter, node_totals, nodes_table, recall_candidates
from shards.tools.stats import plot_stats, root_stats, stats_table
from shards.tools.verify import verify_root
from shards.tools.where import describe_sample, find_sample


def run(arguments: list[str]) -> None:
    """Run `python -m shards` with these arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m shards", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (do, example) in COMMANDS.items():
        epilog = f"example: python -m shards {name} runs/data/latents{example}"
        command = commands.add_parser(name, help=do.__doc__, description=do.__doc__, epilog=epilog, formatter_class=raw)
        command.add_argument("root", help="local folder, or URL such as s3://bucket/latents")
        add_options(name, command.add_argument, command)
    options = parser.parse_args(arguments)
    options.root = open_store(options.root)  # not as an argparse type: argparse would hide the reason for a failure
    COMMANDS[options.command][0](options)


def add_options(name: str, add: Callable[..., object], command: argparse.ArgumentParser) -> None:
    """Add the options that are specific to the command `name`."""
    match name:
        case "exclude":
            kinds = command.add_mutually_exclusive_group(required=True)
            for kind, about in KINDS.items():
                option = f"--{about.split()[0].rstrip(',')}"
                kinds.add_argument(option, nargs="*", action="extend", dest=kind, metavar="VALUE", help=about)
            add("--file", type=Path, action="append", default=[], help="UTF-8 file with more values, one per line")
        case "derive":
            add("out", help="the new root: local folder or URL")
            for option, about in (
                ("storage", "float16 or float8 for all text towers, or for one, as in t5=float8"),
                ("trim", "true to drop padding tokens in all text towers, or in one, as in t5=true"),
                (
                    "width",
                    "number of dimensions to project hidden states onto, for all text towers, or one, as in t5=256",
                ),
                ("joint", "text towers to project jointly, as in clip_l,clip_g t5; see docs/how-to/text-storage.md"),
            ):
                dest = f"text_{option}"
                add(f"--text.{option}", dest=dest, nargs="*", action="extend", default=[], metavar="VALUE", help=about)
            about = "true to store identical text latents only once per file"
            add("--text.deduplicate", dest="text_deduplicate", metavar="VALUE", help=about)
            about = "root whose projections are reused instead of computing new ones"
            add("--text.projection", dest="text_projection", metavar="ROOT", help=about)
            about = "storage of the image latents"
            add("--image.storage", dest="image_storage", choices=("float16", "int8"), help=about)
            add("--image.posterior", dest="image_posterior", choices=("mean",), help="drop the log-variances")
            add("--towers", nargs="*", action="extend", metavar="KIND.NAME", help="towers to keep; default: all")
            add("--buckets", nargs="+", action="extend", help="buckets to derive; default: all")
            about = "worker processes; default: one per available core"
            add("--processes", type=int, default=available_cores(), help=about)
        case "where":
            add("key", help="key of the sample")
        case "stats":
            add("--plot", help="path of a PNG to write")
            about = "maximum number of samples to read per bucket"
            add("--max-samples", type=int, default=10_000, help=about)
        case "card":
            add("--output", help="file to write, such as ROOT/README.md; default: stdout")
        case "push":
            add_push_options(add)
        case "clean":
            add("--older-than", default="7d", help="minimum age, such as 7d, 36h or 90m; default: 7d")
        case "recall":
            add("--node", help="host name")
            add("--gpu", help="GPU UUID or GPU name")
            add("--since", help="only parts started at or after this UTC time, such as 2026-11-22T10:00")
            add("--part", help="folder of a single part, such as 512x512/00042.1f6b5c1a, or a file in it")
            add("--dry-run", action="store_true", help="list the parts without recalling them")
    if name in ("stats", "where", "by-node"):
        add("--json", action="store_true", help="print JSON")


def add_push_options(add: Callable[..., object]) -> None:
    """Add the options of commands that upload something to the hub."""
    add("repo", help="repository on the Hugging Face Hub: org/name")
    add("--license", help="identifier of the licence on the Hub, such as cc-by-4.0; required")
    add("--public", action="store_true", help="make a new repository visible to everyone; default: private")


def verify(options: argparse.Namespace) -> None:
    """Check every byte, shape and count; exit with code 1 if anything is wrong, except in recalled parts."""
    num_problems, notes = 0, list[str]()
    for line in verify_root(options.root, notes.append):
        num_problems += 1
        print(line)
    for line in notes:
        print(line)
    if num_problems:
        raise WorkError(f"{options.root.where()} has {counted(num_problems, 'problem')}, listed above.")
    besides = ", apart from the recalled parts listed above" if notes else ""
    print(f"{options.root.where()} is intact{besides}: every file, sample and count matches its receipt.")


def stats(options: argparse.Namespace) -> None:
    """Show sample counts, bytes, rejects and latent statistics."""
    if options.max_samples < 0:
        raise RequestError(f"--max-samples must not be negative, but is {options.max_samples}.")
    plot = options.plot and parse_local(options.plot)
    found = root_stats(options.root, options.max_samples)
    print(json.dumps(found, indent=2) if options.json else stats_table(found))
    if plot:
        plot_stats(found, plot)


def index(options: argparse.Namespace) -> None:
    """Rebuild every bucket's index.json from the receipts."""
    EncodingRecord.load(options.root)
    for bucket, samples in write_indexes(options.root).items():
        print(f"{bucket}: {counted(samples, 'sample')}")


def card(options: argparse.Namespace) -> None:
    """Write a dataset card: contents, provenance and how to read the samples."""
    text = dataset_card(options.root)
    if not options.output:
        print(text, end="")
    elif isinstance(place := parse_place(options.output), Path):
        write_output(place, text.encode())
    else:
        folder, _, name = place.rpartition("/")
        open_store(folder).write(name, text.encode())


def push(options: argparse.Namespace) -> None:
    """Upload the root to the Hugging Face Hub, with its card: ROOT/README.md, or a new one. Runs can train from there
    directly."""
    if not isinstance(options.root, LocalStore):
        raise RequestError(f"{options.root.where()} is a URL, but only a local folder can be uploaded to the hub.")
    EncodingRecord.load(options.root)
    # those of now: a job that extends the root may publish more before their parts are uploaded
    manifests = tuple(f"{MANIFESTS}/{name}" for name in options.root.files(MANIFESTS))
    if not manifests:
        root = options.root.where()
        raise RequestError(
            f"{root} has no index, so training cannot read it. Run `python -m shards index {root}` first."
        )
    folder = Path(options.root.where())
    written = folder / "README.md"  # perhaps edited
    try:
        text = written.read_text("utf-8") if written.is_file() else dataset_card(options.root)
    except UnicodeDecodeError:
        raise RequestError(
            f"{written} is not UTF-8 text. Save it as UTF-8, or remove it, so that a new card is generated."
        ) from None
    where = push_folder(folder, options.repo, "dataset", text, options.license, options.public, manifests)
    print(f"{where} (train from it with `root: hf://datasets/{options.repo}`)")


def where(options: argparse.Namespace) -> None:
    """Look up one sample: its tar, part, weights and settings, or why it was rejected."""
    found = find_sample(options.root, options.key)
    print(json.dumps(found, indent=2, allow_nan=False) if options.json else "\n\n".join(map(describe_sample, found)))


def by_node(options: argparse.Namespace) -> None:
    """Show parts, samples, throughput and rejects per host and GPU."""
    found = node_totals(options.root)
    print(json.dumps(found, indent=2) if options.json else nodes_table(found))


def recall_parts(options: argparse.Namespace) -> None:
    """Recall a damaged part, or the parts that a host or GPU encoded; the next job re-encodes them."""
    recall_filter = RecallFilter(options.node, options.gpu, options.since, options.part)
    tokens, num_samples = dict[str, str](), 0
    for receipt in recall_candidates(options.root, recall_filter):
        print(receipt.folder)
        tokens[receipt.name] = receipt.token
        num_samples += receipt.samples
    if not options.dry_run:
        recall(options.root, tokens, f"by the command: {recall_filter}")
        Publisher(options.root).publish()  # new runs leave these parts out; running ones warn about them
    parts, samples = counted(len(tokens), "part"), counted(num_samples, "sample")
    if not tokens:
        print(
            "No part matches that is not yet recalled. `python -m shards verify ROOT` names damaged parts, and "
            "`python -m shards by-node ROOT` lists hosts and GPUs."
        )
    elif options.dry_run:
        print(f"Would recall {parts} with {samples}. To recall, run the same command without --dry-run.")
    else:
        print(f"Recalled {parts} with {samples}. To re-encode them, rerun the job that wrote them.")


def clean_up(options: argparse.Namespace) -> None:
    """Delete orphaned files: uncommitted parts and unfinished uploads. Run it only while no job writes to the root."""
    gone = clean(options.root, parse_age(options.older_than))
    for folder in gone:
        print(folder)
    print(f"Removed {counted(len(gone), 'orphan')} (folders, files and uploads) older than {options.older_than}.")


def derive_root(options: argparse.Namespace) -> None:
    """Derive a new root with different storage or fewer towers, without decoding any image."""
    wanted = {name: getattr(options, name) for name in Changes.model_fields}
    wanted |= {name: by_tower(wanted[name]) for name in ("text_storage", "text_trim", "text_width")}
    wanted["text_joint"] = [row.split(",") for row in options.text_joint]
    try:
        changes = Changes.model_validate(wanted)
    except ValidationError as error:
        wrong = error.errors()[0]
        option = str(wrong["loc"][0]).replace("_", ".")
        raise RequestError(f"--{option} {wrong['input']}: {wrong['msg']}.") from None
    if options.processes < 1:
        raise RequestError(f"--processes must be at least 1, but is {options.processes}.")
    from shards.derive.job import derive  # not needed by other commands, and imports torch, which takes seconds

    target = open_store(options.out)
    manifest = derive(options.root, target, changes, options.buckets, options.processes)
    contents = ", ".join(f"{counted(size.samples, 'sample')} in {bucket}" for bucket, size in manifest.buckets.items())
    print(f"{target.where()} contains {contents or 'no samples'}.")


def by_tower(values: list[str]) -> dict[str, str]:
    """Parse option values: `float8` becomes {"*": "float8"} (all towers), `t5=float8` becomes {"t5": "float8"}."""
    return {name or "*": value for name, _, value in (text.rpartition("=") for text in values)}


def exclude_samples(options: argparse.Namespace) -> None:
    """Exclude samples from all later training runs, by key, URL or image SHA-256."""
    ((kind, values),) = ((kind, values) for kind in KINDS if (values := getattr(options, kind)) is not None)
    values = [*values, *chain.from_iterable(map(lines, options.file))]
    print(exclude(options.root, make_exclusion(kind, values)))


def lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 text file, with or without the byte order mark that Windows editors add.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RequestError(
            f"--file {path} cannot be read: {reason}. Nothing was excluded. Check the path and the encoding."
        ) from None


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
    "verify": (verify, ""),
    "stats": (stats, " --json"),
    "index": (index, ""),
    "card": (card, " --output runs/data/latents/README.md"),
    "push": (push, " org/name --license cc-by-4.0"),
    "exclude": (exclude_samples, " --urls --file takedowns.txt"),
    "where": (where, " 000420017"),
    "by-node": (by_node, " --json"),
    "recall": (recall_parts, " --node gpu-17 --dry-run"),
    "clean": (clean_up, " --older-than 7d"),
    "derive": (derive_root, " runs/data/small --image.storage int8 --text.storage float8 --text.trim true"),
}
"""Command → its function, whose docstring is the help text, and example arguments to show after ROOT."""

main = console(run)

if __name__ == "__main__":
    main()
