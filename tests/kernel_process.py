"""Kernels in a process of their own, since Numba decides at its first import whether it simulates.

With NUMBA_ENABLE_CUDASIM=1 the process runs kernels in the simulator and counts what they touch in
global memory; without, it compiles and assembles them, for which no GPU is needed. A simulated
thread that raises can leave the others waiting, so every call has a time limit.
"""

import contextlib
import importlib
import multiprocessing
import os
import threading
import warnings

import numpy as np

SECONDS = 300  # assembling the widest kernel takes 22 on a quiet machine


class KernelProcess:
    """A started process; `call(name, ...)` runs a function of this module there."""

    def __init__(self, *, simulated):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, simulated), daemon=True)
        self.process.start()

    def call(self, name, *args, **kwargs):
        self.connection.send((name, args, kwargs))
        if not self.connection.poll(SECONDS):
            self.process.kill()
            raise TimeoutError(f"{name} took more than {SECONDS} seconds")
        raised, result = self.connection.recv()
        if raised:
            raise result
        return result

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10)


def serve(connection, simulated):
    """Answer calls until there are no more."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if simulated else "0"
    warnings.simplefilter("ignore", RuntimeWarning)  # NaN and inf in a simulated thread
    threading.excepthook = lambda args: None  # the simulator hands it on
    while (message := connection.recv()) is not None:
        name, args, kwargs = message
        try:
            connection.send((False, globals()[name](*args, **kwargs)))
        except Exception as error:
            connection.send((True, error))


class Counting:
    """An array in global memory that notes every element read and written."""

    def __init__(self, array, reads, writes):
        self.array, self.reads, self.writes = array, reads, writes
        self.shape = array.shape

    def __getitem__(self, where):
        found = self.array[where]
        if isinstance(found, np.ndarray):
            return Counting(found, self.reads, self.writes)
        self.reads.append(None)
        return found

    def __setitem__(self, where, value):
        self.writes.append(None)
        self.array[where] = value


def launch_counted(plan):
    """Run a plan; {step: ({array: elements read}, {array: elements written})}."""
    import dataclasses
    import inspect

    from flashsim.kernels.ptx.tma import TensorMap

    traffic = {}
    for step in plan.steps:
        names = list(inspect.signature(step.function.py_func).parameters)
        reads, writes = {}, {}
        args = list(step.args)
        for n, (name, array) in enumerate(zip(names, step.args, strict=True)):
            if isinstance(array, (np.ndarray, TensorMap)):
                reads[name], writes[name] = [], []
                counting = reads[name], writes[name]
                if isinstance(array, TensorMap):
                    counted = Counting(array.array, *counting)
                    args[n] = dataclasses.replace(array, array=counted)
                else:
                    args[n] = Counting(array, *counting)
        dataclasses.replace(plan, steps=[dataclasses.replace(step, args=tuple(args))]).launch()
        free = ("keys", "layout")  # rules: small tables that are not charged
        traffic[step.name] = tuple(
            {name: len(x) for name, x in counts.items() if x and name not in free}
            for counts in (reads, writes)
        )
    return traffic


def attention(q, k, v, **what):
    """(output, lse, traffic) of a simulated run."""
    from flashsim import kernels

    plan = kernels.plan(q, k, v, **what)
    traffic = launch_counted(plan)
    return plan.result("O"), plan.result("L"), traffic


def threads_of(q, k, v, **what):
    """(Br, threads) of the tile that a call picks."""
    from flashsim import kernels

    tile = kernels.plan(q, k, v, **what).tile
    return tile.Br, tile.threads


def merged(O_parts, L_parts, threads):
    """(O, L) of all keys, by `split_kv.merge` from those of parts: (parts, heads, Nq, d) and L."""
    from flashsim.kernels import gpu, split_kv

    parts, heads, Nq, d = O_parts.shape
    O, L = np.zeros((1, heads, Nq, d), np.float32), np.zeros((1, heads, Nq), np.float32)
    function = split_kv.merge(parts, d, threads, "float32")
    shared_bytes = 4 * (parts + threads)
    gpu.launch(function, heads * Nq, threads, shared_bytes, 0, (O_parts, L_parts, O, L))
    return O[0], L[0]


def backward(q, k, v, output, lse, do, **what):
    """(dq, dk, dv, traffic) of a simulated run."""
    from flashsim import kernels

    plan = kernels.plan_backward(q, k, v, output, lse, do, **what)
    traffic = launch_counted(plan)
    return plan.result("dQ"), plan.result("dK"), plan.result("dV"), traffic


def refused(*arrays, pretend="", front="attention", **what):
    """(type, message) of the error that a call raises; `pretend`: a reason why there is no GPU."""
    from flashsim import kernels
    from flashsim.kernels import gpu

    real = gpu.available
    if pretend:
        gpu.available = lambda: pretend
    try:
        getattr(kernels, front)(*arrays, **what)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        gpu.available = real
    return "", ""


def assembled(name, d, arches, **features):
    """{arch: what the assembler says} of one kernel with its default tiles."""
    from flashsim.kernels import assembly

    return {arch: assembly.report(name, d, arch, **features) for arch in arches}


def cache_keys():
    """What names a kernel on disk, of one kernel of each kind; in text."""
    from flashsim.kernels import ampere, cache, flash2, hopper, hopper_backward, tiles
    from flashsim.kernels.masks import Features
    from flashsim.kernels.warp_tiles import warp_tile_for
    from flashsim.kernels.warpgroup_tiles import WarpgroupTile

    f = Features(dtype="float16", band=True)
    kernels = {
        "flash2": flash2.flash_attention_2(tiles.tile_for(64, 64, 64), f),
        "ampere": ampere.flash_attention_2(warp_tile_for(64, 64, 64), f),
        "hopper": hopper.flash_attention_3(WarpgroupTile(64, 64, 64), f),
        "finish": hopper_backward.finish(hopper_backward.tile_for(128, 128, 64), "float16"),
    }
    return {name: repr(cache.constants(made.py_func)) for name, made in kernels.items()}


def hopper_assembled(*tile, **features):
    """What the assembler says of the kernel for warpgroups, linked as for a launch."""
    from flashsim.kernels import assembly

    return assembly.hopper_report(*tile, **features)


def fp8_assembled(*what, **features):
    """What the assembler says of what brings Q, K and V into e4m3."""
    from flashsim.kernels import assembly

    return assembly.fp8_report(*what, **features)


def hopper_backward_assembled(*tile, **features):
    """The same of its backward pass."""
    from flashsim.kernels import assembly

    return assembly.hopper_backward_report(*tile, **features)


def elsewhere(module, name, *args, **kwargs):
    """A function of another module of helpers, which imports kernels at its top."""
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def kernel_names():
    """The kernels that `assembled` knows."""
    from flashsim.kernels import assembly

    return assembly.NAMES
