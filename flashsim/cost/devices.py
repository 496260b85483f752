"""GPUs as cost models need them: peak rates, clocks and on-chip sizes, each with its source.

Every rate is a dense peak: data sheets print tensor-core rates with 2:4 sparsity since Ampere, and
tables that copy those are wrong by two. KB and MB of on-chip memory are 1024 and 1024**2 bytes;
bandwidths are in units of 1e9 bytes/s. Vendor documents were read as others quote or transcribe
them; where not even that was found, the source says so. `Device.notes` names figures that are
often copied wrong, and those on which sources disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checks import amount, bad, bad_type

KB = 1024
MB = 1024**2


@dataclass(frozen=True)
class Device:
    """The figures of one GPU.

    Attributes
    ----------
    key : str
        Short lower-case id, the key in `DEVICES`.
    name : str
        Product name.
    compute_capability : str
        CUDA compute capability such as "9.0"; for AMD the LLVM target such as "gfx942".
    hbm_bytes_per_second : float
        Peak rate of the device memory (HBM or GDDR), bytes/s.
    sm_count : int
        Streaming multiprocessors (AMD: compute units).
    half_flops_per_second : float
        Dense fp16 matrix rate with fp32 accumulation (GeForce cards halve it), FLOP/s.
    fp8_flops_per_second : float or None
        Dense fp8 matrix rate with fp32 accumulation, FLOP/s; None where fp8 has no matrix unit.
    fp32_flops_per_second : float
        fp32 rate outside the matrix units, FLOP/s.
    exp_per_second : float
        Exponentials of the special-function units, 1/s: 16 a clock an SM.
    boost_clock_hz : float
        Clock at which the matrix rates are given, Hz. Hopper and Blackwell run fp32 code faster.
    sram_bytes_per_block : int
        Shared memory that one thread block may use at most (AMD: LDS of a workgroup), bytes.
    sram_bytes_per_sm : int
        Shared memory of one SM at most, bytes.
    sram_bytes_per_clock : int
        What one SM's shared memory gives at most, bytes a clock.
    register_bytes_per_sm : int
        Register file of one SM, bytes.
    l2_bytes : int
        L2 cache of the whole device, bytes.
    sources : Mapping of str to str
        Citation for each field or comma-separated group of fields.
    notes : str
        What is often copied wrong, and where sources disagree.
    """

    key: str
    name: str
    compute_capability: str
    hbm_bytes_per_second: float
    sm_count: int
    half_flops_per_second: float
    fp8_flops_per_second: float | None
    fp32_flops_per_second: float
    exp_per_second: float
    boost_clock_hz: float
    sram_bytes_per_block: int
    sram_bytes_per_sm: int
    sram_bytes_per_clock: int
    register_bytes_per_sm: int
    l2_bytes: int
    sources: Mapping[str, str] = field(repr=False, compare=False)
    notes: str = field(default="", repr=False, compare=False)

    def memory_seconds(self, bytes_: float) -> float:
        """Seconds that `bytes_` bytes take at the peak rate of the device memory.

        Examples
        --------
        >>> device("h200").memory_seconds(4.8e9)
        0.001
        """
        return amount("bytes_", bytes_) / self.hbm_bytes_per_second

    def flops_per_second(self, dtype: str) -> float:
        """Peak rate of matrix products of a dtype, FLOP/s; float32 outside the matrix units.

        Raises
        ------
        ValueError
            If the preset has no rate for it.

        Examples
        --------
        >>> device("h200").flops_per_second("bfloat16")
        989000000000000.0
        """
        no_bfloat16 = self.compute_capability.startswith("7.")  # their matrix units came with 8.0
        rates = {
            "float16": self.half_flops_per_second,
            "bfloat16": None if no_bfloat16 else self.half_flops_per_second,
            "float32": self.fp32_flops_per_second,
        }
        rate = rates.get(dtype)
        if rate is None:
            known = ", ".join(name for name, rate in rates.items() if rate is not None)
            raise bad("dtype", dtype, f"one with a rate of matrix products on {self.key}: {known}")
        return rate

    @property
    def half_flops_per_clock(self) -> int:
        """fp16 FLOPs of one SM's matrix units a clock: the power of two that the rate stands for.

        Data sheets round rates and clocks, so their quotient is off by up to 1 %.
        """
        per_clock = self.half_flops_per_second / (self.sm_count * self.boost_clock_hz)
        return int(2 ** round(math.log2(per_clock)))

    @property
    def exp_per_clock(self) -> int:
        """Exponentials of one SM a clock; the rate may be rounded."""
        return round(self.exp_per_second / (self.sm_count * self.boost_clock_hz))


def checked(gpu: Any) -> Device:
    """A `Device`; a name is none.

    Raises
    ------
    TypeError
        If it is something else.
    """
    if not isinstance(gpu, Device):
        raise bad_type("gpu", gpu, "a Device, as flashsim.cost.devices.device(name) returns")
    return gpu


def device(name: str) -> Device:
    """Look up a preset by its key or an alias, in any case.

    Parameters
    ----------
    name : str
        A key of `DEVICES` or of `ALIASES`.

    Raises
    ------
    ValueError
        If there is no such preset.

    Examples
    --------
    >>> device("A100").key
    'a100-80'
    """
    key = str(name).lower()
    key = ALIASES.get(key, key)
    if key not in DEVICES:
        raise ValueError(
            f"device={name!r}: expected one of {', '.join(DEVICES)} (or {', '.join(ALIASES)})"
        )
    return DEVICES[key]


# Sources that several presets share.
_CUDA_MEMORY = "CUDA Programming Guide 13.1, appendix Compute Capabilities, Table 31 (2025)"
_AMPERE_BLOG = "NVIDIA Ampere Architecture In-Depth, NVIDIA blog, Tables 3 and 4 (2020)"
_A100_SHEET = "NVIDIA A100 data sheet (2021), as quoted by others"
_GA102 = "NVIDIA Ampere GA102 white paper v2.0, Appendix A, Table 9 (2021), as quoted by others"
_ADA = "NVIDIA Ada white paper v2.02, Appendix A, Table 2 (2023), as quoted by others"
_H100_SHEET = "NVIDIA H100 data sheet (2023), as transcribed by HPC Tech; rates halved: no sparsity"
_H200_SHEET = "NVIDIA H200 data sheet (2023), as quoted by others; tensor rates halved: no sparsity"
_BLACKWELL = (
    "NVIDIA Blackwell Architecture Technical Brief v2.1, Table 3 (2025), as quoted by others; "
    "tensor rates halved: no sparsity"
)
_LOCKWOOD = "G. Lockwood's notes on B200, HGX at 1000 W; not confirmed against NVIDIA's documents"
_FA3 = "FlashAttention-3, arXiv:2407.08608, section 3.1, footnote 5 (2024)"
_FA4 = "FlashAttention-4, arXiv:2603.05451, section 2 (2026)"
_BANKS = "32 banks * 4 bytes: CUDA Programming Guide, appendix Compute Capabilities, Shared Memory"
_XLA = "as the driver reports it: OpenXLA, target_config/specs/{}.txtpb"
_QUERY = "as the driver reports it: published device queries"
_ROCM_PEAK = "AMD ROCm documentation, MI300 series microarchitecture, peak performance table (2025)"
_ROCM_SPECS = "AMD ROCm documentation, GPU hardware specifications (2025)"
_SFU = "16 a clock an SM * sm_count * boost_clock_hz; the 16: "
_SFU_7X = _SFU + "CUDA C Programming Guide, arithmetic throughput table, column 7.x (2018)"
_NO_FP8 = (
    "None: no fp8 matrix unit before compute capability 8.9 (CUDA Programming Guide, Table 33)"
)
_SFU_UNCONFIRMED = (
    _SFU + "flashsim facts table; not confirmed for this compute capability in the CUDA guides"
)

_PRESETS = (
    Device(
        key="t4",
        name="NVIDIA T4",
        compute_capability="7.5",
        hbm_bytes_per_second=320e9,
        sm_count=40,
        half_flops_per_second=65e12,
        fp8_flops_per_second=None,
        fp32_flops_per_second=8.1e12,
        exp_per_second=16 * 40 * 1.59e9,
        boost_clock_hz=1.59e9,
        sram_bytes_per_block=64 * KB,
        sram_bytes_per_sm=64 * KB,
        sram_bytes_per_clock=64,
        register_bytes_per_sm=256 * KB,
        l2_bytes=4 * MB,
        sources={
            "compute_capability, sm_count, boost_clock_hz, l2_bytes": _QUERY,
            "hbm_bytes_per_second": _QUERY + ": 5001 MHz * 2 * 256 bits",
            "half_flops_per_second, fp32_flops_per_second": (
                "NVIDIA's announcement of the T4, as the press reports it (2018); "
                "not confirmed against the data sheet"
            ),
            "fp8_flops_per_second": _NO_FP8,
            "sram_bytes_per_clock": "64 in Turing, against 128: " + _GA102,
            "exp_per_second": _SFU_7X,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes="Some tables give 300 GB/s.",
    ),
    Device(
        key="v100",
        name="NVIDIA V100 SXM2",
        compute_capability="7.0",
        hbm_bytes_per_second=900e9,
        sm_count=80,
        half_flops_per_second=125e12,
        fp8_flops_per_second=None,
        fp32_flops_per_second=15.7e12,
        exp_per_second=16 * 80 * 1.53e9,
        boost_clock_hz=1.53e9,
        sram_bytes_per_block=96 * KB,
        sram_bytes_per_sm=96 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=6 * MB,
        sources={
            "compute_capability, hbm_bytes_per_second, sm_count, half_flops_per_second": (
                _AMPERE_BLOG
            ),
            "fp32_flops_per_second, boost_clock_hz, l2_bytes": _AMPERE_BLOG,
            "sram_bytes_per_sm, register_bytes_per_sm": _AMPERE_BLOG,
            "fp8_flops_per_second": _NO_FP8,
            "sram_bytes_per_clock": _BANKS,
            "exp_per_second": _SFU_7X,
            "sram_bytes_per_block": _XLA.format("v100"),
        },
        notes="1455 MHz, 120 and 15 TFLOP/s in older tables are the preliminary figures of 2017.",
    ),
    Device(
        key="a100-40",
        name="NVIDIA A100 40GB (SXM4 and PCIe)",
        compute_capability="8.0",
        hbm_bytes_per_second=1555e9,
        sm_count=108,
        half_flops_per_second=312e12,
        fp8_flops_per_second=None,
        fp32_flops_per_second=19.5e12,
        exp_per_second=16 * 108 * 1.41e9,
        boost_clock_hz=1.41e9,
        sram_bytes_per_block=163 * KB,
        sram_bytes_per_sm=164 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=40 * MB,
        sources={
            "compute_capability, hbm_bytes_per_second, sm_count, half_flops_per_second": (
                _AMPERE_BLOG
            ),
            "fp32_flops_per_second, boost_clock_hz, l2_bytes": _AMPERE_BLOG,
            "fp8_flops_per_second": _NO_FP8,
            "sram_bytes_per_clock": _BANKS,
            "exp_per_second": _SFU_UNCONFIRMED,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes="624 TFLOP/s is with sparsity.",
    ),
    Device(
        key="a100-80",
        name="NVIDIA A100 80GB SXM4",
        compute_capability="8.0",
        hbm_bytes_per_second=2039e9,
        sm_count=108,
        half_flops_per_second=312e12,
        fp8_flops_per_second=None,
        fp32_flops_per_second=19.5e12,
        exp_per_second=16 * 108 * 1.41e9,
        boost_clock_hz=1.41e9,
        sram_bytes_per_block=163 * KB,
        sram_bytes_per_sm=164 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=40 * MB,
        sources={
            "hbm_bytes_per_second, half_flops_per_second, fp32_flops_per_second": _A100_SHEET,
            "compute_capability, sm_count, boost_clock_hz, l2_bytes": _XLA.format("a100_sxm_80"),
            "fp8_flops_per_second": _NO_FP8,
            "sram_bytes_per_clock": _BANKS,
            "exp_per_second": _SFU_UNCONFIRMED,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes="624 TFLOP/s is with sparsity. The 80GB PCIe card has 1935 GB/s.",
    ),
    Device(
        key="rtx3090",
        name="NVIDIA GeForce RTX 3090",
        compute_capability="8.6",
        hbm_bytes_per_second=936e9,
        sm_count=82,
        half_flops_per_second=71e12,
        fp8_flops_per_second=None,
        fp32_flops_per_second=35.6e12,
        exp_per_second=16 * 82 * 1.695e9,
        boost_clock_hz=1.695e9,
        sram_bytes_per_block=99 * KB,
        sram_bytes_per_sm=100 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=6 * MB,
        sources={
            "hbm_bytes_per_second, sm_count, half_flops_per_second, fp32_flops_per_second": _GA102,
            "boost_clock_hz, l2_bytes": _GA102,
            "compute_capability": _QUERY,
            "fp8_flops_per_second": _NO_FP8,
            "sram_bytes_per_clock": _GA102,
            "exp_per_second": (
                _SFU + "an answer in NVIDIA's forum (1:8 of the 128 fp32 lanes) that cites the "
                "CUDA Programming Guide, section 5.4.1"
            ),
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes="142 TFLOP/s is with fp16 accumulation, or with sparsity; 285 is with both.",
    ),
    Device(
        key="rtx4090",
        name="NVIDIA GeForce RTX 4090",
        compute_capability="8.9",
        hbm_bytes_per_second=1008e9,
        sm_count=128,
        half_flops_per_second=165e12,
        fp8_flops_per_second=330e12,
        fp32_flops_per_second=82.6e12,
        exp_per_second=16 * 128 * 2.52e9,
        boost_clock_hz=2.52e9,
        sram_bytes_per_block=99 * KB,
        sram_bytes_per_sm=100 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=72 * MB,
        sources={
            "hbm_bytes_per_second, sm_count, half_flops_per_second, fp8_flops_per_second": _ADA,
            "fp32_flops_per_second, boost_clock_hz, l2_bytes": _ADA,
            "compute_capability": "CUDA Programming Guide as quoted with the Ada white paper",
            "sram_bytes_per_clock": _BANKS,
            "exp_per_second": _SFU_UNCONFIRMED,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes=(
            "330 TFLOP/s of fp16 is with fp16 accumulation, or with sparsity. For fp8 with fp32 "
            "accumulation the white paper printed 660 until v2.02 corrected it to 330."
        ),
    ),
    Device(
        key="l4",
        name="NVIDIA L4",
        compute_capability="8.9",
        hbm_bytes_per_second=300e9,
        sm_count=58,
        half_flops_per_second=121e12,
        fp8_flops_per_second=242e12,
        fp32_flops_per_second=30.3e12,
        exp_per_second=16 * 58 * 2.04e9,
        boost_clock_hz=2.04e9,
        sram_bytes_per_block=99 * KB,
        sram_bytes_per_sm=100 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=48 * MB,
        sources={
            "compute_capability, sm_count, boost_clock_hz, l2_bytes": _QUERY,
            "hbm_bytes_per_second": _QUERY + ": 6251 MHz * 2 * 192 bits",
            "half_flops_per_second, fp8_flops_per_second, fp32_flops_per_second": (
                "NVIDIA L4 data sheet (2023), as quoted by others; "
                "tensor rates 242 and 485 with sparsity, halved"
            ),
            "sram_bytes_per_clock": _BANKS,
            "exp_per_second": _SFU_UNCONFIRMED,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes=(
            "Copied tables give the H100's 3350 GB/s: it is 300. 242 (fp16) and 485 (fp8) TFLOP/s "
            "are with sparsity. Databases list the full chip's 60 SMs: the card has 58."
        ),
    ),
    Device(
        key="h100",
        name="NVIDIA H100 SXM5",
        compute_capability="9.0",
        hbm_bytes_per_second=3350e9,
        sm_count=132,
        half_flops_per_second=989e12,
        fp8_flops_per_second=1979e12,
        fp32_flops_per_second=67e12,
        exp_per_second=3.9e12,
        boost_clock_hz=1.83e9,
        sram_bytes_per_block=227 * KB,
        sram_bytes_per_sm=228 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=50 * MB,
        sources={
            "hbm_bytes_per_second, sm_count, half_flops_per_second, fp8_flops_per_second": (
                _H100_SHEET
            ),
            "fp32_flops_per_second, l2_bytes": _H100_SHEET,
            "compute_capability": _XLA.format("h100_sxm"),
            "sram_bytes_per_clock": "as on the B200: " + _FA4,
            "exp_per_second": _FA3 + ": 16 a clock an SM * 132 SMs * 1830 MHz, rounded there",
            "boost_clock_hz": (
                "NVIDIA H100 white paper v1.04, Table 3 (2023), as OpenXLA quotes it; also " + _FA3
            ),
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes=(
            "1979 (fp16) and 3958 (fp8) TFLOP/s are with sparsity. fp32 is given at 1.98 GHz, the "
            "clock outside the tensor cores."
        ),
    ),
    Device(
        key="h100-pcie",
        name="NVIDIA H100 PCIe",
        compute_capability="9.0",
        hbm_bytes_per_second=2000e9,
        sm_count=114,
        half_flops_per_second=756e12,
        fp8_flops_per_second=1513e12,
        fp32_flops_per_second=51e12,
        exp_per_second=16 * 114 * 1.62e9,
        boost_clock_hz=1.62e9,
        sram_bytes_per_block=227 * KB,
        sram_bytes_per_sm=228 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=50 * MB,
        sources={
            "hbm_bytes_per_second, sm_count, half_flops_per_second, fp8_flops_per_second": (
                _H100_SHEET
            ),
            "fp32_flops_per_second, l2_bytes": _H100_SHEET,
            "compute_capability": _XLA.format("h100_pcie"),
            "sram_bytes_per_clock": "as on the B200: " + _FA4,
            "exp_per_second": _SFU + _FA3,
            "boost_clock_hz": (
                "half_flops_per_second / (114 SMs * 4096 FLOP a clock), and OpenXLA's estimate "
                "(h100_pcie.txtpb); not confirmed against NVIDIA's white paper"
            ),
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
        },
        notes=(
            "1513 (fp16) and 3026 (fp8) TFLOP/s are with sparsity. fp32 is given at 1.755 GHz. "
            "The driver's memory clock gives 2039 GB/s."
        ),
    ),
    Device(
        key="h200",
        name="NVIDIA H200 SXM",
        compute_capability="9.0",
        hbm_bytes_per_second=4800e9,
        sm_count=132,
        half_flops_per_second=989e12,
        fp8_flops_per_second=1979e12,
        fp32_flops_per_second=67e12,
        exp_per_second=3.9e12,
        boost_clock_hz=1.83e9,
        sram_bytes_per_block=227 * KB,
        sram_bytes_per_sm=228 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=60 * MB,
        sources={
            "hbm_bytes_per_second, half_flops_per_second, fp8_flops_per_second": _H200_SHEET,
            "fp32_flops_per_second": _H200_SHEET,
            "compute_capability, sm_count": _XLA.format("h200"),
            "sram_bytes_per_clock": "as on the B200: " + _FA4,
            "exp_per_second": "as the H100 SXM5, the same SMs: " + _FA3,
            "boost_clock_hz": "as the H100 SXM5: the same matrix rate on as many SMs",
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
            "l2_bytes": "flashsim facts table: as the driver reports it; not on the data sheet",
        },
        notes=(
            "1979 (fp16) and 3958 (fp8) TFLOP/s are with sparsity. Measured for this project: "
            "copies at 4180 to 4300 GB/s, matrix products at about 790 TFLOP/s. Some tables "
            "repeat the H100's 50 MB of L2. fp32 is given at 1.98 GHz."
        ),
    ),
    Device(
        key="b200",
        name="NVIDIA B200 (HGX)",
        compute_capability="10.0",
        hbm_bytes_per_second=8000e9,
        sm_count=148,
        half_flops_per_second=2250e12,
        fp8_flops_per_second=4500e12,
        fp32_flops_per_second=80e12,
        exp_per_second=16 * 148 * 1.85e9,
        boost_clock_hz=1.85e9,
        sram_bytes_per_block=227 * KB,
        sram_bytes_per_sm=228 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=256 * KB,
        l2_bytes=132_644_864,
        sources={
            "hbm_bytes_per_second, fp32_flops_per_second": _LOCKWOOD,
            "half_flops_per_second, fp8_flops_per_second": _BLACKWELL,
            "sm_count, boost_clock_hz": _FA4,
            "sram_bytes_per_clock": _FA4,
            "exp_per_second": _SFU + _FA4,
            "sram_bytes_per_block, sram_bytes_per_sm, register_bytes_per_sm": _CUDA_MEMORY,
            "compute_capability, l2_bytes": _XLA.format("b200"),
        },
        notes=(
            "4500 (fp16) and 9000 (fp8) TFLOP/s are with sparsity. For this board NVIDIA's brief "
            "v2.1 (2025) gives 7.7 TB/s and 75 fp32 TFLOP/s, and the driver's clock 7672 GB/s; "
            "8 TB/s is what the B200 was announced with. GB200's 2500 (fp16) and 5000 (fp8) "
            "TFLOP/s belong to a higher power limit."
        ),
    ),
    Device(
        key="mi300x",
        name="AMD Instinct MI300X",
        compute_capability="gfx942",
        hbm_bytes_per_second=5300e9,
        sm_count=304,
        half_flops_per_second=1307e12,
        fp8_flops_per_second=2615e12,
        fp32_flops_per_second=163e12,
        exp_per_second=16 * 304 * 2.1e9,
        boost_clock_hz=2.1e9,
        sram_bytes_per_block=64 * KB,
        sram_bytes_per_sm=64 * KB,
        sram_bytes_per_clock=128,
        register_bytes_per_sm=512 * KB,
        l2_bytes=32 * MB,
        sources={
            "hbm_bytes_per_second, half_flops_per_second, fp8_flops_per_second": _ROCM_PEAK,
            "fp32_flops_per_second": _ROCM_PEAK,
            "boost_clock_hz": _ROCM_PEAK + ": 1307.4e12 / (304 CUs * 2048 FLOP a clock)",
            "sram_bytes_per_clock": "128 bytes a clock read from the LDS: AMD ROCm documentation",
            "exp_per_second": (
                "LLVM, AMDGPU SISchedule.td: transcendentals at a quarter of the rate, so 16 of "
                "64 lanes a clock a CU; not confirmed in AMD's ISA document"
            ),
            "compute_capability, sm_count, sram_bytes_per_block, sram_bytes_per_sm": _ROCM_SPECS,
            "register_bytes_per_sm, l2_bytes": _ROCM_SPECS,
        },
        notes=(
            "2615 TFLOP/s of fp16 is with sparsity. Each of the eight dies sees only its own 4 MB "
            "of L2; the 256 MB Infinity Cache behind them is not counted. Registers are the vector "
            "registers."
        ),
    ),
)

DEVICES: dict[str, Device] = {preset.key: preset for preset in _PRESETS}
"""The presets by key."""

ALIASES: dict[str, str] = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "v100-sxm": "v100",
    "3090": "rtx3090",
    "4090": "rtx4090",
}
"""Other names that `device` accepts, with the key each stands for."""
