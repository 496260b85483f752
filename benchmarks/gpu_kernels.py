"""The kernels on a GPU: right, how fast beside their peers, and how many bytes they really move.

    python benchmarks/gpu_kernels.py --out results.json             # checks and times
    python benchmarks/gpu_kernels.py --out results.json --counters  # and Nsight Compute's bytes

Needs PyTorch, which also makes the inputs and the peers; --counters needs `ncu` and the right to
read counters. Timing and counting are flashsim.measure's; `flashsim bench` times the kernels over
their tiles.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from numba import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsim as fs
from flashsim import kernels
from flashsim.kernels.warpgroup_tiles import FP8_ROWS
from flashsim.measure.bench import header
from flashsim.measure.counters import command, parse_csv
from flashsim.measure.timing import compile_steps, compilers, milliseconds

BIG = (4, 16, 4096, 64)
WIDE = (2, 16, 4096, 128)

# (algorithm, shape, dtype, tiles, further arguments): what ncu looks at
COUNTED = [
    ("flash2", BIG, "float32", (128, 64), {}),
    ("flash2", BIG, "float32", (64, 64), {}),
    ("flash2", BIG, "float16", (128, 64), {}),
    ("flash2", BIG, "float32", (128, 64), {"is_causal": True}),
    ("flash2", WIDE, "float32", (128, 64), {}),
    ("flash2", WIDE, "float32", (64, 32), {}),
    ("flash1", BIG, "float32", (128, 128), {}),
    ("flash1", BIG, "float32", (64, 64), {}),
    ("flash1", WIDE, "float32", (64, 64), {}),
    ("standard", (1, 16, 4096, 64), "float32", (128, 64), {}),
    ("ampere", BIG, "float16", (128, 64), {}),
    ("ampere", WIDE, "float16", (128, 64), {"is_causal": True}),
]
MODELLED = {"ampere": "flash2"}  # by the closed form of another name
# (algorithm, backward, shape, is_causal), in float16 with the tiles that a call picks
TENSOR_CORES = [
    (algorithm, backward, shape, is_causal)
    for algorithm in ("hopper", "ampere")
    for shape in (BIG, WIDE)
    for is_causal in ((False, True) if algorithm == "hopper" else (False,))
    for backward in (False, True)
]
TENSOR_CORES += [("hopper_fp8", False, WIDE, is_causal) for is_causal in (False, True)]

COUNTING = "counting "

SMALL = (2, 4, 2048, 64)
CHECKED = [
    *(("flash2", SMALL, dtype, {}) for dtype in ("float32", "float16", "bfloat16")),
    *((algorithm, SMALL, "float32", {}) for algorithm in ("standard", "flash1", "split_kv")),
    ("flash2", (2, 4, 2000, 64), "float32", {"is_causal": True}),
]
LONG = (1, 1, 131072, 64)
# (shape, dtype, is_causal, [(algorithm, tiles)])
TIMED = [
    (
        BIG,
        "float32",
        False,
        [("flash2", (128, 64)), ("standard", (128, 64)), ("flash1", (128, 128))],
    ),
    (BIG, "float32", True, [("flash2", (128, 64))]),
    (BIG, "float16", False, [("flash2", (128, 64))]),
    (WIDE, "float32", False, [("flash2", (128, 64))]),
    (LONG, "float32", False, [("flash2", (128, 64))]),
]
BACKWARD = ("flash2", "flash2-two-kernel", "flash1")
DECODING = (8, 16, 32768, 64)
DECODED = [
    ("split_kv", (1, 64)), ("split_kv", (4, 64)), ("split_kv", (4, 32)), ("flash2", (16, 64)),
]  # fmt: skip


def normal(shape, dtype, seed):
    """Normal numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, dtype))


def inputs(shape, dtype, seed=0):
    """q, k, v of normal numbers."""
    return tuple(normal(shape, dtype, 3 * seed + n) for n in range(3))


def unfused(q, k, v, is_causal=False):
    """Standard attention as three PyTorch operations."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(s, -1) @ v


def sdpa(backend):
    """PyTorch's fused attention by one of its backends."""

    def run(q, k, v, is_causal=False):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


