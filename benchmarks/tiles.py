"""How long the search for the best tiles takes: every algorithm and pass, several (N, d, M).

    python benchmarks/tiles.py            # some seconds

Each search runs five times, and the median of its CPU time counts, which other programs on the
computer disturb little; of each size the slowest pass is printed, with the requirement. Chips are
those of GPUs, and one of 4 M elements that no GPU has.
"""

import statistics
import time
from functools import partial

from flashsim.algorithms import ALGORITHMS
from flashsim.cost.counts import Head
from flashsim.cost.devices import device
from flashsim.cost.tiles import STEPS, choices, optimal
from flashsim.masks import Mask

REQUIRED_MS = 50
CHIPS = {
    "T4, 64 KB": device("t4").sram_bytes_per_block // 2,
    "A100, 163 KB": device("a100").sram_bytes_per_block // 2,
    "H200, 227 KB": device("h200").sram_bytes_per_block // 2,
    "4 M elements": 2**22,
}


def passes(N, d):
    """Every pass of the registry that has tiles of its own, by name."""
    for choice in choices(N, d, 2**22):
        if choice.rule == "optimal":
            name = choice.algorithms[0]
            row = ALGORITHMS[name]
            yield (
                f"{name}{', backward' if choice.backward else ''}",
                row.backward["literal"] if choice.backward else row,
            )


def milliseconds(run):
    """The median CPU time of five runs."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return 1e3 * statistics.median(seconds)


def main():
    worst = 0.0
    print(f"{'N':>9} {'d':>4} {'M, float16':>14}   slowest search of all passes")
    for N in (1024, 4096, 65536, 2**20):
        for d in (64, 128):
            rows = list(passes(N, d))
            for chip, M in CHIPS.items():
                head = Head(Mask(N, N), d, d)
                times = {
                    f"{name}, {rule}": milliseconds(partial(optimal, row, head, M, step=step))
                    for name, row in rows
                    for rule, step in STEPS.items()
                }
                slowest = max(times, key=times.get)
                worst = max(worst, times[slowest])
                print(f"{N:>9} {d:>4} {chip:>14}   {times[slowest]:5.1f} ms  {slowest}")
    print(f"\nslowest of all: {worst:.1f} ms (required: < {REQUIRED_MS})")


if __name__ == "__main__":
    main()
