"""`python -m bench --output runs/benchmarks.md`: the benchmarks of both stages in turn, each in a process of its own.

Run it on a machine that does nothing else. A benchmark that fails is named, and nothing is written.
"""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    *("pixels", "worker", "encode", "index.epoch_plan", "index.publishing", "index.reading", "loader", "train_step"),
)
INTRODUCTION = """# Benchmarks

Figures that compare two things were taken in turn in one run, on the machine that each section names; on another
machine the ratios carry over better than the rates.
"""


def main() -> None:
    """Run what was asked for, and write one Markdown file."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--output", type=Path, help="a Markdown file; default: print only")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if options.names and options.output:
        parser.error("--output takes all of them: some alone would leave the file without the others")
    sections = [INTRODUCTION]
    for name in options.names or BENCHMARKS:
        print(f"bench.{name} …", file=sys.stderr, flush=True)
        finished = subprocess.run([sys.executable, "-m", f"bench.{name}"], stdout=subprocess.PIPE, text=True)
        if finished.returncode:
            sys.exit(f"error: bench.{name} failed with exit code {finished.returncode}; its message is above.")
        print(finished.stdout, flush=True)
        sections.append(finished.stdout.strip() + "\n")
    if options.output:
        options.output.write_text("\n".join(sections))


if __name__ == "__main__":
    main()
