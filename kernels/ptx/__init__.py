"""Instructions that NumPy-like Python has no word for, as functions: a small vocabulary of PTX.

Each is named as in NVIDIA's PTX ISA manual, and its docstring says which thread holds what. `base`
makes a function of an instruction's text; `emulation` is what it runs on in Numba's simulator.
"""
