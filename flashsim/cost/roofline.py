"""Time: bytes, matrix products and exponentials over the rates of a device.

Three units work side by side: the memory, the matrix units, and the special-function units that
take the exponentials. No run is faster than the busiest of them would be alone (the lower time);
one that never overlaps them takes their sum (the serial time). Rates are peaks, so real runs take
longer than the lower time; how well they overlap decides where between the two they could be.

Left out: the arithmetic between products and exponentials (maxima, sums, rescaling), launches,
tails of a grid, latency. The bytes are those of two memories: on a GPU an L2 serves many of the
re-reads, so a run may beat the memory time. None beats that of the compulsory bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import amount, bad, flag, integer
from .devices import Device, checked

SIDE = 128  # rows of one MMA of a Blackwell SM
HALF = 2  # bytes of bfloat16 and float16
WIDE = 4  # bytes of float32


@dataclass(frozen=True)
class Roofline:
    """Work on a device.

    Attributes
    ----------
    gpu : Device
    dtype : str
        Of the matrix products: "float16", "bfloat16" or "float32".
    hbm_bytes : float
        Bytes that are read and written in HBM.
    flops : int
        Of the matrix products, two a multiply-add.
    exps : int
        Exponentials.

    Examples
    --------
    >>> from flashsim import io_cost
    >>> from flashsim.cost.devices import device
    >>> cost = io_cost("flash2", N=4096, d=64, Br=128, Bc=128, heads=64, dtype="float16")
    >>> time = Roofline(device("h200"), "float16", cost.total_bytes, cost.flops, cost.exps)
    >>> f"{time.lower_seconds:.3g} {time.binds}, {time.serial_seconds:.3g}"
    '0.000462 memory, 0.00102'
    """

    gpu: Device
    dtype: str
    hbm_bytes: float
    flops: int
    exps: int

    def __post_init__(self) -> None:
        checked(self.gpu).flops_per_second(self.dtype)
        for name in ("hbm_bytes", "flops", "exps"):
            amount(name, getattr(self, name))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each resource alone: "memory", "matmul", "exp"."""
        return {
            "memory": self.gpu.memory_seconds(self.hbm_bytes),
            "matmul": self.flops / self.gpu.flops_per_second(self.dtype),
            "exp": self.exps / self.gpu.exp_per_second,
        }

    @property
    def lower_seconds(self) -> float:
        """The busiest resource alone: no overlap is better."""
        return max(self.seconds.values())

    @property
    def serial_seconds(self) -> float:
        """One resource after the other: no overlap at all."""
        return sum(self.seconds.values())

    @property
    def binds(self) -> str:
        """The busiest resource."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def flops_per_byte(self) -> float | None:
        """Arithmetic intensity; None where nothing is moved."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None


@dataclass(frozen=True)
class Cycles:
    """Clock cycles that one SM's units take for one tile of scores, each alone.

    sram is None where the way of the operands is not modelled.
    """

    matmul: float
    exp: float
    sram: float | None


@dataclass(frozen=True)
class _Mma:
    """(rows x inner) @ (inner x columns); stacked: the left operand lies in tensor memory."""

    rows: int
    columns: int
    inner: int
    in_tensor_memory: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.inner

    def sram_bytes(self, ctas: int) -> float:
        """Operands read: the left one once, the right one for every SIDE rows."""
        left = 0 if self.in_tensor_memory else self.rows * self.inner
        right = -(-self.rows // SIDE) * self.inner * self.columns / ctas
        return HALF * (left + right)


def tile_cycles(
    gpu: Device, Br: int = 128, Bc: int = 128, d: int = 128, backward: bool = False, ctas: int = 1
) -> Cycles:
    """Cycles of one Br x Bc tile of scores in 16-bit floats, as FlashAttention-4 counts them.

    The matrix products are the two of the forward pass or the five of the backward one; the
    exponentials are those of P. Shared memory, on compute capability 10 (Blackwell), by the paper's
    account: accumulators live in tensor memory and cost nothing. An MMA of 128 rows reads its right
    operand, and its left one unless that lies in tensor memory: P in O += P V and in
    dV += P^T dO, and dS in dK += dS^T Q. The backward pass also writes dS, for dQ = dS K, and
    passes dQ on in float32, written once and read once by the reduction.

    Parameters
    ----------
    gpu : Device
    Br, Bc, d : int
        Rows of the query and of the key tile, and the width of Q, K and V.
    backward : bool
        The inner loop of the backward pass.
    ctas : {1, 2}
        Thread blocks that share an MMA: each of two stages, and reads, half of the right operand.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable.

    References
    ----------
    Zadouri et al. 2026, FlashAttention-4 (arXiv:2603.05451), sections 3.1.1 and 3.2.1, Tables 1, 3.
    """
    checked(gpu)
    Br, Bc, d = integer("Br", Br, 1), integer("Bc", Bc, 1), integer("d", d, 1)
    if integer("ctas", ctas, 1) > 2:
        raise bad("ctas", ctas, "1 or 2")
    if flag("backward", backward):
        mmas = [
            _Mma(Bc, Br, d),  # S^T = K Q^T
            _Mma(Bc, Br, d),  # dP^T = V dO^T
            _Mma(Bc, d, Br, in_tensor_memory=True),  # dV += P^T dO
            _Mma(Bc, d, Br, in_tensor_memory=True),  # dK += dS^T Q
            _Mma(Br, d, Bc),  # dQ = dS K
        ]
        passed_on = HALF * Br * Bc + 2 * WIDE * Br * d  # dS; dQ in, and out
    else:
        mmas = [
            _Mma(Br, Bc, d),  # S = Q K^T
            _Mma(Br, d, Bc, in_tensor_memory=True),  # O += P V
        ]
        passed_on = 0
    sram = None
    if gpu.compute_capability.startswith("10."):
        sram = (sum(mma.sram_bytes(ctas) for mma in mmas) + passed_on) / gpu.sram_bytes_per_clock
    return Cycles(
        matmul=sum(mma.flops for mma in mmas) / gpu.half_flops_per_clock,
        exp=Br * Bc / gpu.exp_per_clock,
        sram=sram,
    )
