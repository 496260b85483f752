"""Thread blocks on multiprocessors: schedules are possible and greedy, published claims hold."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import flashsim as fs
from flashsim import cli
from flashsim.cost.blocks import ORDERS, blocks, call
from flashsim.cost.devices import DEVICES, device
from flashsim.cost.launches import LAUNCHES
from flashsim.cost.waves import MOST, best_splits, blocks_per_sm, schedule, waves
from flashsim.measure import recorded

works = st.lists(st.integers(0, 9), max_size=60)
slot_counts = st.integers(1, 12)
A100 = {"N": 4096, "d": 64, "heads": 8, "Br": 128, "Bc": 64, "dtype": "float16", "device": "a100"}


@given(works, slot_counts)
def test_each_block_starts_where_one_ends_first(work, slots):
    found = schedule(work, slots)
    free = [0] * slots
    for start, length in zip(found.start.tolist(), work, strict=True):
        assert start == min(free)
        free[free.index(min(free))] += length
    assert found.span == max(free)


@given(works, slot_counts)
def test_a_place_has_one_block_at_a_time(work, slots):
    found = schedule(work, slots)
    assert set(found.slot.tolist()) <= set(range(slots))
    for slot in range(slots):
        mine = np.flatnonzero(found.slot == slot)
        ends = found.start[mine] + found.work[mine]
        assert (found.start[mine][1:] >= ends[:-1]).all()


@given(works.filter(any), slot_counts)
def test_a_span_is_inside_grahams_bounds(work, slots):
    """Graham 1966: at most total / slots + (1 - 1 / slots) longest, whatever the order."""
    found = schedule(work, slots)
    assert found.span >= max(work)
    assert sum(work) <= found.span * slots <= sum(work) + (slots - 1) * max(work)
    assert found.utilisation == pytest.approx(sum(work) / (slots * found.span))
    assert 0 <= found.tail <= 1


@given(st.integers(1, 9), st.integers(0, 60), slot_counts)
def test_blocks_that_are_alike_run_in_waves(length, count, slots):
    alike = schedule([length] * count, slots)
    assert alike.span == -(-count // slots) * length
    nearly = schedule([length] * count + [0], slots)  # not alike: by simulation
    assert (nearly.start[:-1] == alike.start).all()
    if count:
        waves = -(-count // slots)
        assert alike.utilisation == pytest.approx(alike.waves / waves)
        assert alike.tail == pytest.approx(0 if count % slots == 0 else 1 / waves)


@given(
    st.integers(1, 80), st.integers(1, 80), st.integers(1, 16), st.integers(1, 16), st.booleans(),
    st.integers(1, 3), st.sampled_from(["flash1", "flash2"]), st.sampled_from(ORDERS),
)  # fmt: skip
def test_blocks_share_out_the_tiles_that_the_closed_form_visits(
    N, Nk, Br, Bc, causal, heads, algorithm, order
):
    what = {"N": N, "Nk": Nk, "Br": Br, "Bc": Bc, "is_causal": causal, "heads": heads}
    asked = call(algorithm, **what, d=4)
    found = blocks(asked.launches[0], asked.grid, asked.heads, order)
    one = {**what, "d": 1, "dv": 1}  # K's reads are then keys over all visited tiles
    if Nk % Bc == 0:
        keys = fs.io_cost("flash2", **one).reads["K"]
        assert found.work.sum() == keys // min(Bc, Nk)
    members = found.members[found.members >= 0]
    tiles = -(-N // Br)
    assert len(members) == (0 if algorithm == "flash1" else heads * tiles)
    assert set(members.tolist()) == (set() if algorithm == "flash1" else set(range(tiles)))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
def test_pairs_of_a_causal_square_are_alike(pairs, heads, B):
    asked = call("flash2", N=2 * pairs * B, d=4, Br=B, Bc=B, heads=heads, is_causal=True)
    work = blocks(asked.launches[0], asked.grid, heads, "paired").work
    assert (work == 2 * pairs + 1).all()
    assert len(work) == heads * pairs


@given(st.integers(1, 60), st.integers(1, 4))
def test_longest_first_starts_no_block_before_a_longer_one(tiles, heads):
    asked = call("flash2", N=8 * tiles, d=4, Br=8, Bc=8, heads=heads, is_causal=True)
    found = blocks(asked.launches[0], asked.grid, heads, "longest")
    assert found.work.tolist() == sorted([*range(1, tiles + 1)] * heads, reverse=True)
    assert (found.work == found.members[:, 0] + 1).all()


def test_recorded_kernels_fit_on_an_sm_as_often_as_the_measurement_took_them_to():
    """An H200: shared memory binds some, registers others."""
    rows = [row for row in recorded()["rows"] if row["step"] != "peer"]
    bound = set()
    for row in rows:
        limits = row["shared_bytes"], row["threads"], row["registers"]
        assert blocks_per_sm(device("h200"), *limits) == row["blocks_per_sm"], row
        bound.add(blocks_per_sm(device("h200"), row["shared_bytes"]) == row["blocks_per_sm"])
    assert bound == {True, False}


@pytest.mark.parametrize("registers, fitting", [(128, 4), (129, 3), (168, 3), (169, 2), (255, 2)])
def test_a_warp_gets_registers_by_256(registers, fitting):
    """65,536 registers: a thread's are rounded up to a multiple of eight."""
    assert blocks_per_sm(device("h200"), 1024, threads=128, registers=registers) == fitting


