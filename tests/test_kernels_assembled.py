"""Every kernel compiles, and assembles for two architectures: no GPU is needed for that.

By link-time optimisation, as for a launch. The simulator takes any Python, and PTX alone proves
nothing: it may not assemble, or keep its tiles in slow memory. Source: faults E73, E76.
"""

import pytest

pytest.importorskip("numba.cuda", reason="the kernels need numba and numba-cuda")
pytest.importorskip("cuda.core", reason="the assembler comes with numba-cuda[cu13]")

NAMES = (
    "flash2", "flash1", "scores", "softmax", "values", "split", "merge", "D", "flash2_backward",
    "dKdV", "dQ", "flash1_backward", "load_only flash2", "load_only flash1", "ampere",
    "ampere_backward", "keys", "zeros", "round", "statistics", "finish",
)  # fmt: skip


SPILLS = {
    ("flash1_backward", "sm_80"): 256, ("load_only flash1", "sm_80"): 40,
    ("keys", "sm_80"): 12, ("keys", "sm_90a"): 12,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_default_tiles_stay_in_registers(compiler, name):
    """No spills, no local memory, no float64, and a block's registers fit a multiprocessor.

    But on sm_80 for FlashAttention's backward kernel, which has eight matrices to address, and for
    the loads alone of its forward kernel, of which the assembler fits two blocks there; and for
    what lists key tiles, once a call, which the assembler gives 32 registers. Bytes, at most.
    """
    for arch, said in compiler.call("assembled", name, 64, ("sm_80", "sm_90a")).items():
        spills = SPILLS.get((name, arch), 0)
        assert said["spill_bytes"] <= spills
        assert said["stack_bytes"] <= spills
        assert said["wide_floats"] == 0
        assert 0 < said["registers"] * said["threads"] <= 65536


EVERY = {"band": True, "keys": True, "dropout": True}


@pytest.mark.parametrize(
    "name, d, dtype, features",
    [
        ("ampere", 64, "float16", {"band": True}),
        ("ampere", 64, "bfloat16", {"band": True, "keys": True}),
        ("ampere", 64, "float16", {"band": True, "dropout": True}),
        ("ampere", 64, "bfloat16", EVERY),
        ("ampere", 128, "bfloat16", {}),
        ("ampere", 128, "float16", {"band": True, "keys": True}),
        ("ampere", 128, "bfloat16", {"band": True, "dropout": True}),
        ("ampere", 128, "float16", EVERY),
        ("ampere_backward", 64, "float16", {"band": True, "keys": True}),
        ("ampere_backward", 64, "bfloat16", {"band": True, "dropout": True}),
        ("ampere_backward", 64, "float16", EVERY),
        ("ampere_backward", 128, "float16", {"band": True}),
        ("ampere_backward", 128, "bfloat16", {"band": True, "keys": True}),
        ("ampere_backward", 128, "float16", {"band": True, "dropout": True}),
        ("ampere_backward", 128, "bfloat16", EVERY),
    ],
    ids=str,
)
def test_what_warps_hold_stays_in_registers_with_masks_and_dropout(
    compiler, name, d, dtype, features
):
    """As above, of the kernels on tensor cores, whose registers are nearly all taken."""
    said = compiler.call("assembled", name, d, ("sm_80", "sm_90a"), dtype=dtype, **features)
    for each in said.values():
        assert each["spill_bytes"] == each["stack_bytes"] == each["wide_floats"] == 0
        assert 0 < each["registers"] * each["threads"] <= 65536


def test_every_kernel_is_looked_at(compiler):
    assert set(compiler.call("kernel_names")) == set(NAMES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_every_feature_assembles(compiler, dtype):
    features = {"band": True, "keys": True, "layout": True, "mask": dtype, "dropout": True}
    said = compiler.call("assembled", "flash2", 40, ("sm_80", "sm_90a"), dtype=dtype, **features)
    for each in said.values():
        assert each["registers"] > 0
        assert each["wide_floats"] == 0
