"""A character-level transformer in plain NumPy, trained once per attention algorithm.

    python examples/train_char.py --steps 300 --compare standard flash2

trains the same model on the same text from the same seed, first with standard attention and then
with FlashAttention-2, dropout on, and prints the loss curves side by side. What to see:

- The curves are the same to rounding. FlashAttention is not an approximation, forward or backward,
  and both algorithms drop the same weights: the dropout bits are a function of (seed, batch, head,
  row, column), so the backward pass works them out again instead of reading them.
- "1 ulp" is the yardstick: the first algorithm once more, from weights that were all moved by one
  rounding. Training makes any such difference grow, whatever it came from. Another algorithm may
  change the curve by about as much; a wrong gradient changes it thousands of times as much.
- What differs is the traffic. Standard attention writes its N x N matrices to HBM and keeps one of
  them for the backward pass; flash attention keeps one number a row (FlashAttention: two).

Every layer below is a function that returns its output and its own backward pass: a function from
the gradient of the output to that of the input, which adds what it owes to its parameters' `grad`.
The attention is `flashsim.attention`, on a simulated chip of `--sram` elements.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import flashsim as fs

Array = np.ndarray
Back = Callable[[Array], Array]
TEXT = Path(__file__).with_name("workshop.txt")


@dataclass(frozen=True)
class Config:
    algorithm: str = "standard"
    context: int = 128  # N, characters that attend to each other
    width: int = 64  # C = heads * d
    heads: int = 2
    layers: int = 2
    batch: int = 2
    dropout: float = 0.1  # of attention weights
    sram: int = 8192  # elements on chip
    rate: float = 3e-3  # Adam's
    dtype: str = "float32"
    seed: int = 0  # of weights, batches and dropout; below 2^32


class Parameter:
    """An array that is learned, its gradient, and Adam's running means of the gradient."""

    def __init__(self, value: Array):
        self.value = value
        self.grad = np.zeros_like(value)
        self.mean = np.zeros_like(value)
        self.square = np.zeros_like(value)


# ---- the layers: each returns its output and its backward pass


def rows(x: Array) -> Array:
    """(..., C) as a matrix (rows, C)."""
    return x.reshape(-1, x.shape[-1])


def embedding(tokens: Array, E: Parameter, at: Parameter) -> tuple[Array, Back]:
    """A learned vector for what the character is, plus one for where it is: (B, N) -> (B, N, C)."""

    def back(dx: Array) -> Array:
        np.add.at(E.grad, tokens, dx)  # a character that occurs twice owes twice
        at.grad[: tokens.shape[1]] += dx.sum(axis=0)
        return dx

    return E.value[tokens] + at.value[: tokens.shape[1]], back


def linear(x: Array, W: Parameter) -> tuple[Array, Back]:
    """x (..., n) times W (n, m). There is no bias: see `attention`."""

    def back(dy: Array) -> Array:
        W.grad += rows(x).T @ rows(dy)
        return dy @ W.value.T

    return x @ W.value, back


def rms_norm(x: Array, gain: Parameter) -> tuple[Array, Back]:
    """x (..., C) divided by its root mean square, times a gain (C,)."""
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    y = x * r

    def back(dout: Array) -> Array:
        gain.grad += rows(dout * y).sum(axis=0)
        dy = dout * gain.value
        return r * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y * gain.value, back


def gelu(x: Array) -> tuple[Array, Back]:
    """x times the share of a normal distribution below it, in the usual tanh form."""
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x * x * x))

    def back(dy: Array) -> Array:
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x))

    return 0.5 * x * (1 + t), back


