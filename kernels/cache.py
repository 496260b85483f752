"""Compiled kernels kept on disk, so that another process need not compile them again.

Numba can do this itself for a kernel without a closure. Ours are made by functions and hold other
functions, which it cannot tell apart from one process to the next. So the key here is what makes a
kernel: the sources of this package, the constants in the closures, and the types of the arguments.
The files lie where Numba keeps its own, in ``__pycache__`` or in NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

from numba.cuda.dispatcher import CUDACache, CUDADispatcher
from numba_cuda import __version__ as compiler


class KernelCache(CUDACache):
    """A file for each kernel, so that processes may write at the same time.

    bounds: the threads that it is compiled for.
    """

    def __init__(self, function: Any, bounds: int) -> None:
        super().__init__(function)
        self._bounds = bounds

    def _file(self, sig: Any, target: Any) -> Path:
        function = self._py_func
        made_of = (
            str(sig),
            target.codegen().magic_tuple(),
            compiler,
            sources(),
            self._bounds,
            constants(function),
        )
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
        return Path(self._cache_path) / f"{function.__name__}-{name}.kernel"

    def _load_overload(self, sig: Any, target: Any) -> Any:
        try:
            stored = self._file(sig, target).read_bytes()
        except FileNotFoundError:
            return None
        return self._impl.rebuild(target, pickle.loads(stored))

    def _save_overload(self, sig: Any, kernel: Any) -> None:
        self._impl.locator.ensure_cache_path()
        file = self._file(sig, kernel.target_context)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(self._impl.reduce(kernel)))
        part.replace(file)


@cache
def sources() -> str:
    """A digest of the package's text."""
    texts = (file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def constants(function: Any) -> Any:
    """What the closure of a function holds, and those of the functions in it."""

    def constant(x: Any) -> Any:
        if isinstance(x, CUDADispatcher):
            return constants(x.py_func)
        return x.__qualname__ if isfunction(x) else repr(x)  # its repr has an address

    held = [constant(cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__qualname__, function.__code__.co_code, held
