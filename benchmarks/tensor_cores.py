"""The kernels for tensor cores beside PyTorch's, on this GPU: time, error, and the decoding rate.

    python benchmarks/tensor_cores.py --out tensor-cores.json

Needs PyTorch. In each case the contestants take turns, call by call, in one process; the median of
each counts, and the ratio is the peer's over ours. Errors are the largest against float64, on
normal numbers and on six times as large ones, beside those of PyTorch's flash backend. Forward and
backward at 16,384 tokens and 2048 columns of heads; decoding one query a head, eight heads to a
key head, beside a copy. FP8 with and without what brings 16-bit numbers there; its errors are root
mean squares, on normal numbers of which one in a thousand has one ten times as large added.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tune import MODEL, TOKENS, predicted_ms

from flashsim import kernels
from flashsim.cost.devices import device
from flashsim.kernels import gpu
from flashsim.measure.bench import header, require_gpu
from flashsim.measure.timing import compile_steps, compilers

OURS, FP8 = ("hopper", "ampere"), ("hopper_fp8", "hopper")
LENGTHS, DECODED = (1024, 2048, 4096, 8192, 16384), (65536, 131072)
FLEX_LENGTHS = (4096, 16384)  # each is compiled anew, which takes long
ROUNDS, PAUSE_CYCLES = 40, 1_000_000
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def normal(*shape, dtype=torch.float16):
    """Normal numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def with_backend(backend, q, k, v, **what):
    """PyTorch's fused attention by one of its backends."""
    with sdpa_kernel(backend):
        return sdpa(q, k, v, **what)


def medians(calls):
    """Milliseconds of each contestant by name, in turns; of one that does not run, the reason."""
    errors, times = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for name, found in times.items():
            calls[name]()
            torch.cuda._sleep(PAUSE_CYCLES)  # meanwhile Python launches the timed call
            start.record()
            calls[name]()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop))
    return {name: statistics.median(x) for name, x in times.items()}, errors


def compile_one(algorithm, d, is_causal, backward=False):
    """Compile the kernels of a case, which stay on disk."""
    q, lse = normal(1, 1, 256, d), torch.zeros(1, 1, 256, device="cuda")
    what = {"algorithm": algorithm, "is_causal": is_causal}
    made = kernels.plan_backward(q, q, q, q, lse, q, **what) if backward else None
    compile_steps((made or kernels.plan(q, q, q, **what)).steps)


def compile_ahead():
    """Compile all that is timed, in processes beside each other."""
    with ProcessPoolExecutor(compilers(), get_context("spawn")) as pool:
        cases = [*product(OURS, (64, 128), (False, True), (False, True))]
        if gpu.compute_capability() == (9, 0):
            cases += product(FP8[:1], (128,), (False, True))
        for done in [pool.submit(compile_one, *case) for case in cases]:
            done.result()


def flex(q, k, v, is_causal):
    """A call of FlexAttention, compiled."""
    N = q.shape[-2]
    mask = None
    if is_causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask)


