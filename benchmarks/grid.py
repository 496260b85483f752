"""A grid of closed forms: 100,000 points in how many seconds, on one core.

    OPENBLAS_NUM_THREADS=1 python benchmarks/grid.py

Four grids of about that size, one for each way to vary what costs most: the tiles are given, or
sought for each chip, or the best ones are sought at each point; or many GPUs share each count.
"""

import time

from flashsim.cost.devices import DEVICES
from flashsim.cost.grid import grid

REQUIRED = 5.0  # seconds, of the first two


def main():
    grids = {
        "tiles given: 7 N, 3 d, 40 Br, 40 Bc": {
            "N": "1024:65536:x2", "d": "32,64,128", "M": 100_000, "Br": "8:320:8", "Bc": "8:320:8",
        },
        "strict tiles: 50 N, 3 d, 223 M": {
            "N": "1000:1049:1", "d": "32,64,128", "M": "20000:86600:300",
        },
        "optimal tiles: 50 N, 3 d, 223 M": {
            "N": "1000:1049:1", "d": "32,64,128", "M": "20000:86600:300", "rule": "optimal",
        },
        f"strict tiles: 7 N, 3 d, 123 M, {len(DEVICES)} GPUs": {
            "N": "1024:65536:x2", "d": "32,64,128", "M": "20000:81000:500",
            "devices": list(DEVICES),
        },
    }  # fmt: skip
    for n, (what, axes) in enumerate(grids.items()):
        start, busy = time.perf_counter(), time.process_time()
        points = grid(["standard", "flash1", "flash2"], **axes)
        wall, cpu = time.perf_counter() - start, time.process_time() - busy
        required = f"(required: < {REQUIRED:g} s for 100,000)" if n < 2 else ""
        each = 1e6 * wall / len(points)
        print(f"{what:<44} {len(points):7} points {wall:6.2f} s ({cpu:.2f} s of CPU), "
              f"{each:5.1f} µs a point {required}")  # fmt: skip


if __name__ == "__main__":
    main()
