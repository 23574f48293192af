"""Measure how slow bfloat16 and float16 are on this CPU, as `precision: auto` does: `python -m bench.precision`."""

import torch

from bench.kit.common import machine
from shards.base.device import cpu_slowdown, resolve_precision


def main() -> None:
    """Print the instruction set in use, the slowdown of each type, and the precision that `auto` resolves to."""
    print(machine())
    print(f"ATen uses {torch.backends.cpu.get_cpu_capability()}")
    for precision in ("bfloat16", "float16"):
        print(f"{precision}: {cpu_slowdown(precision):.2f} × the time of float32")
    resolve_precision("auto", "cpu", print)


if __name__ == "__main__":
    main()
