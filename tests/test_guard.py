"""What must not change while code moves has not changed, and the guard sees it where it does."""

import json
import math
from dataclasses import replace
from inspect import signature

import pytest

from runtime.world.pool import Pool
from tests.guard import entries, project
from tests.guard.__main__ import check_few, main
from tests.guard.stored import STORED, Stored, compare, read, write

HERE = {"cpu": "this one", "torch": "2"}
RUN = {"loss": 4.0, "gradient_norm": 1.0, "gradients": "aa", "weights": "bb"}
ENTRY = {"plan": {"hash": "12", "engine": "34"}, "run": RUN}
BEFORE = Stored(HERE, {"a plan": ENTRY, "a refusal": {"refused": "too few ranks"}})


def test_nothing_has_changed(pool: Pool) -> None:
    before = read(STORED)
    verdict = check_few(before, pool)
    assert list(verdict.lines()) == [f"new: {name}" for name in verdict.new]


def test_file_covers_every_pair_and_every_strategy_has_a_plan():
    stored = read(STORED).entries
    names = {str(case) for case in entries.cases()}
    planned = {name for name in names & stored.keys() if "plan" in stored[name]}
    for strategy in project.STRATEGIES:
        assert any(name.split()[1] == strategy for name in planned), strategy
    for schedule in project.SCHEDULES:
        assert any(name.split()[2] == schedule for name in planned), schedule
    assert all(stored[name]["run"].keys() >= {"loss", "weights"} for name in planned)
    assert all(len(set(stored[name]["plan"]["iteration_s"])) == 1 for name in planned)


def test_result_files_are_made_again_by_a_script_without_arguments_or_say_why_not():
    for name in entries.result_hashes().keys() - entries.NOT_MADE_AGAIN.keys() - entries.KEPT_BY_HASH.keys():
        script = json.loads((project.RESULT_FILES / name).read_text())["script"]
        assert not signature(project.script_run(script)).parameters, name


def test_jobs_differ_as_they_say():
    jobs = entries.jobs()
    assert len(jobs) >= 3
    held = project.accepted(jobs["missing"], "cornstarch", "1f1b").lowered.plan
    assert {stage.replica for stage in held.stages} == {0, 1}
    modalities = [{segment.modality for segment in sample.segments} for sample in held.batch]
    assert {"text"} in modalities
    assert {"text", "vision", "audio"} in modalities


def test_last_bit_of_a_float_counts():
    assert project.digest([0.1]) == project.digest([0.1])
    assert project.digest([0.1]) != project.digest([math.nextafter(0.1, 1)])


def changed(name: str, entry: dict, machine: dict = HERE) -> dict:
    """What is said of an entry that is now so."""
    now = Stored(machine, {**BEFORE.entries, name: entry})
    return dict(compare(BEFORE, now, set(now.entries)).changed)


def test_equal_entries_hold():
    assert compare(BEFORE, BEFORE, set(BEFORE.entries)).holds


def test_changes_are_named():
    plan = {"hash": "12", "engine": "56"}
    assert changed("a plan", ENTRY | {"plan": plan}) == {"a plan": "plan.engine 34 -> 56"}
    assert changed("a plan", {"refused": "no"}) == {"a plan": "refused a plan -> no"}
    assert changed("a refusal", {"refused": "no"}) == {"a refusal": "refused too few ranks -> no"}
    assert changed("a refusal", ENTRY) == {"a refusal": "refused too few ranks -> a plan"}
    off = ENTRY | {"run": RUN | {"weights": "cc"}}
    assert changed("a plan", off) == {"a plan": "run.weights bb -> cc"}
    assert changed("a plan", ENTRY | {"run": {"refused": "no"}})["a plan"].endswith(
        "run.refused nothing -> no"
    )


