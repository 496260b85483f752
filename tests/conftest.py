"""Hypothesis profiles, and processes for kernels that several files of tests start.

The default profile keeps the suite short; `HYPOTHESIS_PROFILE=deep` digs.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from kernel_process import KernelProcess

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=slow)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module")
def hopper():
    """hopper(name, ...): a function of tests/hopper_kernels.py, in Numba's simulator."""
    process = KernelProcess(simulated=True)
    yield lambda name, *args, **kwargs: process.call(
        "elsewhere", "hopper_kernels", name, *args, **kwargs
    )
    process.close()


@pytest.fixture(scope="module")
def compiler():
    """A process that compiles and assembles."""
    pytest.importorskip("cuda.core", reason="the assembler comes with numba-cuda[cu13]")
    process = KernelProcess(simulated=False)
    yield process
    process.close()
