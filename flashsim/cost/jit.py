"""Machine code for the loops that simulate, by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`numba.njit`; the machine code is kept on disk, if there is a place for it.

    Numba puts it beside the module, or else into the user's cache folder. Where neither can be
    written, as in a read-only installation without a home, each process compiles for itself.
    """
    import numba

    njit: Any = numba.njit
    try:
        machine_code: Function = njit(cache=True)(function)
    except RuntimeError:
        machine_code = njit(function)
    return machine_code
