"""keep_freed_memory: what a read has freed is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGES = 5 * 8 * (4 << 20) // 4096
SCRIPT = """
import resource
import numpy as np
from ray_lance_stream import allocator

assert allocator.keep_freed_memory()

def allocate():
    for _ in range(5):
        [np.full(4 << 20, 1, np.uint8) for _ in range(8)]

def faults(run):
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

allocate()
print(faults(allocate))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_memory_is_not_given_back_between_reads():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < PAGES / 20
