"""Deliberate faults, one at a time: the tests must notice every one. `python tests/mutants.py`

Each mutant is a line or two of the package written wrongly. It is put into a temporary copy, the
tests that are most likely to notice run first, then all others of the core; a failure kills it.
Exit code 1 if a mutant survives: a test is missing, or the fault is none. Python, and what the
tests need, is all that this takes; the working tree is not touched.

A part of a name, as an argument, runs the mutants whose name or file contains it.
"""

# ruff: noqa: E501 (a table: one fault a line)

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("flashsim", "kernels", "tests", "docs", "pyproject.toml")
CORE = (
    "faults", "online_softmax", "masks", "memory", "dropout", "counts", "exact", "front_door",
    "relations", "backward", "block_sparse",
)  # fmt: skip


class Mutant(NamedTuple):
    """`old`, which must occur exactly once in `place`, becomes `new`."""

    name: str
    place: str  # file in flashsim/ or kernels/, or file::function, or file::Class.method
    old: str
    new: str
    tests: tuple[str, ...]  # test files that look first


# (place, test files that look first): name, old, new
FAULTS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("algorithms/flash2.py::flash_attention_2", "faults exact"): [
        ("O is not rescaled", "= alpha[:, None] * Oi +", "= Oi +"),
        ("l is not rescaled", "= alpha * li +", "= li +"),
        ("alpha is computed after m", "alpha = exp(mi, m_new)", "mi[:] = m_new; alpha = exp(mi, m_new)"),
        ("alpha is inverted", "alpha = exp(mi, m_new)", "alpha = exp(m_new, mi)"),
        ("no maximum is subtracted", "np.maximum(mi, Sij.max(axis=1))", "np.zeros_like(mi)"),
        ("the maximum is that of the tile alone", "np.maximum(mi, Sij.max(axis=1))", "Sij.max(axis=1)"),
        ("the running maximum starts at -5e4", "np.full_like(li, -np.inf)", "np.full_like(li, -5e4)"),
        ("the running maximum starts at 0", "np.full_like(li, -np.inf)", "np.zeros_like(li)"),
        ("m is not carried on", "mi[:] = m_new", "pass"),
        ("O is not divided by l", "over(Oi, li)", "Oi"),
        ("lse has base 2", "= shift(mi) + log(li)", "= (shift(mi) + log(li)) / np.log(2)"),
        ("lse takes the logarithm twice", "+ log(li)", "+ log(log(li))"),
        ("lse without m", "shift(mi) + log(li)", "log(li)"),
        ("lse without l", "shift(mi) + log(li)", "mi"),
        ("L is not written for the last row", "L[i] = shift(mi) + log(li)", "L[i.start : i.stop - 1] = (shift(mi) + log(li))[:-1]"),
        ("0 * NaN leaks from behind the mask", "weigh(drop(Pij, i, j), Vj, Mij.keep)", "drop(Pij, i, j) @ Vj"),
        ("a NaN behind an underflowed weight is lost", "Vj, Mij.keep)", "Vj, lambda: Pij > 0)"),
        ("scale is ignored", "Qi @ Kj.T * scale", "Qi @ Kj.T"),
        ("the mask is added before scaling", "Mij(Qi @ Kj.T * scale)", "Mij(Qi @ Kj.T) * scale"),
        ("P is rounded to float16", "exp(Sij, m_new, out=Sij)", "exp(Sij, m_new, out=Sij).astype(np.float16)"),
        ("the mask of the first key tile", "mask.tile(i, j)", "mask.tile(i, slice(0, len(Kj)))"),
        ("a short key tile is padded with zeros", "Mij = mask.tile(i, j)", "Kj, Vj = (np.pad(x, ((0, Bc - len(x)), (0, 0))) for x in (Kj, Vj)); Mij = mask.tile(i, j)"),
    ],
    ("algorithms/flash2.py::flash_attention_2", "counts"): [
        ("V is read twice", "Mij = mask.tile(i, j)", "Vj = V[j]; Mij = mask.tile(i, j)"),
        ("Q is reloaded for each key tile", "Mij = mask.tile(i, j)", "Qi = Q[i]; Mij = mask.tile(i, j)"),
        ("K is not loaded for the first row", "Mij = mask.tile(i, j)", "K.machine.traffic.reads['K'] -= Kj.size * (i.start == 0); Mij = mask.tile(i, j)"),
        ("empty tiles are visited", ", where=mask.row(i)", ""),
        ("O is written in every turn", "mi[:] = m_new", "mi[:] = m_new; O[i] = over(Oi, li)"),
        ("O is not registered on chip", 'on_chip("Oi", np.zeros((len(Qi), V.shape[1]), Qi.dtype))', "np.zeros((len(Qi), V.shape[1]), Qi.dtype)"),
        ("S is not registered on chip", 'on_chip("Sij", Mij(Qi @ Kj.T * scale))', "Mij(Qi @ Kj.T * scale)"),
        ("P is held beside S", "Pij = exp(Sij, m_new, out=Sij)", 'Pij = on_chip("Pij", exp(Sij, m_new))'),
    ],
    ("algorithms/flash2.py::flash_attention_2", "dropout"): [
        ("l after dropout", "li[:] = alpha * li + Pij.sum(axis=1)\n            Oi[:] = alpha[:, None] * Oi + weigh(drop(Pij, i, j)", "Pij = drop(Pij, i, j)\n            li[:] = alpha * li + Pij.sum(axis=1)\n            Oi[:] = alpha[:, None] * Oi + weigh(Pij"),
        ("no dropout", "drop(Pij, i, j)", "Pij"),
        ("dropout bits by position in the tile", "drop(Pij, i, j)", "drop(Pij, slice(0, len(Qi)), slice(0, len(Kj)))"),
    ],
    ("algorithms/split_kv.py", "split_kv"): [
        ("a part sees the keys of all", "mask=mask.among(keys)", "mask=mask"),
        ("the parts are cut inside a tile", "-(-Nk // (Bc * splits)) * Bc", "-(-Nk // splits)"),
        ("the tail of the keys is in no part", "-(-Nk // (Bc * splits)) * Bc", "max(1, Nk // (Bc * splits)) * Bc"),
        ("one part merges too", "if splits == 1:", "if splits == 0:"),
        ("O is not rescaled", "alpha[:, None] * Oi + beta", "Oi + beta"),
        ("the part's O is not weighed", "+ beta[:, None] * Os", "+ Os"),
        ("l is not rescaled", "alpha * li + beta", "li + beta"),
        ("an empty part counts as one key", "alpha * li + beta", "alpha * li + np.exp(shift(Ls) - shift(m_new))"),
        ("a part's weight is 2 to the power", "alpha, beta = exp(mi, m_new), exp(Ls, m_new)", "alpha, beta = np.exp2(mi - shift(m_new)), np.exp2(Ls - shift(m_new))"),
        ("the mean of the parts", "beta = exp(mi, m_new), exp(Ls, m_new)", "beta = exp(mi, m_new), np.ones_like(Ls)"),
        ("m is not carried on", "mi[:] = m_new", "pass"),
        ("L is that of the parts' maximum", "L[i] = shift(mi) + log(li)", "L[i] = mi"),
        ("the partial O is read twice", "m_new = np.maximum(mi, Ls)", "part(Op, mine)[0 : len(Os)]; m_new = np.maximum(mi, Ls)"),
    ],
    ("algorithms/paged.py", "paged"): [
        ("the first page is everywhere", "paged(A, table, page, mask.Nk)", "paged(A, 0 * table, page, mask.Nk)"),
        ("whole pages are read", "paged(A, table, page, mask.Nk)", "paged(A, table, page, len(table) * page)"),
        ("pages in the order they lie in", "paged(A, table, page, mask.Nk)", "paged(A, table[table.argsort()], page, mask.Nk)"),
    ],
    ("problem.py::found_pages", "paged"): [
        ("a page may be one past the last", "own >= pages", "own > pages"),
        ("a negative page counts from the end", "(own < 0) | ", ""),
        ("a page may come twice", "len(set(own.tolist())) < len(own)", "False"),
        ("entries beyond the length are checked", "table[: -(-length // max(1, page))]", "table"),
        ("a length may be too long by a page", "<= len(table) * page:", "<= (len(table) + 1) * page:"),
    ],
    ("problem.py", "varlen"): [
        ("lengths may fall", "if b < a:", "if b < 0:"),
        ("rows may be left over", "found[0] != 0 or found[-1] != rows", "found[0] != 0 or found[-1] > rows"),
        ("the first row may be left out", "found[0] != 0 or ", ""),
        ("keys are cut at the lengths of the queries", "zip(starmap(slice, pairwise(q)), starmap(slice, pairwise(k)), strict=True)", "zip(starmap(slice, pairwise(q)), starmap(slice, pairwise(q)), strict=True)"),
        ("causal is aligned with the whole", "*band(rows.stop - rows.start, keys.stop - keys.start, **rules)", "*band(Nq, Nk, **rules)"),
        ("all sequences have the dropout of the first", "return int(np.ravel_multi_index(at[:-1], self.lead[:-1])) if at[:-1] else 0", "return 0"),
    ],
    ("decode.py", "split_kv"): [
        ("the last token is overwritten", "self._k[..., self.length : stop, :], self._v[..., self.length : stop, :] = k, v\n        self.length = stop", "self._k[..., self.length : stop, :], self._v[..., self.length : stop, :] = k, v\n        self.length = max(self.length, stop - 1)"),
        ("a token sees only those before it", 'causal_align="bottom-right"', 'causal_align="top-left"'),
    ],
    ("paging.py", "paged"): [
        ("a partly filled page is shared", "if len(own) < len(table):", "own = table[:]\n        if False:"),
        ("a shared page may be written", "own = table[: length // self.page]", "own = table[: -(-length // self.page)]"),
        ("what is cleared stays in use", "[0].clear()", "[0].copy()"),
        ("a new page each time", "-(-stop // self.page))", "len(table) + 1)"),
    ],
    ("algorithms/flash1.py::flash_attention_1", "faults exact"): [
        ("old and new factors are swapped", "old, new =", "new, old ="),
        ("l_new without the old l", "l_new = old * li + new * l_ij", "l_new = new * l_ij"),
        ("l_new without the new factor", "+ new * l_ij", "+ l_ij"),
        ("the old l is not rescaled", "l_new = old * li +", "l_new = li +"),
        ("O forgets the l it was divided by", "(old * li)[:, None] * Oi", "old[:, None] * Oi"),
        ("O is not rescaled", "(old * li)[:, None] * Oi", "li[:, None] * Oi"),
        ("the new weights are not rescaled", "+ new[:, None] * weigh", "+ weigh"),
        ("O is divided by the tile's l", "                l_new,\n", "                l_ij,\n"),
        ("m is not written", "l[i], m[i] = l_new, m_new", "l[i] = l_new"),
        ("m is that of the tile alone", "l[i], m[i] = l_new, m_new", "l[i], m[i] = l_new, m_ij"),
        ("l is that of the tile alone", "l[i], m[i] = l_new, m_new", "l[i], m[i] = l_ij, m_new"),
        ("the initial O is not written", "O.fill(0), ", ""),
        ("the initial l is not written", "l.fill(0), ", ""),
        ("the initial m is -5e4", "m.fill(-np.inf)", "m.fill(-5e4)"),
        ("0 * NaN leaks from behind the mask", "weigh(drop(Pij, i, j), Vj, Mij.keep)", "(drop(Pij, i, j) @ Vj)"),
        ("scale is ignored", "Qi @ Kj.T * scale", "Qi @ Kj.T"),
        ("P is rounded to float16", "exp(Sij, m_ij, out=Sij)", "exp(Sij, m_ij, out=Sij).astype(np.float16)"),
    ],
    ("algorithms/flash1.py::flash_attention_1", "counts"): [
        ("O is read twice", "Mij = mask.tile(i, j)", "Oi = O[i]; Mij = mask.tile(i, j)"),
        ("K is reloaded for each row tile", "Mij = mask.tile(i, j)", "Kj = K[j]; Mij = mask.tile(i, j)"),
        ("key tiles that no row needs are loaded", ", where=mask.any_row", ""),
        ("empty tiles are visited", ", where=mask.column(j)", ""),
        ("l is written twice", "l[i], m[i] = l_new, m_new", "l[i], m[i], l[i] = l_new, m_new, l_new"),
    ],
    ("algorithms/flash1.py::flash_attention_1", "dropout"): [
        ("l after dropout", "l_ij = Pij.sum(axis=1)", "l_ij = drop(Pij.copy(), i, j).sum(axis=1)"),
        ("dropout bits by position in the tile", "drop(Pij, i, j)", "drop(Pij, slice(0, len(Qi)), slice(0, len(Kj)))"),
    ],
    ("algorithms/standard.py::standard_attention", "faults exact"): [
        ("scale is ignored", "Qi @ Kj.T * scale", "Qi @ Kj.T"),
        ("only the last key tile reaches O", "Oi += weigh(Pij", "Oi[:] = weigh(Pij"),
        ("0 * NaN leaks from behind the mask", "weigh(Pij, Vj, partial(np.not_equal, Pij, 0))", "Pij @ Vj"),
    ],
    ("algorithms/standard.py::standard_attention", "dropout"): [
        ("dropout bits by position in the tile", "drop(Pij, i, j)", "drop(Pij, i, slice(0, len(Vj)))"),
        ("no dropout", "drop(Pij, i, j)", "Pij"),
    ],
    ("algorithms/standard.py::softmax", "faults exact"): [
        ("the sum is over the rows of a chunk", "Si.sum(axis=1)", "np.full(len(Si), Si.sum(), Si.dtype)"),
        ("the maximum is that of a chunk", "Si.max(axis=1, initial=-np.inf)", "np.full(len(Si), Si.max(initial=-np.inf), Si.dtype)"),
        ("no maximum is subtracted", "Si.max(axis=1, initial=-np.inf)", "np.zeros(len(Si), Si.dtype)"),
        ("no keys have no maximum", ", initial=-np.inf", ""),
        ("P is not normalised", "over(Si, li)", "Si"),
        ("lse without m", "shift(mi) + log(li)", "log(li)"),
        ("P is rounded to float16", "exp(Si, mi)", "exp(Si, mi).astype(np.float16).astype(Si.dtype)"),
    ],
    ("algorithms/standard.py::softmax_in_two_passes", "online_softmax exact"): [
        ("l is not rescaled", "exp(mi, m_new) * li +", "li +"),
        ("l is that of the last chunk", "exp(mi, m_new) * li + ", ""),
        ("the maximum is that of the chunk alone", "np.maximum(mi, Sij.max(axis=1))", "Sij.max(axis=1)"),
        ("m is not carried on", "mi[:] = m_new", "pass"),
        ("the running maximum starts at -5e4", "np.full_like(li, -np.inf)", "np.full_like(li, -5e4)"),
        ("P is not normalised", "over(exp(Sij, mi), li)", "exp(Sij, mi)"),
        ("lse without m", "shift(mi) + log(li)", "log(li)"),
        ("S is read a third time", "mi[:] = m_new", "mi[:] = m_new; S[i, _]"),
    ],
    ("online_softmax.py", "online_softmax"): [
        ("-inf - -inf is NaN", "np.where(m == -np.inf, m.dtype.type(0), m)", "m"),
        ("log of 0 warns", "where=l != 0", "where=True"),
        ("a row without keys is divided by 0", "np.where(a == 0, l.dtype.type(1), a)", "a"),
        ("merge rescales the wrong way", "exp(a.m, m), exp(b.m, m)", "exp(b.m, m), exp(a.m, m)"),
        ("merge does not rescale O", "ea[:, None] * a.O", "a.O"),
        ("merge does not rescale l", "ea * a.l", "a.l"),
        ("finish forgets m", "shift(state.m) + log(state.l)", "log(state.l)"),
        ("weigh takes all rows as live", "rows = keep[:, k]", "rows = keep[:, k] | True"),
        ("weigh forgets the values that are not finite", "out[rows] += P[rows, k, None] * V[k]", "pass"),
        ("weigh looks at the first column of V alone", "np.isfinite(V).all(axis=1)", "np.isfinite(V[:, 0])"),
    ],
    ("masks.py::band", "faults masks"): [
        ("causal sees one key too many", "min(hi, offset)", "min(hi, offset + 1)"),
        ("causal sees one key too few", "min(hi, offset)", "min(hi, offset - 1)"),
        ("causal is ignored beside a window", "min(hi, offset) if is_causal", "offset if is_causal and right is None"),
        ("alignments are swapped", '== "bottom-right"', '!= "bottom-right"'),
        ("the alignment is Nq - Nk", "Nk - Nq if", "Nq - Nk if"),
        ("a window sees one key too many on the left", "offset - left", "offset - left - 1"),
        ("a window sees one key too few on the left", "offset - left", "offset - left + 1"),
        ("a window sees one key too many on the right", "offset + right", "offset + right + 1"),
        ("a window sees one key too few on the right", "offset + right", "offset + right - 1"),
        ("a window is not aligned", "else offset - left", "else -left"),
    ],
    ("masks.py", "masks faults"): [
        ("a tile just past the band is visited", "min(j.stop, i.stop + self.hi)", "min(j.stop, i.stop + self.hi + 1)"),
        ("a padded tile is visited", " or self._live(first, stop) == 0", ""),
        ("a tile with one live key is empty", "self._live(first, stop) == 0", "self._live(first, stop) <= 1"),
        ("a tile cut on the left is full", "j.start >= i.stop - 1 + self.lo", "j.start >= i.start + self.lo"),
        ("a tile cut on the right is full", "j.stop - 1 <= i.start + self.hi", "j.stop - 1 <= i.stop + self.hi"),
        ("a padded tile is full", " or self._live(j.start, j.stop) != j.stop - j.start", ""),
        ("padding is inverted", "keep &= mask.keys[j]", "keep &= ~mask.keys[j]"),
        ("padding by position in the tile", "mask.keys[j]", "mask.keys[: j.stop - j.start]"),
        ("the band is one wider on the left", "(ahead >= mask.lo)", "(ahead >= mask.lo - 1)"),
        ("the band is one narrower on the right", "(ahead <= mask.hi)", "(ahead < mask.hi)"),
        ("a masked score is -1e10", "np.copyto(S, -np.inf, ", "np.copyto(S, -1e10, "),
        ("a masked score is the smallest float32", "np.copyto(S, -np.inf, ", "np.copyto(S, np.finfo(np.float32).min, "),
        ("masking adds -inf", "np.copyto(S, -np.inf, where=~self.keep())", "S[...] = S + np.where(self.keep(), 0, -np.inf)"),
        ("a bool mask is inverted", "self.loaded if self.loaded.dtype == bool", "~self.loaded if self.loaded.dtype == bool"),
        ("a float mask is not added", "S += self.loaded", "pass"),
        ("-inf of a float mask counts as live", "self.loaded != -np.inf", "True"),
        ("one row of a mask stands for all", "return i if tall else", "return i if not tall else"),
    ],
    ("dropout.py", "dropout exact"): [
        ("what is kept is not scaled", "P.dtype.type(1 / (1 - self.p))", "P.dtype.type(1)"),
        ("what is kept is scaled by 1 / p", "1 / (1 - self.p)", "1 / self.p"),
        ("what is kept and dropped is swapped", "mine >= ", "mine < "),
        ("the batch is ignored", "self.head, self.batch)", "self.head, 0)"),
        ("the head is ignored", "self.head, self.batch)", "0, self.batch)"),
        ("the threshold is 2^31 p", "int(self.p * 2**32)", "int(self.p * 2**31)"),
        ("a word equal to the threshold is dropped", "mine >= ", "mine > "),
        ("the threshold is rounded up", "int(self.p * 2**32)", "-int(-self.p * 2**32 // 1)"),
        ("rows by position in the tile", "np.arange(i.start, i.stop, dtype", "np.arange(i.stop - i.start, dtype"),
        ("columns from the start of their quad", "j.start - 4 * first : j.stop - 4 * first", ": j.stop - j.start"),
        ("the high half of the seed is ignored", "seed >> 32", "0"),
        ("nine rounds", "range(10)", "range(9)"),
    ],
    ("problem.py", "front_door faults exact relations"): [
        ("query heads share key heads modulo", "at[-1] // self.group", "at[-1] % self.k.shape[-3]"),
        ("scale is 1 / d", "d**-0.5 if", "d**-1 if"),
        ("scale is 1 / sqrt(dv)", "d**-0.5 if", "v.shape[-1] ** -0.5 if"),
        ("padding is that of the first item", "self.real[at[:-1]]", "self.real[(0,) * len(at[:-1])]"),
    ],
    ("problem.py", "relations"): [
        ("the mask is that of the first head", "None else self.array[at]", "None else self.array[(*at[:-1], 0)]"),
        ("the mask is that of the first item", "None else self.array[at]", "None else self.array[(*(0,) * len(at[:-1]), at[-1])]"),
    ],
    ("problem.py::Problem.dropout", "dropout"): [
        ("the item is its first index", "self._item(at)", "at[0]"),
        ("the head is that of the keys", "at[-1])", "at[-1] // self.group)"),
    ],
    ("attention.py", "faults front_door"): [
        ("lse of the statistics without m", "np.asarray(shift(m) + log(l))", "np.asarray(log(l))"),
        ("SDPA aligns bottom-right", '"top-left", scale', '"bottom-right", scale'),
    ],
    ("memory.py", "memory counts"): [
        ("a store is not counted", "self._wrote(where, view.size)", "self._wrote(where, 0)"),
        ("a load is counted twice", "reads.get(self.name, 0) + cost", "reads.get(self.name, 0) + 2 * cost"),
        ("the first tile is read for nothing", "reads.get(self.name, 0) + cost", "reads.get(self.name, -cost) + cost"),
        ("an elided read is charged", "cost -= int(np.count_nonzero(self.untouched[where]))", "pass"),
        ("a stored row stays free", "self.untouched[where] = False", "pass"),
        ("an elided fill is charged", "self._wrote(slice(0, len(self.data)), 0)", "self._wrote(slice(0, len(self.data)), self.data.size)"),
        ("a literal fill is free", "self._wrote(slice(0, len(self.data)), self.data.size)", "self._wrote(slice(0, len(self.data)), 0)"),
        ("a full chip overflows", "elements > self.sram or", "elements >= self.sram or"),
        ("a chip full to the byte overflows", "size > self.sram_bytes", "size >= self.sram_bytes"),
        ("the budget may be passed by one", "elements > self.sram or", "elements > self.sram + 1 or"),
        ("the budget in bytes is not looked at", " or size > self.sram_bytes", ""),
        ("replacing a tile does not free the old one", "elements - replacing.elements, size - replacing.bytes", "elements, size"),
        ("an evicted tile still takes room", "self.used_elements -= gone.elements", "pass"),
        ("an evicted tile still takes bytes", "self.used_bytes -= gone.bytes", "pass"),
        ("the peak is what is there at the end", "if elements > self.peak_elements:", "if True:"),
        ("a load is counted at its size on chip", "Resident(self.name, view.size, view.nbytes, tile)", "Resident(self.name, view.size, tile.nbytes, tile)"),
        ("new memory is not counted", "+ math.prod(shape)", "+ 0"),
        ("new memory starts as 0", "np.full(shape, np.nan, dtype)", "np.zeros(shape, dtype)"),
        ("tiles are not widened", "np.array(view, dtype=widened(view.dtype), order", "np.array(view, order"),
        ("a tile is a view", "np.array(view, dtype=widened(view.dtype), order=\"C\")", "view.astype(widened(view.dtype), copy=False).view()"),
        ("a tile keeps the order of its array", "order=\"C\")", "order=\"K\")"),
        ("a tile may be written to", "tile.flags.writeable = False", "pass"),
        ("the tail of the rows is dropped", "range(0, N, B)", "range(0, N - N % B, B)"),
        ("the last block overlaps the one before", "(slice(start, min(start + B, N))", "(slice(min(start, max(N - B, 0)), min(start + B, N))"),
        ("the last block is as long as the others", "min(start + B, N)", "start + B"),
    ],
    ("memory.py::tiles", "memory counts"): [
        ("tiles are not evicted", "machine._evict_to(mark)", "pass"),
        ("tiles are not evicted by an exception", "try:\n            yield rows, *(A[rows] for A in arrays)\n        finally:\n            machine", "yield rows, *(A[rows] for A in arrays)\n        if True:\n            machine"),
        ("where is ignored", "if where is not None and not where(rows):", "if False:"),
    ],
    ("memory.py::turns", "memory counts"): [
        ("what a turn made is not evicted", "machine._evict_to(mark)", "pass"),
        ("where is ignored", "if where is not None and not where(rows):", "if False:"),
    ],
    ("cost/counts.py::flash2", "counts"): [
        ("Q is read once for each key tile", '"Q": head.Nq * head.d', '"Q": v.row_visits * head.d'),
        ("K has the width of V", '"K": v.key_visits * head.d,', '"K": v.key_visits * head.dv,'),
        ("V has the width of K", '"V": v.key_visits * head.dv', '"V": v.key_visits * head.d'),
        ("one key too few", '"K": v.key_visits', '"K": v.key_visits - head.d'),
        ("L is not written", '"L": head.Nq', '"L": 0'),
        ("O is read", '"Q": head.Nq * head.d,', '"Q": head.Nq * head.d, "O": head.Nq * head.dv,'),
        ("no exponentials of alpha", "exps=v.area + v.row_visits", "exps=v.area"),
        ("flops without P V", "2 * v.area * (head.d + head.dv)", "2 * v.area * head.d"),
        ("no extra memory", "extra_hbm_elements=head.Nq", "extra_hbm_elements=0"),
        ("no peak where no tile is visited", "peak(alone, *", "peak(*"),
        ("accumulators without l and m", "r0 * (head.dv + 2)", "r0 * head.dv"),
        ("accumulators in bytes as stored", "accumulators * head.wide", "accumulators * head.stored"),
        ("L in bytes as stored", 'head.item_bytes("L")', "head.item_bytes() | {'L': head.stored}"),
    ],
    ("cost/counts.py::flash1", "counts"): [
        ("K is read where no row needs it", '"K": v.keys_of_any', '"K": head.Nk'),
        ("the first pass is not elided", "(v.rows_of_any if elide else 0)", "0"),
        ("all rows have a first pass", "(v.rows_of_any if elide else 0)", "(head.Nq if elide else 0)"),
        ("the initial write is elided always", "+ (0 if elide else head.Nq)", ""),
        ("O has the width of Q", '"O": again * head.dv', '"O": again * head.d'),
        ("m is not read", '"m": again', '"m": 0'),
        ("l is not written", '"l": written', '"l": 0'),
        ("O in bytes as stored", 'item_bytes("O", "l", "m")', 'item_bytes("l", "m")'),
        ("one exponential a row and visit", "2 * v.row_visits,", "v.row_visits,"),
        ("extra memory without m", "extra_hbm_elements=2 * head.Nq", "extra_hbm_elements=head.Nq"),
    ],
    ("cost/counts.py::standard", "counts"): [
        ("V is read once", '"V": Tr * head.Nk * head.dv', '"V": head.Nk * head.dv'),
        ("rules skip tiles", "Mask(head.Nq, head.Nk, array=head.mask.array)", "head.mask"),
        ("S is read once though no row fits", "scores if Bs else 2 * scores,\n            \"V\"", "scores,\n            \"V\""),
        ("P is not read", '"P": scores,\n        }', '"P": 0,\n        }'),
        ("exponentials of one pass", "scores if Bs else 2 * scores + v.row_visits", "scores"),
        ("extra memory without P", "extra_hbm_elements=2 * scores", "extra_hbm_elements=scores"),
        ("no peak of the softmax", "steps.append(_statistics(head, Bs, head.Nk))", "pass"),
        ("no peak of l and m alone", "(*v.shapes, (r0, 0))", "v.shapes"),
        ("no peak of a tile alone", "peak(*alone, *steps)", "peak(*steps)"),
    ],
    ("cost/counts.py", "counts masks"): [
        ("the peak without l and m", "born = r * head.dv + r * c + 2 * r\n", "born = r * head.dv + r * c\n"),
        ("the peak without V", "loaded = r * head.d + c * (head.d + head.dv)", "loaded = r * head.d + c * head.d"),
        ("the peak without the mask", "elements = loaded + born + mask\n", "elements = loaded + born\n"),
        ("accumulators at their stored size", "loaded * head.stored + born * head.wide + ", "(loaded + born) * head.stored + "),
        ("the peak is the emptiest moment", "return max(elements), max(size)", "return min(elements), min(size)"),
        ("a row of S takes its elements alone", "row = head.Nk + 2", "row = head.Nk"),
        ("statistics hold one vector", "return r * (c + 2), r * (c + 2) * head.wide", "return r * (c + 1), r * (c + 1) * head.wide"),
        ("a mask has a column for each key", "per_row = v.keys if broad else v.tiles", "per_row = v.keys"),
        ("a mask has a row for each query", "(v.times * v.rows if tall else v.times) @ per_row", "(v.times * v.rows) @ per_row"),
        ("a mask's tile is never broadcast", "(r if tall else 1) * (c if broad else 1)", "r * c"),
        ("heads add up their peaks", "max(self.sram_elements, other.sram_elements)", "self.sram_elements + other.sram_elements"),
        ("extra memory is that of one head", "extra_hbm_elements=n * self.extra_hbm_elements", "extra_hbm_elements=self.extra_hbm_elements"),
    ],
    ("cost/visits.py::visits", "masks counts"): [
        ("a band ends one key early", "rows + mask.hi, 0", "rows + mask.hi - 1, 0"),
        ("a band begins one key late", "start + mask.lo, 0", "start + mask.lo + 1, 0"),
        ("a band may begin at its end", "some = first < stop", "some = first <= stop"),
        ("the last tile is that of stop", "(stop - 1) // Bc", "stop // Bc"),
        ("the left tile counts without live keys", "at_left = some & (", "at_left = some | ("),
        ("the left tile counts though padded", "alive(np.minimum(edges[left + 1], stop)) >", "alive(np.minimum(edges[left + 1], stop)) >="),
        ("the right tile counts though padded", "(alive(stop) > ", "(alive(stop) >= "),
        ("one tile is left and right", "(left < right)", "(left <= right)"),
        ("one inner tile too few", "right - left - 1, 0", "right - left - 2, 0"),
        ("padding does not empty inner tiles", "np.cumsum(weight * whole)", "np.cumsum(weight)"),
        ("the right tile is as long as the left", "at_right * cols[right]", "at_right * cols[left]"),
        ("inner tiles are touched though padded", "> 0) & whole", "> 0)"),
        ("inner tiles are not touched", "(left + 1)[inner > 0], 1)", "(left + 1)[inner > 0], 0)"),
        ("left tiles are not touched", "touched[left[at_left]] = True", "pass"),
        ("right tiles are not touched", "touched[right[at_right]] = True", "pass"),
        ("the last tile is never at the right", " | (at_right & (right == Tc - 1))", ""),
    ],
    ("cost/counts.py::_softmax", "needs"): [
        ("a softmax always takes a tile", "_statistics(head, 1, head.Nk), ", ""),
        ("a softmax always takes a row", ", _statistics(head, r, c)", ""),
    ],
    ("cost/counts.py::rabe_staats_tiles", "needs"): [
        ("a tile is longer than its chunk", "r, c = clamped((r, c), *longest_chunk(head))", "pass"),
    ],
    ("cost/counts.py::local_tiles", "needs"): [
        ("a tile is longer than its window", "*clamped((r, c), w, near)", "r, c"),
    ],
    ("cost/counts.py::flash3_tiles", "needs"): [
        ("a whole tile follows a whole tile", "min(c, head.Nk - c)", "c"),
    ],
    ("cost/counts_backward.py::standard_backward_tiles", "needs"): [
        ("a softmax's gradient always takes a tile", "_softmax_gradient(head, 1, head.Nk, 0), ", ""),
        ("a softmax's gradient always takes a row", ", _softmax_gradient(head, r, c, r)", ""),
    ],
    ("checks.py::integers", "cost_arguments"): [
        ("fractions are cut", 'found.dtype.kind not in "iu"', "False"),
        ("integers below the least pass", "found.min() < at_least or ", ""),
    ],
    ("checks.py::amount", "cost_arguments"): [
        ("less than nothing is an amount", "< 0", "< -1e9"),
    ],
    ("cost/tiles.py", "tiles counts front_door"): [
        ("the paper's tile is rounded down", "-(-M // (4 * head.d))", "max(1, M // (4 * head.d))"),
        ("the paper's short side is d + 1", "min(long, head.d, length)", "min(long, head.d + 1, length)"),
        ("tiles that fill the chip do not fit", "elements <= sram and", "elements < sram and"),
        ("tiles that fill the bytes do not fit", "size <= sram_bytes", "size < sram_bytes"),
        ("tiles one element too large fit", "elements <= sram and", "elements <= sram + 1 and"),
        ("bytes are not looked at", " and size <= sram_bytes", ""),
        ("roles are not swapped for flash2", "Br, Bc = (long, short) if row.outer", "Br, Bc = (short, long) if row.outer"),
        ("the strict rule is one short", "low, high = 1, at_most", "low, high = 1, max(1, at_most - 1)"),
        ("the optimal long side is not evened out", "return -(-N // -(-N // n))", "return n"),
        ("the optimal rule begins with square tiles", "fits(n, 1), Nlong)", "fits(n, n), Nlong)"),
        ("both lengths are taken for the longer", "(Nq, Nk) if row.outer", "(max(Nq, Nk),) * 2 if row.outer"),
        ("the side beside the shortest is that beside the longest", "moved(high, beside(low)), -high", "moved(high, beside(high)), -high"),
        ("the search ends with the first span", "if moved(low, beside(low)) == fewest:", "if low <= high:"),
        ("the upper half of a span is dropped", "for part in (span(low, middle), span(middle + 1, high)):", "for part in (span(low, middle),):"),
        ("a long side is evened out at any price", "long = even if moved(even, beside(even)) == fewest else low", "long = even"),
        ("a short side is evened out at any price", " and moved(long, _even(Nshort, short)) == fewest", ""),
        ("a hardware tile is a multiple of 8", '"hardware": 16', '"hardware": 8'),
        ("lengths in steps are rounded down", "max(1, -(-N // step))", "max(1, N // step)"),
    ],
    ("cost/launches.py", "cache"): [
        ("flash1 reads K for every row tile", 'Loop("K", reads("K", "V"), reads("Q", "O", "l", "m")', 'Loop("K", reads("V"), reads("Q", "K", "O", "l", "m")'),
        ("flash2 writes no L", 'writes("O", "L")', 'writes("O")'),
        ("standard's softmax writes as it reads", '(_dense("Q", (), reads("S")), _dense("Q", (), writes("P")))', '(_dense("Q", (), reads("S") + writes("P")),)'),
        ("dQ is not read again", 'reads("Q", "dO", "dQ", "L", "D")', 'reads("Q", "dO", "L", "D")'),
    ],
    ("cost/blocks.py", "cache waves"): [
        ("the band of a key tile is that of a query tile", "if by_query else (-mask.hi, -mask.lo)", "if by_query else (mask.lo, mask.hi)"),
        ("a band ends one key early", "end + high, 0, N)", "end + high - 1, 0, N)"),
        ("the last inner tile is not visited", "-(-stop // other)", "stop // other"),
        ("a layout is not transposed for key tiles", 'self.keep if loop.outer == "Q" else self.keep.T', "self.keep"),
        ("the middle tile of an odd head is paired with itself", "last > tile[:half]", "last >= tile[:half]"),
        ("the shortest first", "np.argsort(-found.work", "np.argsort(found.work"),
        ("compulsory are also arrays that are made here", "if not written", "if True"),
        ("query heads do not share keys", "self.heads // self.head.group if", "self.heads if"),
        ("a block of a cut tile takes less room", "run.needs(head, Br, Bc)[1]", "run.needs(head, grid.Br, grid.Bc)[1]"),
    ],
    ("cost/trace.py", "cache"): [
        ("what is needed by nobody is loaded", "if starts and not (needed and first + inner == stop)", "if starts"),
        ("what comes before is repeated", "starts, needed = inner == 0,", "starts, needed = True,"),
        ("the layout is ignored", "by if layout else 0", "0"),
        ("rows and columns of the layout are swapped", "keep[outer, b] if layout == 1", "keep[outer, b] if layout == 2"),
        ("a scan backward skips the last tile", "b = stop - 1 - inner if", "b = stop - 2 - inner if"),
        ("every scan is forward", "at[slot, 4] += 1", "pass"),
        ("only the first of a pair", "if place + 1 < last and (whole or", "if place + 1 < last and (whole and"),
        ("key heads are query heads", "made.head // group]", "made.head]"),
        ("a slot is left empty", "now[0] if now[0] < len(head) else -1", "now[0] if now[0] + 1 < len(head) else -1"),
        ("ragged tiles are whole", "sides[side] for side in SHAPES[name]", "(sides[side] * 0 + np.max(sides[side])) for side in SHAPES[name]"),
    ],
    ("cost/cache.py::_replay_lru", "cache"): [
        ("first in, first out", "if next_[end] == x:", "if True:"),
        ("the most recent makes room", "oldest = previous[end]", "oldest = next_[end]"),
        ("a written tile is fetched", "if not write:\n                bytes_[FETCHED", "if True:\n                bytes_[FETCHED"),
        ("a hit that writes leaves a tile clean", "if next_[end] == x:  # the most recent already\n                if write:", "if next_[end] == x:  # the most recent already\n                if False:"),
        ("a full cache has no room for what fills it", "used + size > capacity", "used + size >= capacity"),
        ("what went back is still dirty", "dirty[oldest] = False", "pass"),
        ("a tile too large is kept", "if size > capacity:", "if False:"),
        ("the bytes held are forgotten between pieces", "held[0] = used", "pass"),
    ],
    ("cost/cache.py::_replay_random", "cache"): [
        ("the last in makes room", "np.int64(state >> np.uint64(33)) % n", "n - 1"),
        ("what went is still here", "place[gone] = -1", "pass"),
        ("a clean tile goes back", "if dirty[gone]:", "if True:"),
    ],
    ("cost/cache.py::dram_cost", "cache"): [
        ("one block in flight", "gpu.sm_count * usual_blocks_per_sm(gpu, asked)", "1"),
        ("launches do not share the L2", "cache.bytes - before, items", "cache.bytes, items"),
        ("the scan is ignored", 'alternating=scan != "forward"', "alternating=False"),
    ],
    ("cost/waves.py", "waves"): [
        ("the system takes no shared memory", "shared_bytes + taken)", "shared_bytes)"),
        ("registers are not rounded up", "-(-registers * WARP // REGISTERS_OF_WARP) * REGISTERS_OF_WARP", "registers * WARP"),
        ("every block starts at once", "order // slots * work[0]", "0 * order"),
        ("the last slot to be free", "heapq.heapreplace(free, (at + length, s))", "free[0] = (at + length, s)"),
        ("utilisation of the busy slots alone", "(self.slots * self.span)", "(min(self.slots, len(self.work)) * self.span)"),
        ("the tail begins with the last block", "1 - done.min() / self.span", "1 - self.start.max() / self.span"),
        ("parts overlap", "at + part) - np.maximum(first[:, None], at)", "at + part + 1) - np.maximum(first[:, None], at)"),
    ],
    ("cost/splits.py", "waves split_kv"): [
        ("the fullest splits, however many", "0.85 * best", "best"),
        ("splits that shorten nothing", "splits == 1 or -(-key_tiles // splits) <", "splits == 1 or -(-key_tiles // splits) <="),
        ("splits where the GPU is nearly full", "0.8 * slots", "slots"),
        ("four fifths of the slots are split", "row_blocks >= 0.8", "row_blocks > 0.8"),
        ("more splits than slots", "min(MOST_SPLITS, slots, key_tiles)", "min(MOST_SPLITS, key_tiles)"),
        ("any number of splits", "min(MOST_SPLITS, slots, key_tiles)", "min(slots, key_tiles)"),
        ("0.85 of the best is not enough", "full >= 0.85 * best", "full > 0.85 * best"),
        ("narrow heads have tiles of 128 keys", "256 if d <= 64", "128 if d <= 64"),
        ("a width of 64 is wide", "d <= 64", "d < 64"),
        ("a width of 128 is wide", "d <= 128", "d < 128"),
        ("a block holds 128 queries", "-(-Nq // ROWS)", "-(-Nq // (2 * ROWS))"),
        ("an SM holds one block", "BLOCKS_AN_SM * device", "device"),
    ],
    ("cost/bounds.py", "bounds"): [
        ("a key that the diagonal reaches is not seen", "i + mask.hi + 1, 0", "i + mask.hi, 0"),
        ("keys before the window are seen", "np.clip(i + mask.lo, 0", "np.clip(i + mask.lo - 1, 0"),
        ("rows without keys are read", "(each > 0).sum()", "(each >= 0).sum()"),
        ("padding is read", "seen[span] |= live[span]", "seen[span] = True"),
        ("a layout keeps all blocks", "live = live & np.repeat", "live = live | np.repeat"),
        ("shared heads are read once for each query head", "shared * keys", "query_heads * keys"),
        ("the output need not be written", "(work.queries + work.keys) * (work.d + work.dv)", "work.queries * work.d + work.keys * (work.d + work.dv)"),
        ("O is compulsory for the backward pass", "(2 * work.d + work.dv)", "(2 * work.d + 2 * work.dv)"),
        ("the bound forgets what is on chip", "- M if math", "if math"),
        ("the bound's constant is 1", "(M + 4 * d**2)", "(M + d**2)"),
        ("the bound of dP takes the width of Q", "_products(work.scores, work.dv, M)", "_products(work.scores, work.d, M)"),
        ("the small chip's order holds on a large one", "if work.d**2 > M else None", "if True else None"),
        ("an approximation must compute every score", "(exact or not b.exact_only)", "True"),
        ("the best bound is the smallest", "largest = max(values", "largest = min(values"),
    ],
    ("cost/roofline.py", "roofline"): [
        ("all resources overlap", "return sum(self.seconds.values())", "return max(self.seconds.values())"),
        ("the idlest resource binds", "return max(self.seconds, key", "return min(self.seconds, key"),
        ("exponentials run at the matmul rate", "self.exps / self.gpu.exp_per_second", "self.exps / self.gpu.half_flops_per_second"),
        ("P is read from shared memory", "_Mma(Br, d, Bc, in_tensor_memory=True),  # O", "_Mma(Br, d, Bc),  # O"),
        ("dS is read from tensor memory for dQ", "_Mma(Br, d, Bc),  # dQ", "_Mma(Br, d, Bc, True),  # dQ"),
        ("dS need not be written", "HALF * Br * Bc + 2", "2"),
        ("dQ is passed on in 16 bits", "2 * WIDE * Br * d", "2 * HALF * Br * d"),
        ("a right operand serves any number of rows", "-(-self.rows // SIDE) * self.inner", "self.inner"),
        ("shared MMAs read as much", "* self.columns / ctas", "* self.columns"),
    ],
    ("cost/devices.py", "roofline devices"): [
        ("bfloat16 came with 7.0", 'self.compute_capability.startswith("7.")', "False"),
        ("float32 runs on the matrix units", '"float32": self.fp32_flops_per_second,', '"float32": self.half_flops_per_second,'),
    ],
    ("checks.py::clamped", "front_door counts"): [
        ("tiles are not clamped to Nk", "max(1, min(Bc, Nk))", "Bc"),
        ("tiles of nothing are 0", "max(1, min(Br, Nq))", "min(Br, Nq)"),
    ],
    ("cost/io.py", "counts"): [
        ("heads are not counted", ".times(heads)\n        if", "\n        if"),
        ("a length hides the last real key", "np.arange(Nk) < length", "np.arange(Nk) < length - 1"),
    ],
    ("reference.py", "exact faults"): [
        ("the bound is a hundred times too wide", "LAMBDA = 7.0", "LAMBDA = 700.0"),
        ("the reference does not mask", "np.where(self.live, S, -np.inf)", "S"),
    ],
    ("algorithms/flash2.py::flash_attention_2_backward", "faults backward"): [
        ("no 1/sqrt(d) in dQ", "scale * weigh(dSij, Kj", "weigh(dSij, Kj"),
        ("no 1/sqrt(d) in dK", "scale * weigh(dSij.T", "weigh(dSij.T"),
        ("D is left out", "softmax_gradient(Pij, dPij, Di)", "softmax_gradient(Pij, dPij, 0 * Di)"),
        ("the mask is missing", "Mij(Qi @ Kj.T * scale)", "(Qi @ Kj.T * scale)"),
        ("the last key tile is not masked", "Mij = mask.tile(i, j)", "Mij = (mask if j.stop < mask.Nk else type(mask)(mask.Nq, mask.Nk)).tile(i, j)"),
        ("a masked score takes a gradient", "Mij.gradient(softmax_gradient(Pij, dPij, Di))", "mask.add_gradient(softmax_gradient(Pij, dPij, Di), i, j)"),
        ("dP is not dropped", "drop(dOi @ Vj.T, i, j)", "dOi @ Vj.T"),
        ("P is not dropped for dV", "drop(Pij, i, j).T", "Pij.T"),
        ("dropout bits by position in the tile", "drop(dOi @ Vj.T, i, j)", "drop(dOi @ Vj.T, slice(0, len(Qi)), slice(0, len(Kj)))"),
        ("dQ is not accumulated", "dQ[i] = dQi + ", "dQ[i] = "),
        ("dQ does not start at zero", "dQ.fill(0)", "pass"),
        ("dK of the last query tile", "dKj += ", "dKj[:] = "),
        ("P from the maximum alone", "exp(Sij, Li, out=Sij)", "exp(Sij, Sij.max(axis=1), out=Sij)"),
        ("0 * NaN leaks into dV", "weigh(drop(Pij, i, j).T, dOi, Mij.keep_transposed)", "drop(Pij, i, j).T @ dOi"),
    ],
    ("algorithms/flash2.py::flash_attention_2_backward", "backward"): [
        ("V is read twice", "Mij = mask.tile(i, j)", "Vj = V[j]; Mij = mask.tile(i, j)"),
        ("empty tiles are visited", "where=where", "where=None"),
    ],
    ("algorithms/flash2.py::flash_attention_2_backward_two_kernels", "backward faults"): [
        ("the second loop adds to the mask's gradient", "Mij.cleared(", "Mij.gradient("),
        ("dQ of the last key tile", "dQi += ", "dQi[:] = "),
        ("no 1/sqrt(d) in dQ", "dQi += scale * ", "dQi += "),
    ],
    ("algorithms/flash2.py::row_dots", "backward"): [
        ("D of the output alone", "(dOi * Oi)", "(Oi * Oi)"),
    ],
    ("algorithms/flash1.py::flash_attention_1_backward", "faults backward"): [
        ("no 1/sqrt(d) in dQ", "scale * weigh(dSij, Kj", "weigh(dSij, Kj"),
        ("D is left out", "softmax_gradient(Pij, dPij, Di)", "softmax_gradient(Pij, dPij, 0 * Di)"),
        ("P is not normalised", "over(exp(Sij, mi, out=Sij), li, out=Sij)", "exp(Sij, mi, out=Sij)"),
        ("the mask is missing", "Mij(Qi @ Kj.T * scale)", "(Qi @ Kj.T * scale)"),
        ("dropout bits by position in the tile", "drop(dOi @ Vj.T, i, j)", "drop(dOi @ Vj.T, slice(0, len(Qi)), slice(0, len(Kj)))"),
        ("dV before dS, of dropped weights", "dPij = on_chip(", "drop(Pij, i, j); dPij = on_chip("),
    ],
    ("algorithms/flash1.py::flash_attention_1_backward_published", "backward"): [
        ("D is kept of the wrong visit", "if mask.first(i, j)", "if j.start == 0"),
        ("D is not kept", "D[i] = Di", "pass"),
        ("O is read in every pass", "if mask.first(i, j)", "if True"),
    ],
    ("algorithms/standard.py::standard_attention_backward", "faults backward"): [
        ("no 1/sqrt(d) in dQ", "dQi += scale * ", "dQi += "),
        ("P is not dropped for dV", 'Pij = on_chip("P", drop(Pij, i, j))', 'Pij = on_chip("P", Pij)'),
        ("dP is not dropped", "drop(dOi @ Vj.T, i, j)", "dOi @ Vj.T"),
    ],
    ("algorithms/standard.py::gradient_of_softmax", "backward"): [
        ("D is left out", "softmax_gradient(Pi, dPi, Di)", "softmax_gradient(Pi, dPi, 0 * Di)"),
        ("a NaN behind the mask counts", "np.where(Pi != 0, dPi, 0)", "dPi.copy()"),
    ],
    ("algorithms/standard.py::gradient_of_softmax_in_two_passes", "backward memory"): [
        ("D of the last tile", "Di += ", "Di[:] = "),
    ],
    ("algorithms/grouped.py", "faults backward"): [
        ("dK is not summed over the group", "sum_j += part_j", "sum_j[:] = part_j"),
    ],
    ("masks.py::Layout.over", "block_sparse"): [
        ("rows and columns of the layout are swapped", "self.keep[rows, j.start // self.Bc : -(-j.stop // self.Bc)]", "self.keep.T[rows, j.start // self.Bc : -(-j.stop // self.Bc)]"),
        ("a block too few", "-(-i.stop // self.Br)", "i.stop // self.Br"),
    ],
    ("masks.py::Layout.scores", "block_sparse"): [
        ("rows and columns of the layout are swapped", "self.keep[rows[:, None]", "self.keep.T[rows[:, None]"),
    ],
    ("masks.py::Mask.add_gradient", "backward"): [
        ("a shared mask has the gradient of its last head", " and not self.d_shared", ""),
        ("a broadcast mask is not summed", "dS.sum(axis=spread, keepdims=True)", "dS[:1, :1]"),
    ],
    ("cost/counts_backward.py::flash1_backward", "backward"): [
        ("O is read once as printed", "(v.rows_of_any if elide else rows) * dv", "v.rows_of_any * dv"),
        ("dK is not set to zero first", '"dK": (keys + (0 if elide else head.Nk)) * d', '"dK": keys * d'),
    ],
    ("cost/counts_backward.py::flash2_backward", "backward"): [
        ("dO is read in the loop alone", "(head.Nq + rows) * dv", "rows * dv"),
        ("L is not read", '"L": rows', '"L": 0'),
    ],
    ("cost/counts_backward.py::two_kernel_backward", "backward"): [
        ("V is read by the first loop alone", "(head.Nk + keys) * dv", "head.Nk * dv"),
        ("five products", "(4 * d + 3 * dv)", "(3 * d + 2 * dv)"),
    ],
    ("cost/counts_backward.py::standard_backward", "backward"): [
        ("dS is read once", '"dS": 2 * scores', '"dS": scores'),
    ],
    ("cost/visits.py::EveryTile", "masks counts"): [
        ("a tile too few", "return -(-self.Nq // self.Br)", "return self.Nq // self.Br"),
        ("rows are loaded once", "return self.Nq * -(-self.Nk // self.Bc)", "return self.Nq"),
        ("keys are loaded once", "return self.turns * self.Nk", "return self.Nk"),
        ("rows visit tiles where there are no keys", "return self.Nq if self.Nk else 0", "return self.Nq"),
        ("the first key tile is whole", "(r, min(self.Bc, self.Nk))", "(r, self.Bc)"),
        ("the first key tile comes again", "_kinds(max(0, self.Nk - self.Bc), self.Bc)", "_kinds(self.Nk, self.Bc)"),
    ],
    ("algorithms/square_tiles.py", "small_sram relations counts"): [
        ("only the last column of Q and K counts", "Sij += Qic @ Kjc.T", "Sij[:] = Qic @ Kjc.T"),
        ("scale is ignored", "Sij *= scale", "pass"),
        ("l is not rescaled", "exp(mi, m_new) * li +", "li +"),
        ("m is not carried on", "mi[:] = m_new", "pass"),
        ("O is not divided by l", "over(Oic, li)", "Oic"),
        ("a masked score takes from V", "Vjc, live)", "Vjc, lambda: np.ones_like(Sij, bool))"),
        ("empty tiles are written", "turns(Bc, K, where=mask.row(i))", "turns(Bc, K)"),
        ("empty columns of S are read", "column(V, c), where=mask.row(i))", "column(V, c))"),
        ("S is read in broader strips", "tiles(1, row(S, i)", "tiles(2, row(S, i)"),
        ("K is read twice", "Sij += Qic @ Kjc.T", "Sij += Qic @ K[j, _].T"),
        ("O is not registered on chip", 'on_chip("Oic", np.zeros((len(li), c.stop - c.start), l.dtype))', "np.zeros((len(li), c.stop - c.start), l.dtype)"),
        ("no dropout", "drop(exp(Sij, mi), i, j)", "exp(Sij, mi)"),
    ],
    ("algorithms/resident_scores.py", "small_sram relations counts"): [
        ("only the last column of Q and K counts", "Sij += Qic @ Kjc.T", "Sij[:] = Qic @ Kjc.T"),
        ("O forgets the l it was divided by", "old[:, None] * Oic", "exp(mi, m_new)[:, None] * Oic"),
        ("O is not normalised", "Mij.keep), l_new)", "Mij.keep), np.ones_like(l_new))"),
        ("l_new without the old l", "l_new = old + ", "l_new = 0 * old + "),
        ("m is not carried on", "li[:], mi[:] = l_new, m_new", "li[:] = l_new"),
        ("l after dropout", "l_new = old + Pij.sum(axis=1)\n            Pij = drop(Pij, i, j)", "Pij = drop(Pij, i, j)\n            l_new = old + Pij.sum(axis=1)"),
        ("the initial O is not written", "O.fill(0)", "pass"),
        ("empty tiles are visited", ", where=mask.row(i)", ""),
        ("O is read twice", "for c, Oic, Vjc in tiles(1, row(O, i), row(V, j)):", "for c, Oic, Vjc in tiles(1, row(O, i), row(V, j)):\n                Oic = O[i, c]"),
    ],
    ("algorithms/standard_unfused.py", "standard_variants relations memory"): [
        ("nothing is masked", "S[i, j] = mask.tile(i, j)(Sij)", "S[i, j] = Sij"),
        ("bits are written twice", "Pdrop[i, j], Z[i, j] = drop.kept(Pij, Zij), Zij", "Pdrop[i, j], Z[i, j] = drop.kept(Pij, Zij), Zij; Z[i, j] = Zij"),
        ("the bits are inverted", "drop.kept(Pij, Zij), Zij", "drop.kept(Pij, Zij), ~Zij"),
        ("dP is not masked by the bits", "dP[i, j] = drop.kept(dPij, Zij)", "dP[i, j] = dPij"),
        ("dV from the weights before dropout", "tiles(Br, dO, column(Pdrop, j))", "tiles(Br, dO, column(P, j))"),
    ],
    ("algorithms/local.py", "approximations"): [
        ("the window before is not seen", "max(0, i.start - w)", "i.start"),
        ("the window after is not seen", "min(i.stop + w, len(K))", "i.stop"),
        ("one key too many after", "i.stop + w, len", "i.stop + w + 1, len"),
        ("dropout by place in the window", "drop.part(i, j)", "drop"),
        ("V is that of the queries", "part(V, j)", "part(V, i)"),
    ],
    ("algorithms/linformer.py", "approximations"): [
        ("values are mixed by E", "project(F, V, Vp", "project(E, V, Vp"),
        ("only the last keys are mixed in", "Xi += weigh", "Xi[:] = weigh"),
        ("garbage behind padding leaks", "weigh(Eij, Xj, partial(np.not_equal, Eij, 0))", "Eij @ Xj"),
    ],
    ("masks.py::Mask.part", "approximations"): [
        ("the band does not move with the columns", "self.hi + i.start - j.start", "self.hi + i.start"),
        ("the band does not move with the rows", "self.lo + i.start - j.start", "self.lo - j.start"),
        ("padding is that of the first keys", "self.keys[j]", "self.keys[: j.stop - j.start]"),
        ("the array is that of the first rows", "part(self.array, *self.place(i, j))", "part(self.array, *self.place(slice(0, i.stop - i.start), j))"),
    ],
    ("dropout.py::Dropout.part", "approximations"): [
        ("rows start at 0", "self.row + i.start", "self.row"),
        ("columns start at 0", "self.column + j.start", "self.column"),
    ],
    ("problem.py::means", "approximations"): [
        ("sums instead of means", "1 / len(run)", "1"),
        ("padded keys are mixed in", "np.flatnonzero(real)", "np.arange(len(real))"),
    ],
    ("problem.py", "approximations"): [
        ("mixed keys of no real key count", "real = (mixing[0] != 0).any(axis=-1)", "real = None"),
        ("local attention sees one window", "- place) <= 1", "- place) <= 0"),
        ("given projections mix padded keys in", "np.where(real[..., None, :], x, dtype.type(0))", "np.where(real[..., None, :] | True, x, dtype.type(0))"),
    ],
    ("reference.py::_Rows", "approximations"): [
        ("mixing is wrong by far more than it is", "np.sqrt(mixed) * summed", "np.sqrt(mixed) * 999 * summed"),
        ("values are mixed by E", "E @ self.K, F @ self.V", "E @ self.K, E @ self.V"),
    ],
    ("cost/counts.py::square_tiles", "small_sram counts"): [
        ("S is read once", '"S": Td * alone.area', '"S": alone.area'),
        ("S is written whole", '"S": v.area, "O"', '"S": head.Nq * head.Nk, "O"'),
        ("V is read with the tiles of K", '"V": alone.key_visits', '"V": v.key_visits'),
        ("exponentials of one reading", "Td * alone.area,\n        **peak", "alone.area,\n        **peak"),
        ("no peak of O", "_held(head, 0, r0 * (broad + 2)),", ""),
    ],
    ("cost/counts.py::square_tiles_need", "small_sram counts"): [
        ("without the mask", "(elements + mask, size + mask_bytes(head, mask))", "(elements, size)"),
        ("without the tile of O", "_held(head, broad, r * (broad + 3)),", ""),
    ],
    ("cost/counts.py::resident_scores", "small_sram counts"): [
        ("the first pass is not elided", "(v.rows_of_any if elide else 0)", "0"),
        ("O is written once", "v.row_visits + (0 if elide else head.Nq)", "head.Nq"),
        ("no peak of l and m alone", "_held(head, 0, 2 * v.tallest),", ""),
    ],
    ("cost/counts.py::standard_unfused", "standard_variants counts"): [
        ("the mask kernel reads nothing", 'unmasked.reads["S"] + scores', 'unmasked.reads["S"]'),
        ("bits take four bytes", '{"Z": 1}', '{"Z": 4}'),
        ("the array mask is not read", ", **mask_reads(head, v)", ""),
    ],
    ("cost/counts.py::local", "approximations"): [
        ("the whole S is kept", "min(3 * w, head.Nk)", "head.Nk"),
        ("Bs is not cut to the window", "min(Bs, rows)", "Bs"),
    ],
    ("cost/counts.py::linformer", "approximations"): [
        ("K is read once", '"K": Tk * N * d', '"K": N * d'),
        ("F is not read", '"F": k * N', '"F": 0'),
        ("mixing takes no FLOPs", " + 2 * k * N * (d + dv)", ""),
        ("no peak of the mixing", "*(_mixing(head, r, c) for r, c in (*mixing.shapes, (i0, 0))),", ""),
        ("mixed keys in bytes as stored", '"P", "Kp", "Vp"', '"P"'),
    ],
    ("cost/counts_backward.py::standard_unfused_backward", "standard_variants backward"): [
        ("P is read for dV as well", '{"P": fused.reads["P"] - scores}', '{"P": fused.reads["P"]}'),
        ("the bits are not read", '"Z": scores}', '"Z": 0}'),
        ("no peak of the dropout kernel", "*(_dropping(head, r, c) for r, c in shapes)", ""),
    ],
    ("cost/approximations.py", "approximations"): [
        ("scores in float32", 'dict.fromkeys(IN_HALF, 2)', 'dict.fromkeys(IN_HALF, 4)'),
    ],
    ("cost/small_sram.py", "small_sram"): [
        ("the winner moves the most", "return min(fitting", "return max(fitting"),
        ("the crossover is one step late", "return (n + 1) / STEPS", "return (n + 2) / STEPS"),
    ],
    ("cost/visits.py::_visits_of_layout", "block_sparse"): [
        ("the layout is transposed", "layout.keep[top", "layout.keep.T[top"),
        ("padding does not empty a block", "cell = live & ", "cell = "),
    ],
    ("cost/grid.py", "grid"): [
        ("given tiles are longer than N", "Br, Bc = clamped(tiles, head.Nq, head.Nk)", "Br, Bc = tiles"),
        ("keys are in one part whatever N is", "splits=parts_of_keys(None, 1, length, length, width)", "splits=1"),
        ("accumulators are wide in no dtype", "stored.itemsize, widened(stored).itemsize", "stored.itemsize, stored.itemsize"),
        ("published kernels count as printed", 'convention == "elided"', "False"),
        ("the budget in bytes is not looked at", " and cost.sram_bytes <= chip.sram_bytes", ""),
        ("the budget in elements is not looked at", "cost.sram_elements <= chip.sram and ", ""),
        ("the bound is that of the budget where more is on chip", "room if fits else max(room, cost.sram_elements)", "room"),
        ("the bound of the forward pass", "best(work, room, backward=backward)", "best(work, room)"),
        ("every GPU is as fast as the first", "_seconds(cost, gpu, dtype)", "_seconds(cost, gpus[0], dtype)"),
        ("a range without its end", "while x <= last", "while x < last"),
    ],
    ("papers/row.py", "papers"): [
        ("a row holds whatever comes out", "return self.verdict == self.expected", "return True"),
        ("a verdict is that of the best number", "max(self.verdicts", "min(self.verdicts"),
        ("one digit fewer counts as rounding", ".quantize(published)", ".quantize(published.scaleb(1))"),
        ("a band is open upwards", "band[0] <= recomputed / float(published) <= band[1]", "band[0] <= recomputed / float(published)"),
        ("a range has no lower end", "low <= x <= high", "x <= high"),
    ],
    ("papers/fa1_tables.py", "papers"): [
        ("crossings in both directions", "if gap >= 0 > gap_after", "if (gap >= 0) != (gap_after >= 0)"),
        ("crossings by linear interpolation", "N * (after / N) ** (gap / (gap - gap_after))", "N + (after - N) * (gap / (gap - gap_after))"),
    ],
    ("papers/fa3.py", "papers"): [
        ("P of the baseline is not rounded to e4m3", "rounded(_half_softmax(S)) @ V", "_half_softmax(S) @ V"),
    ],
    ("algorithms/flash3.py::flash_attention_3", "flash3"): [
        ("P V of the last tile is dropped", "        if before is not None:\n            Oi += times_V(drop(Pij, i, before), load(V, before))  # P V of the last tile\n", ""),
        ("the pipeline rescales before P V is added", "            Oi *= alpha[:, None]  # P V is there: rescale\n            before, mi[:] = j, m_new", "            before, mi[:] = j, m_new"),
        ("V is that of the tile after", "Oi += times_V(drop(Pij, i, before), load(V, before))\n            m_new", "Oi += times_V(drop(Pij, i, j), load(V, j))\n            m_new"),
        ("dropout is that of the tile after", "times_V(drop(Pij, i, before), load(V, before))\n            m_new", "times_V(drop(Pij, i, slice(before.start + 1, before.stop + 1)), load(V, before))\n            m_new"),
        ("P is not registered", 'on_chip("Pij", marked_exp(Sij, m_new))', "marked_exp(Sij, m_new)"),
    ],
    ("online_softmax.py::times_V", "flash3"): [
        ("a masked weight takes NaN from V", "weigh(P, V, lambda: (P != 0) | ~np.signbit(P))", "P @ V"),
    ],
    ("algorithms/flash3.py::flash_attention_3_fp8", "flash3"): [
        ("P is not rounded to e4m3", "Pij[:] = rounded(Pij)", "pass"),
        ("l adds up rounded weights", "li[:] = alpha * li + Pij.sum(axis=1)", "li[:] = alpha * li + rounded(Pij).sum(axis=1)"),
        ("the scale of V is left out", "Vj * vs[j, None]", "Vj"),
        ("the scale of K is that of the first rows", "* ks[j]", "* ks[: len(Kj)]"),
    ],
    ("problem.py::Problem._quantised", "flash3"): [
        ("the rotation is of K alone", "Q, K = Q @ R, K @ R", "K = K @ R"),
        ("what is padded counts for a scale", "K[~real], V[~real] = 0, 0", "pass"),
        ("the rotation overflows in float16", "Q, K = Q @ R, K @ R", "Q, K = ((X @ R).astype(self.q.dtype).astype(X.dtype) for X in (Q, K))"),
        ("nothing is rotated", "if self.incoherent:", "if False:"),
    ],
    ("fp8.py::quantised", "flash3"): [
        ("a block scale is half of what it should be", "x.dtype.type(LARGEST)", "x.dtype.type(2 * LARGEST)"),
        ("one scale for all rows", "range(0, N, rows)]", "range(0, N, rows)]\n    scales = [max(scales, default=0)] * len(scales)"),
        ("NaN decides over a scale", "np.where(np.isfinite(x), np.abs(x), 0)", "np.abs(x)"),
    ],
    ("fp8.py::signs", "flash3"): [
        ("no random signs", "choice([-1.0, 1.0], width)", "choice([1.0, 1.0], width)"),
    ],
    ("cost/counts.py::flash3", "flash3 counts"): [
        ("the epilogue's V is not counted", "fullest(alone, *first, *later, *last)", "fullest(alone, *first, *later)"),
        ("P of the tile before is not counted", "_softmax_stage(head, r, c, c0, r * c0)", "_softmax_stage(head, r, c, c0, 0)"),
    ],
    ("cost/counts.py::flash3_fp8", "flash3"): [
        ("O is of one byte too", '| {"O": head.stored}', '| {"O": 1}'),
    ],
    ("papers/fa4.py", "papers"): [
        ("two different rescalings are one", "lazily_rescaled(q, k, v, tile, 0)", "lazily_rescaled(q, k, v, tile, threshold)"),
    ],
    ("exercise.py", "exercise"): [
        ("what is read in part is taken for the whole", "if read < N * D:", "if read < 1:"),
        ("a narrow matrix is a few numbers a row", "A_FEW = 4", "A_FEW = 64"),
    ],
    ("cost/counts.py", "flash4"): [
        ("every row is rescaled by default", "THRESHOLD = 8.0", "THRESHOLD = 0.0"),
        ("the threshold is 7", "THRESHOLD = 8.0", "THRESHOLD = 7.0"),
    ],
    ("problem.py::_pages", "paged"): [
        ("pages of V may have other rows", "v.shape[:-1] != k.shape[:-1]", "v.size * k.shape[-1] != k.size * v.shape[-1]"),
    ],
    ("problem.py::checked", "paged"): [
        ("messages name a shape that nobody gave", 'raise bad("k.shape", given, f"{H} heads', 'raise bad("k.shape", k.shape, f"{H} heads'),
    ],
    ("problem.py::rows_of_a_scale", "flash3"): [
        ("any size of a block is taken", 'return checks.integer("fp8", fp8, 1)', "return fp8"),
    ],
    ("paging.py::PagedKVCache.attend", "paged"): [
        ("the cache looks ahead", "is_causal=True", "is_causal=False"),
        ("queries of no token", "if lengths and q.shape[-2] > min(lengths):", "if False:"),
    ],
    ("paging.py::paginate", "paged"): [
        ("a length is clipped", "0, k.shape[2] + 1)", "0)"),
    ],
    ("decode.py::KVCache.attend", "split_kv"): [
        ("queries of no token", "if q.shape[-2] > self.length:", "if False:"),
    ],
    ("algorithms/flash4.py::flash_attention_4", "flash4"): [
        ("a threshold in powers of e", "threshold * math.log(2)", "threshold"),
        ("l is not rescaled when m moves", "alpha * li + Pij.sum", "li + Pij.sum"),
        ("m moves without a rescaling", "np.where(grows, m_tile, mi)", "np.maximum(mi, m_tile)"),
        ("the first tile counts as a rescaling", "grows & (mi > -np.inf)", "grows"),
        ("the tally is not of one row", "R[i] += grows", "R[i] += grows.any()"),
    ],
    ("algorithms/flash4.py::partly_emulated", "flash4"): [
        ("all or nothing is emulated", "emulated(j, share)", "emulated(j, float(share > 0.5))"),
        ("the share counts from the tile", "emulated(j, share)", "emulated(slice(0, j.stop - j.start), share)"),
        ("every exponential is emulated", "some = emulated(j, share)", "some = emulated(j, 1.0)"),
        ("powers of e are taken for powers of two", " * S.dtype.type(math.log2(math.e))", ""),
        ("the polynomial is never used", "P[:, some] = exp2(powers, degree)", "pass"),
    ],
    ("exp2.py", "flash4"): [
        ("a coefficient in the sixth digit", "0.69514614", "0.69515614"),
        ("an integer part towards zero", "np.floor(known)", "np.trunc(known)"),
        ("the columns start anew in every tile", "np.arange(columns.start, columns.stop)", "np.arange(columns.stop - columns.start)"),
    ],
    ("algorithms/rabe_staats.py::summarize_chunk", "faults"): [
        ("a masked weight takes NaN from V", "marked_exp(Sr, mr)", "exp(Sr, mr)"),
    ],
    ("algorithms/rabe_staats.py::combine", "rabe_staats"): [
        ("a chunk is not scaled to the largest m", "Or += factor[:, None] * Op", "Or += Op"),
        ("l of a chunk is not scaled", "lr += factor * lp", "lr += lp"),
    ],
    ("algorithms/rabe_staats.py::summarize_chunk", "rabe_staats"): [
        ("dropout counts from the chunk", "drop(Prc, moved(r, i), moved(c, j))", "drop(Prc, r, c)"),
        ("the mask counts from the chunk", "mask.tile(moved(r, i), moved(c, j))", "mask.tile(r, c)"),
    ],
    ("cost/counts.py::rabe_staats", "rabe_staats"): [
        ("each m is read once", '"mc": 2 * states', '"mc": states'),
    ],
    ("cost/counts.py::Head.key_chunk", "rabe_staats"): [
        ("a chunk of keys is one short", "math.isqrt(max(0, self.Nk - 1)) + 1", "max(1, math.isqrt(self.Nk))"),
    ],
    ("cost/schedule.py::timeline", "schedule"): [
        ("a softmax does not wait for S", "softmax, end + wait)", "softmax, end)"),
        ("a warpgroup asks for S during its softmax", "max(K[tile], P[w], turn)", "max(K[tile], turn)"),
        ("ping-pong takes no turns", "turn = end + wait", "pass"),
        ("a place of K is free before it is read", "S[before] + wait if before >= 0 else 0.0", "0.0"),
        ("a place of V is free before it is read", "O[before] + wait if before >= 0 else 0.0", "0.0"),
        ("a producer has a place more", "tile - STAGES", "tile - STAGES - 1"),
        ("without specialisation loads run ahead", "return max(P[0], last + wait) if last else 0.0", "return P[0]"),
        ("without specialisation V runs ahead of the softmax", "max(P[0], last + wait)", "last + wait"),
        ("V is used before it is there", "max(V[tile], P[w] + wait, turn)", "max(P[w] + wait, turn)"),
    ],
    ("cost/schedule.py::tile_times", "schedule"): [
        ("FP8 is exactly twice as fast", "matmul * gpu.half_flops_per_second / gpu.fp8_flops_per_second", "matmul / 2"),
        ("FP8 loads two bytes", "gpu.fp8_flops_per_second, 1\n", "gpu.fp8_flops_per_second, HALF\n"),
    ],
    ("cost/schedule_report.py", "schedule"): [
        ("a rate is a share of the peak", "flops * gpu.boost_clock_hz / line.total_cycles", "gpu.half_flops_per_second * line.utilisation"),
        ("the keys beyond N count", '* N * problem["d"]', '* found[0].tiles * Bc * problem["d"]'),
        ("the paper's rates stand beside any times", " and times == tile_times(gpu)", ""),
        ("the paper's rates stand beside any problem", " and problem == MEASURED_AT", ""),
        ("the paper's rates stand beside any GPU", "gpu.key == MEASURED_ON and ", ""),
    ],
    ("papers/others.py", "papers"): [
        ("safe softmax in two passes", "m = max(m, xj.max())", "m = 0.0; x.machine.traffic.reads['x'] -= xj.size"),
    ],
    ("turns.py::rises_most", "viewer"): [
        ("any new maximum is a rise", "m_new > m_old", "m_new >= m_old"),
        ("of several rows the last is followed", "(-rises[row], row)", "(-rises[row], -row)"),
    ],
    ("turns.py::scopes", "viewer"): [
        ("a loop's tiles outlive it", "loop[0] < indent", "loop[0] <= indent"),
    ],
    ("turns.py::_cells", "viewer"): [
        ("m_old is m_new", 'yield Cell("m_old", step, "mi")', 'yield Cell("m_old", step, name)'),
        ("a loaded state is the turn's", "(header and name not in FINAL_WHEN_LOADED)", "False"),
    ],
    ("turns.py::first", "viewer"): [
        ("loops over a part count from 0", "return next(starts, 0)", "return 0"),
        ("keys count as queries do", "== side", '== "Nq"'),
    ],
    ("turns.py::turns_of", "viewer"): [
        ("what an algorithm calls is never one itself", ", *FORWARD}", "}"),
    ],
    ("page_data.py::_differences", "viewer"): [
        ("a row is held against one of another kind", "last.get(head, ())", "last.get((), ())"),
    ],
    ("page_data.py::_Arrays.values", "viewer"): [
        ("rows are cut, not columns", "[:, :columns]", "[:columns]"),
    ],
    ("page_data.py::_loaded_from", "viewer"): [
        ("a tile is taken for the next", '.split(", ")[1:]', '.split(", ")'),
    ],
    ("page_data.py::_region", "viewer"): [
        ("every read is of whole sides", "part.indices(length)[:2]", "(0, length)"),
    ],
    ("page_data.py::_place", "viewer"): [
        ("rows count from the tile", "side.start if", "0 if"),
        ("a loop without a name is not looked up", "_loaded_from(step, name, run)", "(-1, -1)"),
        ("a whole array counts from 0", 'first(step, "Nq"), -1, 1', "0, -1, 1"),
    ],
    ("page_data.py::_twins", "viewer"): [
        ("a run is compared with another turn", "*(x.start for x in tiles.values())", "*()"),
    ],
    ("page_data.py::_close", "viewer"): [
        ("nothing is wrong", "CLOSE", "1e9"),
    ],
    ("page_data.py::_Arrays.__call__", "viewer"): [
        ("arrays of equal bytes are one", "(x.shape, kept.tobytes())", "(x.shape[:1], kept.tobytes())"),
    ],
    ("viewer.py::View.html", "viewer"): [
        ("a title is HTML", "html.escape(self.title)", "self.title"),
        ("a page may have any number of steps", "len(self.recording) > MOST_STEPS", "False"),
    ],
    ("viewer.py::view", "viewer"): [
        ("a backward pass has the forward one's tiles", "out.tiles_backward or out.tiles", "out.tiles"),
    ],
    ("viewer.py::refused", "viewer"): [
        ("nothing is refused for what an algorithm needs", "REFUSED.get(needed, ())", "()"),
    ],
    ("viewer.py::_needed", "viewer"): [
        ("the chip is that of the forward pass", "if not backward:", "if True:"),
    ],
    ("viewer.py::standard_traffic", "viewer"): [
        ("a backward pass is held against a forward one", "return out.traffic_backward", "return out.traffic"),
    ],
    ("failures.py::Comparison.view", "viewer"): [
        ("standard attention has any chip", ", sram=call.sram", ""),
    ],
    ("failures.py::show", "failures"): [
        ("NaN is no error", "np.where(np.isnan(error), np.inf, error)", "np.nan_to_num(error)"),
    ],
    ("failures.py::faulty", "failures"): [
        ("the lines have other numbers", "module.replace(text,", "text.replace(text,"),
    ],
    ("record.py::record_backward", "record"): [
        ("the tiles are ignored", "run.result = out.backward(do, tiles)", "run.result = out.backward(do)"),
    ],
    ("record.py::_Watcher.on_line", "viewer"): [
        ("a run is refused when it has ended", "self._check_length()", "pass"),
    ],
    ("record.py::_Watcher.__exit__", "viewer"): [
        ("a run may have a step too many", "if kind is None:", "if False:"),
    ],
    ("record.py::_Watcher._parts", "record"): [
        ("a call forgets of what its caller has a part", "dict(self.calls[-1].parts) if self.calls else {}", "{}"),
    ],
    ("memory.py::_moved", "viewer"): [
        ("a part counts from its own first row", "side.start + p.start", "p.start"),
    ],
    ("memory.py::part", "record"): [
        ("a part of a part counts from the first part", "_moved(where, A.within)", "where"),
    ],
    ("kernels/hopper.py::flash_attention_3.step", "hopper"): [
        ("S is used before it is there", "all_but_one()\n            have_S(S, 0)", "have_S(S, 0)"),
        ("O is used before it is there", "all_products()\n            have_O(O, 0)", "have_O(O, 0)"),
        ("V of the tile before is not waited for", "wait_until_full(base, full_V, n - 1)\n", "pass\n"),
        ("V of the tile instead of the one before", "tile_at(base, V_at, n - 1), KV_panel", "tile_at(base, V_at, n), KV_panel"),
        ("later tiles are not masked", "mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi)", "pass"),
        ("O is not rescaled", "rescale(O, alpha)", "pass"),
        ("inf and NaN of a tile that is not the last are multiplied", "if careful and border(i0, j0, lo, hi):", "if False:"),
    ],
    ("kernels/hopper.py::flash_attention_3.step", "hopper_fp8"): [
        ("O stays in the units of the tile before", "O_in_units(alpha, units, V_scale)", "pass"),
        ("m stays in the units of the tile before", "in_units(m, units, S_scale)\n            softmax", "softmax"),
        ("a tile has the scales of the one before", "words, told_at(sm, base, turn), next_key, scale", "words, told_at(sm, base, turn), j0, scale"),
    ],
    ("kernels/hopper.py::flash_attention_3.first_scores", "hopper_fp8"): [
        ("a first tile has no units", "first_units(units, S_scale, V_scale)", "pass"),
    ],
    ("kernels/hopper.py::flash_attention_3.turn_over", "hopper_fp8"): [
        ("a turn has the units of the one before", "first_units(units, S_scale, V_scale)", "pass"),
    ],
    ("kernels/hopper.py::flash_attention_3.settle", "hopper_fp8"): [
        ("lse of weights that are too large", "shift = shift - float32(above)", "pass"),
        ("O leaves in units of its last tile", "reciprocal(l[r]) * V_scale", "reciprocal(l[r])"),
    ],
    ("kernels/fp8.py::units", "hopper_fp8"): [
        ("a tile has the first scale", "j = uint32(uint32(j0) // uint32(FP8_ROWS))", "j = uint32(0)"),
        ("queries have the first scale", "uint32(uint32(r0) // uint32(FP8_ROWS))", "uint32(0)"),
        ("a head has its own key scales", "uint32(words[told + 5])", "uint32(words[told + 1])"),
    ],
    ("kernels/fp8.py::quantised", "hopper_fp8"): [
        ("a warp has its own scale", "for w in range(warps):", "for w in range(0):"),
        ("an infinite number counts for a scale", 'if abs(y[e]) < float32(float("inf")):', "if True:"),
        ("nothing has a scale of its own", "scale = float32(1)", "pass"),
        ("a division that is not exact", "cuda.fma(cuda.fma(-q, scale, x), over, q)", "q"),
        ("columns in the order of keys", "divided(sm[at + 8 * LD], scale, over)", "divided(sm[at + 2 * LD], scale, over)"),
        ("signs are left out", "y[COLUMNS * n + e] *= sign", "pass"),
        ("a sum has the sign of a difference", "y[e] = other - y[e] if", "y[e] = y[e] - other if"),
        ("rows beyond the last are read", "if i < N:\n                load_eight", "if True:\n                load_eight"),
    ],
    ("kernels/warpgroup_tiles.py::rounded_four", "hopper_fp8"): [
        ("weights change places", "S[e], S[e + 1], S[e + 4], S[e + 5]", "S[e], S[e + 4], S[e + 1], S[e + 5]"),
    ],
    ("kernels/hopper.py::flash_attention_3.inner_after", "hopper"): [
        ("the tile with the last key that is seen is inner", "// Bc - 1)", "// Bc)"),
        ("the tile with the first key that is seen is inner", "if not before_band(i0, Br, j0, lo):", "if True:"),
        ("the last key tile is inner", "min(int32(Nk), int32(i0 + hi + 1))", "int32(i0 + hi + 1)"),
    ],
    ("kernels/hopper.py::flash_attention_3.hopper", "hopper"): [
        ("the last tile that a warpgroup sees is left out", "n_stop = uint32(n_first + stop - first)", "n_stop = uint32(n_first + stop - first - 1)"),
        ("all warpgroups have the first rows", "r0 = int32(i0 + warpgroup * ROWS)", "r0 = int32(i0)"),
    ],
    ("kernels/hopper.py::flash_attention_3.last_product", "hopper"): [
        ("the last V is not waited for", "wait_until_full(base, full_V, n)", "pass"),
    ],
    ("kernels/hopper.py::flash_attention_3.turn_over", "hopper"): [
        ("the last V of a turn is not waited for", "wait_until_full(base, full_V, n - 1)", "pass"),
        ("O leaves before its last product is there", "all_products()\n        have_O(Oi, 0)", "have_O(Oi, 0)"),
        ("O of a turn begins with that of the one before", "empty(Oi)", "pass"),
        ("l of a turn begins with that of the one before", "nothing_yet(m, l)", "pass"),
        ("a turn's first tile is not masked", "mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi)", "pass"),
        ("inf and NaN of a turn's last tile are multiplied", "set_aside(sm, words, base, n - 1, Oi, i, lo, hi)", "pass"),
    ],
    ("kernels/hopper.py::flash_attention_3", "hopper"): [
        ("lse in base 2", "shift * float32(ln2) + log(l[r])", "shift + log(l[r])"),
        ("O is not divided by l", "rescale(Oi, over)\n        if wide", "if wide"),
        ("O of the turn before stays", "O[n] = float32(0)", "pass"),
        ("padded keys are seen", "mask_padding(S, words, uint32(slot_at(sm, base, n) + uint32(1)))", "pass"),
        ("values of padded keys are multiplied", "clear_padding(words, uint32(V_j // uint32(2)), bits, mine)", "pass"),
        ("values of padded keys are not waited for", "wait_until_looked_at(base, n)\n\n    @device\n    def take", "pass\n\n    @device\n    def take"),
        ("values were looked at a phase early", "wait_until_full(base, full_V, n)\n        wait_until_full(base, looked_V, n)", "wait_until_full(base, looked_V, n)"),
        ("dropout draws for the rows of another warpgroup", "words[told] + warpgroup * ROWS + row", "words[told] + row"),
        ("which tile is walked is said where another is", "uint32(n) % uint32(2 * stages)", "uint32(0)"),
        ("K is overwritten", "wait_until_empty(here, empty_K, n)", "pass"),
        ("V is overwritten", "wait_until_empty(here, empty_V, n)", "pass"),
        ("Q is overwritten", "wait_for_place(here, empty_Q, turn)", "pass"),
        ("every block does everything", "item = uint32(uint32(cuda.gridDim.x) + cuda.atomic.add(counter, 0, uint32(1)))", "item = uint32(turn)"),
        ("the counter stays as it is", "counter[0] = 0", "pass"),
        ("a head of its own for each query head", "h // group", "h"),
        ("a batch for each part", "words[told + 6] = part_b % batch", "words[told + 6] = part_b"),
        ("values are not looked at", "words[seen_at(sm, base, n)] = int32(n + 1)", "pass"),
        ("inf and NaN that are seen are lost", "add_not_finite(sm, at, O, int32(row + lo), int32(row + hi))", "pass"),
        ("inf and NaN are multiplied", "clear_not_finite(sm, at, thread)", "pass"),
        ("O leaves before it is fenced", "put(sm, element(sm, sO), Oi, within)\n        fence_proxy_async()", "put(sm, element(sm, sO), Oi, within)"),
        ("what is after the band is seen", "edge[r] = min(edge[r], int32(i + 8 * r + hi - j))", "pass"),
        ("what is before the band is seen", "mask_before(S, edge)", "pass"),
        ("keys that are not there are seen", "edge[r] = int32(Nk - 1 - j)", "edge[r] = int32(Bc)"),
    ],
    ("kernels/warpgroup_tiles.py::ring", "hopper hopper_backward"): [
        ("the phase is that of the tile", "uint32(n) // uint32(places) % uint32(2)", "uint32(n) % uint32(2)"),
        ("full is waited for a phase early", "mbarrier_wait(bar(base, first, n), parity(n))", "mbarrier_wait(bar(base, first, n), uint32(1 - parity(n)))"),
    ],
    ("kernels/split_kv.py::merge", "kernels"): [
        ("the other groups' parts are lost", "o += sm[sums + other * wide + t]", "pass"),
        ("weights are not those of the parts", "sm[n] = exp2(sm[n] - shift)", "sm[n] = exp2(sm[n])"),
        ("a row without keys is NaN", "m if m != -float32(float(\"inf\")) else float32(0)", "m"),
    ],
    ("kernels/padding.py", "hopper"): [
        ("a tile whose real keys are before the first is walked", "walked[b, j_first, LAST] < first", "False"),
        ("a tile whose real keys are after the last is walked", "walked[b, j_stop - 1, FIRST] >= stop", "False"),
        ("a tile with no real key between is walked", "some = bits != uint32(0)", "pass"),
        ("all tiles are walked", "if real > 0:", "if real >= 0:"),
    ],
    ("kernels/warp_tiles.py::kept", "ampere hopper"): [
        ("two lanes draw for the same row", "uint32(row + 16 * m + 8 * odd)", "uint32(row + 16 * m)"),
        ("all parts of a warp are drawn for the first rows", "uint32(row + 16 * m + 8 * odd)", "uint32(row + 8 * odd)"),
    ],
    ("kernels/ampere.py::flash_attention_2", "ampere"): [
        ("padded keys are seen", "real[n // 4] >> uint32(col % 32) & 1 == 0", "False"),
        ("values of padded keys are multiplied", "clear_padding(sm, uint32(sV + now), keys, b, j0, tid)", "pass"),
        ("tiles of padding are loaded", "find_next(keys, b, j_next, i0 + lo, j_stop, next_real, lane)", "max(j_next, find_next(keys, b, j_next, i0 + lo, j_stop, next_real, lane) - Bc)"),
        ("all tiles have the keys of the first", "real[w] = next_real[w]", "pass"),
        ("every warp draws for the first rows", "i0 + int32(first + g), int32(j0))", "i0 + int32(g), int32(j0))"),
        ("what is kept is not scaled", "over *= factor", "pass"),
        ("nothing is dropped", "drop(Sij, kept, float32(1))", "pass"),
    ],
    ("kernels/ampere_backward.py::flash_attention_2_backward", "ampere"): [
        ("padded keys are seen", "sm[sR + key] != key", "False"),
        ("padded keys are multiplied", "wait_for_all()\n            clear_padding(sm, sK, keys, b, j0, tid)", "pass"),
        ("padded keys have a gradient", "clear_padding(sm, sK, keys, b, j0, tid)\n            clear_padding(sm, sV", "clear_padding(sm, sV"),
        ("queries that see no real key are visited", "i0 = next_seeing(sm, sR, i0, i_stop, Nq, lo, hi, j0)", "pass"),
        ("dP is not dropped", "drop(dSji, kept, factor)", "pass"),
        ("P is not dropped", "drop(Pji, kept, float32(1))", "pass"),
        ("dV is not scaled", "dVj[n] *= factor", "pass"),
    ],
    ("kernels/warp_tiles.py::add_not_finite", "ampere"): [
        ("what is dropped is inf", "y *= float32(0)", "pass"),
        ("of another column is looked up", "(lane & 28) + k % 8 // 2", "lane"),
    ],
    ("kernels/padding.py::next_real", "ampere"): [
        ("keys beyond those that are seen count", "and key >= first and key < stop", "and key < keys.shape[1]"),
    ],
    ("kernels/padding.py::next_seeing", "ampere"): [
        ("keys after the window are seen", "int32(min(int32(i0 + rows), int32(Nq)) + high)", "int32(columns)"),
    ],
    ("kernels/warp_tiles.py::kept_transposed", "ampere hopper_backward"): [
        ("of the keys of another lane is drawn", "uint32(uint32(theirs & uint32(0x11111111)) << uint32(q ^ uint32(n)))", "uint32(uint32(theirs & uint32(0x11111111)) << q)"),
    ],
    ("kernels/cache.py::constants", "hopper"): [
        ("a kernel's name has an address", "x.__qualname__ if isfunction(x) else repr(x)", "repr(x)"),
    ],
    ("kernels/hopper_backward.py::flash_attention_3_backward.hopper_backward", "hopper_backward"): [
        ("padded keys have a gradient", "clear_rows(dKj, real_rows(words, begin, tid))", "pass"),
        ("dS of padded keys is not 0", "clear_rows_dS(dP, real_rows(words, begin, tid))", "pass"),
        ("dP is that of weights that were dropped", "take_out(dP, keep, rules)", "pass"),
        ("dS is not fenced", "dS, within)\n                fence_proxy_async()", "dS, within)"),
        ("dS is used before the others put theirs", "bar_sync(everyone, computing)  # dS is there, and the place for dQ is free", "bar_sync(mine + warpgroup, WARPGROUP)"),
        ("dQ leaves from where the next one goes", "have_left()\n", "pass\n"),
        ("dQ is not fenced", "dQi)\n                fence_proxy_async()", "dQi)"),
        ("dQ leaves before all have put it", "bar_sync(mine + warpgroup, WARPGROUP)\n                if leader:  # dQ", "if leader:  # dQ"),
        ("S is used before it is there", "all_but_one()\n                have_S(S, 0)", "have_S(S, 0)"),
        ("dP is used before it is there", "tid)\n                    all_but_one()", "tid)"),
        ("K and V are left while others read them", "bar_sync(everyone, computing)  # nobody needs K_j or V_j any more", "pass"),
        ("a wrong panel of dS", "descriptor(dS_part, KV_panel)", "descriptor(dS_part, Q_panel)"),
        ("all parts of dQ are of the first queries", " + chunk % PANEL * 2)", ")"),
        ("dK without the scale", "dKj[n] *= scale * float32(ln2)", "pass"),
        ("P is not masked", "clear_masked(S, key", "pass; (S, key"),
        ("dS is not masked", "clear_masked(dP, key", "pass; (dP, key"),
        ("every warpgroup has the first keys", "key = int32(r0 + within)", "key = int32(j0 + within)"),
        ("the last tile of queries is left out", "uint32(stop + (Br - 1)) // uint32(Br)", "uint32(stop) // uint32(Br)"),
        ("tiles of queries that see no key are visited", "stop = min(stop, int32(min(j0 + Bc, Nk) - lo))", "pass"),
        ("a group's second head begins at its first query", "h, i = uint32(h + 1), i_first", "h, i = uint32(h + 1), uint32(0)"),
        ("a cleared K stays", "if banded and hidden and bad_K:\n                    bring", "if False:\n                    bring"),
        ("a K with NaN is multiplied", "if banded and hidden and bad_K:\n                    set", "if False:\n                    set"),
    ],
    ("kernels/hopper_backward.py::flash_attention_3_backward", "hopper_backward"): [
        ("Q is overwritten", "wait_until_empty(bars, empty_Q, n)", "pass"),
        ("dO is overwritten", "wait_until_empty(bars, empty_dO, n)", "pass"),
        ("a K that comes back is not waited for", "mbarrier_wait(full, times % uint32(2))", "pass"),
        ("a K that comes back is waited for once", "times % uint32(2)", "uint32(0)"),
        ("a K that comes back is read by products", "        bar_sync(everyone, computing)  # no product reads K_j\n", ""),
        ("a part of K is still NaN", "fence_proxy_async()\n        bar_sync(everyone, computing)\n\n    @device\n    def bring", "fence_proxy_async()\n\n    @device\n    def bring"),
        ("a part of dO is still NaN", "fence_proxy_async()\n            bar_sync(everyone, computing)\n\n    @device\n    def start_dV", "fence_proxy_async()\n\n    @device\n    def start_dV"),
        ("inf and NaN are looked for in dO alone", "not_finite(sm, Q, tid) | not_finite(sm, dO, tid)", "not_finite(sm, dO, tid)"),
        ("what is before a window is seen", "j0 < i0 + Br - 1 + lo or ", ""),
        ("inf and NaN of dO are lost", "add_not_finite(sm, dO, dV, int32(j - hi), int32(j - lo))", "pass"),
        ("inf and NaN of Q are multiplied", "clear(sm, Q, tid)", "pass"),
    ],
    ("kernels/hopper_backward.py::row_statistics", "hopper_backward"): [
        ("D is 0", "float32(0) if nothing else mine", "float32(0)"),
        ("D is another row's", "if lane == n:", "if lane == 0:"),
        ("D is a part of the row's", "total += shuffle_xor(total, uint32(apart))", "pass"),
        ("L is not in base 2", "lse * float32(log2e)", "lse"),
    ],
    ("kernels/hopper_backward.py::finish", "hopper_backward"): [
        ("dQ without the scale", "scale * float32(ln2)", "float32(1)"),
        ("both threads of a sector have its first half", "+ 2 * half)", ")"),
        ("rows of dQ change places", "two(x[4 * e + 2 + u] * by, x[4 * e + u] * by)", "two(x[4 * e + 3 - u] * by, x[4 * e + 1 - u] * by)"),
        ("panels are taken for parts of the queries", "w // panels * queries", "w % panels * queries"),
    ],
}  # fmt: skip

