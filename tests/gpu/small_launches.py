"""Launch every kernel on small ragged sizes: something for compute-sanitizer to look at.

for tool in memcheck racecheck initcheck; do
    compute-sanitizer --tool $tool python tests/gpu/small_launches.py
done
"""

import numpy as np


def main():
    from flashsim import kernels

    rng = np.random.default_rng(0)
    for d, dtype, what in (
        (64, np.float32, {}),
        (40, np.float16, {"is_causal": True, "attn_mask": rng.random((150, 200)) < 0.5}),
        (64, np.float32, {"window": (30, 5), "key_padding_mask": np.arange(200)[None] < 120}),
    ):
        q, k, v = (rng.standard_normal((1, 2, n, d)).astype(dtype) for n in (150, 200, 200))
        for algorithm in ("standard", "flash1", "flash2", "split_kv"):
            out = kernels.attention(q, k, v, algorithm=algorithm, tiles=(32, 32), **what)
        for algorithm in ("flash1", "flash2", "flash2-two-kernel"):
            kernels.attention_backward(
                q, k, v, out.output, out.lse, q, algorithm=algorithm, tiles=(32, 32), **what
            )
    rules = {"key_padding_mask": np.arange(200)[None] < 120, "dropout_p": 0.2}
    for d, what in ((64, {"is_causal": True}), (128, {"window": (30, 5)}), (64, {}), (64, rules)):
        q, k, v = (rng.standard_normal((1, 2, n, d)).astype(np.float16) for n in (150, 200, 200))
        for algorithm in ("ampere", "hopper"):
            out = kernels.attention(q, k, v, algorithm=algorithm, **what)
            kernels.attention_backward(q, k, v, out.output, out.lse, q, algorithm=algorithm, **what)
    kernels.attention(q[..., :1, :], k, v, algorithm="hopper_split_kv")
    # A place on chip has one tile of queries after another.
    q, k = (rng.standard_normal((1, 1, n, 128)).astype(np.float16) for n in (600, 130))
    out = kernels.attention(q, k, k, algorithm="hopper")
    kernels.attention_backward(q, k, k, out.output, out.lse, q, algorithm="hopper")
    for what in ({}, {"is_causal": True}):
        q, k = (rng.standard_normal((1, 2, n, 128)).astype(np.float16) for n in (300, 700))
        kernels.attention(q, k, k, algorithm="hopper_fp8", **what)
    print("launched")


if __name__ == "__main__":
    main()