def test_changes_are_counted_by_what_changed():
    entries = {
        "plan": ENTRY | {"plan": {"hash": "21", "engine": "0"}},
        "times": ENTRY | {"plan": ENTRY["plan"] | {"engine": "0"}},
        "both": {"plan": ENTRY["plan"] | {"engine": "0"}, "run": RUN | {"loss": 5.0}},
        "refused": {"refused": "no"},
        "file": {"in_file": 2},
    }
    before = Stored(HERE, dict.fromkeys(entries, ENTRY) | {"file": {"in_file": 3}})
    found = compare(before, Stored(HERE, entries), set(entries))
    assert {kind: count for kind, count in found.kinds.items() if count} == {
        "refused before or now": 1,
        "another plan": 1,
        "other times of the same plan": 2,
        "other loss, gradients or weights of the same plan": 1,
        "result files": 1,
    }


def test_a_plan_that_is_not_executed_this_time_has_not_changed():
    assert changed("a plan", {"plan": ENTRY["plan"]}) == {}


def test_elsewhere_numbers_are_near_and_bits_do_not_count():
    there = HERE | {"cpu": "another"}
    near = RUN | {"loss": 4.0 * (1 + 1e-14), "gradients": "cc", "weights": "dd"}
    assert changed("a plan", ENTRY | {"run": near}, there) == {}
    assert "run.loss" in changed("a plan", ENTRY | {"run": near})["a plan"]
    far = RUN | {"loss": 4.0 * (1 + 1e-10)}
    assert changed("a plan", ENTRY | {"run": far}, there) == {"a plan": f"run.loss 4.0 -> {far['loss']}"}
    assert "plan.hash" in changed("a plan", ENTRY | {"plan": {"hash": "21", "engine": "34"}}, there)["a plan"]


def test_other_hashes_than_an_earlier_version_has_are_listed_apart():
    tables = {"one": {"hashes": "12", "in_file": 3}, "two": {"hashes": "12", "in_file": 3}}
    before = Stored(HERE, tables, version=2)
    after = tables | {"one": {"hashes": "34", "in_file": 3}, "two": {"hashes": "34", "in_file": 2}}
    verdict = compare(before, replace(before, entries=after), set(after))
    assert verdict.rehashed == ("one", "two")
    assert verdict.changed == {"two": "in_file 3 -> 2"}
    assert compare(replace(before, version=3), replace(before, entries=after), set(after)).rehashed == ()


def test_new_entries_are_welcome_and_gone_ones_are_not():
    more = replace(BEFORE, entries={**BEFORE.entries, "one more": ENTRY})
    verdict = compare(BEFORE, more, set(more.entries))
    assert verdict.holds
    assert list(verdict.lines()) == ["new: one more"]
    verdict = compare(more, BEFORE, set(BEFORE.entries))
    assert not verdict.holds
    assert list(verdict.lines()) == ["gone: one more"]


def test_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "stored.json"
    write(BEFORE, path)
    assert read(path) == BEFORE
    assert len(path.read_text().splitlines()) == len(BEFORE.entries) + 4
    assert json.loads(path.read_text())["machine"] == HERE


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    assert main(["--check", "--file", str(tmp_path / "none.json")]) == 2
    assert "want a file that --update wrote" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--update", "--reduced"])


def test_only_cases_that_there_are_can_be_renewed(tmp_path, capsys):
    kept = tmp_path / "stored.json"
    write(Stored(project.machine(), BEFORE.entries), kept)
    held = kept.read_text()
    assert main(["--update", "--only", "no such case", "--file", str(kept)]) == 2
    assert "no case has 'no such case' in its name" in capsys.readouterr().err
    write(Stored(project.machine(), BEFORE.entries), kept)
    assert kept.read_text() == held


def test_runs_of_another_machine_are_kept_with_their_plans_alone(tmp_path, capsys):
    kept, name = tmp_path / "stored.json", "trained fsdp 1f1b"
    stored = read(STORED).entries[name]
    aged = stored | {"plan": stored["plan"] | {"memory": "of an earlier account"}}
    write(Stored({"cpu": "another", "torch": "0"}, {name: aged}), kept)
    assert main(["--update", "--only", name, "--file", str(kept)]) == 0
    assert read(kept) == Stored({"cpu": "another", "torch": "0"}, {name: stored})
    write(Stored({"cpu": "another", "torch": "0"}, BEFORE.entries), kept)
    held = kept.read_text()
    assert main(["--update", "--only", name, "--file", str(kept)]) == 2
    assert "another plan than the stored one" in capsys.readouterr().err
    assert kept.read_text() == held