def forward(N, d, is_causal, preset):
    """A row of the table of forward passes."""
    q, k, v = (normal(TOKENS // N, MODEL // d, N, d) for _ in range(3))
    plans = {x: kernels.plan(q, k, v, algorithm=x, is_causal=is_causal) for x in OURS}
    calls = {x: p.launch for x, p in plans.items() if p.algorithm == x}
    for name, backend in BACKENDS.items():
        calls[name] = lambda b=backend: with_backend(b, q, k, v, is_causal=is_causal)
    if N in FLEX_LENGTHS:
        calls["flex"] = flex(q, k, v, is_causal)
    found, errors = medians(calls)
    tile = plans["hopper"].tile
    return {
        "N": N, "d": d, "is_causal": is_causal, "ms": found, "errors": errors,
        "tiles": {x: [p.tile.Br, p.tile.Bc] for x, p in plans.items() if p.algorithm == x},
        "predicted_ms": predicted_ms(tile, N, is_causal, preset) if "hopper" in calls else None,
    }  # fmt: skip


def accuracy(d, is_causal, size):
    """Largest errors against float64 of our kernels and of PyTorch's flash backend."""
    q, k, v = (size * normal(1, 4, 2000, d) for _ in range(3))
    exact = sdpa(*(x.double() for x in (q, k, v)), is_causal=is_causal)
    found = {x: kernels.attention(q, k, v, algorithm=x, is_causal=is_causal) for x in OURS}
    outputs = {x: out.output for x, out in found.items() if out.algorithm == x}
    outputs["flash"] = with_backend(BACKENDS["flash"], q, k, v, is_causal=is_causal)
    far = {name: (x.double() - exact).abs().max().item() for name, x in outputs.items()}
    return {"d": d, "is_causal": is_causal, "size": size, "largest_error": far}


def in_fp8(N, is_causal, d=128):
    """A row of the table of FP8: "alone" is the last step, of Q, K and V that are in e4m3."""
    q, k, v = (normal(TOKENS // N, MODEL // d, N, d) for _ in range(3))
    plans = {x: kernels.plan(q, k, v, algorithm=x, is_causal=is_causal) for x in FP8}
    calls = {x: p.launch for x, p in plans.items()}
    *before, last = plans["hopper_fp8"].steps
    for name, steps in ("alone", [last]), ("before", before):
        calls[name] = dataclasses.replace(plans["hopper_fp8"], steps=steps).launch
    calls["cuDNN"] = lambda: with_backend(BACKENDS["cuDNN"], q, k, v, is_causal=is_causal)
    found, errors = medians(calls)
    return {"N": N, "d": d, "is_causal": is_causal, "ms": found, "errors": errors}


def outliers(N=8192, d=128):
    """Root mean square errors against float64, as in Table 3 of the FlashAttention-3 paper."""
    q, k, v = (
        (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)).half()
        for x in (normal(1, 4, N, d, dtype=torch.float32) for _ in range(3))
    )
    exact = sdpa(*(x.double() for x in (q, k, v)))
    found = {x: kernels.attention(q, k, v, algorithm=x).output for x in FP8}
    plain = kernels.attention(q, k, v, algorithm="hopper_fp8", incoherent=False)
    found["hopper_fp8, not rotated"] = plain.output
    far = {x: (o.double() - exact).square().mean().sqrt().item() for x, o in found.items()}
    return {"N": N, "d": d, "root_mean_square_error": far}


def decoding(N, d=128, key_heads=8, group=8):
    """One query a head, beside a copy of as many bytes."""
    q, (k, v) = normal(1, key_heads * group, 1, d), (normal(1, key_heads, N, d) for _ in range(2))
    there = torch.empty_like(k)
    plan = kernels.plan(q, k, v, algorithm="hopper_split_kv", enable_gqa=True)
    calls = {plan.algorithm: plan.launch, "copy": lambda: there.copy_(k)}
    for name, backend in BACKENDS.items():
        calls[name] = lambda b=backend: with_backend(b, q, k, v, enable_gqa=True)
    found, errors = medians(calls)
    moved = 2 * k.numel() * k.element_size()  # K and V read; or K read and written
    rates = {name: moved / ms / 1e9 for name, ms in found.items()}
    return {"N": N, "ms": found, "errors": errors, "terabytes_per_second": rates}


def backward(N, d, is_causal):
    """A row of the table of backward passes; the peers' forward pass is not timed either."""
    q, k, v, do = (normal(TOKENS // N, MODEL // d, N, d) for _ in range(4))
    out = kernels.attention(q, k, v, algorithm=OURS[0], is_causal=is_causal)
    given = q, k, v, out.output, out.lse, do
    plans = {x: kernels.plan_backward(*given, algorithm=x, is_causal=is_causal) for x in OURS}
    calls = {x: p.launch for x, p in plans.items() if p.algorithm == x}
    for name, backend in BACKENDS.items():
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        o = with_backend(backend, *x, is_causal=is_causal)
        calls[name] = lambda o=o, x=x: torch.autograd.grad(o, x, do, retain_graph=True)
    found, errors = medians(calls)
    return {"N": N, "d": d, "is_causal": is_causal, "ms": found, "errors": errors}


def shown(r, products=2):
    """A line of the table of forward passes, which have two products; a backward pass has five."""
    flops = 2 * products * TOKENS * MODEL * r["N"] * (0.5 if r["is_causal"] else 1)
    best = min((r["ms"][x] for x in OURS if x in r["ms"]), default=float("nan"))
    cells = [f"{x} {ms:.3f} ({flops / ms / 1e9:.0f})" for x, ms in r["ms"].items()]
    ratios = [f"{x} / ours {r['ms'][x] / best:.2f}" for x in BACKENDS if x in r["ms"]]
    causal = "causal" if r["is_causal"] else ""
    return f"d={r['d']:<3} N={r['N']:<5} {causal:6} " + "  ".join(cells + ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="tensor-cores.json")
    parser.add_argument("--gpu", default="h200", help="the preset that is predicted for")
    options = parser.parse_args()
    try:
        require_gpu()
    except OSError as missing:
        sys.exit(f"tensor_cores: {str(missing).removeprefix('bench: ')}")
    compile_ahead()
    torch.manual_seed(0)
    tables = ("errors", "forward", "backward", "decoding", "fp8", "fp8_errors")
    how = f"CUDA events around one call, contestants in turns; medians of {ROUNDS}"
    result = {"header": header(flush=False) | {"time": how}, **{table: [] for table in tables}}
    for d, is_causal, size in product((64, 128), (False, True), (1, 6)):
        result["errors"].append(accuracy(d, is_causal, size))
        print(result["errors"][-1], flush=True)
    for d, is_causal, N in product((64, 128), (False, True), LENGTHS):
        result["forward"].append(forward(N, d, is_causal, device(options.gpu)))
        print(shown(result["forward"][-1]), flush=True)
    save(result, options.out)
    if gpu.compute_capability() == (9, 0):
        for N in DECODED:
            result["decoding"].append(decoding(N))
            print(result["decoding"][-1], flush=True)
        result["fp8_errors"].append(outliers())
        print(result["fp8_errors"][-1], flush=True)
        for is_causal, N in product((False, True), LENGTHS):
            result["fp8"].append(in_fp8(N, is_causal))
            print("fp8", result["fp8"][-1], flush=True)
    for d, is_causal, N in product((64, 128), (False, True), LENGTHS):
        result["backward"].append(backward(N, d, is_causal))
        print("backward", shown(result["backward"][-1], products=5), flush=True)
    save(result, options.out)


def save(result, out):
    """Write what there is so far."""
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
