"""The sums of gradients that are timed alone and beside computing."""

from experiments.bench import reduction
from runtime.world.pool import Pool


def test_the_slower_rank_counts_and_ratios_are_of_quartiles():
    ways = {"there": 1.0, "made": 2.0, "beside": 5.0, "one": 1.0, "one_beside": 3.0}
    one, other = ({name: [s * k * r for r in (1, 2, 3, 4)] for name, s in ways.items()} for k in (1, 2))
    found = reduction.summarised([one, other])
    assert found["made_s"] == 8.0
    assert (found["shared"], found["one_shared"]) == (2.5, 3.0)


def test_every_way_is_timed_in_every_round(pool: Pool) -> None:
    by_rank = pool.run(reduction.seconds, 2, 2, timeout_s=60.0)
    for ours in by_rank:
        assert {len(times) for times in ours.values()} == {2}
        assert all(second > 0 for times in ours.values() for second in times)