def attention(
    x: Array, Wqkv: Parameter, Wo: Parameter, config: Config, seed: int, calls: list[fs.Attention]
) -> tuple[Array, Back]:
    """Causal multi-head attention, x (B, N, C); what flashsim returns is appended to `calls`.

    A bias on k would add the same number to every score of a row, which softmax ignores: its
    gradient is zero but for rounding, and Adam would blow that rounding up to full steps.
    """
    B, N, C = x.shape
    H = config.heads
    qkv, back_qkv = linear(x, Wqkv)  # (B, N, 3C)
    q, k, v = qkv.reshape(B, N, 3, H, C // H).transpose(2, 0, 3, 1, 4)  # (B, H, N, d) each
    out = fs.attention(
        q,
        k,
        v,
        algorithm=config.algorithm,
        is_causal=True,
        dropout_p=config.dropout,
        seed=seed,
        sram=config.sram,
    )
    calls.append(out)
    y, back_out = linear(out.output.transpose(0, 2, 1, 3).reshape(B, N, C), Wo)

    def back(dy: Array) -> Array:
        do = back_out(dy).reshape(B, N, H, C // H).transpose(0, 2, 1, 3)
        dqkv = np.stack(out.backward(do))  # (3, B, H, N, d)
        return back_qkv(dqkv.transpose(1, 3, 0, 2, 4).reshape(B, N, 3 * C))

    return y, back


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Callable[[], Array]]:
    """Mean of -log softmax(logits)[target]; logits (B, N, vocabulary), targets (B, N)."""
    z = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(z).sum(axis=-1, keepdims=True)
    right = targets[..., None]
    loss = np.mean(np.log(total) - np.take_along_axis(z, right, axis=-1), dtype=np.float64)

    def back() -> Array:
        p = np.exp(z) / total
        np.put_along_axis(p, right, np.take_along_axis(p, right, axis=-1) - 1, axis=-1)
        return p / targets.size

    return float(loss), back


# ---- the model


class Transformer:
    """Embedding, `layers` blocks of attention and MLP, a norm and a head (not tied)."""

    def __init__(self, config: Config, vocabulary: int):
        C, rng = config.width, np.random.default_rng([config.seed, 0])
        depth = 1 / math.sqrt(2 * config.layers)  # what is added to the residual stream is smaller

        def normal(n: int, m: int, size: float = 1.0) -> Parameter:
            return Parameter((rng.standard_normal((n, m)) * size).astype(config.dtype))

        def gain() -> Parameter:
            return Parameter(np.ones(C, config.dtype))

        self.config = config
        self.E = normal(vocabulary, C, 0.1)
        self.at = normal(config.context, C, 0.1)
        self.blocks = [
            {
                "norm1": gain(),
                "Wqkv": normal(C, 3 * C, C**-0.5),
                "Wo": normal(C, C, C**-0.5 * depth),
                "norm2": gain(),
                "W1": normal(C, 4 * C, C**-0.5),
                "W2": normal(4 * C, C, (4 * C) ** -0.5 * depth),
            }
            for _ in range(config.layers)
        ]
        self.norm = gain()
        self.head = normal(C, vocabulary, 0.1 * C**-0.5)
        self.calls: list[fs.Attention] = []  # of the last forward pass, one a layer

    def parameters(self) -> dict[str, Parameter]:
        named = {"E": self.E, "at": self.at, "norm": self.norm, "head": self.head}
        for n, block in enumerate(self.blocks):
            named |= {f"{n}.{name}": p for name, p in block.items()}
        return named

    def block(self, x: Array, layer: int, step: int) -> tuple[Array, Back]:
        """x (B, N, C), pre-norm: x + attention(norm(x)), then x + MLP(norm(x))."""
        p = self.blocks[layer]
        seed = (self.config.seed << 32) + step * self.config.layers + layer  # of the dropout
        h, back_norm1 = rms_norm(x, p["norm1"])
        h, back_attention = attention(h, p["Wqkv"], p["Wo"], self.config, seed, self.calls)
        x = x + h
        h, back_norm2 = rms_norm(x, p["norm2"])
        h, back_W1 = linear(h, p["W1"])
        h, back_gelu = gelu(h)
        h, back_W2 = linear(h, p["W2"])

        def back(dx: Array) -> Array:
            dx = dx + back_norm2(back_W1(back_gelu(back_W2(dx))))
            return dx + back_norm1(back_attention(dx))

        return x + h, back

    def loss(self, tokens: Array, targets: Array, step: int) -> tuple[float, Callable[[], None]]:
        """Of (B, N) characters and those that follow; the second return fills every `grad`."""
        self.calls.clear()
        x, back = embedding(tokens, self.E, self.at)
        backs = [back]
        for layer in range(self.config.layers):
            x, back = self.block(x, layer, step)
            backs.append(back)
        x, back_norm = rms_norm(x, self.norm)
        logits, back_head = linear(x, self.head)
        loss, back_loss = cross_entropy(logits, targets)

        def backward() -> None:
            for p in self.parameters().values():
                p.grad.fill(0)
            dx = back_norm(back_head(back_loss()))
            for back in reversed(backs):
                dx = back(dx)

        return loss, backward


def adam(p: Parameter, step: int, rate: float) -> None:
    """One step of Adam (Kingma and Ba 2015), steps counted from 1."""
    b1, b2 = 0.9, 0.99
    p.mean += (1 - b1) * (p.grad - p.mean)
    p.square += (1 - b2) * (p.grad**2 - p.square)
    p.value -= rate * (p.mean / (1 - b1**step)) / (np.sqrt(p.square / (1 - b2**step)) + 1e-8)


# ---- training


@dataclass
class Run:
    """A loss for each step, and what the attention cost in all of them."""

    losses: list[float]
    forward_elements: int = 0  # read and written, all layers, heads and steps
    backward_elements: int = 0
    kept_elements: int = 0  # in HBM from a step's forward to its backward, beyond q, k, v and O
    tiles: tuple[int, int] = (0, 0)
    tiles_backward: tuple[int, int] = (0, 0)
    seconds: float = 0.0


def encode(text: str) -> tuple[Array, int]:
    """The text as numbers, and how many different characters it has."""
    alphabet = sorted(set(text))
    number = {character: n for n, character in enumerate(alphabet)}
    return np.array([number[character] for character in text]), len(alphabet)


def batches(text: Array, config: Config) -> Iterator[tuple[Array, Array]]:
    """Endless (tokens, targets), (B, N) each: pieces of the text, and the same one further on."""
    rng = np.random.default_rng([config.seed, 1])
    while True:
        start = rng.integers(0, len(text) - config.context, config.batch)
        piece = text[start[:, None] + np.arange(config.context + 1)]
        yield piece[:, :-1], piece[:, 1:]


def nudge(model: Transformer) -> None:
    """Move every weight by one unit in the last place, up or down at random."""
    rng = np.random.default_rng([model.config.seed, 2])
    for p in model.parameters().values():
        up = rng.integers(0, 2, p.value.shape, dtype=bool)
        p.value = np.nextafter(p.value, np.where(up, np.inf, -np.inf).astype(p.value.dtype))


def train(config: Config, text: str, steps: int, *, nudged: bool = False) -> Run:
    """Train from the seed on; with `nudged`, from one rounding beside the initial weights."""
    numbers, vocabulary = encode(text)
    model = Transformer(config, vocabulary)
    if nudged:
        nudge(model)
    run, begin = Run([]), time.perf_counter()
    for step, (tokens, targets) in zip(range(1, steps + 1), batches(numbers, config), strict=False):
        loss, backward = model.loss(tokens, targets, step)
        backward()
        for p in model.parameters().values():
            adam(p, step, config.rate)
        run.losses.append(loss)
        if steps > 1 and sys.stderr.isatty():
            end = "\r" if step < steps else "\n"
            print(f"{config.algorithm}: step {step} of {steps}", end=end, file=sys.stderr)
        run.forward_elements += sum(out.traffic.total_elements for out in model.calls)
        run.backward_elements += sum(out.traffic_backward.total_elements for out in model.calls)
    run.seconds = time.perf_counter() - begin
    run.kept_elements = sum(out.kept_elements for out in model.calls)
    run.tiles, run.tiles_backward = model.calls[0].tiles, model.calls[0].tiles_backward
    return run


def difference(a: Run, b: Run) -> float:
    """The largest between two loss curves."""
    return float(np.abs(np.subtract(a.losses, b.losses)).max())


def allowed(run: Run, nudged: Run, dtype: str) -> float:
    """How far rounding can have taken another algorithm's curve from that of `run`.

    A nudge is one rounding of every weight, before the first step. An algorithm rounds differently
    at every step, each time by about as much, and at worst all steps push the same way: as many
    nudges as there are steps. A loss itself cannot be told closer than its own rounding.
    """
    one = max(difference(run, nudged), float(np.finfo(dtype).eps) * max(run.losses))
    return len(run.losses) * one


# ---- the command line


def print_curves(names: list[str], runs: list[Run], nudged: Run | None, every: int) -> None:
    """The losses side by side, and how far each is from the first."""
    others = [*zip(names[1:], runs[1:], strict=True)]
    if nudged:
        others.append(("1 ulp", nudged))
    width = max(10, *map(len, names)) + 2
    print(" step" + "".join(f"{name:>{width}}" for name in (*names, *(name for name, _ in others))))
    what = ["loss"] * len(names) + ["minus first"] * len(others)
    print("     " + "".join(f"{w:>{width}}" for w in what))
    base, steps = runs[0].losses, len(runs[0].losses)
    for n in range(steps):
        if n in (0, steps - 1) or (n + 1) % every == 0:
            losses = "".join(f"{run.losses[n]:{width}.6f}" for run in runs)
            apart = "".join(f"{run.losses[n] - base[n]:{width}.1e}" for _, run in others)
            print(f"{n + 1:5}{losses}{apart}")
    if others:
        blank = " " * width * len(names)
        largest = "".join(f"{difference(runs[0], run):{width}.1e}" for _, run in others)
        print(f"  max{blank}{largest}   of all {steps} steps")


def print_traffic(names: list[str], runs: list[Run]) -> None:
    """What each run moved between the chip and HBM."""
    width = max(10, *map(len, names)) + 1
    print(
        f"{'':{width}}{'tiles Br x Bc':>20}{'elements moved, all steps':>36}{'elements kept':>22}"
    )
    print(
        f"{'algorithm':{width}}{'forward':>10}{'backward':>10}{'forward':>12}{'backward':>12}"
        f"{'sum':>12}{'ratio':>8}{'for backward':>14}{'seconds':>9}"
    )
    first = runs[0].forward_elements + runs[0].backward_elements
    for name, run in zip(names, runs, strict=True):
        moved = (run.forward_elements, run.backward_elements)
        print(
            f"{name:{width}}{'x'.join(map(str, run.tiles)):>10}"
            f"{'x'.join(map(str, run.tiles_backward)):>10}"
            + "".join(f"{n / 1e6:>10.2f} M" for n in (*moved, sum(moved)))
            + f"{sum(moved) / first:8.3f}{run.kept_elements:>14}{run.seconds:>9.1f}"
        )


# Those that run without a layout or other argument of their own, and have a backward pass.
TRAINABLE = [name for name, row in fs.ALGORITHMS.items() if row.backward and not row.requires]


def main(arguments: list[str] | None = None) -> int:
    """0 if all curves are the same to rounding, 1 if not."""
    default = Config()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--compare",
        "--algorithm",
        nargs="+",
        default=["standard", "flash2"],
        choices=TRAINABLE,
        metavar="ALGORITHM",
        help=f"of {', '.join(TRAINABLE)}; the others are held against the first",
    )
    parser.add_argument("--sram", type=int, default=default.sram, help="elements on the chip")
    parser.add_argument("--dropout", type=float, default=default.dropout)
    parser.add_argument("--dtype", choices=["float32", "float64"], default=default.dtype)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--text", type=Path, default=TEXT, help="what to learn")
    parser.add_argument("--every", type=int, default=20, help="steps between printed losses")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.every < 1:
        parser.error("--steps and --every must be at least 1")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed {options.seed}: expected 0 or more, below 2^32")
    try:
        names, text = options.compare, options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text}: {error}")
    if len(text) <= default.context:
        parser.error(f"--text {options.text}: {len(text)} characters, at most one context")
    config = replace(
        default,
        algorithm=names[0],
        sram=options.sram,
        dropout=options.dropout,
        dtype=options.dtype,
        seed=options.seed,
    )
    try:
        for name in names:  # what cannot run is said before the first run, not after it
            train(replace(config, algorithm=name), text, 1)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{len(text)} characters, {encode(text)[1]} different; {config.layers} layers, "
        f"{config.heads} heads, N={config.context}, d={config.width // config.heads}, "
        f"batch {config.batch}, {config.dtype}, dropout {config.dropout}\n"
    )
    runs = [train(replace(config, algorithm=name), text, options.steps) for name in names]
    nudged = train(config, text, options.steps, nudged=True) if len(runs) > 1 else None
    print_curves(names, runs, nudged, options.every)
    print()
    print_traffic(names, runs)
    same = True
    if nudged:
        bound = allowed(runs[0], nudged, config.dtype)
        worst = max(difference(runs[0], run) for run in runs[1:])
        same = worst <= bound
        print(
            f"\n{'The same to rounding' if same else 'NOT THE SAME'}: {worst:.1e} apart, where "
            f"{options.steps} steps of rounding allow {bound:.1e}."
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
