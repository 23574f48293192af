"""Run the benchmarks of both stages, each in its own process: `python -m bench --output runs/benchmarks.md`.

Use an otherwise idle machine. If a benchmark fails, nothing is written.
"""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("pixels", "worker", "encode", "index.epoch_plan", "index.publishing", "loader", "train_step")
INTRODUCTION = """# Benchmarks

The two sides of each comparison were timed alternately in one run, on the machine that each section names. On other
machines the ratios carry over better than the rates.
"""


def main() -> None:
    """Run the requested benchmarks, and write one Markdown file."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"There is no benchmark {', '.join(unknown)}. Choose from {', '.join(BENCHMARKS)}.")
    if options.names and options.output:
        parser.error(
            "--output needs all benchmarks, because the file would otherwise lack sections. Omit the names or --output."
        )
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
