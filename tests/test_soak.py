"""Long runs: what processes hold is read, growth is told from noise, and each load can be sampled."""

import json
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.soak.__main__ import growths, lines, main
from experiments.soak.draw import drawing
from experiments.soak.growth import growth, theil_sen
from experiments.soak.sampling import Resources, Series, resources_of


def test_a_descriptor_a_thread_and_a_megabyte_are_seen():
    before = resources_of(os.getpid())
    with tempfile.TemporaryFile():
        ballast = mmap.mmap(-1, 2**24)  # no allocator has such pages already
        ballast.write(b"x" * 2**24)
        after = resources_of(os.getpid())
    assert after.descriptors == before.descriptors + 1
    assert after.uss_bytes - before.uss_bytes >= 2**23
    assert len(ballast) == 2**24
    assert after.rss_bytes >= after.uss_bytes


class TestGrowth:
    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 10**6), st.floats(-5, 5))
    def test_the_slope_is_the_median_of_all_pairs(self, seed: int, slope: float):
        rng = np.random.default_rng(seed)
        x = np.sort(rng.uniform(0, 100, 12))
        y = slope * x + rng.normal(0, 1, 12)
        pairs = [(y[j] - y[i]) / (x[j] - x[i]) for i in range(12) for j in range(i + 1, 12)]
        assert theil_sen(x, y) == pytest.approx(np.median(pairs))

    def test_a_leak_is_found_within_its_interval_under_noise_that_stays(self):
        rng = np.random.default_rng(1)
        done = [*range(0, 2000, 20)]
        noise = np.zeros(len(done))
        for index in range(1, len(done)):
            noise[index] = 0.8 * noise[index - 1] + rng.normal(0, 2000)
        leaking = growth(done, [10**6 + 40 * step + n for step, n in zip(done, noise, strict=True)])
        assert leaking.low < 40_000 < leaking.high
        assert leaking.low > 0
        assert not leaking.is_flat
        assert growth(done, 10**6 + noise).is_flat

    def test_what_grows_while_it_warms_up_or_once_is_flat(self):
        done = [*range(0, 2000, 20)]
        assert growth(done, [min(step, 400) * 1e4 for step in done]).is_flat
        assert growth(done, [10**8 + (step > 1500) * 10**5 for step in done]).is_flat

    def test_a_leak_too_small_to_meet_is_told_and_called_flat(self):
        done = [*range(0, 20_000, 200)]
        found = growth(done, [5e7 + 3.2 * each for each in done])
        assert found.per_1000 == pytest.approx(3200)
        assert found.is_flat

    def test_too_few_samples_are_refused(self):
        with pytest.raises(ValueError, match="at least 8 samples"):
            growth([*range(8)], [1.0] * 8)


def test_leaks_are_named_and_drawn():
    series = Series()
    for step in range(40):
        series.done.append(50 * step)
        for name, more in (("rank 0", 0), ("rank 1", 1)):
            each = Resources(rss_bytes=10**8, uss_bytes=10**7, descriptors=10 + more * step, threads=2)
            series.by_process.setdefault(name, []).append(each)
    record = growths({"run": series})
    assert record["leaks"] == ["run/rank 1/descriptors"]
    assert record["growth"]["run/rank 1/descriptors"]["per_1000"] == pytest.approx(20)
    assert lines(record)[-1] == "leaks: run/rank 1/descriptors"
    assert [[panel.title for panel in row if panel] for row in drawing({"run": series}).rows] == [["run"]] * 4


def test_pages_that_a_fork_copies_are_no_leak():
    series = Series()
    for step in range(40):
        series.done.append(50 * step)
        copied = Resources(rss_bytes=10**8, uss_bytes=10**7 + 10**5 * step, descriptors=9, threads=2)
        leaking = Resources(
            rss_bytes=10**8 + 10**5 * step, uss_bytes=10**7 + 10**5 * step, descriptors=9, threads=2
        )
        series.by_process.setdefault("fork", []).append(copied)
        series.by_process.setdefault("leaks", []).append(leaking)
    assert growths({"run": series})["leaks"] == ["run/leaks/rss_bytes", "run/leaks/uss_bytes"]


def test_a_process_that_is_gone_leaves_the_sample_out():
    series = Series()
    series.sample(1, {"own": os.getpid()})
    series.sample(2, {"own": os.getpid(), "gone": 2**22 + 1})
    assert series.done == [1]
    assert list(series.by_process) == ["own"]


def test_steps_of_a_run_are_sampled_and_recorded(tmp_path: Path, capsys):
    main(["--steps", "100", "--load", "run", "--out", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads((tmp_path / "soak.json").read_text())
    processes = {name.split("/")[1] for name in record["growth"]}
    assert processes == {"supervisor", "rank 0", "rank 1"}
    assert record["growth"]["run/rank 0/descriptors"]["per_1000"] == 0
    assert (tmp_path / "soak.png").stat().st_size > 10_000
