"""Closed forms of the backward passes, as `flashsim.cost.counts` has those of the forward ones."""

from __future__ import annotations

from dataclasses import replace

from ..masks import Mask
from .counts import Cost, Head, fullest, leanest, mask_bytes, mask_reads, peak
from .visits import visits


def _moment(head: Head, stored: int, wide: int, r: int = 0, c: int = 0) -> tuple[int, int]:
    """(elements, bytes) of so many stored and wide elements; with r x c scores also the mask's."""
    mask = head.mask_tile(r, c) if r * c else 0
    wide += mask if mask and head.d_mask == "accumulated" else 0
    return stored + wide + mask, stored * head.stored + wide * head.wide + mask_bytes(head, mask)


def _backward(head: Head, r: int, c: int, wide: int) -> tuple[int, int]:
    """Q_i, dO_i, K_j, V_j; S_ij, dP_ij, two statistics of the rows, and `wide` elements besides."""
    return _moment(head, (r + c) * (head.d + head.dv), 2 * r * c + 2 * r + wide, r, c)


def flash1_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) in the inner loop: besides Q, dO, K, V, S, dP, l, m also O, dQ, dK, dV."""
    return _backward(head, r, c, r * (head.dv + head.d) + c * (head.d + head.dv))


def flash2_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest loop: Q, dO, K, V, S, dP, L, D, dQ, dK, dV; or O, dO."""
    inner = _backward(head, r, c, r * head.d + c * (head.d + head.dv))
    return fullest(inner, _moment(head, 2 * r * head.dv, 0))


def two_kernel_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest loop: dK and dV, or dQ, beside Q, dO, K, V, S, dP, L, D."""
    narrow = replace(head, d_mask="")  # the second loop leaves the mask's gradient alone
    return fullest(
        _backward(head, r, c, c * (head.d + head.dv)),
        _backward(narrow, r, c, r * head.d),
        _moment(head, 2 * r * head.dv, 0),
    )


def standard_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest step; the softmax's takes a row or, if less, a tile."""
    softmax = leanest(_softmax_gradient(head, 1, head.Nk, 0), _softmax_gradient(head, r, c, r))
    return fullest(*_standard_backward_steps(head, r, c), softmax)


def _standard_backward_steps(head: Head, r: int, c: int) -> list[tuple[int, int]]:
    d, dv, P = head.d, head.dv, r * c
    return [
        _moment(head, r * dv, c * dv + P),  # line 1: dO; dV, P
        _moment(head, (r + c) * dv, P),  # line 2: dO, V; dP
        _moment(head, c * d, r * d + P),  # line 4: K; dQ, dS
        _moment(head, r * d, c * d + P),  # line 5: Q; dK, dS
    ]


def _softmax_gradient(head: Head, r: int, c: int, statistics: int) -> tuple[int, int]:
    """P and dP, rowsum(P ∘ dP) where it outlives its turn, and the mask's gradient."""
    d_mask = head.mask_tile(r, c) if c and head.d_mask == "accumulated" else 0
    return _moment(head, 0, 2 * r * c + statistics + d_mask)


def gradient_rows(head: Head, sram: float, sram_bytes: float) -> dict[str, int]:
    """Bs: the rows of P and dP that standard attention's softmax gradient holds on chip."""

    def fits(rows: int) -> bool:
        elements, size = _softmax_gradient(head, rows, head.Nk, 0)
        return elements <= sram and size <= sram_bytes

    row = max(1, 2 * head.Nk)
    rows = int(min(head.Nq, sram / row, sram_bytes / (row * head.wide)))
    while rows and not fits(rows):
        rows -= 1
    return {"Bs": rows}


def _d_mask(head: Head, read: int, written: int) -> tuple[dict[str, int], dict[str, int]]:
    """Reads and writes of the gradient of an array mask; its initial zeros are not among them."""
    if not head.d_mask:
        return {}, {}
    return ({"dmask": read} if head.d_mask == "accumulated" else {}), {"dmask": written}


def _gradients(head: Head, *wide: str) -> dict[str, int]:
    """Item sizes in HBM of a backward pass: gradients as stored, the named ones wide."""
    stored = dict.fromkeys(("dO", "dQ", "dK", "dV"), head.stored)
    shared = ("dK", "dV") if head.group > 1 else ()
    return head.item_bytes(*wide) | stored | dict.fromkeys((*shared, *wide, "dmask"), head.wide)


