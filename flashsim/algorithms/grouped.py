"""Grouped query attention: gradients of a key head that several query heads share."""

from typing import Any

import numpy as np

from ..memory import chip_of, row, tiles, turns


def sum_over_group(parts: list[Any], total: Any, *, B: int) -> None:
    """total (Nk, width) = the sum of the query heads' own gradients, B rows at a time."""
    on_chip = chip_of(total)
    width = total.shape[1]
    for j in turns(B, total):
        sum_j = on_chip("sum_j", np.zeros((j.stop - j.start, width), parts[0].dtype))
        for part in parts:
            for _, part_j in tiles(width, row(part, j)):
                sum_j += part_j
        total[j] = sum_j
