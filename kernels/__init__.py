"""GPU kernels in Numba CUDA: the tilings of `flashsim.algorithms`, run on real hardware.

Imported as ``flashsim.kernels``; one file per kernel, and a README beside them that reads them as a
ladder. Importing this package needs neither Numba nor a GPU; its functions need both::

    from flashsim import kernels
    out = kernels.attention(q, k, v, algorithm="flash2", is_causal=True)

The folder stands at the top of the repository, beside the simulator rather than inside it, and must
not claim the global name ``kernels``, which belongs to another package. So ``package-dir`` in
pyproject.toml installs it under ``flashsim``.
"""

from typing import Any

__all__ = ["attention", "attention_backward", "plan", "plan_backward"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
