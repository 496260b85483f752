"""The training example: right gradients, one loss curve for every algorithm, faults noticed."""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import flashsim as fs

PATH = Path(__file__).parents[1] / "examples" / "train_char.py"
FLASH = ["flash1", "flash2", "flash2-two-kernel"]
STEPS = 40


def _loaded():
    spec = importlib.util.spec_from_file_location("train_char", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _loaded()
TEXT = example.TEXT.read_text(encoding="utf-8")[:3000]
# Several tiles in every pass of a flash algorithm; dropout strong enough that a wrong bit shows.
SMALL = example.Config(context=24, width=16, batch=1, dropout=0.2, sram=1200, rate=1e-2)
TINY = replace(SMALL, context=6, width=4, layers=2, sram=55, dtype="float64")


@cache
def trained(dtype, algorithm, nudged=False):
    config = replace(SMALL, dtype=dtype, algorithm=algorithm)
    return example.train(config, TEXT, STEPS, nudged=nudged)


def allowed(dtype):
    return example.allowed(trained(dtype, "standard"), trained(dtype, "standard", True), dtype)


def tiny(**changes):
    """A model away from where training starts: gains that are not 1, and weights of order 1."""
    model = example.Transformer(replace(TINY, **changes), vocabulary=5)
    rng = np.random.default_rng(1)
    for p in model.parameters().values():
        p.value += rng.normal(0, 0.5, p.value.shape)
    return model


def tiny_loss(model):
    tokens, targets = np.random.default_rng(3).integers(0, 5, (2, 1, TINY.context))
    return model.loss(tokens, targets, step=7)


@cache
def central_differences():
    """Of every weight, by standard attention in one tile.

    Dropout's bits are a function of position, so the loss is smooth with dropout on.
    """
    model, h, slopes = tiny(sram=10**6), float(np.finfo(float).eps ** (1 / 3)), {}
    for name, p in model.parameters().items():
        slopes[name] = np.empty_like(p.value)
        for at in np.ndindex(p.value.shape):
            here, losses = p.value[at], []
            for p.value[at] in (here + h, here - h):
                losses.append(tiny_loss(model)[0])
            p.value[at] = here
            slopes[name][at] = (losses[0] - losses[1]) / (2 * h)
    return slopes


def gradient_error(algorithm):
    """The largest difference of any weight's gradient from central differences."""
    model = tiny(algorithm=algorithm)
    _, backward = tiny_loss(model)
    backward()
    for out in model.calls:
        for tiles in (out.tiles, out.tiles_backward):
            assert min(tiles) < TINY.context  # so that there are several
    return max(
        np.abs(p.grad - central_differences()[name]).max() for name, p in model.parameters().items()
    )


# h = eps^(1/3) = 6e-6: the quotient is off by h^2 / 6 times a third derivative (6e-9 if that is
# 1000, which norms of short vectors come near) and by the rounding of a loss over h (4e-11).
GRADIENT_BOUND = 1e-8


def test_every_gradient_of_the_model_equals_central_differences():
    """Dropout on, and each algorithm in several tiles."""
    for slopes in central_differences().values():
        assert np.abs(slopes).max() > 1e6 * GRADIENT_BOUND
    for algorithm in ("standard", *FLASH):
        assert gradient_error(algorithm) < GRADIENT_BOUND


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_algorithm_trains_along_the_same_curve(dtype):
    """To rounding, which training makes grow, so the bound is measured: see `example.allowed`.

    The second line holds the bound itself to what rounding can be: for float64, 1e-9 of a loss.
    """
    curve = trained(dtype, "standard")
    assert allowed(dtype) < {"float32": 1e-3, "float64": 1e-9}[dtype]
    for algorithm in FLASH:
        assert example.difference(curve, trained(dtype, algorithm)) <= allowed(dtype)


@pytest.mark.parametrize("algorithm", FLASH)
def test_curves_differ_less_in_finer_numbers(algorithm):
    """What shrinks with the unit of rounding is rounding: eps is 5e8 times smaller in float64."""
    coarse, fine = (
        example.difference(trained(dtype, "standard"), trained(dtype, algorithm))
        for dtype in ("float32", "float64")
    )
    assert coarse > 0
    assert fine < 1e-6 * coarse


def test_the_loss_falls():
    losses = trained("float32", "flash2").losses
    assert len(losses) == STEPS
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_the_traffic_is_that_of_the_closed_form():
    """Times layers and steps; and what is kept is N^2, 2N or N for each head."""
    heads, layers, N = SMALL.heads, SMALL.layers, SMALL.context
    for algorithm, kept in zip(("standard", *FLASH), (N * N, 2 * N, N, N), strict=True):
        run = trained("float32", algorithm)
        for backward, (Br, Bc), moved in (
            (False, run.tiles, run.forward_elements),
            (True, run.tiles_backward, run.backward_elements),
        ):
            cost = fs.io_cost(
                algorithm, N=N, d=SMALL.width // heads, Br=Br, Bc=Bc, heads=heads,
                batch=SMALL.batch, is_causal=True, backward=backward, sram=SMALL.sram,
            )  # fmt: skip
            assert moved == cost.total_elements * layers * STEPS
        assert run.kept_elements == kept * heads * layers


def test_every_step_and_layer_drops_other_weights_and_every_algorithm_the_same(monkeypatch):
    attention, seeds = fs.attention, {}

    def noted(*qkv, **what):
        seeds.setdefault(what["algorithm"], []).append(what["seed"])
        assert what["dropout_p"] == SMALL.dropout
        return attention(*qkv, **what)

    monkeypatch.setattr(fs, "attention", noted)
    for algorithm in ("standard", "flash2"):
        example.train(replace(SMALL, algorithm=algorithm), TEXT, 3)
    assert len(set(seeds["standard"])) == 3 * SMALL.layers
    assert seeds["standard"] == seeds["flash2"]


def test_the_command_line_compares_all_algorithms(capsys):
    names = ["standard", *FLASH]
    assert example.main(["--steps", "2", "--every", "1", "--compare", *names]) == 0
    out = capsys.readouterr().out
    assert all(out.count(name) >= 2 for name in names)
    assert "The same to rounding" in out


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--sram", "20"], "sram"),
        (["--dropout", "1"], "dropout_p"),
        (["--steps", "0"], "--steps"),
        (["--compare", "fast"], "--compare"),
        (["--text", "no_such_file"], "--text"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_what_cannot_run_is_named_before_anything_runs(arguments, named, capsys):
    with pytest.raises(SystemExit) as refused:
        example.main(arguments)
    assert refused.value.code == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.out == ""


def no_scale(out, do):
    """dQ without 1 / sqrt(d)."""
    dq, dk, dv = BACKWARD(out, do)
    return dq * dq.dtype.type(dq.shape[-1] ** 0.5), dk, dv


def no_replay(out, do):
    """Other dropout bits than the forward pass had."""
    right, problem = out.call, out.call.problem
    out.call = replace(right, problem=replace(problem, seed=problem.seed + 1))
    gradients = BACKWARD(out, do)
    out.call = right
    return gradients


def no_tail(out, do):
    """What the last key owes for its value is lost."""
    dq, dk, dv = BACKWARD(out, do)
    dv[..., -1, :] = 0
    return dq, dk, dv


BACKWARD = fs.Attention.backward


@pytest.fixture(params=[no_scale, no_replay, no_tail], ids=lambda fault: fault.__name__)
def _fault(request, monkeypatch):
    """flash2 with a wrong backward pass; the other algorithms as they are."""

    def backward(out, do):
        return request.param(out, do) if out.algorithm == "flash2" else BACKWARD(out, do)

    monkeypatch.setattr(fs.Attention, "backward", backward)


@pytest.mark.usefixtures("_fault")
def test_a_wrong_backward_pass_is_seen_in_the_curve():
    """By an order of magnitude more than the bound, in float32."""
    wrong = example.train(replace(SMALL, algorithm="flash2"), TEXT, STEPS)
    off = example.difference(trained("float32", "standard"), wrong)
    assert off > 10 * allowed("float32")


@pytest.mark.usefixtures("_fault")
def test_a_wrong_backward_pass_is_seen_in_the_gradient():
    assert gradient_error("standard") < GRADIENT_BOUND
    assert gradient_error("flash2") > 1e4 * GRADIENT_BOUND


@pytest.mark.usefixtures("_fault")
def test_a_wrong_backward_pass_makes_the_comparison_fail(capsys):
    """One step is not enough: a gradient shows in the loss of the next."""
    assert example.main(["--steps", "3", "--compare", "standard", "flash2"]) == 1
    assert "NOT THE SAME" in capsys.readouterr().out
