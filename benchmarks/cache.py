"""How fast the L2 is simulated: tile accesses a second of one core, beside pycachesim's.

    python benchmarks/cache.py           # half a minute; pip install pycachesim for its lines

Accesses are those of FlashAttention-2 on an H200, N = 131,072, d = 128, two heads, float16. Ours is
timed whole, the schedule of the blocks in flight included, and the cache alone over a trace that is
there. pycachesim gets that trace with a cache line for a tile: 128 sets of 16 ways hold about as
many lines as 60 MB hold tiles, but are not the exact LRU, for which it takes one set. Seconds are
those of the process on a core; contestants take turns, and the median counts.
"""

import platform
import statistics
import time

import numpy as np

from flashsim.cost.blocks import blocks, call
from flashsim.cost.cache import Cache, dram_cost
from flashsim.cost.devices import device
from flashsim.cost.trace import numbered, program, trace

SIZES = {"N": 131072, "d": 128, "heads": 2, "Br": 128, "Bc": 64, "dtype": "float16"}
REQUIRED = 20e6
LINE = 64
SETS, WAYS = 128, 16
SHORT = 200_000  # accesses, for what is slow


def recorded_trace():
    """The accesses, and the bytes of each tile."""
    asked = call("flash2", **SIZES)
    (launch,) = asked.launches
    tiles, elements, _ = numbered(asked, list(launch.arrays))
    run = program(launch, asked.grid, blocks(launch, asked.grid, 2), tiles, 1)
    slots = device("h200").sm_count
    pieces = [x.copy() for x in trace(run, slots, alternating=False, jitter=0.0, seed=0)]
    return np.concatenate(pieces), 2 * elements


def pycachesim(sets, ways):
    """One LRU level of pycachesim."""
    from cachesim import Cache as Level
    from cachesim import CacheSimulator, MainMemory

    memory, level = MainMemory(), Level("L2", sets, ways, LINE, "LRU")
    memory.load_to(level)
    memory.store_from(level)
    return CacheSimulator(level, memory), level


def core_seconds(run):
    """What a call takes of a core."""
    start = time.process_time()
    run()
    return time.process_time() - start


def report(what, accesses, seconds, note=""):
    print(f"{what:<58} {accesses / seconds / 1e6:8.1f} M/s  {note}")


def main():
    entries, sizes = recorded_trace()
    l2 = device("h200").l2_bytes
    n = len(entries)
    contestants = {
        "whole": lambda: dram_cost("flash2", **SIZES),
        "whole, random": lambda: dram_cost("flash2", **SIZES, policy="random"),
        "lru": lambda: Cache(sizes, l2).replay(entries),
        "random": lambda: Cache(sizes, l2, "random").replay(entries),
    }
    addresses = entries // 2 * LINE
    try:
        simulator, level = pycachesim(SETS, WAYS)
        as_list = addresses.tolist()
        contestants["list"] = lambda: level.backend.iterload(as_list)
        contestants["array"] = lambda: level.backend.iterload(addresses)
    except ImportError:
        simulator = None
    seconds = {name: [] for name in contestants}
    for turn in range(6):
        for name, run in contestants.items():
            taken = core_seconds(run)
            if turn:  # the first may compile
                seconds[name].append(taken)
    took = {name: statistics.median(all_turns) for name, all_turns in seconds.items()}
    print(f"{n:,} tile accesses; {platform.processor() or platform.machine()}, one core")
    report("schedule and exact LRU", n, took["whole"], f"(required: {REQUIRED / 1e6:.0f})")
    report("schedule and random replacement", n, took["whole, random"])
    report("exact LRU alone", n, took["lru"])
    report("random replacement alone", n, took["random"])
    if simulator is None:
        print("pycachesim is not installed")
        return
    report(f"pycachesim, {SETS} sets x {WAYS} ways, iterload of a list", n, took["list"])
    report(f"pycachesim, {SETS} sets x {WAYS} ways, iterload of an array", n, took["array"])
    loop = core_seconds(lambda: [simulator.load(address) for address in as_list[:SHORT]])
    report(f"pycachesim, {SETS} sets x {WAYS} ways, a Python loop", SHORT, loop)
    _, exact = pycachesim(1, SETS * WAYS)
    one_set = core_seconds(lambda: exact.backend.iterload(as_list[:SHORT]))
    report("pycachesim, exact LRU (one set), iterload of a list", SHORT, one_set)


if __name__ == "__main__":
    main()
