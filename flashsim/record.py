"""Runs an algorithm line by line without changing it, and keeps what each line did.

A `Recording` is a list of `Step`: the statement that ran, the locals it bound or changed (in-place
changes too), the memory events it caused, what is on chip after it, and the traffic so far::

    run = record_attention(q, k, v, tiles=(4, 2), sram=100)
    run[:10]                # the first ten steps; a notebook shows them as a table
    run[8].locals["m_new"]  # what a local holds after step 8
    run.result.output       # what the call returned

The function runs as it is, under `sys.monitoring` (`sys.settrace` on Python 3.11), so its results
and counts are those of an ordinary run, bit for bit. A statement is a step of its own each time it
runs. A loop header is the load: its step has the tiles that come, and the eviction of the turn
before; the header that ends a loop evicts with nothing new. Functions of the same module that the
algorithm calls are recorded too, and other algorithms; the calling line then comes before theirs,
and once more if it changed something itself. One that is given parts of arrays counts their rows
from 0, and its steps say which parts they are.
"""

from __future__ import annotations

import ast
import html
import inspect
import math
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeGuard, overload

import numpy as np

from . import checks
from .algorithms import ALGORITHMS, backward_of
from .attention import Attention, attention
from .checks import bad, bad_type
from .masks import Mask
from .memory import Event, Hbm, Machine, Traffic

Array = np.ndarray[Any, Any]

_KEPT = (np.ndarray, np.generic, slice, int, float, str)  # the locals worth a copy
_ALGORITHMS = ALGORITHMS["flash2"].forward.__module__.rpartition(".")[0]
_MOST_SHOWN = 16  # elements; of a longer array a table shows the shape


class Held(NamedTuple):
    """A tile on chip."""

    name: str
    shape: tuple[int, ...]
    elements: int
    bytes: int


@dataclass(frozen=True)
class Step:
    """One statement that ran.

    Attributes
    ----------
    number : int
        Position in the whole recording, from 0.
    function : str
        Name of the function that the statement is in.
    line : int
        Its first line in the source file.
    code : str
        Its text; of a loop or condition the header.
    locals : dict
        The arrays, numbers, slices and strings that the function's locals hold after it: copies.
    changed : dict
        Those that it bound or changed, and what it wrote to HBM, as in "O[0:4]".
    events : tuple of Event
        What it did to memory.
    resident : tuple of Held
        What is on chip after it.
    traffic : Traffic
        HBM reads and writes so far.
    parts : dict
        Of the arrays in HBM of which the function, or what called it, was given only a part: the
        rows (and columns) that it is, as slices. The function's own loops count from there.
    """

    number: int
    function: str
    line: int
    code: str
    locals: dict[str, Any]
    changed: dict[str, Any]
    events: tuple[Event, ...]
    resident: tuple[Held, ...]
    traffic: Traffic
    parts: dict[str, tuple[slice, ...]] = field(default_factory=dict)

    @property
    def used_elements(self) -> int:
        """Elements on chip after the step."""
        return sum(held.elements for held in self.resident)

    @property
    def used_bytes(self) -> int:
        """Bytes on chip after the step; a loaded tile counts as in HBM."""
        return sum(held.bytes for held in self.resident)

    def __str__(self) -> str:
        rows = [f"step {self.number}, line {self.line}: {self.code}"]
        rows += [_equation(f"  changed  {name} = ", x) for name, x in self.changed.items()]
        if self.events:
            rows.append(f"  memory   {_memory(self.events)}")
        held = ", ".join(f"{h.name} {h.elements}" for h in self.resident)
        rows.append(f"  on chip  {self.used_elements} elements" + (f": {held}" if held else ""))
        read, written = self.traffic.read_elements, self.traffic.written_elements
        rows.append(f"  so far   {read} elements read, {written} written")
        return "\n".join(rows)


