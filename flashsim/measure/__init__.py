"""Runs the kernels on a GPU, times them, reads hardware counters, and compares with the model.

`bench.bench` makes a data set; `compare` holds one, by default the recorded one, against `io_cost`.
Only the first needs a GPU, Numba and, for counters, Nsight Compute.
"""

from .compare import Comparison, compare, rank_correlation, recorded
from .counters import parse_csv

__all__ = ["Comparison", "compare", "parse_csv", "rank_correlation", "recorded"]
