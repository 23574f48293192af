"""How a process keeps memory."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from shards.base.pool import configure_malloc

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        small = [torch.ones(1 << 20) for _ in range(8)]  # 4 MB each
        del small
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
configure_malloc()
faults()
print(given_back, faults())
"""


def test_memory_that_is_freed_is_not_faulted_in_again() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    given_back, kept = map(int, said.split())
    assert kept < given_back / 10, said