@dataclass
class Recording:
    """The steps of a run, in order. `run[3]` is one of them, `run[3:9]` a recording of some.

    Attributes
    ----------
    steps : list of Step
    source : dict
        Of every function that ran: {line number in the file: text of the line}.
    hbm : dict
        {name: shape} of the arrays in HBM that the functions were given; empty for plain arrays.
    sram, sram_bytes : float
        The budget of the chip; inf where there is none.
    result : Any
        What the recorded call returned.
    """

    steps: list[Step] = field(default_factory=list)
    source: dict[str, dict[int, str]] = field(default_factory=dict)
    hbm: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sram: float = math.inf
    sram_bytes: float = math.inf
    result: Any = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @overload
    def __getitem__(self, which: int) -> Step: ...
    @overload
    def __getitem__(self, which: slice) -> Recording: ...
    def __getitem__(self, which: int | slice) -> Step | Recording:
        if isinstance(which, slice):
            return replace(self, steps=self.steps[which])
        return self.steps[which]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [("step", "line", "statement", "changed", "on chip", "read", "written")]
        for step in self:
            traffic = step.traffic
            numbers = step.used_elements, traffic.read_elements, traffic.written_elements
            on_chip, read, written = map(str, numbers)
            changed = ", ".join(step.changed)
            number, line = str(step.number), str(step.line)
            rows.append((number, line, step.code, changed, on_chip, read, written))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = (str.rjust, str.rjust, str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
        return "\n".join(
            "  ".join(side(cell, n) for side, cell, n in zip(sides, row, widths, strict=True))
            for row in rows
        )

    def listing(self) -> str:
        """The source of the functions that ran, with line numbers."""
        return "\n\n".join(
            "\n".join(f"{number:4}  {text}".rstrip() for number, text in lines.items())
            for lines in self.source.values()
        )

    def _repr_html_(self) -> str:
        in_bytes = self.sram_bytes < math.inf
        used = [step.used_bytes if in_bytes else step.used_elements for step in self]
        budget = self.sram_bytes if in_bytes else self.sram
        full = max(used, default=0) if budget == math.inf else budget
        chip = f"{'bytes' if in_bytes else 'elements'} on chip"
        chip += "" if budget == math.inf else f", of {budget:g}"
        heads = "step", "line", "statement, memory events", "what changed"
        rows = [_row("th", *heads, f"{chip};<br>elements so far")]
        for step, now in zip(self, used, strict=True):
            code, memory = html.escape(step.code), html.escape(_memory(step.events))
            changed = "\n".join(_equation(f"{name} = ", x) for name, x in step.changed.items())
            traffic = f"{step.traffic.read_elements} read, {step.traffic.written_elements} written"
            rows.append(
                _row(
                    "td",
                    step.number,
                    step.line,
                    f"<code>{code}</code>" + (f"<br>{memory}" if memory else ""),
                    f'<pre style="margin:0">{html.escape(changed)}</pre>',
                    f'{_bar(now, full)} {now}<br><span style="white-space:nowrap">{traffic}</span>',
                )
            )
        return f'<div style="overflow-x:auto;font-size:80%"><table>{"".join(rows)}</table></div>'


def _row(tag: str, *cells: object) -> str:
    style = "text-align:left;vertical-align:top;padding:0.2em 0.5em"
    return "<tr>" + "".join(f'<{tag} style="{style}">{x}</{tag}>' for x in cells) + "</tr>"


def _equation(left: str, x: Any) -> str:
    """`left` and a value, to three digits; of a long array the shape and type."""
    if isinstance(x, slice):
        return f"{left}{x.start}:{x.stop}"
    if isinstance(x, np.ndarray) and x.size > _MOST_SHOWN:
        return f"{left}{' x '.join(map(str, x.shape))} {x.dtype}"
    if isinstance(x, np.ndarray):
        numbers = [_number(value) for value in x.flat]
        width = max(map(len, numbers), default=0)
        text = np.array2string(
            x, prefix=left, formatter={"all": lambda value: _number(value).rjust(width)}
        )
        return left + text
    return left + (_number(x) if isinstance(x, (float, np.floating)) else repr(x))


def _number(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, (float, np.floating)) else str(x)


def _memory(events: tuple[Event, ...]) -> str:
    """Events on one line: evictions by name, anything else with where and how much."""
    return ", ".join(
        f"evict {e.name}"
        if e.kind == "evict"
        else f"{e.kind} {e.name}{f'[{e.where}]' if e.where else ''} {e.elements}"
        for e in events
    )


def _bar(used: int, full: float) -> str:
    share = 100 * used / full if full else 0
    return (
        '<span style="display:inline-block;width:5em;height:0.7em;border:1px solid currentColor;'
        f'background:linear-gradient(to right,#0072B2 {share:.0f}%,transparent {share:.0f}%)">'
        "</span>"
    )


def record(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
    """Call `fn(*args, **kwargs)` and record it.

    Parameters
    ----------
    fn : function
        An algorithm: a Python function whose source can be found.
    *args, **kwargs
        Its arguments. If an array lives in the HBM of a `Machine`, the steps have that machine's
        events, residents and traffic; with plain arrays they have the locals alone.

    Returns
    -------
    Recording
        Its `result` is what the function returned.

    Examples
    --------
    >>> def mean(x):
    ...     total = 0.0
    ...     for value in x:
    ...         total += value
    ...     return total / len(x)
    >>> print(record(mean, [1.0, 5.0]))
    step  line  statement              changed  on chip  read  written
       0     2  total = 0.0            total          0     0        0
       1     3  for value in x:        value          0     0        0
       2     4  total += value         total          0     0        0
       3     3  for value in x:        value          0     0        0
       4     4  total += value         total          0     0        0
       5     3  for value in x:                       0     0        0
       6     5  return total / len(x)                 0     0        0
    """
    with recording(fn) as run:
        run.result = fn(*args, **kwargs)
    return run


def record_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "flash2",
    most_steps: float = math.inf,
    **options: Any,
) -> Recording:
    """Record one head of `flashsim.attention`.

    Parameters
    ----------
    q, k, v : array (N, d), (Nk, d), (Nk, dv)
        One head; leading dimensions of length 1 are allowed.
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    most_steps : number
        Stop a run that takes more.
    **options
        As for `flashsim.attention`: tiles, sram, is_causal, ...

    Returns
    -------
    Recording
        Its `result` is what `flashsim.attention` returns.

    Raises
    ------
    ValueError, TypeError
        As `flashsim.attention`, and if there is more than one head, or there are more steps than
        `most_steps`.
    """
    forward = ALGORITHMS[checks.choice("algorithm", algorithm, ALGORITHMS)].forward
    if math.prod(np.shape(q)[:-2]) != 1:
        raise bad("q.shape", np.shape(q), "one head, (N, d): pass q[batch, head]")
    with recording(forward, most_steps) as run:
        run.result = attention(q, k, v, algorithm=algorithm, **options)
    return run


def record_backward(
    out: Attention,
    do: Any,
    tiles: tuple[int, int] | None = None,
    *,
    most_steps: float = math.inf,
) -> Recording:
    """Record `out.backward(do, tiles)`, the backward pass of one head.

    Parameters
    ----------
    out : Attention
        What `flashsim.attention` returned, or the `result` of `record_attention`.
    do : array (N, dv)
        Gradient of the output, in the shape and dtype of `out.output`.
    tiles : (Br, Bc), optional
        As for `Attention.backward`.
    most_steps : number
        Stop a run that takes more.

    Returns
    -------
    Recording
        Its `result` is (dq, dk, dv).

    Raises
    ------
    ValueError, TypeError
        As `Attention.backward`, and if there is more than one head, or there are more steps than
        `most_steps`.
    """
    if math.prod(out.output.shape[:-2]) != 1:
        raise bad("out.output.shape", out.output.shape, "one head, (N, dv)")
    with recording(backward_of(out.algorithm, out.call.convention).run, most_steps) as run:
        run.result = out.backward(do, tiles)
    return run


def recording(
    fn: Callable[..., Any], most_steps: float = math.inf
) -> AbstractContextManager[Recording]:
    """Record `fn`, whoever calls it, while the context lasts; stop it once it took too many steps.

    An exception passes through; the recording then ends with the statement that raised it::

        with recording(flash_attention_2) as run:
            out = fs.attention(q, k, v)

    Raises
    ------
    ValueError
        Out of the run itself, when it takes more than `most_steps`.
    TypeError
        If `fn` is not a Python function written with def.
    OSError
        If its source cannot be found.
    RuntimeError
        On entry, if others have taken every tool id of `sys.monitoring`.
    """
    f = inspect.unwrap(fn)
    if not _ordinary(f):
        raise bad_type("fn", fn, "a Python function that is written with def")
    sources, modules = {f.__code__: _Source(f)}, [f.__globals__]
    for module in modules:  # what it may call of its own module, and of the algorithms that it uses
        for f in module.values():
            if not _ordinary(f) or f.__code__ in sources:
                continue
            if f.__globals__ is module:
                with suppress(OSError):  # no source
                    sources[f.__code__] = _Source(f)
            elif _is_algorithm(f) and all(f.__globals__ is not m for m in modules):
                modules.append(f.__globals__)
    return _Watcher(sources, most_steps)


def too_many_steps(steps: str, most: float) -> ValueError:
    """The error for a recording that is too long."""
    return bad("recording", steps, f"at most {most}: larger tiles, or fewer rows, take fewer")


def _ordinary(f: Any) -> TypeGuard[FunctionType]:
    """Whether it is a function that runs from its first line to its last in one go."""
    return (
        isinstance(f, FunctionType)
        and f.__name__ != "<lambda>"
        and not f.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
    )


def _is_algorithm(f: FunctionType) -> bool:
    return (f.__module__ or "").startswith(f"{_ALGORITHMS}.")


class _Source:
    """A function's text, and the statement that each of its lines belongs to."""

    def __init__(self, fn: FunctionType) -> None:
        lines, first = inspect.getsourcelines(fn.__code__)
        self.name = fn.__name__
        self.lines = {first + k: line.rstrip() for k, line in enumerate(lines)}
        self.start: dict[int, int] = {}  # line: first line of its statement
        for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):  # outer before inner
            if isinstance(node, (ast.stmt, ast.ExceptHandler)):
                body, last = getattr(node, "body", None), node.end_lineno or node.lineno
                if body:  # a compound statement: its header
                    last = max(node.lineno, body[0].lineno - 1)
                for line in range(node.lineno, last + 1):
                    self.start[first - 1 + line] = first - 1 + node.lineno

    def code(self, start: int) -> str:
        """The statement that starts there, on one line, without comments."""
        lines = (self.lines[line].strip() for line, s in self.start.items() if s == start)
        return " ".join(line.split("  #")[0] for line in lines if line and line[0] != "#")


