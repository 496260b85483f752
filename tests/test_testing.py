"""The battery for other people's kernels: right ones pass, each fault is caught and named."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashsim as fs
from flashsim import testing
from flashsim.masks import band
from flashsim.reference import exact
from flashsim.testing import FEATURES, _battery, check_kernel, error_bound
from strategies import BACKWARDS, VARIANTS, same_bits

WITHOUT_DROPOUT = set(FEATURES) - {"dropout"}


def of_flashsim(algorithm, convention="literal", **how):
    """(fn, gradients) of one of flashsim's algorithms."""

    def run(q, k, v, **what):
        return fs.attention(q, k, v, algorithm=algorithm, convention=convention, **how, **what)

    def fn(q, k, v, **what):
        out = run(q, k, v, **what)
        return out.output, out.lse

    return fn, lambda q, k, v, do, **what: run(q, k, v, **what).backward(do)


def tiled(fault="", B=16):
    """A readable kernel with tiles of B keys, all features but dropout, and one fault."""

    def fn(q, k, v, *, is_causal=False, causal_align="bottom-right", window=None, attn_mask=None,
           key_padding_mask=None, scale=None, enable_gqa=False):  # fmt: skip
        if fault == "strides are ignored":
            q, k, v = (memory_in_order(x) for x in (q, k, v))
        (batch, H, Nq, d), (KV, Nk) = q.shape, k.shape[1:3]
        stored, wide = q.dtype, np.promote_types(q.dtype, np.float32)
        head = np.arange(H) % KV if fault == "heads modulo" else np.arange(H) // (H // KV)
        if scale is None or fault == "scale is ignored":
            scale = 1 if fault == "no 1 / sqrt(d)" else d**-0.5
        if fault == "q is scaled in place":
            q *= stored.type(scale)
            scale = 1
        q, k, v = (x.astype(wide) for x in (q, k[:, head], v[:, head]))
        if fault == "items share a maximum":
            q[1:] += q[:1].mean() * wide.type(1e-3)

        if fault == "aligned top-left":
            causal_align = "top-left"
        lo, hi = band(Nq, Nk, is_causal=is_causal, causal_align=causal_align, window=window)
        hi += {"a row sees the next key": 1, "a row does not see itself": -1}.get(
            fault, 0
        ) * is_causal
        lo += (fault == "window is short") * (window is not None)
        ahead = np.arange(Nk) - np.arange(Nq)[:, None]
        keep = np.broadcast_to((ahead >= lo) & (ahead <= hi), (batch, H, Nq, Nk)).copy()
        if key_padding_mask is not None:
            keep &= key_padding_mask[:, None, None]
        bias = np.zeros((1, 1), wide)
        if attn_mask is not None and attn_mask.dtype == bool:
            keep &= ~attn_mask if fault == "mask is inverted" else attn_mask
        elif attn_mask is not None:
            keep &= attn_mask != -np.inf
            bias = attn_mask.astype(wide)
        bias = np.broadcast_to(bias, keep.shape)

        m = np.full((batch, H, Nq, 1), -5e4 if fault == "finite maximum" else -np.inf, wide)
        l, O = np.zeros_like(m), np.zeros((batch, H, Nq, v.shape[-1]), wide)
        stop = Nk // B * B if fault == "tail dropped" and Nk > B else Nk
        for j in (slice(start, min(start + B, stop)) for start in range(0, stop, B)):
            Kj, Vj, live, bj = k[:, :, j], v[:, :, j], keep[..., j], bias[..., j]
            if fault == "short tile padded" and Kj.shape[2] < B:
                pad = [(0, 0), (0, 0), (0, B - Kj.shape[2]), (0, 0)]
                Kj, Vj = np.pad(Kj, pad), np.pad(Vj, pad)
                live = np.pad(live, [(0, 0)] * 3 + pad[2:3], constant_values=True)
                bj = np.pad(bj, [(0, 0)] * 3 + pad[2:3])
            S = q @ Kj.swapaxes(-1, -2)
            S = (S + bj) * scale if fault == "mask before scaling" else S * scale + bj
            S = np.where(live, S, -1e30 if fault == "-1e30 for -inf" else -np.inf).astype(wide)
            m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
            if fault == "no maximum":
                m_new = np.zeros_like(m)
            shift = m_new if fault == "-inf minus -inf" else np.where(m_new == -np.inf, 0, m_new)
            P, alpha = np.exp(S - shift), np.exp(m - shift)
            if fault == "float16 P":
                P = P.astype(np.float16).astype(wide)
            if fault == "bfloat16 products":
                P, Vj = (x.astype(ml_dtypes.bfloat16).astype(wide) for x in (P, Vj))
            l = (1 if fault == "l is not rescaled" else alpha) * l + P.sum(axis=-1, keepdims=True)
            O = (1 if fault == "O is not rescaled" else alpha) * O
            if np.isfinite(Vj).all() or fault == "NaN leaks":
                O = O + P @ Vj
            else:
                O = O + np.where(live[..., None], P[..., None] * Vj[:, :, None], 0).sum(axis=-2)
            m = m_new
        O = O / l if fault == "0 / 0" else O / np.where(l == 0, 1, l)
        lse = (m + np.log(l))[..., 0]
        lse = {"lse in base 2": lse / np.log(2), "lse twice": lse * np.log(2)}.get(fault, lse)
        if fault == "other bits each time":
            O = O * (1 + np.random.default_rng().choice([0, np.finfo(wide).eps], O.shape))
        return O.astype(stored), lse

    def quiet(q, k, v, **what):
        with np.errstate(all="ignore"):
            return fn(q, k, v, **what)

    return quiet


