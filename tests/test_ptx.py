"""Each instruction of kernels/ptx/warp.py, emulated, against what NumPy says it does.

The layouts of registers are written out here once more, from the figures of the PTX ISA manual.
"""

import ml_dtypes
import numpy as np
import pytest

from kernel_process import KernelProcess

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def simulator():
    process = KernelProcess(simulated=True)
    yield lambda name, *args: process.call("elsewhere", "ptx_kernels", name, *args)
    process.close()


def words(low, high):
    """Two 16-bit floats as one register."""
    low, high = (np.asarray(x).view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << 16


def left(A):
    """(32, 4) registers of A (16, 16)."""
    fragments = np.zeros((32, 4), np.uint32)
    for lane in range(32):
        for n in range(4):
            row, column = lane // 4 + 8 * (n % 2), 2 * (lane % 4) + 8 * (n // 2)
            fragments[lane, n] = words(A[row, column], A[row, column + 1])
    return fragments


def right(B):
    """(32, 2) registers of B (16, 8)."""
    fragments = np.zeros((32, 2), np.uint32)
    for lane in range(32):
        for n in range(2):
            row, column = 2 * (lane % 4) + 8 * n, lane // 4
            fragments[lane, n] = words(B[row, column], B[row + 1, column])
    return fragments


def result(D):
    """(32, 4) registers of D (16, 8)."""
    rows = np.arange(32)[:, None] // 4 + np.array([0, 0, 8, 8])
    return D[rows, 2 * (np.arange(32)[:, None] % 4) + np.array([0, 1, 0, 1])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_is_the_product_of_two_tiles_added_to_a_third(simulator, dtype):
    rng = np.random.default_rng(1)
    A, B = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in ((16, 16), (16, 8)))
    C = rng.standard_normal((16, 8)).astype(np.float32)
    D = simulator("multiply", left(A), right(B), result(C), dtype)
    wanted = A.astype(np.float64) @ B.astype(np.float64) + C
    assert np.abs(D - result(wanted)).max() < 1e-5


def test_ldmatrix_gives_the_operands_of_mma(simulator):
    """A tile by rows is the left operand; transposed, two right operands side by side."""
    tile = np.random.default_rng(2).standard_normal((16, 16)).astype(np.float16)
    bits = tile.view(np.uint16)
    assert np.array_equal(simulator("load_matrices", bits, False), left(tile))
    both = np.hstack([right(tile[:, :8]), right(tile[:, 8:])])
    assert np.array_equal(simulator("load_matrices", bits, True), both)


def test_stmatrix_stores_what_ldmatrix_loads(simulator):
    tile = np.random.default_rng(2).integers(0, 1 << 16, (16, 16)).astype(np.uint16)
    assert np.array_equal(simulator("store_matrices", left(tile)), tile)


@pytest.mark.parametrize("pending", [0, 1])
def test_a_copy_is_there_only_after_a_wait_for_its_group(simulator, pending):
    A = np.arange(512, dtype=np.uint16).reshape(32, 16)
    early, some, late = simulator("copies", A, pending)
    wanted = np.where(np.arange(32)[:, None] % 2 == 0, A, 0)
    assert np.isnan(early.view(np.float16)).all()
    assert np.array_equal(some[:, :8], wanted[:, :8])
    assert np.array_equal(some[:, 8:], early[:, 8:] if pending else wanted[:, 8:])
    assert np.array_equal(late, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp2_pack_shuffle_and_ballot(simulator, dtype):
    """Ties go to even, -inf to 0, and what is too large to inf."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 32)).astype(np.float32) * np.float32(4)
    x[:6] = 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 3e38, -np.inf, 0
    power, packed, other, third, above = simulator("alone", x, y, dtype)
    with np.errstate(over="ignore"):
        assert np.allclose(power, np.exp2(x.astype(np.float64)), rtol=3e-7)
        assert np.array_equal(packed, words(x.astype(DTYPES[dtype]), y.astype(DTYPES[dtype])))
    assert np.array_equal(other, x[np.arange(32) ^ 2])
    assert np.array_equal(third, packed[3 * np.arange(32) % 32])
    assert (above == (x > 0) @ (1 << np.arange(32))).all()


def test_pairs_on_chip_leave_it_in_order(simulator):
    out = np.arange(256, dtype=np.uint16).reshape(32, 8)
    found = simulator("round_trip", out.view(np.uint32))
    out[::3] = 0
    assert np.array_equal(found, out)


def test_four_numbers_are_rounded_to_e4m3(simulator):
    """To the nearest, ties to even; what is beyond the largest becomes that, NaN stays NaN."""
    x = (np.random.default_rng(5).standard_normal((32, 4)) * 2.0**5).astype(np.float32)
    x[0], x[1] = (1 + 2.0**-4, 1 + 3 * 2.0**-4, 448, 449), (1e9, -np.inf, 2.0**-10, 3 * 2.0**-10)
    x[2, 0] = np.nan
    found = simulator("four_packed", x).view(np.uint8).reshape(32, 4).view(ml_dtypes.float8_e4m3fn)
    found = found.astype(np.float32)
    np.testing.assert_array_equal(found[0], [1, 1.25, 448, 448])
    np.testing.assert_array_equal(found[1], [448, -448, 0, 2.0**-8])
    assert np.isnan(found[2, 0])
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = grid[np.isfinite(grid)]
    nearest = np.abs(grid[:, None, None] - x[3:]).min(axis=0)
    np.testing.assert_array_equal(np.abs(found[3:] - x[3:]), nearest)


def test_two_floats_are_loaded_and_stored_at_once(simulator):
    A = np.arange(128, dtype=np.float32).reshape(32, 4)
    assert np.array_equal(simulator("turned_round", A), A[:, ::-1])


def test_a_warp_that_diverges_is_refused(simulator):
    with pytest.raises(RuntimeError, match="one warp, several instructions"):
        simulator("diverge")


@pytest.mark.parametrize("d", [64, 128])
def test_no_two_of_eight_rows_meet_in_a_bank(simulator, d):
    """Nor do the chunks of a row, and every place of a tile is taken once."""
    at = simulator("places", 16, d)
    assert np.array_equal(at[..., 0], at[..., 1])
    at = at[..., 0]
    assert sorted(at.ravel()) == list(range(0, 16 * d, 8))
    banks = at // 8 % 8  # groups of four: 16 bytes
    for first in (0, 8):
        assert all(len(set(column)) == 8 for column in banks[first : first + 8].T)
    for row in banks:
        assert all(len(set(row[c : c + 8])) == 8 for c in range(0, d // 8, 8))
