"""What `flashsim run`, `io` and `layouts` find out: a record a pass, or a layout, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from . import checks, layouts
from .algorithms import ALGORITHMS, SHAPES, Algorithm, Backward, backward_of
from .attention import Attention, attention
from .checks import clamped
from .cost.bounds import COMPULSORY, COMPULSORY_BACKWARD, Work, best
from .cost.counts import Cost, Head
from .cost.devices import Device
from .cost.io import DTYPES, expected_cost, io_cost
from .cost.tiles import RULES, STEPS, default_tiles, optimal, tile_sizes, usable
from .inputs import Inputs
from .masks import Mask, band
from .memory import SramOverflow, Traffic, widened
from .paging import paginate
from .problem import block_layout, checked, parts_of_keys
from .reference import Exact, ExactGradients, exact, exact_gradients

Array = np.ndarray[Any, Any]
Record = dict[str, Any]
Budget = dict[str, Any]  # {"sram": elements} or {"sram_bytes": bytes}, as `attention` takes it

LARGEST_SCORES = 2**28  # standard attention keeps two matrices of so many scores: 2 GiB in float32
LARGEST_GRADIENTS = 2**24  # the reference's gradients take 20 such matrices in float64: 2.7 GB
LARGEST_GRID = 2**24  # blocks in a layout

# How the command line is told what an algorithm cannot do without.
OPTIONS = {
    "block_mask": "--layout too, which says what to skip",
    "local_window": "--local-window too, the queries of a window",
    "projection": "--projection too, the keys that all are mixed into",
    "fp8": "--fp8 too, the rows that share a scale",
    "block_tables": "--page-size too, the rows of a page",
}

AN_ERROR = "a number of at least 0"

# Largest error of a file's expected output, in the precision that it was stored in.
TOLERANCES = {"float64": 2e-6, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def conventions(algorithm: str, backward: bool = False) -> tuple[str, ...]:
    """The conventions under which a pass of an algorithm costs differently."""
    row = ALGORITHMS[algorithm]
    return tuple(row.backward) if backward else row.conventions


def variants(
    names: Iterable[str], backward: bool = False, given: Iterable[str] = (), *, run: bool = True
) -> list[tuple[str, str]]:
    """(algorithm, convention) for names such as "flash2" or "flash1:elided".

    A name without a convention stands for all under which the forward pass differs, or with
    `backward` either pass. No names stand for all the usual algorithms that differ in these passes
    and run with what is `given`, of the arguments that are some algorithm's own. Where nothing is
    `run`, pages are not asked for: what attention costs does not depend on them.

    Raises
    ------
    ValueError
        If there is no such algorithm or convention, it needs what is not given, with `backward` it
        has no backward pass, or what is an algorithm's own is given without it.
    """
    found = []
    given = {"", *given}
    needed: set[str] = set()
    usual = (
        name
        for name, row in ALGORITHMS.items()
        if row.usual and row.requires in given and (backward or not row.forward_of)
    )
    for name in names or usual:
        algorithm, colon, convention = name.partition(":")
        row = ALGORITHMS[checks.choice("algorithm", algorithm, ALGORITHMS)]
        if row.requires not in given and (run or row.requires != "block_tables"):
            raise ValueError(f"--algorithm {name}: expected {OPTIONS[row.requires]}")
        if backward:
            backward_of(algorithm)
        known = (*row.conventions, *(conventions(algorithm, True) if backward else ()))
        needed.update((row.requires, *row.options))
        found += [
            (algorithm, c)
            for c in ([checks.choice("convention", convention, known)] if colon else known)
        ]
    for requires in given - needed - {"", "block_mask"}:
        (name,) = (
            name for name, row in ALGORITHMS.items() if requires in (row.requires, *row.options)
        )
        others = {"block_tables": "--page-size", "incoherent": "--no-incoherent"}
        option = others.get(requires, f"--{requires.replace('_', '-')}")
        raise ValueError(f"{option}: expected only with --algorithm {name}")
    return list(dict.fromkeys(found))


def passes(
    chosen: Iterable[tuple[str, str]], backward: bool
) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """Of each variant, the (convention, backward) of the passes to show: each cost once.

    With both passes, a forward pass that another variant has too is that one's.
    """
    found, shown = [], set()
    for algorithm, convention in chosen:
        mine = []
        for back in (False, True) if backward else (False,):
            known = conventions(algorithm, back)
            here = convention if convention in known else known[0]
            same = backward and not back and ALGORITHMS[algorithm].forward_of
            key = same or algorithm, here, back
            if key not in shown:
                mine.append((here, back))
            shown.add(key)
        found.append((algorithm, convention, mine))
    return found


def label(record: Record) -> str:
    """The name of a record's variant, as `variants` takes it."""
    return name_of(record["algorithm"], record["convention"], record["pass"] == "backward")