def memory_in_order(x):
    """The first numbers of the memory that x is a view of, as if x were contiguous."""
    while isinstance(x.base, np.ndarray):
        x, shape = x.base, x.shape
        x = x.ravel()[: np.prod(shape)].reshape(shape)
        break
    return x


def gradients(fault=""):
    """Backward passes with a fault."""

    def fn(q, k, v, do, **what):
        group = q.shape[1] // k.shape[1]
        if fault == "causal is ignored":
            what.pop("is_causal", None)
        if fault == "not summed over the group" and group > 1:
            k, v = k.repeat(group, 1), v.repeat(group, 1)
        dq, dk, dv = fs.attention(q, k, v, **what).backward(do)
        if fault == "scale is left out":
            return dq / np.float32(what.get("scale", q.shape[-1] ** -0.5)), dk, dv
        if fault == "not summed over the group":
            return dq, dk[:, ::group], dv[:, ::group]
        return dq, dk, dv

    return fn


# fault: the case that must name it, and what the report must say of the cause
FAULTS = {
    "O is not rescaled": ("a maximum that rises in a later tile", "not rescaled"),
    "l is not rescaled": ("a maximum that rises in a later tile", "not rescaled"),
    "tail dropped": (
        "a last key in a tile of its own",
        "keys after the last full tile are left out",
    ),
    "short tile padded": ("low scores beside a short tile", "a short last tile is padded"),
    "a row sees the next key": ("causal", "off by one: a row sees one key more"),
    "a row does not see itself": ("causal", "off by one: a row does not see its own key"),
    "aligned top-left": ("causal, fewer queries than keys", "aligned top-left"),
    "window is short": ("a window of w to the left sees w + 1", "a key short on the left"),
    "lse in base 2": ("lse is a natural logarithm", "lse is in base 2"),
    "lse twice": ("lse is a natural logarithm", "lse is converted twice"),
    "float16 P": ("products as good as their dtype", "in float16"),
    "bfloat16 products": ("products as good as their dtype", "scores or weights in"),
    "NaN leaks": ("NaN and inf behind a mask", "0 * NaN is NaN"),
    "heads modulo": ("query heads 0 and 1 share key head 0", "modulo"),
    "scale is ignored": ("scale", "scale is ignored"),
    "no 1 / sqrt(d)": ("lengths around powers of two", "not divided by sqrt(d)"),
    "mask before scaling": ("a bias is not scaled", "added before scaling"),
    "mask is inverted": ("bool mask", "inverted"),
    "strides are ignored": ("strided inputs", "as if they were contiguous"),
    "finite maximum": ("a running maximum that starts finite", "finite number"),
    "no maximum": ("scores that overflow exp", "no maximum"),
    "0 / 0": ("a row that sees no key", "0 / 0"),
    "-1e30 for -inf": ("a row that sees no key", "finite number"),
    "-inf minus -inf": ("first key tiles all masked", "exp(-inf + inf)"),
    "q is scaled in place": ("inputs are not written to", "in place"),
    "items share a maximum": ("a batch is its items", "an item"),
}


