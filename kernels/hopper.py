"""FlashAttention-3's forward pass for compute capability 9.0: tensor cores, fed by the copy engine.

One warpgroup of a block, the producer, asks for tiles; the others, the consumers, have 64 queries
each and compute. Between them are mbarriers: a place for a tile is full once its bytes are there,
and empty again once every consumer is done with it. A consumer asks for S of tile j and for O of
tile j - 1 in one go, and computes the softmax of tile j while O is still under way: exponentials
and matrix products overlap within a warpgroup, not only across warpgroups.

There are as many blocks as multiprocessors. A block takes one tile of queries after the other, and
the producer is ahead: it loads for the next while the consumers finish the last. So are they: the
last O of a tile of queries is asked for together with the first S of the next. A consumer leaves
out the key tiles of which its own 64 queries see nothing. With a mask, 0 times inf must not count,
so the producer's other warps look through the values of border tiles, before they are used. With
padding they make those of padded keys 0; which tiles have a real key is known beforehand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from . import fp8, padding, warp_tiles, warpgroup_tiles
from .gpu import cuda, device, float32, int32, kernel, log, types, uint32
from .masks import LOG2E, Features
from .ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
)
from .ptx.shared import fence_proxy_async, shared_address
from .ptx.tma import (
    fence_tensor_map,
    tensor_maps,
    tma_commit_group,
    tma_load,
    tma_store,
    tma_wait_group,
    tma_wait_group_read,
)
from .ptx.warp import opaque, reciprocal
from .ptx.warpgroup import (
    bar_arrive,
    bar_sync,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from .ptx.wgmma import PANEL, ROW_BYTES, descriptor, pin, wgmma_wait_group
from .warp_tiles import row_sum
from .warpgroup_tiles import ALIGNED, ROWS, TURNS, WARPGROUP, WORDS, WarpgroupTile

NONE = -1  # no item of work is left
L2_BYTES = 32 << 20  # for the K and V of a section: an H100 has 50 MB, and Q and O pass through too


def signature(f: Features) -> tuple[Any, ...]:
    """Numba types of the kernel's arguments."""
    tensor_map, L = types.Array(types.uint8, 1, "C"), types.Array(types.float32, 3, "C")
    O = types.Array(types.float32, 4, "C") if f.output else tensor_map
    i, u = types.int32, types.uint32
    counter = types.Array(u, 1, "C")
    rules = types.BaseTuple.from_types(rule_types(f))
    return (*[tensor_map] * 3, O, L, counter, i, i, i, types.float32, u, u, u, i, rules)


def rule_types(f: Features) -> tuple[Any, ...]:
    """Of what its last argument holds: nothing without padding, dropout and FP8."""
    tables = types.Array(types.int32, 2, "C"), types.Array(types.int32, 3, "C")
    random = types.uint64, types.uint64, types.float32
    scales = [types.Array(types.float32, 3, "C")] * 3
    return (
        *(tables if f.keys else ()),
        *(random if f.dropout else ()),
        *(scales if f.fp8 else ()),
    )