def timed(name, calls, flops):
    """A row of the table; a contestant that does not run says why."""
    try:
        time = milliseconds(calls, seconds=0.3)
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
    median = time["ms"]
    row = {"name": name, **time, "tflops": flops / median / 1e9}
    print(f"{name:58s} {median:9.3f} ms  {row['tflops']:7.1f} TFLOP/s", flush=True)
    return row


def plans(shape, dtype, **what):
    """The kernel's launches on three sets of inputs."""
    return [kernels.plan(*inputs(shape, dtype, seed), **what) for seed in range(3)]


def forward_times(shape, dtype, is_causal, algorithms):
    """Every kernel and every peer on one shape."""
    B, H, N, d = shape
    flops = 4 * B * H * N * N * d * (0.5 if is_causal else 1)
    label = f"{B},{H},{N},{d} {dtype}{' causal' if is_causal else ''}"
    rows = []
    for algorithm, tiles in algorithms:
        made = plans(shape, dtype, algorithm=algorithm, tiles=tiles, is_causal=is_causal)
        tile = made[0].tile
        name = f"{algorithm} {tile.Br}x{tile.Bc} | {label}"
        rows.append(timed(name, [p.launch for p in made], flops))
        if algorithm == "standard":
            for step in made[0].steps:
                alone = dataclasses.replace(made[0], steps=[step])
                rows.append(timed(f"  of which {step.name} | {label}", [alone.launch], flops))
        del made
        torch.cuda.empty_cache()
    peers = {
        "torch unfused": unfused,
        "torch SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "torch SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "torch SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    sets = [inputs(shape, dtype, seed) for seed in range(3)]
    for name, peer in peers.items():
        calls = [lambda x=x, peer=peer: peer(*x, is_causal=is_causal) for x in sets]
        rows.append(timed(f"{name} | {label}", calls, flops))
    return rows


def backward_times(shape, dtype):
    """The backward pass beside PyTorch's; 10 N^2 d operations a head, whatever is recomputed."""
    B, H, N, d = shape
    label = f"{B},{H},{N},{d} {dtype}"
    flops = 10 * B * H * N * N * d
    q, k, v = inputs(shape, dtype)
    do = torch.randn_like(q)
    out = kernels.attention(q, k, v)
    rows = []
    for algorithm in BACKWARD:
        made = kernels.plan_backward(q, k, v, out.output, out.lse, do, algorithm=algorithm)
        rows.append(timed(f"{algorithm} backward | {label}", [made.launch], flops))
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    for name, backend in {
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
    }.items():

        def both(backend=backend):
            with sdpa_kernel(backend):
                o = torch.nn.functional.scaled_dot_product_attention(*x)
            return lambda: torch.autograd.grad(o, x, do, retain_graph=True)

        try:
            call = both()
        except RuntimeError as error:
            rows.append({"name": f"SDPA {name} backward | {label}", "error": str(error)[:200]})
            continue
        rows.append(timed(f"torch SDPA {name} backward | {label}", [call], flops))
    return rows


def decode_times(batch, heads, N, d, dtype):
    """One query against N keys: the bytes of K and V bind."""
    q, k, v = (normal((batch, heads, n, d), dtype, seed) for seed, n in enumerate((1, N, N)))
    label = f"decode {batch},{heads},{N},{d} {dtype}"
    flops = 4 * batch * heads * N * d
    rows = []
    for algorithm, tiles in DECODED:
        made = kernels.plan(q, k, v, algorithm=algorithm, tiles=tiles)
        name = f"{algorithm} {tiles[0]}x{tiles[1]} | {label}"
        rows.append(timed(name, [made.launch], flops))
    rows.append(
        timed(
            f"torch SDPA | {label}",
            [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)],
            flops,
        )
    )
    return rows


def errors(shape, dtype, algorithm, **what):
    """Largest error against float64, of the kernel and of unfused PyTorch in the same type."""
    q, k, v = inputs(shape, dtype)
    exact = unfused(*(x[:1, :4].double() for x in (q, k, v)), **what)
    out = kernels.attention(q, k, v, algorithm=algorithm, **what)
    again = kernels.attention(q, k, v, algorithm=algorithm, **what)

    def far(output):
        return (output[:1, :4].double() - exact).abs().max().item()

    row = {
        "algorithm": algorithm,
        "shape": shape,
        "dtype": dtype,
        **what,
        "error": far(out.output),
        "error_unfused": far(unfused(q, k, v, **what)),
        "same_bits_twice": bool(torch.equal(out.output, again.output)),
    }
    print(row, flush=True)
    return row