class _Activation:
    """A call under way: its frame, the statement that runs, and what its locals held before it."""

    def __init__(
        self, frame: FrameType, source: _Source, parts: dict[str, tuple[slice, ...]]
    ) -> None:
        self.frame, self.source, self.parts = frame, source, parts
        self.line: int | None = None
        self.reported = False  # whether the statement has its step already
        self.seen: dict[str, tuple[Any, Any]] = {}  # name: (the object, a copy of its value)
        self.update()

    def update(self) -> dict[str, Any]:
        """Copies of the locals that were bound or changed since the last update."""
        now = self.frame.f_locals
        changed: dict[str, Any] = {}
        for name in self.seen.keys() - now.keys():
            del self.seen[name]
        for name, x in now.items():
            if isinstance(x, _KEPT):
                before = self.seen.get(name)
                if before is None or before[0] is not x or not _same(before[1], x):
                    self.seen[name] = x, changed.setdefault(name, _copy(x))
            else:
                self.seen.pop(name, None)
        return changed


def _copy(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        x = x.copy()
        x.flags.writeable = False
    return x


def _same(a: Any, b: Any) -> bool:
    """Whether the bits are the same: an array may have changed in place."""
    if not isinstance(b, np.ndarray):
        return True  # the same object, and it cannot change
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _with_callers(frame: FrameType | None) -> set[FrameType]:
    frames = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return frames


class _Watcher(AbstractContextManager[Recording]):
    """Turns the lines that are about to run, and returns, into the steps of a recording."""

    def __init__(self, sources: dict[CodeType, _Source], most_steps: float) -> None:
        self.sources, self.run, self.most_steps = sources, Recording(), most_steps
        self.events = _LineEvents(set(sources), self.on_line, self.on_return)
        self.outside: set[FrameType] = set()  # under way before: not recorded
        self.calls: list[_Activation] = []  # innermost last
        self.machine: Machine | None = None
        self.log: list[Event] = []
        self.own_log = False  # the machine kept none, and shall have none afterwards
        self.noted = 0  # events that are in steps already
        self.arrays: dict[str, Hbm] = {}
        self.resident: tuple[Held, ...] = ()
        self.traffic = Traffic()

    def __enter__(self) -> Recording:
        self.outside = _with_callers(sys._getframe())
        self.events.start()
        return self.run

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.events.stop()
        while self.calls:
            self._end_call()
        self.outside.clear()
        if self.machine is not None and self.own_log:
            self.machine.log = None
        if kind is None:
            self._check_length()

    def on_line(self, frame: FrameType, line: int) -> None:
        if frame in self.outside:
            return
        call = self._call(frame)
        start = call.source.start.get(line, line)
        if start != call.line:  # else another line of the same statement
            self._finish(call)
            call.line, call.reported = start, False
            self._check_length()

    def _check_length(self) -> None:
        if len(self.run) > self.most_steps:
            raise too_many_steps(f"more than {self.most_steps} steps", self.most_steps)

    def on_return(self, frame: FrameType) -> None:
        if frame not in self.outside:
            self._call(frame)
            self._end_call()

    def _end_call(self) -> None:
        done = self.calls.pop()
        self._finish(done)
        if self.calls:  # what it changed in place is in its own steps: no news for its caller
            theirs = {id(x): (x, value) for x, value in done.seen.values()}
            mine = self.calls[-1].seen
            for name, (x, value) in mine.items():
                mine[name] = theirs.get(id(x), (x, value))

    def _call(self, frame: FrameType) -> _Activation:
        """The activation of a frame, after ending those that an exception left."""
        if not self.calls or self.calls[-1].frame is not frame:
            alive = _with_callers(frame)
            while self.calls and self.calls[-1].frame not in alive:
                self._end_call()
        if self.calls:
            if self.calls[-1].frame is frame:
                return self.calls[-1]
            self._finish(self.calls[-1])  # the line that calls comes before what it calls
        self._look_for_hbm(frame)
        source = self.sources[frame.f_code]
        self.run.source.setdefault(source.name, source.lines)
        self.calls.append(_Activation(frame, source, self._parts(frame)))
        return self.calls[-1]

    def _parts(self, frame: FrameType) -> dict[str, tuple[slice, ...]]:
        """What a call gets only a part of, itself or since its caller did."""
        parts = dict(self.calls[-1].parts) if self.calls else {}
        parts |= {x.name: x.within for x in frame.f_locals.values() if isinstance(x, Hbm)}
        return {name: within for name, within in parts.items() if within}

    def _look_for_hbm(self, frame: FrameType) -> None:
        for x in frame.f_locals.values():
            A = x.array if isinstance(x, Mask) else x
            if not isinstance(A, Hbm):
                continue
            if self.machine is None:
                self.machine = A.machine
                self.run.sram, self.run.sram_bytes = A.machine.sram, A.machine.sram_bytes
                if A.machine.log is None:
                    A.machine.log, self.own_log = [], True
                self.log, self.noted = A.machine.log, len(A.machine.log)
                self._look_at_chip()
            if A.machine is self.machine and not (A.within and A.name in self.arrays):
                self.arrays[A.name] = A  # the whole one, where a part has its name too
                self.run.hbm[A.name] = A.shape

    def _look_at_chip(self) -> None:
        if self.machine is not None:
            self.resident = tuple(
                Held(r.name, r.tile.shape, r.elements, r.bytes) for r in self.machine.resident
            )
            t = self.machine.traffic
            self.traffic = Traffic(dict(t.reads), dict(t.writes), dict(t.item_bytes))

    def _finish(self, call: _Activation) -> None:
        """Make a step of the statement that has run, unless it has one that says it all."""
        if call.line is None:
            return
        changed = call.update()
        events = tuple(self.log[self.noted :])
        self.noted += len(events)
        if events:
            self._look_at_chip()
        for e in events:
            if e.kind == "write" and e.name in self.arrays:
                part = _part(self.arrays[e.name], e.where)
                if part is not None:
                    changed[f"{e.name}[{e.where}]"] = part
        if changed or events or not call.reported:
            self.run.steps.append(
                Step(
                    number=len(self.run.steps),
                    function=call.source.name,
                    line=call.line,
                    code=call.source.code(call.line),
                    locals={name: x for name, (_, x) in call.seen.items()},
                    changed=changed,
                    events=events,
                    resident=self.resident,
                    traffic=self.traffic,
                    parts=call.parts,
                )
            )
        call.reported = True


def _part(A: Hbm, where: str) -> Array | None:
    """A copy of the part of A that an event's text names, uncounted; None if it is no such text."""
    index = index_of(where)
    if index is None:
        return None
    part: Array = _copy(np.asarray(A.data[index]))
    return part


def index_of(where: str) -> tuple[int | slice, ...] | None:
    """The index that an event's text stands for, as "0:4, 2"; None if it stands for none."""
    try:
        return tuple(
            slice(*(None if end == "None" else int(end) for end in text.split(":")))
            if ":" in text
            else int(text)
            for text in where.split(", ")
        )
    except ValueError:
        return None


class _Lines:
    """Calls back before each line of some code objects and at each return, in one thread.

    What traced or monitored before is left alone, or back in place after `stop`. A class and not a
    generator, of which a tracer that pairs calls with returns would see one without the other.
    """

    def __init__(
        self,
        codes: set[CodeType],
        on_line: Callable[[FrameType, int], None],
        on_return: Callable[[FrameType], None],
    ) -> None:
        self.codes, self.on_line, self.on_return = codes, on_line, on_return


if sys.version_info >= (3, 12):

    class _LineEvents(_Lines):
        def start(self) -> None:
            monitoring, E = sys.monitoring, sys.monitoring.events
            free = [tool for tool in (4, 3, 5, 2, 1, 0) if monitoring.get_tool(tool) is None]
            if not free:
                raise RuntimeError("every tool id of sys.monitoring is taken: expected a free one")
            self.tool, self.thread = free[0], threading.get_ident()
            monitoring.use_tool_id(self.tool, "flashsim.record")
            monitoring.register_callback(self.tool, E.LINE, self.line)
            monitoring.register_callback(self.tool, E.PY_RETURN, self.leave)
            for code in self.codes:
                monitoring.set_local_events(self.tool, code, E.LINE | E.PY_RETURN)

        def line(self, code: CodeType, number: int) -> None:
            if threading.get_ident() == self.thread:
                self.on_line(sys._getframe(1), number)

        def leave(self, code: CodeType, offset: int, value: object) -> None:
            if threading.get_ident() == self.thread:
                self.on_return(sys._getframe(1))

        def stop(self) -> None:
            monitoring, E = sys.monitoring, sys.monitoring.events
            for code in self.codes:
                monitoring.set_local_events(self.tool, code, 0)
            monitoring.register_callback(self.tool, E.LINE, None)
            monitoring.register_callback(self.tool, E.PY_RETURN, None)
            monitoring.free_tool_id(self.tool)

else:

    class _LineEvents(_Lines):
        def start(self) -> None:
            self.before: Any = sys.gettrace()
            sys.settrace(self.trace)

        def trace(self, frame: FrameType, what: str, arg: object) -> Any:
            if frame.f_code not in self.codes:
                return None
            if what == "line":
                self.on_line(frame, frame.f_lineno)
            elif what == "return":
                self.on_return(frame)
            return self.trace

        def stop(self) -> None:
            sys.settrace(self.before)
