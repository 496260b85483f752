"""GPU kernels in Numba CUDA: the tilings of `flashsim.algorithms`, run on real hardware.

Imported as ``flashsim.kernels``; one file per kernel. Importing this package needs neither Numba
nor a GPU; importing a kernel needs Numba.

The folder stands at the top of the repository, beside the simulator rather than inside it, and must
not claim the global name ``kernels``, which belongs to another package. So ``package-dir`` in
pyproject.toml installs it under ``flashsim``.
"""