def arguments(
    p: Any, tile: WarpgroupTile, f: Features, Q: Any, O: Any, L: Any, group: int, span: int,
    tables: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's arguments for a checked `launch.Problem`; Q as the kernel is to see it.

    tables: what `padding.walked_tiles` writes, with a padding mask; in FP8 the scales of Q, K and
    V; otherwise nothing.
    """
    lo, hi, scale = p.rules[3:6]
    boxes = {"q": (Q, ROWS), "k": (p.K, tile.Bc), "v": (p.V, tile.V_rows)}
    boxes |= {} if f.output else {"output": (O, ROWS)}
    maps = tensor_maps(boxes, f.dtype)
    of_a_head = (2 if f.fp8 else 4) * max(1, p.Nk * p.d)  # bytes of K and V
    together = max(1, L2_BYTES // of_a_head) if f.band else 1
    section = min(together * group, L.shape[0] * L.shape[1])
    Nk, lo, hi, span = np.array([p.Nk, lo, hi, span], np.int32)
    counts = np.array([group, max(1, section), p.batch], np.uint32)
    counter = cuda.to_device(np.zeros(2, np.uint32))
    rules = (*tables, *(p.rules[7:10] if f.dropout else ()))
    return (*maps, *([O] if f.output else []), L, counter, Nk, lo, hi, scale, *counts, span, rules)


@device
def in_order(block, Tr, heads, section):
    """(query tile, head) of an item of work: the heads of a section together, the last tiles first.

    With a causal mask the last tiles are the longest, and a GPU is done soonest if it begins with
    them. The heads of a section are so few that their keys and values stay in the L2.
    """
    begin = uint32(block // uint32(section * Tr) * section)
    together = uint32(min(section, uint32(heads - begin)))
    rest = uint32(block - begin * Tr)
    return uint32(Tr - 1 - rest // together), uint32(begin + rest % together)


@cache
def flash_attention_3(tile: WarpgroupTile, f: Features) -> Any:
    """Algorithm 2 of Shah et al. 2024 (arXiv:2407.08608), by blocks that take turns of work.

    Q, O (batch, heads, Nq, d) and K, V (batch, key heads, Nk, d) are tensor maps, of boxes of 64
    and of Bc rows; the kernel's d is a multiple of 64, and columns beyond the tensor's are 0. L
    (batch, heads, Nq) is the logsumexp. scale > 0 has a factor of log2(e). P is rounded to the type
    of V. A tile of queries walks at most `span` keys: all of them, or a part; then O, a float32
    array, and L have a batch for each part. counter (2,): 0 before and after. rules: with padding,
    rank and walked of `padding.walked_tiles`, and tiles are counted among those that are walked;
    with dropout, seed, threshold and factor of `dropout.kept`.

    In FP8, section 3.3 there, Q, K and V are as `fp8.quantised` leaves them, and rules are their
    scales, the same for 128 rows: (batch, heads, blocks of rows). P is rounded to e4m3. What a mask
    hides of V must be finite; padding and dropout are left out.
    """
    Br, Bc, d, stages, consumers = tile.Br, tile.Bc, tile.d, tile.stages, tile.consumers
    Q_bytes, KV_bytes, ping_pong = tile.Q_bytes, tile.KV_bytes, tile.ping_pong and consumers > 1
    Q_panel, KV_panel, box = ROW_BYTES * Br, ROW_BYTES * Bc, ROW_BYTES * ROWS  # bytes
    Q_loaded = 2 * Br * tile.loaded_columns
    RS, RP, RO = Bc // 2, Bc // 4, d // 2  # registers of S, P and O
    ln2, banded, wide, shares = 1 / LOG2E, f.band, bool(f.output), consumers > 1
    places, K_at = tile.places, tile.places * Q_bytes  # bytes from the first Q on
    V_at = K_at + stages * KV_bytes
    full_Q, empty_Q = tile.bars_at, tile.bars_at + 8 * places
    full_K, full_V, empty_K, empty_V, looked_V = (
        tile.bars_at + 8 * (2 * places + n * stages) for n in range(5)
    )
    words_at = tile.bars_at + 8 * tile.mbarriers
    turns, written, cleared, looked = 1, 1 + consumers, 1 + 2 * consumers, 2 + 2 * consumers
    pair, computing, looking = 2 * WARPGROUP, consumers * WARPGROUP, WARPGROUP - 32  # threads
    padded, dropout, masked = f.keys, f.dropout, (f.band or f.keys) and not f.fp8
    above = fp8.ABOVE if f.fp8 else 0
    apart = not padded and d <= 128
    key_words = tile.key_words
    slots_at, kept_words = words_at + 4 * TURNS * WORDS + 4 * stages, warp_tiles.kept_words(Bc)
    lookers, ahead = 1 if masked else 0, places > 1  # ahead: Q_i is loaded before O_(i-1) has left
    later = max(0, places - 2)  # turns after which a place is given back

    few, many = tile.registers_with_padding if f.keys else tile.registers
    give_up, take = setmaxnreg_dec(few), setmaxnreg_inc(many)
    load_K = warpgroup_tiles.load(Bc, tile.loaded_columns)
    load_V = warpgroup_tiles.load_transposed(d) if f.fp8 else load_K
    loaded_columns = tile.loaded_columns
    if f.fp8:
        start_S = warpgroup_tiles.rows_by_rows(Br, Bc, d // 2, "e4m3")
        start_O = warpgroup_tiles.rows_by_transposed(Bc, d)
    else:
        start_S = warpgroup_tiles.rows_by_rows(Br, Bc, d, f.dtype)
        start_O = warpgroup_tiles.rows_by_columns(Bc, d, f.dtype)
    all_but_one, all_products = wgmma_wait_group(1), wgmma_wait_group(0)
    have_left = tma_wait_group_read(later)
    stage, bar, wait_until_full, wait_until_empty = warpgroup_tiles.ring(stages)
    place, bar_of_Q, wait_for_Q, wait_for_place = warpgroup_tiles.ring(places)
    have_S, have_O = pin(RS), pin(RO)
    mask_after, mask_before = warpgroup_tiles.mask_after(Bc), warpgroup_tiles.mask_before(Bc)
    softmax = warpgroup_tiles.softmax(Bc, above)
    not_finite = warpgroup_tiles.not_finite(Bc, d, looking, f.dtype)
    add_not_finite = warpgroup_tiles.add_not_finite(Bc, d, f.dtype)
    clear_not_finite = warpgroup_tiles.clear_not_finite(Bc, d, computing, f.dtype)
    rescale, put = warpgroup_tiles.rescale(d), warpgroup_tiles.put(Br, d, f.dtype)
    store_wide = warpgroup_tiles.store_wide(d)
    mask_padding = warpgroup_tiles.mask_padding(Bc)
    clear_padding = warpgroup_tiles.clear_padding(Bc, d, looking)
    kept, weigh = warp_tiles.kept(Bc), warpgroup_tiles.weigh(Bc, f.dtype, dropout, f.fp8)
    of_rows, of_tile, first_units, in_units, O_in_units, kept_units = fp8.units(f.fp8)
    tiles_between = padding.tiles_between(Bc, padded)

    @device
    def give_back(base, turn):
        """The place of a turn's Q and O, or with three places that of the turn before it."""
        if turn >= later:
            mbarrier_arrive(bar_of_Q(base, empty_Q, turn - uint32(later)))

    @device
    def Q_at(base, turn):
        return uint32(base + uint32(place(turn) * Q_bytes))

    @device
    def tile_at(base, first, n):
        return uint32(base + uint32(uint32(first) + uint32(stage(n) * KV_bytes)))

    @device
    def element(sm, address):
        """The index of an address in shared memory, of 16-bit elements."""
        return uint32(uint32(address - shared_address(sm, 0)) // uint32(2))

    @device
    def told_at(sm, base, turn):
        """Where it says what to do in a turn, in 32-bit words: a few turns are kept."""
        first = uint32(base + uint32(words_at) - shared_address(sm, 0))
        slot = uint32(uint32(turn) % uint32(TURNS))
        return uint32(uint32(first // uint32(4)) + uint32(slot * uint32(WORDS)))

    @device
    def seen_at(sm, base, n):
        """Where it says which tile was seen to have inf or NaN, in the stage of the n-th."""
        first = uint32(base + uint32(words_at + 4 * TURNS * WORDS) - shared_address(sm, 0))
        return uint32(uint32(first // uint32(4)) + stage(n))

    @device
    def slot_at(sm, base, n):
        """Where it says which key tile is the n-th, and which of its keys are real.

        Of twice as many as there are stages: who looks through V is behind who is done with K.
        """
        first = uint32(base + uint32(slots_at) - shared_address(sm, 0))
        slot = uint32(uint32(n) % uint32(2 * stages))
        return uint32(uint32(first // uint32(4)) + uint32(slot * uint32(key_words)))

    @device
    def announced(sm, words, base, n, rules, b, j0):
        """The first key of the n-th tile of the block, where it would be j0 if all were walked."""
        slot, j = slot_at(sm, base, n), uint32(j0 // uint32(Bc))
        words[slot] = rules[1][b, j, padding.NUMBER]
        for w in range(key_words - 1):
            words[slot + 1 + w] = rules[1][b, j, padding.BITS + w]
        return uint32(uint32(uint32(words[slot]) // uint32(2)) * uint32(Bc))

    @device
    def as_announced(sm, words, base, n, j0):
        """The first key of the n-th tile, once its K_j is there."""
        return int32(words[slot_at(sm, base, n)] // 2 * Bc)

    @device
    def some_padded(sm, words, base, n):
        """Whether a key of the n-th tile is not real."""
        return words[slot_at(sm, base, n)] % 2 != 0

    @device
    def item_with_padding(part_b, batch):
        return uint32(part_b % batch)

    @device
    def nothing_announced(sm, words, base, n, rules, b, j0):
        return j0

    @device
    def key_after(sm, words, base, n, j0):
        return int32(j0)

    @device
    def none_padded(sm, words, base, n):
        return False

    @device
    def no_item(part_b, batch):
        return uint32(0)

    item_of = item_with_padding if padded else no_item  # of the batch: whose keys to look at
    announce = announced if padded else nothing_announced
    first_key = as_announced if padded else key_after
    partial = some_padded if padded else none_padded

    @device
    def band_of_all(rules, b, first, stop):
        j_first = int32(max(int32(0), first) // Bc)
        return j_first, int32(max(int32(0), int32(stop + (Bc - 1))) // Bc)

    tiles_of_band = tiles_between if padded else band_of_all

    @device
    def seen_from(rules, b, i0, rows, j_first, j_stop, Nq, lo, hi):
        """(first, stop): those of key tiles j_first to j_stop of which some rows see something."""
        i_stop = min(int32(i0 + rows), int32(Nq))
        if banded:
            seen_first, seen_stop = tiles_of_band(rules, b, int32(i0 + lo), int32(i_stop + hi))
            j_first, j_stop = max(int32(j_first), seen_first), min(int32(j_stop), seen_stop)
        if j_first >= j_stop or i0 >= i_stop:
            j_first, j_stop = int32(0), int32(0)
        return uint32(j_first), uint32(j_stop)

    @device
    def before_band(i0, rows, j0, lo):
        """Whether some key of a tile is before all that one of some rows sees."""
        return banded and int32(j0) < int32(i0 + (rows - 1) + lo)

    @device
    def after_band(i0, j0, hi):
        """Whether some key of a tile is after all that the first of some rows sees."""
        return banded and int32(j0 + (Bc - 1)) > int32(i0 + hi)

    @device
    def border(i0, j0, lo, hi):
        """Whether the band masks a score of the block's rows and a key tile."""
        return before_band(i0, Br, j0, lo) or after_band(i0, j0, hi)

    @device
    def tell(sm, words, base, turn, counter, L, Nk, lo, hi, group, section, batch, span, rules):
        """What to do in a turn: first what has the block's number, then what is next."""
        item = uint32(cuda.blockIdx.x)
        if turn > 0:
            item = uint32(uint32(cuda.gridDim.x) + cuda.atomic.add(counter, 0, uint32(1)))
        H, Nq = opaque(uint32(L.shape[1])), opaque(uint32(L.shape[2]))  # not kept, nor what follows
        Tr = uint32(uint32(Nq + uint32(Br - 1)) // uint32(Br))
        heads, told = uint32(L.shape[0] * H), told_at(sm, base, turn)
        if item >= uint32(Tr * heads):
            words[told] = NONE
        else:
            i, bh = in_order(item, Tr, heads, section)
            i0, h, part_b = int32(i * Br), uint32(bh % H), uint32(bh // H)
            part, b = uint32(part_b // batch), item_of(part_b, batch)
            k_stop = min(Nk, int32((part + 1) * span))
            j_first, j_stop = tiles_between(rules, b, int32(part * span), k_stop)
            first, stop = seen_from(rules, b, i0, Br, j_first, j_stop, Nq, lo, hi)
            words[told] = i0
            words[told + 1] = h
            words[told + 2] = part_b
            words[told + 3] = first
            words[told + 4] = stop
            words[told + 5] = h // group
            words[told + 6] = part_b % batch

    @device
    def produce(
        Q, K, V, L, counter, sm, words, base, Nk, lo, hi, group, section, batch, span, rules
    ):
        """One thread asks for the tiles of one turn of work after the other."""
        turn, before = uint32(0), uint32(0)  # key tiles before this turn's
        tell(sm, words, base, turn, counter, L, Nk, lo, hi, group, section, batch, span, rules)
        while True:
            here = opaque(base)  # what is kept would take registers
            wait_for_place(here, empty_Q, turn)
            full = bar_of_Q(here, full_Q, turn)
            told = told_at(sm, here, turn)
            i0, h, first, stop = words[told], words[told + 1], words[told + 3], words[told + 4]
            key_head, b = words[told + 5], words[told + 6]
            if i0 == NONE:
                break
            mbarrier_expect_tx(full, Q_loaded)  # load Q_i
            for c in range(loaded_columns // PANEL):
                for w in range(consumers):
                    to = uint32(Q_at(here, turn) + uint32(c * Q_panel + w * box))
                    tma_load(to, Q, PANEL * c, i0 + ROWS * w, h, b, full)
            last = uint32(before + stop - first)
            for c in range(int32(before), int32(last)):
                n, here = opaque(uint32(c)), opaque(base)
                j0 = uint32((first + c - before) * Bc)
                wait_until_empty(here, empty_K, n)  # load K_j, V_j
                j0 = announce(sm, words, here, n, rules, b, j0)
                load_K(tile_at(here, K_at, n), K, j0, key_head, b, bar(here, full_K, n))
                wait_until_empty(here, empty_V, n)
                load_V(tile_at(here, V_at, n), V, j0, key_head, b, bar(here, full_V, n))
                if n == before:  # for the next turn, while these are under way
                    then = uint32(turn + 1)
                    tell(
                        sm, words, base, then, counter, L, Nk, lo, hi, group, section, batch, span,
                        rules,
                    )  # fmt: skip
            before, turn = last, uint32(turn + 1)
            if first == stop:
                tell(
                    sm, words, base, turn, counter, L, Nk, lo, hi, group, section, batch, span,
                    rules,
                )  # fmt: skip
        mbarrier_arrive(full)
        if cuda.atomic.add(counter, 1, uint32(1)) == uint32(cuda.gridDim.x) - uint32(1):
            counter[0] = 0  # for the next launch
            counter[1] = 0

    @device
    def look(sm, words, base, lo, hi):
        """The other warps see whether there is inf or NaN in the values of a border tile.

        And there is nothing in those of padded keys, once they are done.
        """
        mine = uint32(uint32(cuda.threadIdx.x) % uint32(WARPGROUP) - uint32(32))
        turn, before = uint32(0), uint32(0)
        while True:
            wait_for_Q(base, full_Q, turn)
            told = told_at(sm, base, turn)
            i0, first, stop = int32(words[told]), words[told + 3], words[told + 4]
            bar_sync(looked, looking)
            if mine == 0:
                give_back(base, turn)
            if i0 == NONE:
                break
            j0, last = int32(first * Bc), uint32(before + stop - first)
            for c in range(int32(before), int32(last)):
                n = opaque(uint32(c))
                wait_until_full(base, full_V, n)
                V_j, j0 = element(sm, tile_at(base, V_at, n)), first_key(sm, words, base, n, j0)
                if partial(sm, words, base, n):
                    bits = uint32(slot_at(sm, base, n) + uint32(1))
                    clear_padding(words, uint32(V_j // uint32(2)), bits, mine)
                    fence_proxy_async()
                    bar_sync(looked, looking)
                if border(i0, j0, lo, hi) and not_finite(sm, V_j, mine) != 0:
                    words[seen_at(sm, base, n)] = int32(n + 1)
                bar_sync(looked, looking)
                if mine == 0:
                    mbarrier_arrive(bar(base, looked_V, n))
                    mbarrier_arrive(bar(base, empty_V, n))
                j0 = int32(j0 + Bc)
            before, turn = last, uint32(turn + 1)

    @device
    def row_within(thread):
        """A thread's first row, of those of its warpgroup; the other is 8 further."""
        w, lane = uint32(thread % uint32(WARPGROUP) // uint32(32)), uint32(thread % uint32(32))
        return int32(16 * w + lane // uint32(4))

    @device
    def wait_until_looked_at(base, n):
        """Of V_j.

        Not all tiles are waited for here, so the mbarrier might still be a phase behind: until V_j
        is there, since it is loaded once the tile before it in its stage was looked at.
        """
        wait_until_full(base, full_V, n)
        wait_until_full(base, looked_V, n)

    @device
    def nothing_aside(sm, words, base, n, O, i, lo, hi):
        """In FP8, where inf and NaN of V behind a mask reach the output."""

    @device
    def set_aside_odd(sm, words, base, n, O, i, lo, hi):
        """Of a V_j with inf or NaN, these go to O where they are seen, and 0 is left of them.

        i: the warpgroup's first row, from the tile's first key on. By all consumers together.
        """
        wait_until_looked_at(base, n)
        if words[seen_at(sm, base, n)] == int32(n + 1):
            at, thread = element(sm, tile_at(base, V_at, n)), opaque(uint32(cuda.threadIdx.x))
            row = int32(i + row_within(thread))
            add_not_finite(sm, at, O, int32(row + lo), int32(row + hi))
            bar_sync(cleared, computing)
            clear_not_finite(sm, at, thread)
            fence_proxy_async()
            bar_sync(cleared, computing)

    set_aside = nothing_aside if f.fp8 else set_aside_odd

    @device
    def wait_until_cleared(sm, words, base, n):
        """V_j has nothing at padded keys."""
        if partial(sm, words, base, n):
            wait_until_looked_at(base, n)

    @device
    def take_turn(warpgroup):
        if ping_pong:
            bar_sync(turns + warpgroup, pair)

    @device
    def give_turn(warpgroup):
        """To the next consumer; the last gives it to the first, for the next tile."""
        if ping_pong:
            bar_arrive(turns + (warpgroup + 1 if warpgroup < consumers - 1 else 0), pair)

    @device
    def pass_over(sm, words, base, n, O, i0, j0, lo, hi, warpgroup, leader):
        """The n-th key tile, of which this warpgroup sees nothing."""
        wait_until_full(base, full_K, n)
        j0 = first_key(sm, words, base, n, j0)
        take_turn(warpgroup)
        give_turn(warpgroup)
        wait_until_full(base, full_V, n)
        if border(i0, j0, lo, hi):
            set_aside(sm, words, base, n, O, i0 + warpgroup * ROWS - j0, lo, hi)
        bar_sync(written + warpgroup, WARPGROUP)  # no product has kept its warps together
        if leader:
            mbarrier_arrive(bar(base, empty_K, n))
            mbarrier_arrive(bar(base, empty_V, n))

    @device
    def mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi):
        """-inf where a score of the warpgroup's rows and the n-th key tile does not count."""
        edge = cuda.local.array(2, int32)
        if partial(sm, words, base, n):
            mask_padding(S, words, uint32(slot_at(sm, base, n) + uint32(1)))
        i, j = int32(r0 + row_within(tid)), int32(j0 + 2 * (tid % uint32(4)))
        if int32(j0 + Bc) > Nk or after_band(r0, j0, hi):
            for r in range(2):
                edge[r] = int32(Nk - 1 - j)
                if banded:
                    edge[r] = min(edge[r], int32(i + 8 * r + hi - j))
            mask_after(S, edge)
        if before_band(r0, ROWS, j0, lo):
            for r in range(2):
                edge[r] = int32(i + 8 * r + lo - j)
            mask_before(S, edge)

    @device
    def draw(keep, sm, words, base, turn, rules, warpgroup, j0):
        """Which weights of the warpgroup's rows and a key tile dropout keeps."""
        told, thread = told_at(sm, base, opaque(turn)), opaque(uint32(cuda.threadIdx.x))
        row = int32(words[told] + warpgroup * ROWS + row_within(thread))
        b, h = words[told + 6], words[told + 1]
        kept(keep, rules[-3], rules[-2], b, h, row, j0)

    @device
    def draw_nothing(keep, sm, words, base, turn, rules, warpgroup, j0):
        pass

    choose = draw if dropout else draw_nothing

    @device
    def as_it_is(q):
        return q

    # The descriptors of Q's columns, kept from tile to tile, would take registers that are needed.
    once_more = opaque if padded or d > 128 else as_it_is

    def step(careful):
        """Of the walk over key tiles: for any tile, or for one that is inner, as that before is.

        A loop that may mask, or change O, would cost every tile time, also where it does neither.
        """

        @device
        def step_of_walk(held, given, n, j0):
            """S of the n-th tile, O of the one before; j0: its first key, and of the n-th after."""
            S, P, O, m, l, alpha, units, keep = held
            q, sm, words, base, rules, turn, i0, r0, Nk, lo, hi, scale = given[:12]
            warpgroup, leader, tid = given[12:]
            if careful and border(i0, j0, lo, hi):
                set_aside(sm, words, base, n - 1, O, r0 - j0, lo, hi)
            wait_until_full(base, full_K, n)
            take_turn(warpgroup)
            start_S(S, descriptor(once_more(q), 0), descriptor(tile_at(base, K_at, n), 0))
            wait_until_cleared(sm, words, base, n - 1)
            wait_until_full(base, full_V, n - 1)
            Vj = descriptor(tile_at(base, V_at, n - 1), KV_panel)
            start_O(O, P, Vj)  # O += PV, one behind
            give_turn(warpgroup)
            next_key = first_key(sm, words, base, n, int32(j0 + Bc))
            S_scale, V_scale = of_tile(rules, words, told_at(sm, base, turn), next_key, scale)
            choose(keep, sm, words, base, turn, rules, warpgroup, next_key)
            all_but_one()
            have_S(S, 0)
            if leader:
                mbarrier_arrive(bar(base, empty_K, n))
            j0 = first_key(sm, words, base, n, int32(j0 + Bc))
            if careful:
                mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi)
            in_units(m, units, S_scale)
            softmax(S, m, l, alpha, S_scale)  # while O is under way
            all_products()
            have_O(O, 0)
            if leader:
                mbarrier_arrive(bar(base, empty_V, n - 1))
            weigh(S, P, keep, rules)
            O_in_units(alpha, units, V_scale)
            rescale(O, alpha)
            return j0

        return step_of_walk

    careful_step, inner_step = step(True), step(False)

    @device
    def inner_after(i0, j0, Nk, lo, hi):
        """How many tiles after one are inner, as it is: the block's rows see every key of them."""
        count = int32(0)
        if not before_band(i0, Br, j0, lo):
            seen = min(int32(Nk), int32(i0 + hi + 1))
            count = max(count, int32(int32(seen - j0) // Bc - 1))
        return count

    @device
    def walk_with_care(held, given, n, n_stop, j0):
        """From the n-th tile on; j0: the first key of the one before, and then of the last."""
        for c in range(n, n_stop):
            j0 = careful_step(held, given, c, j0)
        return j0

    @device
    def walk_inner_apart(held, given, n, n_stop, j0):
        i0, Nk, lo, hi = given[6], given[8], given[9], given[10]
        while n < n_stop:
            inner_stop = min(n_stop, int32(n + inner_after(i0, j0, Nk, lo, hi)))
            while n < inner_stop:
                j0 = inner_step(held, given, n, j0)
                n += int32(1)
            if n < n_stop:
                j0 = careful_step(held, given, n, j0)
                n += int32(1)
        return j0

    walk = walk_inner_apart if apart else walk_with_care

    @device
    def write(O, Oi, sm, base, turn, warpgroup, leader, within, r0, h, b):
        """O_i leaves in whole rows, from where Q_i was."""
        sO = uint32(Q_at(base, turn) + uint32(warpgroup * box))
        bar_sync(written + warpgroup, WARPGROUP)
        put(sm, element(sm, sO), Oi, within)
        fence_proxy_async()
        bar_sync(written + warpgroup, WARPGROUP)
        if leader:
            for c in range(d // PANEL):
                tma_store(uint32(sO + uint32(c * Q_panel)), O, PANEL * c, r0, h, b)
            tma_commit_group()

    @device
    def nothing_yet(m, l):
        """m = -inf, l = 0: before the first key."""
        for r in range(2):
            m[r] = -float32(float("inf"))
            l[r] = float32(0)

    @device
    def empty(O):
        for n in range(RO):
            O[n] = float32(0)

    @device
    def row_of(words, told, thread):
        """The first of a thread's two rows, in a turn."""
        w = uint32(thread // uint32(WARPGROUP))
        return int32(words[told] + w * ROWS + row_within(thread))

    @device
    def settle(L, m, l, over, units, sm, words, base, turn, tid, scale):
        """Write L_i of a turn; over is what makes O_i of O: 1 / l, or 0 if no key counts."""
        S_scale, V_scale = kept_units(units, scale)
        told = told_at(sm, base, opaque(turn))  # read again: kept, it would take registers
        thread = opaque(tid)
        t, row, Nq = uint32(thread % uint32(4)), row_of(words, told, thread), uint32(L.shape[2])
        h, b = uint32(words[told + 1]), uint32(words[told + 2])
        for r in range(2):
            l[r] = row_sum(l[r])
            over[r] = reciprocal(l[r]) * V_scale if l[r] != float32(0) else float32(0)
            if t == 0 and row + 8 * r < Nq:
                shift = m[r] * S_scale if m[r] != -float32(float("inf")) else float32(0)
                if above:
                    shift = shift - float32(above)
                L[b, h, uint32(row + 8 * r)] = shift * float32(ln2) + log(l[r])

    @device
    def leave(O, Oi, over, sm, words, base, turn, tid, leader, Nq):
        """Write O_i of a turn, and give a place to another Q."""
        told, thread = told_at(sm, base, opaque(turn)), opaque(tid)
        w = uint32(thread // uint32(WARPGROUP))
        h, b = words[told + 1], words[told + 2]
        rescale(Oi, over)
        if wide:
            store_wide(O[b, h], Oi, row_of(words, told, thread), Nq)
            bar_sync(written + w, WARPGROUP)  # all have read what they were told
        else:
            r0 = int32(words[told] + w * ROWS)
            write(O, Oi, sm, base, turn, w, leader, row_within(thread), r0, h, b)
        if leader:
            if not wide:
                have_left()
            give_back(base, turn)

    @device
    def finish(O, L, Oi, m, l, alpha, units, sm, words, base, turn, tid, leader, scale):
        """Write O_i and L_i of a turn."""
        settle(L, m, l, alpha, units, sm, words, base, turn, tid, scale)
        leave(O, Oi, alpha, sm, words, base, turn, tid, leader, L.shape[2])

    @device
    def first_scores(held, given, n, j0):
        """S of a turn's first tile, the n-th, alone; j0: its first key."""
        S, P, _, m, l, alpha, units, keep = held
        q, sm, words, base, rules, turn, _, r0, Nk, lo, hi, scale = given[:12]
        warpgroup, leader, tid = given[12:]
        wait_until_full(base, full_K, n)
        take_turn(warpgroup)
        start_S(S, descriptor(q, 0), descriptor(tile_at(base, K_at, n), 0))  # S = QKᵀ
        give_turn(warpgroup)
        j0 = first_key(sm, words, base, n, j0)
        S_scale, V_scale = of_tile(rules, words, told_at(sm, base, turn), j0, scale)
        choose(keep, sm, words, base, turn, rules, warpgroup, j0)
        all_products()
        have_S(S, 0)
        if leader:
            mbarrier_arrive(bar(base, empty_K, n))
        mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi)
        first_units(units, S_scale, V_scale)
        softmax(S, m, l, alpha, S_scale)
        weigh(S, P, keep, rules)
        return j0

    @device
    def last_product(held, sm, words, base, n, i0, r0, j0, lo, hi, leader):
        """O += PV of a turn's last tile, the n-th, alone."""
        P, O = held[1], held[2]
        if border(i0, j0, lo, hi):
            set_aside(sm, words, base, n, O, r0 - j0, lo, hi)
        wait_until_cleared(sm, words, base, n)
        wait_until_full(base, full_V, n)
        start_O(O, P, descriptor(tile_at(base, V_at, n), KV_panel))
        all_products()
        have_O(O, 0)
        if leader:
            mbarrier_arrive(bar(base, empty_V, n))

    @device
    def turn_over(held, given, O, L, n, j_before, j0):
        """S of a turn's first tile, and O of the last tile of the turn before, which then leaves.

        One could follow the other, but then nothing would be computed beside a softmax. j_before,
        j0: the first key of the one tile, and of the other.
        """
        S, P, Oi, m, l, alpha, units, keep = held
        q, sm, words, base, rules, turn, _, r0, Nk, lo, hi, scale = given[:12]
        warpgroup, leader, tid = given[12:]
        over = cuda.local.array(2, float32)
        if banded:
            i_before = int32(words[told_at(sm, base, opaque(turn - 1))])
            if border(i_before, j_before, lo, hi):
                i = int32(i_before + warpgroup * ROWS - j_before)
                set_aside(sm, words, base, n - 1, Oi, i, lo, hi)
        wait_until_full(base, full_K, n)
        take_turn(warpgroup)
        start_S(S, descriptor(once_more(q), 0), descriptor(tile_at(base, K_at, n), 0))
        wait_until_cleared(sm, words, base, n - 1)
        wait_until_full(base, full_V, n - 1)
        start_O(Oi, P, descriptor(tile_at(base, V_at, n - 1), KV_panel))
        give_turn(warpgroup)
        settle(L, m, l, over, units, sm, words, base, opaque(turn) - 1, tid, scale)
        nothing_yet(m, l)
        j0 = first_key(sm, words, base, n, j0)
        S_scale, V_scale = of_tile(rules, words, told_at(sm, base, opaque(turn)), j0, scale)
        choose(keep, sm, words, base, turn, rules, warpgroup, j0)
        all_but_one()
        have_S(S, 0)
        if leader:
            mbarrier_arrive(bar(base, empty_K, n))
        mask(S, sm, words, base, n, r0, j0, tid, Nk, lo, hi)
        first_units(units, S_scale, V_scale)
        softmax(S, m, l, alpha, S_scale)
        all_products()
        have_O(Oi, 0)
        if leader:
            mbarrier_arrive(bar(base, empty_V, opaque(n) - 1))
        weigh(S, P, keep, rules)
        leave(O, Oi, over, sm, words, base, turn - 1, tid, leader, L.shape[2])
        empty(Oi)
        return j0

    @kernel(tile.threads)
    def hopper(Q, K, V, O, L, counter, Nk, lo, hi, scale, group, section, batch, span, rules):
        sm = cuda.shared.array(0, types.uint16)
        words = cuda.shared.array(0, int32)  # the same memory
        tid = uint32(cuda.threadIdx.x)
        warpgroup, leader = uint32(tid // uint32(WARPGROUP)), tid % uint32(WARPGROUP) == 0
        begin = shared_address(sm, 0)
        base = uint32(begin + (ALIGNED - begin % ALIGNED) % ALIGNED)  # where Q_i is

        if tid == 0:
            for n in range(places):
                mbarrier_init(bar_of_Q(base, full_Q, n), 1)
                mbarrier_init(bar_of_Q(base, empty_Q, n), consumers + lookers)
            for n in range(stages):
                mbarrier_init(bar(base, full_K, n), 1)
                mbarrier_init(bar(base, full_V, n), 1)
                mbarrier_init(bar(base, empty_K, n), consumers)
                mbarrier_init(bar(base, empty_V, n), consumers + lookers)
                mbarrier_init(bar(base, looked_V, n), 1)
                words[seen_at(sm, base, n)] = 0
            fence_mbarrier_init()
        elif warpgroup == consumers and leader:
            fence_tensor_map(Q)
            fence_tensor_map(K)
            fence_tensor_map(V)
        cuda.syncthreads()

        if warpgroup == consumers:
            if shares:
                give_up()
            if leader:
                produce(
                    Q, K, V, L, counter, sm, words, base, Nk, lo, hi, group, section, batch, span,
                    rules,
                )  # fmt: skip
            elif masked and tid % uint32(WARPGROUP) >= 32:
                look(sm, words, base, lo, hi)
        else:
            if shares:
                take()
            S = cuda.local.array(RS, float32)
            P = cuda.local.array(RP, uint32)
            Oi = cuda.local.array(RO, float32)
            m = cuda.local.array(2, float32)
            l = cuda.local.array(2, float32)
            alpha = cuda.local.array(2, float32)
            units = cuda.local.array(2, float32)
            keep = cuda.local.array(kept_words, uint32)
            held = S, P, Oi, m, l, alpha, units, keep
            first_units(units, float32(1), float32(1))
            turn, before = uint32(0), uint32(0)  # key tiles before this turn's
            j0, owes = int32(0), False  # whether the last tile is not in O yet
            if not wide and leader:
                fence_tensor_map(O)
            if ping_pong and warpgroup == consumers - 1:
                bar_arrive(turns, pair)  # the first consumer has the first turn

            while True:
                wait_for_Q(base, full_Q, turn)
                told = told_at(sm, base, turn)
                i0 = int32(words[told])
                r0, j_first, row_scale = i0, int32(0), scale
                n_first, n_stop = before, before  # from here to there the warpgroup sees something
                again = uint32(opaque(tid) // uint32(WARPGROUP))  # kept, it would take a register
                q = uint32(Q_at(base, turn) + again * uint32(box))  # where the warpgroup's Q is
                if i0 != NONE:
                    first_tile, stop_tile = words[told + 3], words[told + 4]
                    r0 = int32(i0 + warpgroup * ROWS)  # the warpgroup's first row
                    first, stop = seen_from(
                        rules, words[told + 6], r0, ROWS, first_tile, stop_tile, L.shape[2], lo, hi
                    )
                    if first < stop:
                        n_first = uint32(before + first - first_tile)
                        n_stop = uint32(n_first + stop - first)
                    j_first = int32(first_tile * Bc)
                    row_scale = of_rows(rules, words, told, r0, scale)
                given = (
                    q, sm, words, base, rules, turn, i0, r0, Nk, lo, hi, row_scale, warpgroup,
                    leader, tid,
                )  # fmt: skip
                if owes and n_first == before and n_first < n_stop:
                    j0 = turn_over(held, given, O, L, n_first, j0, j_first)
                else:
                    if owes:
                        i_before = int32(words[told_at(sm, base, opaque(turn - 1))])
                        r_before = int32(i_before + warpgroup * ROWS)
                        last_product(
                            held, sm, words, base, before - 1, i_before, r_before, j0, lo, hi,
                            leader,
                        )  # fmt: skip
                    if ahead and turn > 0:
                        finish(
                            O, L, Oi, m, l, alpha, units, sm, words, base, turn - 1, tid, leader,
                            scale,
                        )  # fmt: skip
                    if i0 == NONE:
                        break
                    nothing_yet(m, l)
                    empty(Oi)
                    for n in range(int32(before), int32(n_first)):
                        pass_over(sm, words, base, n, Oi, i0, j_first, lo, hi, warpgroup, leader)
                        j_first = int32(j_first + Bc)
                    j0 = j_first
                    if n_first < n_stop:
                        j0 = first_scores(held, given, n_first, j_first)
                owes = False
                if n_first < n_stop:
                    j0 = walk(held, given, int32(n_first + 1), int32(n_stop), j0)
                told = told_at(sm, base, opaque(turn))  # read again: kept, it would take a register
                last = uint32(before + words[told + 4] - words[told + 3])  # tiles with this turn's
                if n_first < n_stop:
                    owes = ahead and n_stop == last
                    if not owes:
                        last_product(held, sm, words, base, n_stop - 1, i0, r0, j0, lo, hi, leader)
                    j_first = int32(j0 + Bc)
                for n in range(int32(n_stop), int32(last)):
                    pass_over(sm, words, base, n, Oi, i0, j_first, lo, hi, warpgroup, leader)
                    j_first = int32(j_first + Bc)

                if not ahead:
                    finish(
                        O, L, Oi, m, l, alpha, units, sm, words, base, turn, tid, leader, scale,
                    )  # fmt: skip
                before, turn = last, uint32(turn + 1)
            if warpgroup == 0:
                take_turn(warpgroup)  # which nobody has taken
            if not wide and leader:
                tma_wait_group()

    return hopper
