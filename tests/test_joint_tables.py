"""What a joint search prints of what it began with."""

from workbench.planner.stage_counts import OUT_OF_TIME
from workbench.report.joint_tables import joint_table

RECORD = {
    "job": "j",
    "objective": "time",
    "joint_s": 0.2,
    "gain": 1.5,
    "best_single": "fsdp",
    "best_single_s": 0.3,
    "best_from": "fsdp",
    "lower_bound_s": 0.1,
    "gap": 0.5,
    "candidates": 10,
    "seconds": 25.0,
    "search_s": 5.0,
    "candidates_per_s": 2.0,
    "path": [],
}


def test_starts_that_ran_out_of_time_are_told() -> None:
    starts = [{"strategy": "fsdp", "iteration_s": 0.3}, {"strategy": "hsdp", "refusal": "does not fit"}]
    first, _, _ = joint_table({**RECORD, "starts": starts})
    assert first == "200 ms a step, 1.500 times as fast as the best strategy, fsdp with 300 ms"
    late = {"strategy": "oobleck", "refusal": OUT_OF_TIME}
    stopped = {"strategy": "dip", "iteration_s": 0.4, "stopped": True}
    first, _, last, *unjudged = joint_table({**RECORD, "starts": [*starts, late, stopped]})
    assert first == "200 ms a step, 1.500 times as fast as the best start judged in time, fsdp with 300 ms"
    assert str(last).endswith("10 candidates in 5.0 s after 20.0 s of starts, 2 a second")
    assert unjudged == [
        "2 of 4 starts planned in full; a larger --budget plans the others:",
        "  stopped, with their best plans so far: dip",
        "  not judged, out of time: oobleck",
    ]