def described(report, name):
    (case,) = [case for case in report.failures if case.name == name]
    return case


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_right_kernel_passes(dtype):
    report = check_kernel(tiled(), features=WITHOUT_DROPOUT, dtypes=[dtype])
    assert report.passed, str(report)
    assert report.missing.keys() == {"dropout", "gradients"}


def test_a_report_has_a_column_for_each_dtype():
    dtypes = ("float16", "bfloat16", "float32", "float64")
    report = check_kernel(tiled(), dtypes=dtypes, only="around powers")
    assert [case.dtype for case in report.cases] == list(dtypes)
    lines = str(report).split("\n")
    assert lines[3].split()[-4:] == list(dtypes)
    assert re.fullmatch(r" +lengths around powers of two +19( +[0-9.]+){4}", lines[6])
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_and_the_report_names_it(fault):
    report = check_kernel(tiled(fault), features=WITHOUT_DROPOUT)
    name, cause = FAULTS[fault]
    case = described(report, name)
    assert cause in case.likely, str(report)
    assert case.ratio > 1
    text = " ".join(str(report).split())
    assert re.search(rf"{re.escape(name)} \d+ FAILED", text)
    assert cause in text
    with pytest.raises(AssertionError, match=re.escape(name)):
        report.raise_if_failed()


@pytest.mark.parametrize(
    "fault", ["NaN leaks", "lse in base 2", "heads modulo", "strides are ignored"]
)
def test_what_has_nothing_to_do_with_a_fault_passes(fault):
    """A fault in one feature fails no case without it."""
    feature = {"NaN leaks": "masked_nan", "lse in base 2": "lse", "heads modulo": "gqa"}.get(
        fault, ""
    )
    report = check_kernel(tiled(fault), features=WITHOUT_DROPOUT - {feature})
    assert {case.name for case in report.failures} == ({"strided inputs"} if not feature else set())


@pytest.mark.parametrize(
    "fault, name",
    [
        ("scale is left out", "dq, dk, dv: any length"),
        ("not summed over the group", "dq, dk, dv: grouped heads"),
        ("causal is ignored", "dq, dk, dv: causal"),
    ],
)
def test_faults_in_gradients_are_caught(fault, name):
    fn, right = of_flashsim("flash2")
    features = {"causal", "scale", "gqa", "lse"}
    assert check_kernel(fn, features=features, gradients=right, only="dq").passed
    report = check_kernel(fn, features=features, gradients=gradients(fault), only="dq")
    assert described(report, name).ratio > 1
    if fault != "scale is left out":
        assert {case.name for case in report.failures} == {name}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_algorithms_of_flashsim_pass(variant):
    fn, backward = of_flashsim(*variant)
    check = backward if variant in BACKWARDS else None
    report = check_kernel(fn, features=FEATURES, gradients=check, deterministic=True)
    assert report.passed, str(report)
    assert report.missing == ({} if check else {"gradients": 13})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision_pass_in_that_precision_only(dtype):
    def fn(q, k, v):
        stored, (q, k, v) = q.dtype, (x.astype(np.float32) for x in (q, k, v))
        S = (q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)).astype(dtype)
        P = np.exp(S.astype(np.float32) - S.max(axis=-1, keepdims=True).astype(np.float32))
        P /= P.sum(axis=-1, keepdims=True)
        return (P.astype(dtype).astype(np.float32) @ v).astype(stored)

    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert check_kernel(fn, dtypes=[dtype.name]).passed
    assert not check_kernel(fn, dtypes=["float32"]).passed
    worse = check_kernel(
        lambda q, k, v: (fn(q, k, v).astype(np.float32) * np.float32(1.02)).astype(q.dtype),
        dtypes=[dtype.name],
    )
    assert not worse.passed


