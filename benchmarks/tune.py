"""Which tiles a kernel on tensor cores should have on this GPU: all are tried, the fastest told.

    python benchmarks/tune.py --out tiles.json    # some minutes, half of them compiling
    python benchmarks/tune.py --predict           # no GPU: hopper's candidates, and predictions

It is `hopper` on compute capability 9.0 and `ampere` elsewhere, unless --algorithm says which. The
candidates are all that fit in shared memory. hopper: 128 or 192 queries, 64 keys or more, two
stages or three, as many as leave a thread room for its results; the consumers take turns. ampere:
64 or 128 queries, 32, 64 or 128 keys, 4 or 8 warps. Each is held against the plain kernel's answer,
and timed at 16,384 tokens; hopper's beside the time that flashsim.cost.schedule allows it: its
pipeline alone, at peak rates, with two consumers.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from flashsim import kernels
from flashsim.cost.devices import device
from flashsim.cost.schedule import tile_times, timeline
from flashsim.kernels import ampere, gpu
from flashsim.kernels.warp_tiles import WarpTile
from flashsim.kernels.warpgroup_tiles import WarpgroupTile
from flashsim.measure.bench import header, require_gpu
from flashsim.measure.timing import compile_steps, compilers, inputs, milliseconds

HOPPER_ROOM = 227 * 1024  # bytes of shared memory of a block, on compute capability 9.0
WIDTHS, TOKENS, MODEL = (64, 128), 16384, 2048  # MODEL: heads x d
LENGTHS = (2048, 8192)
FAR = 4e-3  # from the plain kernel, at most: a few roundings of float16


def candidates(algorithm, d, room=HOPPER_ROOM):
    """Tiles that fit in so many bytes of shared memory, hopper's without a spill."""
    if algorithm == "ampere":
        return [t for t in warp_tiles(d) if ampere.arrangement(t)["bytes"] <= room]
    sizes = product((128, 192), range(64, 192, 16), (2, 3))
    tiles = [WarpgroupTile(Br, Bc, d, stages, ping_pong=True) for Br, Bc, stages in sizes]
    return [t for t in tiles if t.held <= t.registers[1] and t.bytes <= room]


def warp_tiles(d):
    """Those of ampere that can be had at all."""
    for Br, Bc, warps in product((64, 128), (32, 64, 128), (4, 8)):
        with suppress(ValueError):
            yield WarpTile(Br, Bc, d, warps)


def shape(N, d):
    """(batch, heads, N, d) of so many tokens of a model."""
    return TOKENS // N, MODEL // d, N, d