def compile_one(job):
    """Compile the kernels of a call, or of its backward pass."""
    algorithm, (_, _, N, d), dtype, what, queries, backward = job
    q, k, v = (normal((1, 1, n, d), dtype, 0) for n in (queries or N, N, N))
    if backward:
        lse = torch.zeros(q.shape[:-1], device="cuda")
        made = kernels.plan_backward(q, k, v, q, lse, q, algorithm=algorithm)
    else:
        made = kernels.plan(q, k, v, algorithm=algorithm, **what)
    compile_steps(made.steps)


def jobs():
    """What `compile_one` is told, for all that is launched below."""
    found = [(*case, None, False) for case in CHECKED]
    for shape, dtype, is_causal, algorithms in TIMED:
        for algorithm, tiles in algorithms:
            what = {"tiles": tiles, "is_causal": is_causal}
            found.append((algorithm, shape, dtype, what, None, False))
    for algorithm, shape, dtype, tiles, what in COUNTED:
        found.append((algorithm, shape, dtype, {"tiles": tiles, **what}, None, False))
    found += [(a, DECODING, "float32", {"tiles": tiles}, 1, False) for a, tiles in DECODED]
    return found + [(a, BIG, "float32", {}, None, True) for a in BACKWARD]


def compile_ahead():
    """Compile it, in processes beside each other, which keep it on disk."""
    with ProcessPoolExecutor(compilers(), get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, job) for job in jobs()]:
            done.result()


def launch_counted():
    """What runs under ncu: each case once, in order."""
    for algorithm, shape, dtype, tiles, what in COUNTED:
        made = kernels.plan(*inputs(shape, dtype), algorithm=algorithm, tiles=tiles, **what)
        torch.cuda.synchronize()
        with cuda.profiling():
            for step in made.steps:
                if step.name != "finish":  # of flash1, in no closed form
                    dataclasses.replace(made, steps=[step]).launch()
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    for case in TENSOR_CORES:
        made = tensor_plan(*case)
        tiles = made.tile.Br, made.tile.Bc
        print(COUNTING + json.dumps([tiles, [step.name for step in made.steps]]), flush=True)
        torch.cuda.synchronize()
        with cuda.profiling():
            made.launch()
            torch.cuda.synchronize()
        del made


def tensor_plan(algorithm, backward, shape, is_causal):
    """The launches of a case of TENSOR_CORES."""
    what = {"algorithm": algorithm, "is_causal": is_causal}
    q, k, v = inputs(shape, "float16")
    if not backward:
        return kernels.plan(q, k, v, **what)
    lse = torch.full(q.shape[:-1], 9.0, device="cuda")
    return kernels.plan_backward(q, k, v, torch.randn_like(q), lse, torch.randn_like(q), **what)