def name_of(algorithm: str, convention: str, backward: bool = False) -> str:
    """ "flash2", or "flash1:elided" where the convention makes a difference."""
    several = len(conventions(algorithm, backward)) > 1
    return f"{algorithm}:{convention}" if several else algorithm


def output_gradient(inputs: Inputs, seed: int | None) -> Array:
    """The gradient of the output to start a backward pass from: that of the inputs, or drawn.

    Raises
    ------
    ValueError
        If the inputs have one and a seed is given as well.
    """
    if inputs.do is None:
        shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
        rng = np.random.default_rng((checks.integer("seed", 0 if seed is None else seed, 0), 1))
        return rng.standard_normal(shape, np.float32).astype(inputs.q.dtype)
    if seed is not None:
        raise ValueError(f"--seed {seed}: expected none, as {inputs.origin} gives do")
    return inputs.do


def run_records(
    inputs: Inputs,
    chosen: list[tuple[str, str]],
    *,
    budget: Budget,
    tiles: tuple[int, int] | None,
    device: Device,
    tolerance: float | None,
    on_step: Callable[[str], None],
    do: Array | None = None,
    splits: int | None = None,
    page: int | None = None,
    exp_emulation: tuple[float, int] | None = None,
    rescale_threshold: float | None = None,
    incoherent: bool = True,
    **what: Any,
) -> list[Record]:
    """Run each variant on the inputs and hold it against float64 and against its closed form.

    Parameters
    ----------
    inputs : Inputs
    chosen : list of (algorithm, convention)
    budget, tiles, **what
        Arguments of `attention`.
    device : Device
        Whose memory bandwidth turns bytes into time.
    tolerance : float, optional
        Largest error of an expected output; None for that of its dtype, in TOLERANCES.
    on_step : callable
        Told what comes next.
    do : array (..., Nq, dv), optional
        Gradient of the output: run the backward passes too.
    splits : int, optional
        Of "split_kv"; it is held against a bound of its own, which knows of the merge.
    page : int, optional
        Rows of a page, for "paged": the keys that are real are put in pages in a random order.
    exp_emulation, rescale_threshold : optional
        Of "flash4"; likewise, with the error of the polynomial, or of larger exponents.
    incoherent : bool
        Of "flash3-fp8".

    Returns
    -------
    list of Record
        Forward passes, then backward ones; `failures` lists what does not hold. local_window,
        projection and fp8 are for the approximations alone: these are held against their own
        definition, and how far that is from attention is `approximation_error`.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    what, coarse = _split(what)
    what = {
        "attn_mask": inputs.attn_mask, "key_padding_mask": inputs.key_padding_mask,
        "enable_gqa": True, **what,
    }  # fmt: skip
    if tolerance is not None and checks.number("tolerance", tolerance, AN_ERROR) < 0:
        raise checks.bad("tolerance", tolerance, AN_ERROR)
    head = checked(q, k, v, **what, tiles=tiles).head
    _check_size(head, chosen, do)
    on_step("float64 reference")
    references = {"": exact(q, k, v, **what, tiles=tiles)}
    for name, size in coarse.items():
        coarse_how = {name: size} | ({"incoherent": incoherent} if name == "fp8" else {})
        references[name] = exact(q, k, v, **what, tiles=tiles, **coarse_how)
    gradients = None
    if do is not None:
        on_step("float64 gradients")
        gradients = exact_gradients(q, k, v, do, **what, tiles=tiles)
    real = _real_rows(inputs)
    of_flash4 = {"exp_emulation": exp_emulation, "rescale_threshold": rescale_threshold}
    records = []
    for algorithm, convention, shown in passes(chosen, do is not None):
        on_step(f"{algorithm}, {convention}")
        entry = ALGORITHMS[algorithm]
        mine, (key, value) = what, (k, v)
        if entry.requires == "block_tables":
            key, value, pages = _in_pages(inputs, page)
            mine = {n: x for n, x in what.items() if n != "key_padding_mask"} | pages
        how = {"convention": convention, **budget, **mine, **_own(entry, coarse, splits)}
        own_bound: dict[str, Any] = {}
        for name, given in of_flash4.items():
            if given is not None and name in entry.options:
                how[name] = own_bound[name] = given
        if "incoherent" in entry.options:
            how["incoherent"] = incoherent
        try:
            out = attention(q, key, value, algorithm=algorithm, tiles=tiles, **how)
        except SramOverflow as error:
            raise SramOverflow(f"{algorithm}: {error}") from error
        if out.splits > 1:
            own_bound["splits"] = out.splits
        for here, backward in shown:
            if backward:
                row = ALGORITHMS[algorithm].backward[here]
                keep = what.get("block_mask")
                own = None if tiles is None else _backward_tiles(row, head, budget, tiles, keep)
                wanted = gradients
                if own_bound:
                    wanted = exact_gradients(q, k, v, do, **what, tiles=tiles, **own_bound)
                record = _backward_record(out, here, own, do, wanted, device)
            else:
                reference = references["" if entry.exact else entry.requires]
                if own_bound or mine is not what:
                    reference = exact(q, key, value, **mine, tiles=tiles, **own_bound)
                record = _forward_record(out, here, reference, device)
                record |= {"approximation_error": None}
                if entry.exact and "exp_emulation" not in own_bound:
                    record |= _expectation(out, inputs, tolerance, real)
                else:
                    attended = references[""].output
                    record["approximation_error"] = relative_error(out.output, attended, real)
            cost = expected_cost(out, q, key, value, **how, backward=backward)
            record["differs_from_formula"] = _differences(record, cost)
            record["failures"] = _failures(record)
            records.append(record)
    records.sort(key=lambda record: bool(record["pass"] == "backward"))
    return _with_ratio(records)


def _in_pages(inputs: Inputs, page: int | None) -> tuple[Array, Array, dict[str, Any]]:
    """The real keys and values in pages, and where they are."""
    k, v = (x if x.ndim == 2 else x.reshape(-1, *x.shape[-3:]) for x in (inputs.k, inputs.v))
    real, lengths = inputs.key_padding_mask, None
    if real is not None:
        real = real.reshape(-1, k.shape[-2])
        lengths = real.sum(axis=1).tolist()
        if not (real == (np.arange(k.shape[-2]) < np.array(lengths)[:, None])).all():
            raise checks.bad("key_padding_mask", "with holes", "real keys first, for paged")
    return paginate(k, v, checks.integer("page", page, 1), lengths)


def _split(what: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is to be computed, and how coarsely by the approximations."""
    names = {row.requires for row in ALGORITHMS.values() if not row.exact}
    coarse = {n: x for n, x in what.items() if n in names and x is not None}
    return {n: x for n, x in what.items() if n not in names}, coarse