MUTANTS = [
    Mutant(name, place, old, new, tuple(tests.split()))
    for (place, tests), faults in FAULTS.items()
    for name, old, new in faults
]

# Fixed examples and no shrinking: a verdict does not change from run to run, and comes soon.
PLUGIN = """
from pathlib import Path

def pytest_configure(config):
    import flashsim
    from hypothesis import Phase, settings

    assert Path(flashsim.__file__).is_relative_to(Path.cwd()), "tests another flashsim"
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", settings(), database=None, phases=phases)
    settings.load_profile("mutants")
"""


def source_with(mutant: Mutant, source: str) -> str:
    """The file's text with the fault in it; the old text must occur once in the mutant's place."""
    start, stop = 0, len(source)
    if "::" in mutant.place:
        node: ast.AST = ast.parse(source)
        for name in mutant.place.split("::")[1].split("."):
            node = next(n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == name)
        lines = source.splitlines(keepends=True)
        start = len("".join(lines[: node.lineno - 1]))
        stop = len("".join(lines[: node.end_lineno]))
    there = source[start:stop]
    if there.count(mutant.old) != 1:
        sys.exit(f"{mutant.place}: {there.count(mutant.old)} times, not once: {mutant.old!r}")
    return source[:start] + there.replace(mutant.old, mutant.new) + source[stop:]


