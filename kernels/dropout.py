"""The bits of flashsim.dropout, in a kernel: Philox4x32-10, a function of where a weight is.

One call of Philox gives the words of four neighbouring columns of a row, 4 quad to 4 quad + 3.
"""

from __future__ import annotations

from .gpu import device, float32, uint32, uint64


@device
def _words(seed, b, h, row, quad):
    """Of the four columns; by products of 32 bits, which are one instruction each."""
    low, high = uint64(0xFFFFFFFF), uint64(32)
    c0, c1, c2, c3 = uint32(quad), uint32(row), uint32(h), uint32(b)
    k0, k1 = uint32(seed & low), uint32(seed >> high)
    for _ in range(10):
        x = uint64(c0) * uint64(0xD2511F53)
        y = uint64(c2) * uint64(0xCD9E8D57)
        c0, c1 = uint32(uint32(y >> high) ^ c1 ^ k0), uint32(y & low)
        c2, c3 = uint32(uint32(x >> high) ^ c3 ^ k1), uint32(x & low)
        k0 = uint32((uint64(k0) + uint64(0x9E3779B9)) & low)
        k1 = uint32((uint64(k1) + uint64(0xBB67AE85)) & low)
    return c0, c1, c2, c3


@device
def kept(p, seed, threshold, factor, b, h, row, col):
    """A weight after dropout: 0, or p times factor = 1 / (1 - probability)."""
    w0, w1, w2, w3 = _words(seed, b, h, row, col // 4)
    word = w0
    if col % 4 == 1:
        word = w1
    if col % 4 == 2:
        word = w2
    if col % 4 == 3:
        word = w3
    z = factor if word >= uint32(threshold) else float32(0)
    return p * z


@device
def kept_four(seed, threshold, b, h, row, quad):
    """Four bits of a register, from the lowest: 1 where a weight of the four columns is kept."""
    w0, w1, w2, w3 = _words(seed, b, h, row, quad)
    least = uint32(threshold)
    low = uint32(uint32(w0 >= least) | uint32(uint32(w1 >= least) << uint32(1)))
    high = uint32(uint32(w2 >= least) | uint32(uint32(w3 >= least) << uint32(1)))
    return uint32(low | uint32(high << uint32(2)))