def test_pytorchs_attention_passes_but_for_nan_behind_a_mask():
    """On the CPU its masks do not stop NaN (pytorch #101967): the case that fails if declared."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    what = {"arrays": "torch", "causal_align": "top-left"}
    features = {"causal", "attn_mask", "scale", "gqa"}
    report = check_kernel(sdpa, features=features, dtypes=["float32", "bfloat16"], **what)
    assert report.passed, str(report)
    assert any(case.group == "Gradients" for case in report.cases)
    more = features | {"different_lengths", "value_width", "empty_rows", "masked_nan"}
    failures = check_kernel(sdpa, features=more, gradients=False, **what).failures
    assert {c.name for c in failures} <= {
        "NaN and inf behind a mask",
        "behind a mask, NaN is as good as 0",
    }


def test_torch_tensors_reach_the_kernel_and_gradients_come_from_autograd():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    seen = []

    def fn(q, k, v, scale=None):
        seen.append((type(q), q.dtype))
        S = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.softmax(S, -1) @ v

    report = check_kernel(fn, arrays="torch", dtypes=["float64", "bfloat16"], features={"scale"})
    assert report.passed, str(report)
    assert set(seen) == {(torch.Tensor, torch.float64), (torch.Tensor, torch.bfloat16)}
    assert "gradients" not in report.missing
    cut = check_kernel(lambda *qkv: fn(*qkv).detach(), arrays="torch")
    assert cut.passed
    assert "gradients" in cut.missing
    q, k, v = (torch.ones(1, 2, 5, 4, dtype=torch.bfloat16) for _ in range(3))
    same = np.ones((1, 2, 5, 4), ml_dtypes.bfloat16)
    assert np.array_equal(error_bound(q, k, v)[0], error_bound(same, same, same)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_printed_python_makes_the_inputs(dtype):
    """Each input of the battery, made from its text, is what the kernel was given, bit for bit."""
    names = {n: getattr(np, n) for n in ("array", "inf", "nan", "ones")}
    names |= {n: getattr(testing, n) for n in testing.__all__}
    given = []

    def fn(*arrays, **what):
        given.append((arrays, what))

    specs = _battery(dtype, 3, (1, 8, 40), "bottom-right")
    calls = [
        c
        for s in specs
        for i in s.inputs
        for c in ([i.first, i.second] if hasattr(i, "first") else [i])
    ]
    assert len(calls) > 370
    for call in calls:
        exec(str(call), {**names, "fn": fn, "gradients": fn})
        arrays, what = given.pop()
        wanted = [call.q, call.k, call.v] + ([] if call.do is None else [call.do])
        assert all(same_bits(a, b) for a, b in zip(arrays, wanted, strict=True)), str(call)
        assert what.keys() == call.what.keys()
        for name, x in what.items():
            assert (
                same_bits(x, call.what[name]) if isinstance(x, np.ndarray) else x == call.what[name]
            )


def test_the_battery_asks_for_declared_features_only():
    seen = set()

    def fn(q, k, v, **what):
        seen.update(what)
        assert q.shape == k.shape == v.shape
        assert q.shape[-1] in (8, 64)
        return fs.attention(q, k, v, **what).output

    report = check_kernel(fn, features={"scale"}, widths=(8, 64))
    assert report.passed
    assert seen == {"scale"}
    assert {"causal", "gqa", "lse", "dropout", "different_lengths"} <= report.missing.keys()


def test_same_seed_same_report_and_another_seed_other_inputs():
    fn = tiled("float16 P")
    a, b, c = (check_kernel(fn, seed=seed, only="around powers") for seed in (1, 1, 2))
    assert a == b
    assert str(a) == str(b)
    assert a.failures[0].call.q.tobytes() == b.failures[0].call.q.tobytes()
    assert a.failures[0].call.q.tobytes() != c.failures[0].call.q.tobytes()


def test_different_bits_are_noted_and_are_a_failure_on_demand():
    fn = tiled("other bits each time")
    report = check_kernel(fn)
    assert report.passed
    assert "NOTED: the same bits five times" in str(report)
    assert described(check_kernel(fn, deterministic=True), "the same bits five times")


def test_a_refusal_is_no_failure_if_it_is_announced():
    def fn(q, k, v):
        if q.shape[-2] % 16:
            raise NotImplementedError("N must be a multiple of 16")
        return fs.attention(q, k, v).output

    assert not check_kernel(fn).passed
    report = check_kernel(fn, refusals=(NotImplementedError,))
    assert report.passed
    assert "NotImplementedError: N must be a multiple of 16" in str(report)
    refused = [case for case in report.cases if case.status == "refused"]
    assert refused
    assert not check_kernel(fn, refusals=(NotImplementedError,), only=refused[0].name).passed


@pytest.mark.parametrize(
    "fn, says",
    [
        (lambda q, k, v: q[..., :1], "output has shape (1, 2, 1, 1), expected (1, 2, 1, 3)"),
        (lambda q, k, v: None, "output has shape (), expected"),
        (lambda q, k, v: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda q, k: q, "TypeError: "),
        (lambda q, k, v: np.full(v.shape, np.nan, q.dtype), "is nan, expected"),
        (lambda q, k, v: np.full(v.shape, np.inf, q.dtype), "is inf, expected"),
    ],
)
def test_whatever_a_kernel_does_is_a_failed_case(fn, says):
    report = check_kernel(fn, only="lengths", widths=(3,))
    assert not report.passed
    assert says in report.failures[0].found
    assert not check_kernel(fn, features={"causal", "lse"}, widths=(3,)).passed


def test_an_lse_that_is_declared_must_be_returned():
    report = check_kernel(
        lambda q, k, v: fs.attention(q, k, v).output, features={"lse"}, only="len"
    )
    assert "expected (output, lse)" in report.failures[0].found


def test_nothing_passes_if_nothing_ran():
    report = check_kernel(tiled(), only="no such case")
    assert not report.passed
    with pytest.raises(AssertionError):
        report.raise_if_failed()


@pytest.mark.parametrize("fault", ["-inf minus -inf", "float16 P", "NaN leaks"])
def test_reports_fit_a_terminal_and_say_where_to_look(fault):
    text = str(check_kernel(tiled(fault), features=WITHOUT_DROPOUT))
    assert max(map(len, text.split("\n"))) <= 80
    assert text.index("FAILED:") < text.index("found ") < text.index("likely ") < text.index("fn(q")


def test_the_public_bound_is_that_of_the_reference():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 7, 4), dtype=np.float32)
    mask = np.tri(7, dtype=bool)
    output_bound, lse_bound = error_bound(q, k, v, attn_mask=mask, scale=0.3)
    right = exact(q, k, v, attn_mask=mask, scale=0.3)
    assert same_bits(output_bound, right.output_bound)
    assert same_bits(lse_bound, right.lse_bound)


BAD = [
    ({"arrays": "jax"}, "arrays='jax'"),
    ({"dtypes": ["int8"]}, "dtypes='int8'"),
    ({"features": ["softcap"]}, "features='softcap'"),
    ({"causal_align": "left"}, "causal_align='left'"),
    ({"widths": ()}, r"widths=\(\)"),
    ({"widths": (0,)}, "widths=0"),
    ({"seed": -1}, "seed=-1"),
    ({"device": "cuda"}, "device='cuda'"),
]


@pytest.mark.parametrize("arguments, says", BAD)
def test_an_unusable_argument_is_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        check_kernel(tiled(), **arguments)


def test_the_battery_does_not_need_pytest():
    code = "import sys, flashsim.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


class OnDevice(np.ndarray):
    """An array that, as CuPy's, only `get` turns into NumPy's."""

    def get(self):
        return self.view(np.ndarray)


def test_cupy_arrays_are_made_and_read_by_cupys_own_functions(monkeypatch):
    """With a stand-in for CuPy, as there is no GPU."""
    OnDevice.__module__ = "cupy"
    cupy = SimpleNamespace(
        asarray=lambda x: np.asarray(x).view(OnDevice),
        broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def fn(*arrays, **what):
        given = [*arrays, *(x for x in what.values() if isinstance(x, np.ndarray))]
        assert all(type(x) is OnDevice for x in given)
        plain = {n: x.get() if isinstance(x, OnDevice) else x for n, x in what.items()}
        return fs.attention(*(x.get() for x in arrays[:3]), **plain)

    report = check_kernel(
        lambda *a, **what: fn(*a, **what).output.view(OnDevice),
        gradients=lambda *a, **what: fn(*a, **what).backward(a[3].get()),
        arrays="cupy", features={"attn_mask", "key_padding_mask"}, widths=(8,),
    )  # fmt: skip
    assert report.passed, str(report)
    with pytest.raises(ValueError, match="bfloat16"):
        check_kernel(fn, arrays="cupy", dtypes=["bfloat16"])


def test_the_example_in_the_documentation_prints_what_stands_there():
    page = Path(__file__).parent.parent.joinpath("docs", "testing.md").read_text()
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", page, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})

    def words(text):
        """The text without measured numbers, whose last digits differ between machines."""
        return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "#", " ".join(text.split()))

    assert words(printed.getvalue()) == words(shown)
    assert all(f"| `{name}` | {text} |" in page for name, text in FEATURES.items())
