"""The built-in sample: attention of one layer of a real sentence encoder, on two texts."""

from __future__ import annotations

from importlib.resources import files

from .inputs import Inputs, from_safetensors, named

FILE = "minilm_layer3.safetensors"


def load_sample() -> Inputs:
    """Q, K, V (2, 4, 180, 32) float32 of all-MiniLM-L6-v2, with the model's own attention output.

    The second text has 24 tokens and is padded. Scale 1/sqrt(32). Origin and licence (Apache-2.0)
    are in `flashsim/data/README.md`.

    Examples
    --------
    >>> sample = load_sample()
    >>> sample.q.shape, sample.key_padding_mask.sum(axis=1).tolist()
    ((2, 4, 180, 32), [180, 24])
    """
    arrays = from_safetensors((files("flashsim") / "data" / FILE).read_bytes())
    origin = "built-in sample: all-MiniLM-L6-v2, encoder layer 3, heads 1, 2, 8, 11, two texts"
    return named(origin, arrays)