def _own(row: Algorithm, coarse: dict[str, Any], splits: int | None) -> dict[str, Any]:
    """Of the sizes of the approximations, that of this one; and into how many parts it cuts."""
    found = {row.requires: coarse[row.requires]} if row.requires in coarse else {}
    return found | ({"splits": splits} if "splits" in row.options else {})


def relative_error(output: Any, exact: Any, real: Any = True) -> float:
    """|output - exact| / |exact|, the root of summed squares over the rows that are real."""
    off = np.where(real, output.astype(np.float64) - exact, 0)
    size = np.linalg.norm(np.where(real, exact, 0))
    return float(np.linalg.norm(off) / size) if size else 0.0


def _check_size(head: Head, chosen: list[tuple[str, str]], do: Array | None) -> None:
    """Refuse what does not fit in this computer's memory before anything is computed."""
    scores, here = head.Nq * head.Nk, f"N={head.Nq}, Nk={head.Nk}: expected N * Nk of at most"
    for name, _ in chosen:
        if scores > LARGEST_SCORES and "S" in ALGORITHMS[name].arrays:
            raise ValueError(
                f"{here} {LARGEST_SCORES} where {ALGORITHMS[name].title} runs, which stores them; "
                "choose other algorithms, or use `flashsim io`"
            )
    if scores > LARGEST_GRADIENTS and do is not None:
        raise ValueError(f"{here} {LARGEST_GRADIENTS} with --backward; or use `flashsim io`")


