"""Decoding token by token: a cache of the keys and values so far, and attention over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .attention import Attention, attention
from .checks import bad, bad_type
from .problem import as_floats

Array = np.ndarray[Any, Any]


class KVCache:
    """Keys and values of the tokens so far, in memory for `capacity` of them.

    Parameters
    ----------
    k, v : array (..., N, d), (..., N, dv)
        Of the prompt; of no token, (..., 0, d) and (..., 0, dv), if there is none. The leading
        dimensions, (..., kv_heads), are those of all that is appended. Both are copied.
    capacity : int
        Tokens that it has room for, N included.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 10, 16), dtype=np.float32)  # eight heads, ten tokens
    >>> cache = KVCache(k[:, :9], v[:, :9], capacity=32)
    >>> cache.append(k[:, 9:], v[:, 9:])
    >>> cache.attend(q[:, 9:]).traffic.reads["K"] == cache.k.size
    True
    """

    def __init__(self, k: Any, v: Any, *, capacity: int) -> None:
        k, v = _pair(k, v)
        if v.dtype != k.dtype:
            raise bad_type("v.dtype", str(v.dtype), f"{k.dtype}, the dtype of k")
        self.length = k.shape[-2]
        room = checks.integer("capacity", capacity, max(1, self.length))
        self._k, self._v = (np.empty((*x.shape[:-2], room, x.shape[-1]), x.dtype) for x in (k, v))
        self._k[..., : self.length, :], self._v[..., : self.length, :] = k, v

    @property
    def capacity(self) -> int:
        """Tokens that it has room for."""
        return int(self._k.shape[-2])

    @property
    def k(self) -> Array:
        """The keys so far, (..., length, d): a view."""
        return self._k[..., : self.length, :]

    @property
    def v(self) -> Array:
        """The values so far, (..., length, dv): a view."""
        return self._v[..., : self.length, :]

    def append(self, k: Any, v: Any) -> None:
        """Add the keys (..., n, d) and values (..., n, dv) of the n tokens that come next.

        Raises
        ------
        ValueError, TypeError
            If they do not fit to those before, or there is no room.
        """
        k, v = _pair(k, v)
        for name, new, old in (("k", k, self.k), ("v", v, self.v)):
            if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1]:
                fits = f"{(*old.shape[:-2], 'n', old.shape[-1])}, as the cache has"
                raise bad(f"{name}.shape", new.shape, fits)
            if new.dtype != old.dtype:
                raise bad_type(f"{name}.dtype", str(new.dtype), f"{old.dtype}, as the cache has")
        stop = self.length + k.shape[-2]
        if stop > self.capacity:
            left = self.capacity - self.length
            raise bad("k.shape", k.shape, f"at most {left} tokens: the cache holds {self.capacity}")
        self._k[..., self.length : stop, :], self._v[..., self.length : stop, :] = k, v
        self.length = stop

    def attend(self, q: Any, *, algorithm: str = "split_kv", **how: Any) -> Attention:
        """Attention of the last tokens, q (..., n, d), each over itself and all before it.

        Parameters
        ----------
        q : array (..., n, d)
            Queries of the last n tokens, whose keys and values are in the cache.
        algorithm, **how
            As in `flashsim.attention`. Causal, aligned bottom-right: query n - 1 sees all.

        Raises
        ------
        ValueError, TypeError
            If there are more queries than tokens, or `attention` cannot take what is given.
        """
        q = as_floats("q", q)
        if q.shape[-2] > self.length:
            raise bad("q.shape", q.shape, f"at most {self.length} queries, as many as tokens")
        return attention(
            q, self.k, self.v, algorithm=algorithm, is_causal=True, causal_align="bottom-right",
            **how,
        )  # fmt: skip


def _pair(k: Any, v: Any) -> tuple[Array, Array]:
    """k and v, checked as far as they must fit to each other."""
    k, v = as_floats("k", k), as_floats("v", v)
    if v.shape[:-1] != k.shape[:-1]:
        raise bad("v.shape", v.shape, f"{k.shape[:-1]} and a width, to go with k.shape={k.shape}")
    return k, v
