"""Q, K and V for a run: read from a file, or drawn.

Two file formats, by suffix: `.npz` and `.safetensors`. Nothing is ever unpickled: NumPy is told not
to, and safetensors holds no code.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import checks
from .cost.io import DTYPES
from .problem import checked

Array = np.ndarray[Any, Any]

REQUIRED = ("q", "k", "v")
OPTIONAL = ("key_padding_mask", "attn_mask", "expected_output", "do")

_SAFETENSORS_TYPES = {
    "F16": DTYPES["float16"],
    "BF16": DTYPES["bfloat16"],
    "F32": DTYPES["float32"],
    "F64": DTYPES["float64"],
    "BOOL": np.dtype(bool),
}


@dataclass(frozen=True)
class Inputs:
    """What `attention` is called with, and what it should give.

    Attributes
    ----------
    origin : str
        Where the arrays come from, for people.
    q, k, v : ndarray (..., Nq, d), (..., Nk, d), (..., Nk, dv)
    key_padding_mask : bool ndarray (batch, Nk), optional
        True for a real token.
    attn_mask : bool or float ndarray, optional
    expected_output : ndarray (..., Nq, dv), optional
    do : ndarray (..., Nq, dv), optional
        Gradient of the output, to start a backward pass from.
    """

    origin: str
    q: Array
    k: Array
    v: Array
    key_padding_mask: Array | None = None
    attn_mask: Array | None = None
    expected_output: Array | None = None
    do: Array | None = None


def packed(inputs: Inputs) -> tuple[Inputs, list[int]]:
    """The real tokens of all items one after the other, (heads, total, width), and where each ends.

    Returns
    -------
    Inputs
        Without padding.
    list of int
        Cumulative lengths from 0 to total: `cu_seqlens_q`.

    Raises
    ------
    ValueError
        If it is no self-attention, or there is a mask array, which has no place in a pack.
    """
    batch, N = inputs.q.shape[:-3], inputs.q.shape[-2]
    if inputs.q.ndim < 3 or inputs.k.shape[-2] != N:
        given = f"{inputs.q.shape} and {inputs.k.shape}"
        raise checks.bad("q.shape, k.shape", given, "(..., heads, N, d), as many keys, to pack")
    if inputs.attn_mask is not None:
        raise checks.bad("attn_mask", "given", "None, to pack")
    real = np.ones((*batch, N), bool)
    if inputs.key_padding_mask is not None:
        real = inputs.key_padding_mask.reshape(*batch, N)
    items = list(np.ndindex(*batch))

    def together(x: Array | None) -> Array | None:
        return None if x is None else np.concatenate([x[at][:, real[at]] for at in items], axis=1)

    names = ("q", "k", "v", "expected_output", "do")
    arrays: dict[str, Any] = {name: together(getattr(inputs, name)) for name in names}
    ends = np.cumsum([0, *(real[at].sum() for at in items)]).tolist()
    return Inputs(f"{inputs.origin}, packed", **arrays), ends


def random_inputs(
    shape: tuple[int, int, int, int], seed: int = 0, dtype: str = "float32"
) -> Inputs:
    """Standard normal Q, K, V of shape (batch, heads, N, d), the same for the same seed.

    Raises
    ------
    ValueError, TypeError
        If a size, the seed or the dtype is unusable.
    """
    for name, size in zip(("batch", "heads", "N", "d"), shape, strict=True):
        checks.integer(f"shape: {name}", size, 1)
    rng = np.random.default_rng(checks.integer("seed", seed, 0))
    stored = DTYPES[checks.choice("dtype", dtype, DTYPES)]
    try:
        q, k, v = (rng.standard_normal(shape, np.float32).astype(stored) for _ in range(3))
    except (ValueError, MemoryError) as error:
        raise checks.bad("shape", shape, f"what fits in memory ({error})") from error
    return Inputs(f"random normal numbers, seed {seed}", q, k, v)


def read_inputs(path: Path) -> Inputs:
    """Q, K, V and what else there is, from a `.npz` or `.safetensors` file.

    Parameters
    ----------
    path : Path
        A file with arrays named q, k, v and, if wanted, key_padding_mask, attn_mask,
        expected_output and do, as in `Inputs`. Other arrays are not looked at.

    Raises
    ------
    ValueError
        If the file is missing, unreadable, truncated, not of the format that its suffix says, lacks
        an array or has one of a type that cannot be used; the message says which file and why.
    """
    readers = {".npz": _npz, ".safetensors": _safetensors}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: expected a .npz or .safetensors file")
    try:
        return named(str(path), readers[path.suffix.lower()](path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def named(origin: str, arrays: Mapping[str, Array]) -> Inputs:
    """Inputs from arrays by name, checked; what cannot be used is a ValueError or TypeError."""
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"no array named {' or '.join(missing)}; q, k and v are needed")
    inputs = Inputs(origin, **arrays)
    checked(
        inputs.q, inputs.k, inputs.v, attn_mask=inputs.attn_mask,
        key_padding_mask=inputs.key_padding_mask, enable_gqa=True,
    )  # fmt: skip
    expected, shape = inputs.expected_output, (*inputs.q.shape[:-1], inputs.v.shape[-1])
    if expected is not None and expected.dtype.name not in checks.FLOATS:
        accepted = "one of " + ", ".join(checks.FLOATS)
        raise checks.bad_type("expected_output.dtype", str(expected.dtype), accepted)
    if expected is not None and expected.shape != shape:
        raise checks.bad("expected_output.shape", expected.shape, f"{shape}, that of the output")
    if inputs.do is not None and inputs.do.dtype != inputs.q.dtype:
        accepted = f"{inputs.q.dtype}, the dtype of q"
        raise checks.bad_type("do.dtype", str(inputs.do.dtype), accepted)
    if inputs.do is not None and inputs.do.shape != shape:
        raise checks.bad("do.shape", inputs.do.shape, f"{shape}, that of the output")
    return inputs


# What NumPy and zipfile raise on damaged, encrypted, absurdly large and object arrays.
_DAMAGED = (
    ValueError, TypeError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def _npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("not a .npz file (which is a zip archive), or truncated")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {n: archive[n] for n in (*REQUIRED, *OPTIONAL) if n in archive}
        except _DAMAGED as error:
            raise ValueError(f"not a readable .npz file: {error}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # a member that is no .npy comes as bytes
            raise ValueError(f"{name} is not an array in NumPy's format")
    return arrays


def _safetensors(path: Path) -> dict[str, Array]:
    return from_safetensors(path.read_bytes())


def from_safetensors(data: bytes) -> dict[str, Array]:
    """The arrays that `Inputs` has, by name; bfloat16 too, which safetensors' NumPy reader refuses.

    Raises
    ------
    ValueError
        If `data` is not a safetensors file, or an array is of a type that cannot be used.
    """
    from safetensors import SafetensorError, deserialize

    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"not a .safetensors file, or truncated: {error}") from error
    arrays = {}
    for name in (*REQUIRED, *OPTIONAL):
        if name in tensors:
            tensor = tensors[name]
            if tensor["dtype"] not in _SAFETENSORS_TYPES:
                known = ", ".join(_SAFETENSORS_TYPES)
                raise ValueError(f"{name} is {tensor['dtype']}, expected one of {known}")
            flat = np.frombuffer(tensor["data"], _SAFETENSORS_TYPES[tensor["dtype"]])
            arrays[name] = flat.reshape(tensor["shape"])
    return arrays
