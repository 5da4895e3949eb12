"""Result files: judged by today's rules, counted by evidence, and current: what they read is as it was."""

import json
import subprocess
import sys

import pytest

from experiments.harness import reads, record, script
from experiments.harness.outcome import About, Claim, Evidence, PaperNumber, Unstated, outcome_of
from experiments.harness.reads import changed_since, modules_of, reads_of
from experiments.harness.record import as_record, stored_records
from experiments.harness.tally import changes, counts, records_at, summary_of
from experiments.renew import in_order, is_stale

CHEAP = "cornstarch_icml/table1"


def number(key: str) -> PaperNumber:
    return PaperNumber(key, 100.0, "ms", "Table 1", 0.05)


@pytest.fixture(scope="module")
def records():
    evidence = Evidence(claims=[Claim("wins", True), Claim("sums up", False, About.BOOKKEEPING)])
    evidence.add(number("modelled/a"), 101.0)
    evidence.add(number("modelled/b"), 200.0)
    evidence.add(number("modelled/c"), 100.0, Unstated("batch", 10.0, 100.0, "1", "10"))
    evidence.add(number("itself/a"), 100.0)
    evidence.causes["modelled/b"] = "another kernel"
    return [as_record(outcome_of(CHEAP, [evidence]))]


def test_rows_are_counted_by_evidence_and_claims_by_subject(records):
    found = counts(records)
    assert found["by_evidence"]["reproduced by our models"] == {"ok": 1, "undetermined": 1, "OFF": 1}
    assert found["by_evidence"]["the paper's own arithmetic"] == {"ok": 1}
    assert (found["determined"], found["determined_ok"], found["undetermined_near"]) == (3, 2, 1)
    assert found["claims"]["the paper"] == {"hold": 1, "fail": 0}
    assert found["claims"]["bookkeeping"] == {"hold": 0, "fail": 1}
    assert (found["off_without_cause"], found["idle_causes"], found["stale"]) == ([], [], [])
    assert found["claims_without_cause"] == [f"{CHEAP}: sums up"]


def test_papers_and_all_are_summed_beside_scripts(records):
    found = summary_of(records)
    assert found[CHEAP]["verdict"] == "OFF"
    assert found[CHEAP]["rows_undetermined"] == 1
    assert found["papers"]["cornstarch_icml"] == found["all"]


def test_counts_of_the_stored_results_add_up():
    for each in stored_records():
        found = counts([each])
        total = sum(found["rows"].values())
        assert total == len(each["rows"]) == sum(sum(one.values()) for one in found["by_evidence"].values())
        assert found["determined"] + found["rows"]["undetermined"] + found["rows"]["refuted"] == total


def test_stored_claims_that_fail_have_a_cause_where_results_have_causes():
    """Results from before causes of claims are left to the next renewal, which `tests/release.py` demands."""
    with_causes = [each for each in stored_records() if "idle_causes" in json.loads(_stored(each))]
    assert counts(with_causes)["claims_without_cause"] == []


def _stored(record) -> str:
    return (reads.ROOT / f"experiments/results/{record['script'].replace('/', '_')}.json").read_text()


def test_a_result_is_stale_where_what_it_read_has_changed(records, tmp_path, monkeypatch):
    kept = dict(records[0], reads=reads_of(CHEAP))
    assert changed_since(kept) == []
    assert changed_since({"script": CHEAP}) == ["not recorded"]
    assert changed_since(kept | {"reads": kept["reads"] | {"modules": "0"}}) == ["modules"]
    data = tmp_path / "data.csv"
    data.write_text("1\n")
    monkeypatch.setattr(reads, "ROOT", tmp_path)
    assert data.read_text() == "1\n"
    assert reads.opened_files() == {"data.csv"}
    files = {"data.csv": reads.hash_of(data)}
    monkeypatch.setattr(reads, "modules_hash", lambda _: "m")
    kept = {"script": CHEAP, "reads": {"modules": "m", "files": files}}
    assert changed_since(kept) == []
    data.write_text("2\n")
    assert changed_since(kept) == ["data.csv"]


def test_a_result_of_uncommitted_modules_is_not_kept(records, tmp_path, monkeypatch, capsys):
    outcome = outcome_of(CHEAP, [])
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "uncommitted", lambda paths: ["a.py"])
    script.keep(outcome)
    assert "not kept, because a.py differs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with record.results_in(tmp_path / "elsewhere"):
        script.keep(outcome)
    assert [path.name for path in tmp_path.rglob("*.json")] == ["cornstarch_icml_table1.json"]


def test_rows_that_left_say_why():
    def kept(verdict: str, **more):
        row = record.as_record(outcome_of(CHEAP, [Evidence([number("modelled/a")], {"modelled/a": 50.0})]))
        row["rows"][0] |= {"verdict": verdict} | more
        return row

    unstated = {"what": "batch", "low": 50.0, "high": 150.0, "low_at": "one", "high_at": "three"}
    found = changes([kept("OFF")], [kept("undetermined", unstated=unstated)])["cornstarch_icml"]
    assert (found["determined_before"], found["determined"]) == (1, 0)
    assert found["left"] == {"table1: modelled/a": "batch: 50 (one) .. 150 (three)"}
    assert changes([kept("UNDERSPECIFIED")], [kept("ok")])["cornstarch_icml"]["left"] == {}
    with pytest.raises(ValueError, match="git"):
        records_at("no-such-commit")


def test_docstrings_do_not_count_and_code_does(tmp_path):
    texts = ('"""One."""\nX = "a"\n', '"""Two\n\nlines."""\nX = "a"\n', '"""One."""\nX = "b"\n')
    hashes = []
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.py").write_text(text)
        hashes.append(reads._module(tmp_path / f"{index}.py")[0])
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", [CHEAP, "oobleck/table2_2"])
def test_whatever_a_script_has_imported_counts(name):
    """Nothing of the project is loaded by its imports that the closure of names misses."""
    code = (
        f"import experiments.{name.replace('/', '.')}, sys\n"
        "for each, m in sys.modules.items():\n"
        "    if each.partition('.')[0] in ('workbench', 'sim', 'runtime', 'experiments'): print(m.__file__)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=reads.ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    named = {str(path) for path in modules_of(name)}
    without_effect = {str(reads.ROOT / name) for name in reads.WITHOUT_EFFECT}
    assert loaded
    assert set(loaded) <= named | without_effect


def test_results_that_others_read_are_renewed_first():
    reads = {"modules": "", "files": {"experiments/results/paper_first.json": ""}}
    records = {"paper/a": {"reads": reads}, "paper/first": {"reads": None}}
    assert in_order(["paper/a", "paper/first", "paper/new"], records) == [
        "paper/first",
        "paper/new",
        "paper/a",
    ]


def test_a_circle_of_readers_is_renewed_all_the_same():
    records = {
        f"paper/{one}": {"reads": {"files": {f"experiments/results/paper_{other}.json": ""}}}
        for one, other in ("ab", "ba")
    }
    assert in_order(["paper/a", "paper/b"], records) == ["paper/a", "paper/b"]


def test_stale_is_what_is_missing_dirty_or_changed(records):
    (record,) = records
    clean = record | {"commit": "0123456789ab"}
    assert not is_stale(clean)
    assert is_stale(None)
    assert is_stale(clean | {"commit": "0123456789ab-dirty"})
    assert is_stale(clean | {"reads": record["reads"] | {"modules": "others"}})
