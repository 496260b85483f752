"""The bits of flashsim.dropout, in a kernel: Philox4x32-10, a function of where a weight is."""

from __future__ import annotations

from .gpu import device, float32, uint64


@device
def kept(p, seed, threshold, factor, b, h, row, col):
    """A weight after dropout: 0, or p times factor = 1 / (1 - probability)."""
    low = uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = uint64(col // 4), uint64(row), uint64(h), uint64(b)
    k0, k1 = seed & low, seed >> uint64(32)
    for _ in range(10):
        x = c0 * uint64(0xD2511F53)
        y = c2 * uint64(0xCD9E8D57)
        c0, c1 = (y >> uint64(32)) ^ c1 ^ k0, y & low
        c2, c3 = (x >> uint64(32)) ^ c3 ^ k1, x & low
        k0 = (k0 + uint64(0x9E3779B9)) & low
        k1 = (k1 + uint64(0xBB67AE85)) & low
    word = c0
    if col % 4 == 1:
        word = c1
    if col % 4 == 2:
        word = c2
    if col % 4 == 3:
        word = c3
    z = factor if word >= threshold else float32(0)
    return p * z
