"""Compiles first, in processes beside each other: it takes nearly all the time.

Each of them runs a share of the tests, whatever comes of it, and so leaves its kernels on disk.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FEW = 8  # tests that are not worth it
AHEAD = "FLASHSIM_COMPILES_AHEAD"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    here = Path(__file__).parent
    names = [item.nodeid for item in session.items if item.path.parent == here]
    if len(names) <= FEW or {AHEAD, "PYTEST_XDIST_WORKER"} & set(os.environ) or not usable():
        return
    workers = max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen(
            [*command, *names[n::workers]],
            cwd=session.config.rootpath, env=os.environ | {AHEAD: "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for n in range(min(workers, len(names)))
    ]  # fmt: skip
    for process in running:
        process.wait()


def usable():
    """Whether there is a GPU to compile for."""
    try:
        from flashsim.kernels import gpu
    except ImportError:
        return False
    return not gpu.SIMULATED and not gpu.available()