def predicted_ms(tile, N, is_causal, preset):
    """Milliseconds that the pipeline takes at least: each SM its share of the blocks' time."""
    batch, heads, _, d = shape(N, tile.d)
    times = tile_times(preset, tile.Br, tile.Bc, d)
    lengths = [
        -(-(min(i + tile.Br, N) if is_causal else N) // tile.Bc) for i in range(0, N, tile.Br)
    ]
    cycles = {n: timeline("both", times, n).total_cycles for n in set(lengths)}
    whole = batch * heads * sum(cycles[n] for n in lengths)
    return 1e3 * whole / preset.sm_count / preset.boost_clock_hz


def compile_one(algorithm, tile, is_causal):
    """Compile a candidate, which stays on disk."""
    x = np.zeros((1, 1, 256, tile.d), "float16")
    what = {"algorithm": algorithm, "tile": tile, "is_causal": is_causal}
    compile_steps(kernels.plan(x, x, x, **what).steps)


def compile_plain(d, is_causal):
    """Compile the plain kernel, which each is held against."""
    x = np.zeros((1, 1, 256, d), "float16")
    compile_steps(kernels.plan(x, x, x, is_causal=is_causal).steps)


def compile_ahead(algorithm, widths, room):
    """Compile all of them, in processes beside each other."""
    tiles = [tile for d in widths for tile in candidates(algorithm, d, room)]
    with ProcessPoolExecutor(compilers(), get_context("spawn")) as pool:
        jobs = product([algorithm], tiles, (False, True))
        compiled = [pool.submit(compile_one, *job) for job in jobs]
        compiled += [pool.submit(compile_plain, *job) for job in product(widths, (False, True))]
        for done in compiled:
            done.result()


def error(algorithm, tile, is_causal):
    """The largest distance from the plain kernel, on ragged sizes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, tile.d)).astype("float16") for n in (1000, 1100, 1100))
    plan = kernels.plan(q, k, v, algorithm=algorithm, tile=tile, is_causal=is_causal)
    plan.launch()
    plain = kernels.attention(q, k, v, is_causal=is_causal).output
    return float(np.abs(plan.result("O").astype(float) - plain.astype(float)).max())


def row(algorithm, tile, N, is_causal, preset, measure):
    """A candidate at one length."""
    found = {"algorithm": algorithm, **asdict(tile), "N": N, "is_causal": is_causal}
    if algorithm == "hopper":
        found["predicted_ms"] = predicted_ms(tile, N, is_causal, preset)
    if measure:
        what = {"algorithm": algorithm, "tile": tile, "is_causal": is_causal}
        q, k, v, _ = inputs(shape(N, tile.d), N, "float16", sets=1)[0]
        found |= milliseconds([kernels.plan(q, k, v, **what).launch])
    return found


def shown(r):
    """A line of the table."""
    flops = 4 * TOKENS * MODEL * r["N"] * (0.5 if r["is_causal"] else 1)
    took = f"{r['ms']:8.3f} ms {flops / r['ms'] / 1e9:5.0f} TFLOP/s" if "ms" in r else ""
    what, many = ("stages", r["stages"]) if "stages" in r else ("warps", r["warps"])
    expected = f" predicted {r['predicted_ms']:7.3f} ms" if "predicted_ms" in r else ""
    return (
        f"{r['algorithm']} d={r['d']:<3} N={r['N']:<5} {'causal' if r['is_causal'] else '':6} "
        f"{r['Br']:3} x {r['Bc']:<3} {many} {what}{expected} {took}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="tiles.json")
    parser.add_argument("--predict", action="store_true", help="measure nothing; hopper")
    parser.add_argument("--algorithm", choices=("hopper", "ampere"))
    presets = ("h200", "h100", "h100-pcie")
    parser.add_argument("--gpu", default="h200", choices=presets, help="which is predicted for")
    lengths = [TOKENS >> n for n in range(9)]
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, choices=lengths)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, choices=WIDTHS)
    options = parser.parse_args()
    if not Path(options.out).absolute().parent.is_dir():
        parser.error(f"--out {options.out}: there is no such folder")
    preset, algorithm, room = device(options.gpu), options.algorithm or "hopper", HOPPER_ROOM
    if options.predict and algorithm == "ampere":
        sys.exit("tune: --predict is for --algorithm hopper, whose pipeline is simulated")
    if not options.predict:
        try:
            require_gpu()
        except OSError as missing:
            reason = str(missing).removeprefix("bench: ")
            sys.exit(f"tune: {reason}; --predict needs no GPU")
        if gpu.compute_capability() != (9, 0):
            algorithm = options.algorithm or "ampere"
        has = gpu.compute_capability()
        if has < (8, 0) or (algorithm == "hopper" and has != (9, 0)):
            needed = "9.0" if algorithm == "hopper" else "8.0 or more"
            found = ".".join(map(str, has))
            sys.exit(f"tune: {algorithm} needs compute capability {needed}, this GPU has {found}")
        room = gpu.shared_memory_bytes()
        compile_ahead(algorithm, options.widths, room)
    rows, chosen = [], []
    for d, is_causal in product(options.widths, (False, True)):
        tiles = candidates(algorithm, d, room)
        if not options.predict:
            tiles = [t for t in tiles if error(algorithm, t, is_causal) <= FAR]
        for N in options.lengths:
            found = [row(algorithm, t, N, is_causal, preset, not options.predict) for t in tiles]
            found.sort(key=lambda r: r["ms" if "ms" in r else "predicted_ms"])
            rows += found
            chosen.append(found[0])
            print(*map(shown, found[:5]), sep="\n", flush=True)
    if not options.predict:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(
                {"header": header(flush=False), "chosen": chosen, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