def source_file(root: Path, mutant: Mutant) -> Path:
    """The mutant's file: kernels/ is imported as a part of flashsim/, but lies beside it."""
    name = mutant.place.split("::")[0]
    return root / ("" if name.startswith("kernels/") else "flashsim") / name


def failure(copy: Path, tests: list[str]) -> str:
    """The first of the tests that fails, or "" if all pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-n0", "-q", "--tb=no", "-p", "mutants_plugin",
         "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests],
        cwd=copy, env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode == 0:
        return ""
    found = re.search(r"^FAILED \S*?(\w+\.py::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        sys.exit(f"pytest neither passed nor failed:\n{done.stdout}{done.stderr}")
    return found[1]


def rewrite(file: Path, text: str) -> None:
    """Write the file and forget its bytecode, which might look as new as the text."""
    file.write_text(text)
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def killer(copy: Path, mutant: Mutant) -> str:
    """The test that notices the mutant, or ""."""
    file = source_file(copy, mutant)
    right = file.read_text()
    first = [f"tests/test_{name}.py" for name in mutant.tests]
    others = [f"tests/test_{name}.py" for name in CORE if name not in mutant.tests]
    try:
        rewrite(file, source_with(mutant, right))
        return failure(copy, first) or failure(copy, others)
    finally:
        rewrite(file, right)


def main(part: str = "") -> int:
    """Run the mutants whose name or place contains `part`, two at a time; 1 if one survives."""
    mutants = [m for m in MUTANTS if part in m.name or part in m.place]
    for mutant in mutants:  # a text that moved is found before anything runs
        source_with(mutant, source_file(ROOT, mutant).read_text())
    workers = min(2, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for n in range(workers):
            copy = Path(folder, str(n))
            for name in COPIED:
                ours = ROOT / name
                if ours.is_dir():
                    shutil.copytree(ours, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif ours.exists():
                    shutil.copy(ours, copy / name)
            (copy / "flashsim" / "kernels").symlink_to(copy / "kernels")
            (copy / "mutants_plugin.py").write_text(PLUGIN)
            copies.put(copy)

        def judged(mutant: Mutant) -> tuple[str, float]:
            copy, start = copies.get(), time.monotonic()
            try:
                return killer(copy, mutant), time.monotonic() - start
            finally:
                copies.put(copy)

        killers: dict[str, None] = {}
        survivors = 0
        for mutant, (test, seconds) in zip(mutants, pool.map(judged, mutants), strict=True):
            what = f"{mutant.place}: {mutant.name}"
            print(f"{what:<86} {seconds:5.1f} s  {test or 'SURVIVED'}", flush=True)
            survivors += not test
            if test:
                killers[f"tests/{test}"] = None
        broken = failure(copies.get(), list(killers)) if killers else ""
    if broken:
        sys.exit(f"{broken} fails on the package as it is: the verdicts say nothing")
    print(f"\n{len(mutants)} mutants, {survivors} survived; the {len(killers)} tests that noticed "
          "the others pass on the package as it is")  # fmt: skip
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
