"""A paged KV cache: keys and values of many sequences in pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import checks
from .attention import Attention, attention
from .checks import bad, bad_type
from .problem import as_floats

Array = np.ndarray[Any, Any]


def paginate(
    k: Array, v: Array, page: int, lengths: Sequence[int] | None = None, seed: int = 0
) -> tuple[Array, Array, dict[str, Any]]:
    """Keys and values in pages that lie in a random order, as `attention` takes them.

    Parameters
    ----------
    k, v : array (N, d), (N, dv), or (batch, heads, N, d), (batch, heads, N, dv)
    page : int
        Rows of a page.
    lengths : sequence of int, optional
        Tokens of each item, N at most; default: all.

    Returns
    -------
    k, v : array (pages, page, d), (pages, page, dv), or with heads after the pages
    how : dict
        block_tables and seq_lens.

    Raises
    ------
    ValueError, TypeError
        If the arrays do not fit to each other, or a length is more than they hold.
    """
    checks.integer("page", page, 1)
    k, v = as_floats("k", k), as_floats("v", v)
    if k.ndim not in (2, 4):
        raise bad("k.shape", k.shape, "(N, d) or (batch, heads, N, d)")
    if v.shape[:-1] != k.shape[:-1]:
        raise bad("v.shape", v.shape, f"{k.shape[:-1]} and a width, to go with k.shape={k.shape}")
    alone = k.ndim == 2
    if alone:
        k, v = k[None, None], v[None, None]
    given = [k.shape[2]] * len(k) if lengths is None else lengths
    lengths = checks.integers("lengths", given, 0, k.shape[2] + 1).tolist()
    if len(lengths) != len(k):
        raise bad("lengths", lengths, f"{len(k)} numbers, one for each item")
    pages = sum(-(-n // page) for n in lengths)
    cache = PagedKVCache(
        *(np.zeros((pages, x.shape[1], page, x.shape[3]), x.dtype) for x in (k, v))
    )
    for n, one_k, one_v in zip(lengths, k, v, strict=True):
        cache.add(one_k[:, :n], one_v[:, :n])
    order = np.random.default_rng(seed).permutation(pages)
    place = np.append(np.argsort(order), -1)
    how = {"block_tables": place[cache.block_tables(range(len(k)))], "seq_lens": lengths}
    k, v = cache.k[order], cache.v[order]
    return (k[:, 0], v[:, 0], how) if alone else (k, v, how)


class PagedKVCache:
    """Keys and values in pages, as PagedAttention keeps them; sequences may share pages.

    Parameters
    ----------
    k, v : array (pages, heads, page, d), (pages, heads, page, dv)
        The pool, which it works in; what is in no page of a sequence may be anything.

    Raises
    ------
    ValueError, TypeError
        If they are not writable NumPy arrays of one float type that fit to each other.

    Notes
    -----
    A page has one writer: `fork` shares the pages that are full, and copies the last one if it is
    not. Source: Kwon et al. 2023 (arXiv:2309.06180), sections 4.3 and 4.4.

    Examples
    --------
    >>> cache = PagedKVCache(*np.zeros((2, 8, 1, 4, 16), np.float32))  # eight pages of four
    >>> a = cache.add(*np.ones((2, 1, 6, 16), np.float32))  # one head, six tokens: two pages
    >>> b = cache.fork(a)  # one page shared, one copied
    >>> cache.tables[a], cache.tables[b], cache.wasted_slots
    ([0, 1], [0, 2], 4)
    """

    def __init__(self, k: Array, v: Array) -> None:
        for name, x in (("k", k), ("v", v)):
            checks.instance(name, x, np.ndarray, "a NumPy array, which the cache works in")
            as_floats(name, x)
            if x.ndim != 4 or x.shape[:3] != k.shape[:3] or 0 in x.shape[1:]:
                raise bad(f"{name}.shape", x.shape, "(pages, heads, page, width), k and v alike")
            if not x.flags.writeable:
                raise bad(name, "a read-only array", "one that can be written to")
        if v.dtype != k.dtype:
            raise bad_type("v.dtype", str(v.dtype), f"{k.dtype}, the dtype of k")
        self.k, self.v = k, v
        self.tables: list[list[int]] = []  # of each sequence, its pages in order
        self.lengths: list[int] = []

    @property
    def page(self) -> int:
        """Rows of a page."""
        return int(self.k.shape[2])

    @property
    def free_pages(self) -> int:
        """Pages in no sequence."""
        return len(self._free())

    @property
    def wasted_slots(self) -> int:
        """Rows of pages in use that hold no token: at most page - 1 a sequence."""
        filled = {p: 0 for table in self.tables for p in table}
        for table, length in zip(self.tables, self.lengths, strict=True):
            for n, p in enumerate(table):
                filled[p] = max(filled[p], min(self.page, length - n * self.page))
        return sum(self.page - rows for rows in filled.values())

    def add(self, k: Any, v: Any) -> int:
        """A new sequence with keys (heads, N, d) and values (heads, N, dv); returns its number."""
        self.tables.append([])
        self.lengths.append(0)
        try:
            self.append(len(self.tables) - 1, k, v)
        except (ValueError, TypeError):
            del self.tables[-1], self.lengths[-1]
            raise
        return len(self.tables) - 1

    def append(self, sequence: int, k: Any, v: Any) -> None:
        """Add the keys (heads, n, d) and values (heads, n, dv) of a sequence's next n tokens.

        Raises
        ------
        ValueError, TypeError
            If they do not fit to the pool, or there are too few free pages; nothing is added then.
        """
        table, length = self._of(sequence)
        k, v = as_floats("k", k), as_floats("v", v)
        for name, x, pool in (("k", k, self.k), ("v", v, self.v)):
            shape = (pool.shape[1], k.shape[1] if k.ndim == 3 else -1, pool.shape[3])
            if x.shape != shape:
                raise bad(f"{name}.shape", x.shape, f"({shape[0]}, n, {shape[2]}), as the pool has")
            if x.dtype != pool.dtype:
                raise bad_type(f"{name}.dtype", str(x.dtype), f"{pool.dtype}, as the pool has")
        stop = length + k.shape[1]
        self._take(table, -(-stop // self.page))
        n = np.arange(length, stop)
        where = np.array(table, np.int64)[n // self.page], slice(None), n % self.page
        self.k[where], self.v[where] = np.moveaxis(k, 1, 0), np.moveaxis(v, 1, 0)
        self.lengths[sequence] = stop

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens so far; full pages are shared. Returns its number.

        Raises
        ------
        ValueError
            If the last page is partly filled and there is none free for its copy.
        """
        table, length = self._of(sequence)
        own = table[: length // self.page]
        if len(own) < len(table):
            taken: list[int] = []
            self._take(taken, 1)
            for pool in (self.k, self.v):
                pool[taken[0]] = pool[table[-1]]
            own += taken
        self.tables.append(own)
        self.lengths.append(length)
        return len(self.tables) - 1

    def clear(self, sequence: int) -> None:
        """Forget a sequence's tokens; pages that no other shares are free then."""
        self._of(sequence)[0].clear()
        self.lengths[sequence] = 0

    def attend(self, sequences: Sequence[int], q: Any, **how: Any) -> Attention:
        """Attention of the last tokens of some sequences, q (sequences, heads, n, d), causal.

        **how: as for `flashsim.attention`.

        Raises
        ------
        ValueError, TypeError
            If a sequence has fewer than n tokens, or `attention` cannot take what is given.
        """
        q, tables = as_floats("q", q), self.block_tables(sequences)
        lengths = [self.lengths[sequence] for sequence in sequences]
        if lengths and q.shape[-2] > min(lengths):
            most = f"at most {min(lengths)} queries, the tokens of the shortest sequence"
            raise bad("q.shape", q.shape, most)
        return attention(
            q, self.k, self.v, algorithm="paged", is_causal=True, causal_align="bottom-right",
            block_tables=tables, seq_lens=lengths, **how,
        )  # fmt: skip

    def block_tables(self, sequences: Sequence[int]) -> Array:
        """The pages of some sequences (sequences, pages of the longest), -1 beyond them."""
        tables = [self._of(sequence)[0] for sequence in sequences]
        most = max(map(len, tables), default=0)
        padded = [table + [-1] * (most - len(table)) for table in tables]
        return np.array(padded, np.int64).reshape(len(tables), most)

    def _of(self, sequence: int) -> tuple[list[int], int]:
        checks.integer("sequence", sequence, 0, len(self.tables))
        return self.tables[sequence], self.lengths[sequence]

    def _take(self, table: list[int], pages: int) -> None:
        """Put free pages at a table's end until it has so many."""
        missing, free = max(0, pages - len(table)), self._free()
        if missing > len(free):
            raise bad("pages", len(self.k), f"{missing - len(free)} more: all others are in use")
        table += free[:missing]

    def _free(self) -> list[int]:
        used = {p for table in self.tables for p in table}
        return [p for p in range(len(self.k)) if p not in used]