@pytest.mark.parametrize("gpu", DEVICES.values(), ids=DEVICES)
def test_what_a_block_may_use_fits_once_and_more_does_not(gpu):
    assert blocks_per_sm(gpu, gpu.sram_bytes_per_block) == 1
    assert blocks_per_sm(gpu, gpu.sram_bytes_per_block + 1) == 0
    if gpu.name.startswith("NVIDIA"):
        most_blocks, most_threads = MOST[gpu.compute_capability]
        assert blocks_per_sm(gpu, 1024, threads=most_threads) == 1
        assert blocks_per_sm(gpu, 1024, threads=32) == most_blocks


def test_flash1_leaves_most_of_a_gpu_idle_where_heads_are_few():
    """FA2 (arXiv:2307.08691), section 3.2: a block a head fills 108 multiprocessors from 80 on."""
    one, two = waves("flash1", **A100), waves("flash2", **A100)
    assert one.utilisation == pytest.approx(8 / 108)
    assert two.utilisation == pytest.approx(256 / (3 * 108))
    assert one.work.sum() == two.work.sum() == 8 * 32 * 64
    assert one.span / two.span == pytest.approx(2048 / 192)
    many = waves("flash1", **{**A100, "heads": 80})
    assert many.utilisation == pytest.approx(80 / 108)


def test_splitting_the_keys_fills_the_gpu_with_one_query():
    """Flash-Decoding: with N = 65,536 and eight heads, twelve parts, and a twelfth of the time."""
    decode = {**A100, "N": 1, "Nk": 65536}
    whole = waves("flash2", **decode)
    splits = best_splits(len(whole.work), whole.slots, 1024)
    split = waves("flash2", **decode, splits=splits)
    assert splits == 12
    assert whole.utilisation == pytest.approx(8 / 108)
    assert split.utilisation > 0.88
    assert split.work.sum() == whole.work.sum()
    assert whole.span / split.span == pytest.approx(12, abs=0.1)


def test_causal_blocks_balance_better_the_longer_ones_start():
    found = {order: waves("flash2", **A100, is_causal=True, order=order) for order in ORDERS}
    spans = {order: schedule.span for order, schedule in found.items()}
    assert spans["longest"] < spans["reversed"] < spans["forward"]
    assert found["longest"].utilisation > 0.9
    assert len({schedule.work.sum() for schedule in found.values()}) == 1