def flash1_backward(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """Algorithm 4 of Dao et al. 2022; `elide`: as the published kernel, D kept, O read once."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows, keys = v.row_visits, v.keys_of_any
    again = rows - (v.rows_of_any if elide else 0)
    mask = mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    kept = {"D": v.rows_of_any} if elide else {}
    first, later = (v.first, v.later) if elide else (v.shapes, frozenset())
    return Cost(
        reads={
            "K": keys * d,
            "V": keys * dv,
            "Q": rows * d,
            "O": (v.rows_of_any if elide else rows) * dv,
            "dO": rows * dv,
            "dQ": again * d,
            "l": rows,
            "m": rows,
            **({"D": again} if elide else {}),
            **mask,
            **d_read,
        },
        writes={
            "dQ": (rows + (0 if elide else head.Nq)) * d,
            "dK": (keys + (0 if elide else head.Nk)) * d,
            "dV": (keys + (0 if elide else head.Nk)) * dv,
            **kept,
            **d_written,
        },
        item_bytes=_gradients(head, "O", "l", "m", "D", "dQ"),
        flops=2 * v.area * (3 * d + 2 * dv),
        exps=v.area,
        **peak(
            *(flash1_backward_tiles(head, r, c) for r, c in first),
            *(_backward(head, r, c, r * (1 + d) + c * (d + dv)) for r, c in later),
        ),
        extra_hbm_elements=head.Nq if elide else 0,
    )


def flash2_backward(head: Head, *, Br: int, Bc: int, elide: bool) -> Cost:
    """Algorithm 2 of Dao 2023; `elide`: the initial dQ costs nothing."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows = v.row_visits
    again = rows - (v.rows_of_any if elide else 0)
    mask = mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    r0, c0 = v.tallest, min(Bc, head.Nk)
    return Cost(
        reads={
            "O": head.Nq * dv,
            "dO": (head.Nq + rows) * dv,
            "K": head.Nk * d,
            "V": head.Nk * dv,
            "Q": rows * d,
            "dQ": again * d,
            "L": rows,
            "D": rows,
            **mask,
            **d_read,
        },
        writes={
            "D": head.Nq,
            "dQ": (rows + (0 if elide else head.Nq)) * d,
            "dK": head.Nk * d,
            "dV": head.Nk * dv,
            **d_written,
        },
        item_bytes=_gradients(head, "L", "D", "dQ"),
        flops=2 * v.area * (3 * d + 2 * dv),
        exps=v.area,
        **peak(
            _moment(head, 2 * r0 * dv, 0),
            _moment(head, c0 * (d + dv), c0 * (d + dv)),
            *(flash2_backward_tiles(head, r, c) for r, c in v.shapes),
        ),
        extra_hbm_elements=head.Nq,
    )


def two_kernel_backward(head: Head, *, Br: int, Bc: int, elide: bool = False) -> Cost:
    """One loop for dK and dV, one for dQ; nothing is initialised, so there is nothing to elide."""
    v, d, dv = visits(head.mask, Br, Bc), head.d, head.dv
    rows, keys = v.row_visits, v.key_visits
    mask = mask_reads(head, v)
    d_read, d_written = _d_mask(head, mask.get("mask", 0), mask.get("mask", 0))
    r0, c0 = v.tallest, min(Bc, head.Nk)
    return Cost(
        reads={
            "O": head.Nq * dv,
            "dO": (2 * head.Nq + rows) * dv,
            "K": (head.Nk + keys) * d,
            "V": (head.Nk + keys) * dv,
            "Q": (head.Nq + rows) * d,
            "L": head.Nq + rows,
            "D": head.Nq + rows,
            **{name: 2 * n for name, n in mask.items()},
            **d_read,
        },
        writes={
            "D": head.Nq,
            "dQ": head.Nq * d,
            "dK": head.Nk * d,
            "dV": head.Nk * dv,
            **d_written,
        },
        item_bytes=_gradients(head, "L", "D"),
        flops=2 * v.area * (4 * d + 3 * dv),
        exps=2 * v.area,
        **peak(
            _moment(head, 2 * r0 * dv, 0),
            _moment(head, c0 * (d + dv), c0 * (d + dv)),
            _moment(head, r0 * (d + dv), r0 * (d + 2)),
            *(two_kernel_backward_tiles(head, r, c) for r, c in v.shapes),
        ),
        extra_hbm_elements=head.Nq,
    )


def standard_backward(head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False) -> Cost:
    """Algorithm 3 of Dao et al. 2022; Bs = 0: a row of P and dP does not fit and is read twice."""
    v = visits(Mask(head.Nq, head.Nk, array=head.mask.array), Br, Bc)
    d, dv, scores, Tr = head.d, head.dv, head.Nq * head.Nk, v.turns
    Tc = -(-head.Nk // Bc)
    r0, c0 = v.tallest, min(Bc, head.Nk)
    steps = [step for r, c in v.shapes for step in _standard_backward_steps(head, r, c)]
    if Bs:
        tall, broad = head.mask.own_sides
        turns = -(-head.Nq // Bs)
        d_mask = (head.Nq if tall else turns) * (head.Nk if broad else 1)
        steps.append(_softmax_gradient(head, Bs, head.Nk, 0))
    else:
        d_mask = mask_reads(head, v).get("mask", 0)
        steps += [_softmax_gradient(head, r, c, r) for r, c in (*v.shapes, (r0, 0))]
    d_read, d_written = _d_mask(head, d_mask, d_mask)
    twice = 1 if Bs else 2
    return Cost(
        reads={
            "P": (1 + twice) * scores,
            "dO": (Tc + 1) * head.Nq * dv,
            "V": Tr * head.Nk * dv,
            "dP": twice * scores,
            "K": Tr * head.Nk * d,
            "Q": Tc * head.Nq * d,
            "dS": 2 * scores,
            **d_read,
        },
        writes={
            "dV": head.Nk * dv,
            "dP": scores,
            "dS": scores,
            "dQ": head.Nq * d,
            "dK": head.Nk * d,
            **d_written,
        },
        item_bytes=_gradients(head, "P", "dP", "dS"),
        flops=4 * scores * (d + dv),
        exps=0,
        **peak(
            _moment(head, r0 * dv, 0),
            _moment(head, 0, r0 * d),
            _moment(head, 0, c0 * max(d, dv)),
            *steps,
        ),
        extra_hbm_elements=2 * scores,
    )


def standard_unfused_backward_tiles(head: Head, r: int, c: int) -> tuple[int, int]:
    """(elements, bytes) of the fullest kernel: those of standard attention, or dPdrop and Z."""
    return fullest(standard_backward_tiles(head, r, c), _dropping(head, r, c))


def _dropping(head: Head, r: int, c: int) -> tuple[int, int]:
    return 2 * r * c, r * c * (head.wide + 1)


def standard_unfused_backward(
    head: Head, *, Br: int, Bc: int, Bs: int, elide: bool = False
) -> Cost:
    """Standard attention's, with a kernel that reads dPdrop and Z and writes dP."""
    fused = standard_backward(head, Br=Br, Bc=Bc, Bs=Bs)
    scores, shapes = head.Nq * head.Nk, visits(Mask(head.Nq, head.Nk), Br, Bc).shapes
    softmax = {"P": fused.reads["P"] - scores}
    return replace(
        fused,
        reads=fused.reads | softmax | {"Pdrop": scores, "dPdrop": scores, "Z": scores},
        writes=fused.writes | {"dPdrop": scores},
        item_bytes=_gradients(head, "P", "Pdrop", "dPdrop", "dP", "dS") | {"Z": 1},
        **peak(
            (fused.sram_elements, fused.sram_bytes), *(_dropping(head, r, c) for r, c in shapes)
        ),
        extra_hbm_elements=3 * scores,
    )


def group_sum(head: Head, *, Bc: int) -> Cost:
    """dK and dV of `head.group` query heads added up into those of the key head they share."""
    sums = head.Nk * head.d, head.Nk * head.dv
    rows = min(max(1, Bc // 2), head.Nk)
    return Cost(
        reads={"dK": head.group * sums[0], "dV": head.group * sums[1]},
        writes={"dK_group": sums[0], "dV_group": sums[1]},
        item_bytes={
            "dK": head.wide,
            "dV": head.wide,
            "dK_group": head.stored,
            "dV_group": head.stored,
        },
        **peak(_moment(head, 0, 2 * rows * max(head.d, head.dv))),
        extra_hbm_elements=head.group * sum(sums),
    )