def _backward_tiles(
    row: Backward, head: Head, budget: Budget, tiles: tuple[int, int], block_mask: Any
) -> tuple[int, int]:
    """Tiles of a backward pass where some are given.

    Where the given ones are the blocks of a layout, a block is cut into as many equal parts as it
    takes to fit, so that no tile lies in two blocks.
    """
    if block_mask is None:
        return tiles
    Br, Bc = clamped(tiles, head.Nq, head.Nk)
    for n in range(1, math.gcd(Br, Bc) + 1):
        elements, size = row.needs(head, Br // n, Bc // n)
        fits = elements <= budget.get("sram", math.inf) and size <= budget.get(
            "sram_bytes", math.inf
        )
        if fits and Br % n == Bc % n == 0:
            return Br // n, Bc // n
    return tiles


def _cut(
    block_mask: Any, blocks: tuple[int, int] | None, tiles: tuple[int, int], Nq: int, Nk: int
) -> Any:
    """A layout over blocks, told for the tiles that each block is cut into."""
    if block_mask is None or blocks is None:
        return None
    for axis, (block, tile, N) in enumerate(
        zip(clamped(blocks, Nq, Nk), tiles, (Nq, Nk), strict=True)
    ):
        block_mask = block_mask.repeat(block // tile, axis).take(range(-(-N // tile)), axis)
    return block_mask


def _forward_record(out: Attention, convention: str, reference: Exact, device: Device) -> Record:
    return {
        **_moved("forward", out.algorithm, convention, out.tiles, out.traffic, device),
        "output_error_over_bound": reference.output_ratio(out.output),
        "lse_error_over_bound": reference.lse_ratio(out.lse),
        "splits": out.splits,
        "rescales": None if out.rescales is None else int(out.rescales.sum()),
        "sram_elements": out.sram_peak_elements,
        "sram_bytes": out.sram_peak_bytes,
        "extra_hbm_elements": out.extra_hbm_elements,
    }


def _backward_record(
    out: Attention, convention: str, tiles: tuple[int, int] | None, do: Any,
    exact: ExactGradients | None, device: Device,
) -> Record:  # fmt: skip
    try:
        gradients = out.backward(do, tiles=tiles)
    except SramOverflow as error:
        raise SramOverflow(f"{out.algorithm}, backward: {error}") from error
    assert exact is not None
    assert out.traffic_backward is not None
    assert out.tiles_backward is not None
    moved = out.tiles_backward, out.traffic_backward, device
    ratios = exact.ratios(gradients)
    return {
        **_moved("backward", out.algorithm, convention, *moved),
        **{f"{name}_error_over_bound": ratio for name, ratio in ratios.items()},
        "sram_elements": out.sram_peak_backward_elements,
        "sram_bytes": out.sram_peak_backward_bytes,
        "extra_hbm_elements": out.extra_hbm_backward_elements,
        "kept_elements": out.kept_elements,
    }


def _expectation(out: Attention, inputs: Inputs, tolerance: float | None, real: Any) -> Record:
    """The error of an expected output, and what it may be."""
    expected = inputs.expected_output
    if expected is None:
        return {"expected_output_error": None}
    return {
        "expected_output_error": _largest_error(out.output, expected, real),
        "expected_output_tolerance": (
            TOLERANCES[expected.dtype.name] if tolerance is None else tolerance
        ),
    }


def _moved(
    which: str,
    algorithm: str,
    convention: str,
    tiles: tuple[int, int],
    traffic: Traffic,
    device: Device,
) -> Record:
    return {
        "pass": which,
        "algorithm": algorithm,
        "convention": convention,
        "Br": tiles[0],
        "Bc": tiles[1],
        "reads": _nonzero(traffic.reads),
        "writes": _nonzero(traffic.writes),
        "read_elements": traffic.read_elements,
        "written_elements": traffic.written_elements,
        "total_elements": traffic.total_elements,
        "total_bytes": traffic.total_bytes,
        "memory_seconds": device.memory_seconds(traffic.total_bytes),
    }


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if n}


def _real_rows(inputs: Inputs) -> Any:
    """Which rows an expected output is compared in: in padded self-attention, the real tokens'."""
    keys, lead = inputs.key_padding_mask, inputs.q.shape[:-3]
    if keys is None or inputs.q.shape[-2] != inputs.k.shape[-2]:
        return True
    return keys.reshape(*lead, 1, -1, 1)


def _largest_error(output: Any, expected: Any, real: Any) -> float:
    error = np.abs(output.astype(np.float64) - expected.astype(np.float64))
    return float(np.where(real, error, 0).max(initial=0))


def _differences(record: Record, cost: Cost) -> list[str]:
    """Which of the executed counts are not those of the closed form."""
    sizes = ("sram_elements", "sram_bytes", "extra_hbm_elements")
    formula = {"reads": _nonzero(cost.reads), "writes": _nonzero(cost.writes)}
    formula |= {name: getattr(cost, name) for name in sizes}
    return [name for name, value in formula.items() if record[name] != value]


def errors(record: Record) -> dict[str, float]:
    """Largest error / bound of each result that was held against float64."""
    end = "_error_over_bound"
    return {name.removesuffix(end): x for name, x in record.items() if name.endswith(end)}


def _failures(record: Record) -> list[str]:
    found = [
        f"{what} is off by {ratio:.3g} times its bound"
        for what, ratio in errors(record).items()
        if not ratio <= 1
    ]
    if record["differs_from_formula"]:
        found.append(f"{', '.join(record['differs_from_formula'])} not as in the closed form")
    error = record.get("expected_output_error")
    if error is not None and not error <= record["expected_output_tolerance"]:
        found.append(
            f"output is off by {error:.2g} from the expected one, more than "
            f"{record['expected_output_tolerance']:g}"
        )
    return found


def _with_ratio(records: list[Record]) -> list[Record]:
    """Add `ratio_to_standard`, of elements moved in the same pass; None without standard's."""
    standard = {r["pass"]: r["total_elements"] for r in records if r["algorithm"] == "standard"}
    for record in records:
        whole = standard.get(record["pass"])
        record["ratio_to_standard"] = record["total_elements"] / whole if whole else None
    return records


def io_records(
    chosen: list[tuple[str, str]],
    *,
    N: int,
    Nk: int,
    d: int,
    dv: int,
    dtype: str,
    budget: Budget,
    rule: str | None,
    tiles: tuple[int, int] | None,
    device: Device,
    backward: bool = False,
    block_mask: Any = None,
    splits: int | None = None,
    **what: Any,
) -> list[Record]:
    """The closed form of each variant, with the tiles given or, if none are, those of a rule.

    Parameters as of `io_cost`; rule as of `tile_sizes`, with M the budget in elements as stored.
    With `backward`, the backward passes come after the forward ones; with `block_mask`, `tiles` are
    its blocks. `bound_elements` is what no algorithm on this chip can move less than; where the
    tiles need a larger chip, on one as large as that.
    """
    for name, size, least in (("N", N, 0), ("Nk", Nk, 0), ("d", d, 1), ("dv", dv, 1)):
        checks.integer(name, size, least)
    stored = DTYPES[checks.choice("dtype", dtype, DTYPES)]
    what, coarse = _split(what)
    head = Head(Mask(N, Nk), d, dv, stored.itemsize, widened(stored).itemsize)
    tiles = None if tiles is None else checks.pair_of_tiles(tiles)
    work = _work(N, Nk, d, dv, tiles, block_mask, **what)
    M = _elements(budget, stored.itemsize)
    records = []
    for algorithm, _, shown in passes(chosen, backward):
        mine = _own(ALGORITHMS[algorithm], coarse, splits)
        keys = mine.get("projection", Nk)
        met = replace(head, mask=Mask(N, keys), unmixed=Nk)
        if "splits" in mine:
            calls = what.get("heads", 1) * what.get("batch", 1)
            met = replace(met, splits=parts_of_keys(splits, calls, N, Nk, d))
        for here, back in shown:
            cost_of = {
                "N": N, "Nk": Nk, "d": d, "dv": dv, "dtype": dtype, "convention": here,
                "backward": back, **budget, **what, **mine,
            }  # fmt: skip
            own = tiles or _tiles(algorithm, back, met, budget, rule)
            row = ALGORITHMS[algorithm].backward[here] if back else ALGORITHMS[algorithm]
            if isinstance(row, Backward):
                own = _backward_tiles(row, head, budget, own, block_mask)
            Br, Bc = usable(row, own, replace(head, mask=Mask(N, keys)))
            keep = _cut(block_mask, tiles, (Br, Bc), N, Nk)
            cost = io_cost(algorithm, Br=Br, Bc=Bc, block_mask=keep, **cost_of)
            need = {"sram": cost.sram_elements, "sram_bytes": cost.sram_bytes}
            over = max(need[unit] - limit for unit, limit in budget.items())
            exact, chip = ALGORITHMS[algorithm].exact, max(1, M, cost.sram_elements)
            least, bound = best(work, chip, backward=back, exact=exact)
            compulsory = (COMPULSORY_BACKWARD if back else COMPULSORY).elements(work, chip)
            record = {
                **_moved(("forward", "backward")[back], algorithm, here, (Br, Bc), cost, device),
                "flops": cost.flops,
                "exps": cost.exps,
                "flops_per_byte": cost.flops / cost.total_bytes if cost.total_bytes else None,
                "sram_elements": cost.sram_elements,
                "sram_bytes": cost.sram_bytes,
                "splits": 1 if back else met.splits,
                "fits": over <= 0,
                "extra_hbm_elements": cost.extra_hbm_elements,
                "compulsory_elements": compulsory or 0,
                "bound_elements": least,
                "bound": bound.name,
                "ratio_to_bound": cost.total_elements / least if least else None,
            }
            if back:
                heads = what.get("heads", 1) * what.get("batch", 1)
                record["kept_elements"] = heads * _kept(ALGORITHMS[algorithm], head.sizes)
            records.append(record)
    records.sort(key=lambda record: bool(record["pass"] == "backward"))
    return _with_ratio(records)


def _work(
    N: int, Nk: int, d: int, dv: int, blocks: tuple[int, int] | None, block_mask: Any,
    *, heads: int = 1, batch: int = 1, is_causal: bool = False,
    causal_align: str = "bottom-right", window: Any = None, **approximation: Any,
) -> Work:  # fmt: skip
    """What the bounds count of exact attention: its scores, and the rows that have any."""
    lo, hi = band(N, Nk, is_causal=is_causal, causal_align=causal_align, window=window)
    layout = block_layout(block_mask, blocks, N, Nk)
    return Work.of(Mask(N, Nk, lo=lo, hi=hi, layout=layout), d, dv, heads * batch)


def _elements(budget: Budget, itemsize: int) -> int:
    """M: the most elements that the chip may hold."""
    return int(budget.get("sram", budget.get("sram_bytes", 0) // itemsize))


def _kept(row: Algorithm, sizes: dict[str, int]) -> int:
    """What a head's forward pass leaves in HBM for the backward one, beyond Q, K, V and O."""
    reads = row.backward["literal"].reads
    names = [name for name in row.arrays if name in reads and name != "O"]
    return sum(math.prod(sizes[symbol] for symbol in SHAPES[name]) for name in names)


def _tiles(
    algorithm: str, backward: bool, head: Head, budget: Budget, rule: str | None
) -> tuple[int, int]:
    forward = ALGORITHMS[algorithm]
    row = backward_of(algorithm) if backward else forward
    if checks.choice("rule", rule, RULES) == "strict":
        return default_tiles(row, head, **budget)
    if rule in STEPS:
        return optimal(row, head, **budget, step=STEPS[rule])
    M = max(1, _elements(budget, head.stored))
    return tile_sizes(M, head.d, "paper", algorithm, backward=backward)


# Layouts, by names such as "random:0.25": form, builder from the grid's shape, and most arguments.

LAYOUTS: dict[str, tuple[str, Callable[..., Array], int]] = {
    "butterfly": ("butterfly[:FACTORS]", lambda grid, *n: layouts.butterfly(grid[0], *n), 1),
    "local-global": ("local-global[:LOCAL[,GLOBAL]]", layouts.local_global, 2),
    "strided": (
        "strided[:STRIDE]",
        lambda grid, *n: layouts.strided(grid, *n or (_root(grid),)),
        1,
    ),
    "random": ("random:DENSITY[,SEED]", layouts.at_random, 2),
    "causal": ("causal", layouts.causal, 0),
}
USUAL_LAYOUTS = (
    "butterfly", "local-global", "strided", "causal",
    "random:0.125", "random:0.25", "random:0.5", "random:0.75",
)  # fmt: skip


def _root(grid: tuple[int, int]) -> int:
    """The stride that leaves about as many blocks near the diagonal as far from it."""
    return max(1, round(math.sqrt(max(grid))))


def named_layout(name: str, blocks: tuple[int, int], Nq: int, Nk: int) -> Array:
    """A layout such as "butterfly" or "random:0.25", over blocks of (Br, Bc) scores.

    Raises
    ------
    ValueError
        If there is none of that name, or none on the grid that the blocks make; it says why.
    """
    kind, colon, text = name.partition(":")
    if kind not in LAYOUTS:
        forms = ", ".join(form for form, _, _ in LAYOUTS.values())
        raise checks.bad("layout", name, f"one of {forms}")
    form, build, most = LAYOUTS[kind]
    try:
        numbers = [_number(part) for part in text.split(",")] if colon else []
    except ValueError:
        raise checks.bad("layout", name, form) from None
    if len(numbers) > most or (kind == "random" and not numbers):
        raise checks.bad("layout", name, form)
    rows, columns = grid = _grid(blocks, Nq, Nk)
    there = f"there are {rows} x {columns} of {blocks[0]} x {blocks[1]} scores"
    if rows * columns > LARGEST_GRID:
        raise checks.bad("layout", name, f"at most {LARGEST_GRID} blocks; {there}")
    if kind == "butterfly" and not (rows == columns > 0 and rows & (rows - 1) == 0):
        others = _power_of_two(Nq, Nk, max(blocks))
        if others is not None:
            there += f", and those of {others[0]} x {others[1]} would do"
        raise checks.bad(
            "layout", name, f"as many rows of blocks as columns, a power of two; {there}"
        )
    try:
        return build(grid, *numbers)
    except (ValueError, TypeError) as error:
        raise ValueError(f"layout={name!r}: {error}") from error


def _grid(blocks: tuple[int, int], Nq: int, Nk: int) -> tuple[int, int]:
    return -(-Nq // blocks[0]), -(-Nk // blocks[1])


def _number(text: str) -> float:
    return int(text) if text.strip().isdecimal() else float(text)


def block_sizes(Nq: int, Nk: int) -> tuple[int, int]:
    """(Br, Bc) of about 32, or an eighth of a short length, if they can be a power of two of each.

    Where they cannot, 32; then there is no butterfly.
    """
    wanted = min(32.0, max(Nq, Nk) / 8)
    return _power_of_two(Nq, Nk, wanted, (wanted / 2, wanted * 1.5)) or (32, 32)


def _power_of_two(
    Nq: int, Nk: int, wanted: float, sides: tuple[float, float] = (0, math.inf)
) -> tuple[int, int] | None:
    """(Br, Bc), closest to wanted, that cut both lengths into the same power of two of blocks."""
    found, n = [], 1
    while n <= min(Nq, Nk):
        blocks = -(-Nq // n), -(-Nk // n)
        if _grid(blocks, Nq, Nk) == (n, n) and sides[0] <= max(blocks) <= sides[1]:
            found.append(blocks)
        n *= 2
    return min(found, key=lambda blocks: abs(math.log(max(blocks) / wanted)), default=None)


def layout_records(
    inputs: Inputs,
    names: Iterable[str],
    *,
    blocks: tuple[int, int],
    on_step: Callable[[str], None],
    **what: Any,
) -> tuple[list[Record], list[str]]:
    """What each layout drops on the inputs, and what it moves beside dense FlashAttention.

    Parameters
    ----------
    inputs : Inputs
    names : iterable of str
        As `named_layout` takes them.
    blocks : (Br, Bc)
        Blocks of the layouts, and tiles of the runs.
    on_step : callable
        Told what comes next.
    **what
        Further masks and scale, as in `attention`.

    Returns
    -------
    records : list of Record
        `failures` lists what does not hold.
    missing : list of str
        Why there is no record of some layout.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    what = {
        "attn_mask": inputs.attn_mask, "key_padding_mask": inputs.key_padding_mask,
        "enable_gqa": True, **what,
    }  # fmt: skip
    head = checked(q, k, v, **what).head
    blocks = clamped(blocks, head.Nq, head.Nk)
    on_step("dense")
    dense = attention(q, k, v, algorithm="flash1", tiles=blocks, **what).traffic.total_elements
    records, missing = [], []
    for name in names:
        on_step(name)
        try:
            keep = named_layout(name, blocks, head.Nq, head.Nk)
        except ValueError as error:
            missing.append(str(error))
            continue
        how = {**what, "block_mask": keep}
        out = attention(q, k, v, algorithm="block_sparse", tiles=blocks, **how)
        cost = expected_cost(out, q, k, v, **how)
        dropped, real = np.broadcast_arrays(
            layouts.weight_outside(q, k, keep, blocks, **what)[..., None], _real_rows(inputs)
        )
        dropped = dropped[real]
        same = all(
            _nonzero(moved) == _nonzero(wanted)
            for moved, wanted in (
                (out.traffic.reads, cost.reads),
                (out.traffic.writes, cost.writes),
            )
        )
        records.append(
            {
                "layout": name,
                "Br": blocks[0],
                "Bc": blocks[1],
                "block_rows": keep.shape[0],
                "block_columns": keep.shape[1],
                "blocks_kept": int(keep.sum()),
                "density": layouts.density(keep),
                "dropped_weight_mean": float(dropped.mean()) if dropped.size else 0.0,
                "dropped_weight_worst": float(dropped.max(initial=0)),
                "total_elements": out.traffic.total_elements,
                "dense_elements": dense,
                "ratio_to_dense": out.traffic.total_elements / dense if dense else None,
                "failures": [] if same else ["reads or writes not as in the closed form"],
            }
        )
    return records, missing