@pytest.mark.parametrize("slots", [54, 108, 132])
@given(blocks_=st.integers(1, 200), key_tiles=st.integers(1, 300))
def test_splits_are_few_and_nearly_as_full_as_they_can_be(slots, blocks_, key_tiles):
    def fullness(splits):
        filled = blocks_ * splits / slots
        return filled / np.ceil(filled)

    splits = best_splits(blocks_, slots, key_tiles)
    assert 1 <= splits <= min(128, slots, key_tiles)
    if blocks_ >= 0.8 * slots:
        assert splits == 1
        return
    most = min(128, slots, key_tiles)
    lengths = {s: -(-key_tiles // s) for s in range(1, most + 1)}
    useful = [s for s in lengths if s == 1 or lengths[s] < lengths[s - 1]]
    assert splits in useful
    best = max(map(fullness, useful))
    assert fullness(splits) >= 0.85 * best
    assert all(fullness(s) < 0.85 * best for s in useful if s < splits)


@pytest.mark.parametrize(
    "row_blocks, slots, key_tiles, splits",
    [
        # Up to 128 and to the slots. One block is fuller the more it is split: 125 is the last
        # number up to 128 that makes parts shorter, 112 the first of at least 0.85 * 125.
        (1, 1000, 1000, 112),
        # 4 splits, 8 blocks in three waves of 3 places, would be 0.89 full. Up to 3 there are 1 and
        # 2, both 0.67; 3 make parts no shorter than 2 do.
        (2, 3, 4, 1),
        # 17 of 20 places are 0.85 of all of them, which 20 splits fill. 0.85 is enough.
        (1, 20, 1000, 17),
        # 16 blocks fill four fifths of 20 places: not split. 15 are 0.75 full, as twice and three
        # times as many are, and four times as many full.
        (16, 20, 1000, 1),
        (15, 20, 1000, 4),
    ],
)
def test_splits_at_the_limits_of_the_published_rule(row_blocks, slots, key_tiles, splits):
    assert best_splits(row_blocks, slots, key_tiles) == splits


def test_two_splits_of_48_heads_fill_108_multiprocessors_better_than_three():
    """The example in the published kernel's source: 0.89 against 0.67."""
    what = {"N": 1, "Nk": 6 * 64, "d": 64, "Br": 64, "Bc": 64, "heads": 48, "device": "a100"}
    found = [waves("flash2", **what, blocks_an_sm=1, splits=n).utilisation for n in (2, 3)]
    assert found == pytest.approx([0.89, 0.67], abs=0.005)


@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.booleans(),
    st.integers(1, 12),
)  # fmt: skip
def test_parts_of_the_keys_add_up(N, Nk, Br, Bc, causal, splits):
    what = {"N": N, "Nk": Nk, "d": 4, "Br": Br, "Bc": Bc, "is_causal": causal, "blocks_an_sm": 1}
    whole, split = (waves("flash2", **what, splits=n) for n in (1, splits))
    assert len(split.work) == splits * len(whole.work)
    assert (split.work.reshape(-1, splits).sum(axis=1) == whole.work).all()
    key_tiles = -(-Nk // Bc)
    assert split.work.max(initial=0) <= -(-key_tiles // splits)


@pytest.mark.parametrize(
    "what, said",
    [
        ({"algorithm": "standard"}, "algorithm='standard'"),
        ({"algorithm": "flash1", "splits": 2}, "splits=2"),
        ({"order": "paired", "splits": 2}, "splits=2"),
        ({"splits": 0}, "splits=0"),
        ({"order": "best"}, "order='best'"),
        ({"blocks_an_sm": 0}, "blocks_an_sm=0"),
        ({"device": "h900"}, "device='h900'"),
        ({"is_causal": 1}, "is_causal=1"),
        ({"causal_align": "left"}, "causal_align='left'"),
    ],
)
def test_unusable_arguments_are_refused_by_name(what, said):
    given = {"algorithm": "flash2", "N": 64, "d": 8, "Br": 8, "Bc": 8} | what
    with pytest.raises((ValueError, TypeError)) as refusal:
        waves(given.pop("algorithm"), **given)
    assert str(refusal.value).startswith(said)


def test_every_launch_is_of_an_algorithm_in_the_registry():
    assert set(LAUNCHES) <= set(fs.ALGORITHMS)


def invoke(*arguments, columns=120):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, [str(a) for a in arguments])


@pytest.mark.parametrize("columns", [80, 120, 300])
def test_waves_shows_who_leaves_the_gpu_idle(columns):
    result = invoke("waves", "--causal", columns=columns)
    assert result.exit_code == 0, result.output
    assert "108 multiprocessors" in result.stdout
    assert "flash2, longest" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_waves_writes_json_and_csv():
    document = json.loads(invoke("waves", "--json").stdout)
    shown = {record["launch"]: record["utilisation"] for record in document["records"]}
    assert shown["flash1"] == shown["one query"] == pytest.approx(8 / 108)
    rows = list(csv.DictReader(io.StringIO(invoke("waves", "--csv").stdout)))
    assert [row["launch"] for row in rows] == list(shown)


@pytest.mark.parametrize("command", ["waves", "l2"])
def test_tiles_that_fit_in_no_sm_are_said_to(command):
    arguments = [command, "-N", "512", "-d", "64", "--heads", "1", "--device", "a100", "--tiles"]
    text = "do not fit in its 163 KB of shared memory: "
    large = " ".join(invoke(*arguments, "512,512").stdout.split())
    assert text in large
    assert "flash2, 1348 KB" in large
    assert "do not fit" not in invoke(*arguments, "64,64").stdout
    assert "do not fit" not in invoke(*arguments, "512,512", "--blocks", "1").stdout


@pytest.mark.parametrize("causal", [False, True])
def test_the_picture_is_of_the_mask_that_was_asked_for(causal, tmp_path):
    file = tmp_path / "waves.svg"
    assert invoke("waves", "-N", "512", *["--causal"] * causal, "--plot", file).exit_code == 0
    titles = file.read_text()
    assert ("<!-- not causal -->" in titles) == (not causal)
    assert ("<!-- causal, blocks as they come -->" in titles) == causal


def test_waves_draws(tmp_path):
    file = tmp_path / "waves.png"
    assert invoke("waves", "-N", "512", "--plot", file).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tiles", "8"], "--tiles 8"),
        (["--heads", "0"], "heads=0"),
        (["-N", 10**10], f"N={10**10}, heads=8, batch=1: expected at most {2**22} thread blocks"),
        (["-N", 1, "--blocks", 2, "--batch", 2**20], "not 8388608"),
    ],
)
def test_waves_refuses_bad_arguments(arguments, said):
    result = invoke("waves", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