def tensor_model(algorithm, backward, shape, is_causal, tiles):
    """Bytes into and out of the multiprocessors by launch: FlashAttention-2's, shared out."""
    B, H, N, d = shape
    Br, Bc = reversed(tiles) if backward and algorithm == "ampere" else tiles  # keys are its rows
    fp8 = {"fp8": FP8_ROWS} if algorithm == "hopper_fp8" else {}
    cost = fs.io_cost(
        "flash3-fp8" if fp8 else "flash2", N=N, d=d, Br=Br, Bc=Bc, heads=H, batch=B,
        dtype="float16", backward=backward, is_causal=is_causal, **fp8,
    )  # fmt: skip
    rows, numbers, reads, writes = B * H * N, B * H * N * d, cost.reads, cost.writes
    if fp8:  # with scales, and signs of columns, of which a block has few
        before = (2 * numbers, numbers + 4 * rows // FP8_ROWS)
        attention = (cost.read_bytes, cost.written_bytes)
        return {f"{x} in FP8": before for x in "QKV"} | {"hopper": attention}
    if not backward:
        return {algorithm: (cost.read_bytes, cost.written_bytes)}
    read_again = reads["Q"] + reads["K"] + reads["V"] + reads["dO"] - numbers
    added = writes["dQ"] - numbers  # in the L2: it enters no multiprocessor
    statistics = 2 if algorithm == "hopper" else 1  # of a row: D, and L in another base
    return {
        "zeros": (0, 4 * numbers),
        "D": (2 * 2 * numbers + 4 * rows * (statistics - 1), 4 * rows * statistics),
        f"{algorithm}_backward": (
            2 * read_again + 4 * (reads["L"] + reads["D"]),
            4 * added + 2 * (writes["dK"] + writes["dV"]),
        ),
        "finish" if algorithm == "hopper" else "round": (4 * numbers, 2 * numbers),
    }


def tensor_rows(made, launches):
    """Of each case, [(tiles, names of its launches)], what was counted beside the model."""
    rows, left = [], iter(launches)
    for case, (tiles, names) in zip(TENSOR_CORES, made, strict=True):
        model = tensor_model(*case, tiles)
        algorithm, backward, shape, is_causal = case
        what = {"algorithm": algorithm, "backward": backward, "shape": shape}
        what |= {"is_causal": is_causal, "dtype": "float16", "tiles": tiles}
        for name in names:
            found, (read, written) = next(left), model[name]
            ratio = {
                "read_ratio": found["sm_read_bytes"] / read if read else None,
                "write_ratio": found["sm_written_bytes"] / written,
            }
            moved = {"model_read_bytes": read, "model_written_bytes": written}
            counted = {name: x for name, x in found.items() if name != "kernel"}
            rows.append({**what, "step": name, **moved, **ratio, **counted})
    return rows


def counters():
    """Bytes that ncu counts for each case, beside the closed form."""
    program = [sys.executable, __file__, "--launch-counted"]
    done = subprocess.run(command(program), capture_output=True, text=True)
    said = done.stdout + done.stderr
    try:
        found = parse_csv(said)
    except ValueError as error:
        return [{"error": str(error)}]
    rows, lines = [], said.splitlines()
    made = [json.loads(x.removeprefix(COUNTING)) for x in lines if x.startswith(COUNTING)]
    for algorithm, shape, dtype, tiles, what in COUNTED:
        B, H, N, d = shape
        launches_of_it = 3 if algorithm == "standard" else 1
        mine, found = found[:launches_of_it], found[launches_of_it:]
        cost = fs.io_cost(
            MODELLED.get(algorithm, algorithm),
            N=N, d=d, Br=tiles[0], Bc=tiles[1], heads=H, batch=B, dtype=dtype, **what,
        )  # fmt: skip
        moved = ("sm_read_bytes", "sm_written_bytes", "dram_read_bytes", "dram_written_bytes")
        total = {name: sum(m[name] for m in mine) for name in moved}
        rows.append(
            {
                "algorithm": algorithm, "shape": shape, "dtype": dtype, "tiles": tiles, **what,
                "model_read_bytes": cost.read_bytes, "model_written_bytes": cost.written_bytes,
                "measured": total, "launches": mine,
                "read_ratio": total["sm_read_bytes"] / cost.read_bytes,
                "write_ratio": total["sm_written_bytes"] / cost.written_bytes,
            }
        )  # fmt: skip
        shown = {
            k: rows[-1][k]
            for k in ("algorithm", "shape", "dtype", "tiles", "read_ratio", "write_ratio")
        }
        print(shown, what, flush=True)
    return rows + tensor_rows(made, found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_kernels.json")
    parser.add_argument("--counters", action="store_true")
    parser.add_argument("--only-counters", action="store_true")
    parser.add_argument("--launch-counted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch_counted:
        return launch_counted()
    torch.backends.cuda.matmul.allow_tf32 = False
    result = {"header": header(flush=False), "times": [], "errors": [], "counters": []}

    def save():
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)

    compile_ahead()
    if not options.only_counters:
        for algorithm, shape, dtype, what in CHECKED:
            result["errors"].append(errors(shape, dtype, algorithm, **what))
        for case in TIMED:
            result["times"] += forward_times(*case)
            save()
        result["times"] += backward_times(BIG, "float32")
        result["times"] += decode_times(*DECODING, "float32")
        save()
    if options.counters or options.only_counters:
        result["counters"] = counters()
    save()
    return None


if __name__ == "__main__":
    main()
