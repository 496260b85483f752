"""The built-in sample is the real thing: small, licensed, and what its model computed."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

import flashsim as fs
from flashsim.reference import exact
from flashsim.sample import FILE, load_sample

DATA = files("flashsim") / "data"


def test_the_expected_output_is_exact_attention() -> None:
    """The model computed it in float32, so it agrees within 2e-6; in padded rows too."""
    sample = load_sample()
    reference = exact(sample.q, sample.k, sample.v, key_padding_mask=sample.key_padding_mask)
    assert sample.expected_output is not None
    assert np.abs(sample.expected_output - reference.output).max() <= 2e-6


@pytest.mark.parametrize("algorithm", [n for n, row in fs.ALGORITHMS.items() if not row.requires])
def test_every_algorithm_gives_the_expected_output(algorithm: str) -> None:
    sample = load_sample()
    out = fs.attention(
        sample.q, sample.k, sample.v, key_padding_mask=sample.key_padding_mask,
        algorithm=algorithm, sram=4096,
    )  # fmt: skip
    assert sample.expected_output is not None
    assert np.abs(out.output - sample.expected_output).max() <= 2e-6


def test_the_second_text_is_padded() -> None:
    sample = load_sample()
    assert sample.key_padding_mask is not None
    assert sample.key_padding_mask.sum(axis=1).tolist() == [180, 24]
    assert sample.q.shape == sample.k.shape == sample.v.shape == (2, 4, 180, 32)
    assert sample.q.dtype == np.float32


def test_the_padding_matters() -> None:
    """Without the mask the second text comes out otherwise, so the sample does test masking."""
    sample = load_sample()
    out = fs.attention(sample.q, sample.k, sample.v)
    assert sample.expected_output is not None
    error = np.abs(out.output - sample.expected_output).max(axis=(1, 2, 3))
    assert error[0] <= 2e-6
    assert error[1] > 0.1


def test_the_sample_is_small_and_has_its_origin_and_licence_beside_it() -> None:
    assert len((DATA / FILE).read_bytes()) < 800_000
    assert "Apache License" in (DATA / "LICENSE-Apache-2.0.txt").read_text()
    origin = (DATA / "README.md").read_text()
    for fact in (FILE, "all-MiniLM-L6-v2", "Apache-2.0", "layer 3", "1/sqrt(32)", "1, 2, 8 and 11"):
        assert fact in origin
