"""Result files: judged by today's rules, counted by evidence, and current: what they read is as it was."""

import subprocess
import sys

import pytest

from experiments.harness import reads
from experiments.harness.outcome import About, Claim, Evidence, PaperNumber, Unstated, outcome_of
from experiments.harness.reads import changed_since, modules_of, reads_of
from experiments.harness.record import as_record, stored_records
from experiments.harness.tally import counts, summary_of

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
    assert (found["off_without_cause"], found["stale"]) == ([], [])


def test_papers_and_all_are_summed_beside_scripts(records):
    found = summary_of(records)
    assert found[CHEAP]["verdict"] == "OFF"
    assert found[CHEAP]["rows_undetermined"] == 1
    assert found["papers"]["cornstarch_icml"] == found["all"]


def test_counts_of_the_stored_results_add_up():
    for record in stored_records():
        found = counts([record])
        total = sum(found["rows"].values())
        assert total == len(record["rows"]) == sum(sum(one.values()) for one in found["by_evidence"].values())
        assert found["determined"] + found["rows"]["undetermined"] + found["rows"]["refuted"] == total


def test_a_result_is_stale_where_what_it_read_has_changed(records, tmp_path, monkeypatch):
    record = dict(records[0], reads=reads_of(CHEAP))
    assert changed_since(record) == []
    assert changed_since({"script": CHEAP}) == ["not recorded"]
    assert changed_since(record | {"reads": record["reads"] | {"modules": "0"}}) == ["modules"]
    data = tmp_path / "data.csv"
    data.write_text("1\n")
    monkeypatch.setattr(reads, "ROOT", tmp_path)
    assert data.read_text() == "1\n"
    assert reads.opened_files() == {"data.csv"}
    kept = {"data.csv": reads.hash_of(data)}
    monkeypatch.setattr(reads, "modules_hash", lambda _: "m")
    record = {"script": CHEAP, "reads": {"modules": "m", "files": kept}}
    assert changed_since(record) == []
    data.write_text("2\n")
    assert changed_since(record) == ["data.csv"]


def test_docstrings_do_not_count_and_code_does(tmp_path):
    texts = ('"""One."""\nX = "a"\n', '"""Two\n\nlines."""\nX = "a"\n', '"""One."""\nX = "b"\n')
    hashes = []
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.py").write_text(text)
        hashes.append(reads._module(tmp_path / f"{index}.py")[0])
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("script", [CHEAP, "oobleck/table2_2"])
def test_whatever_a_script_has_imported_counts(script):
    """Nothing of the project is loaded by its imports that the closure of names misses."""
    code = (
        f"import experiments.{script.replace('/', '.')}, sys\n"
        "for name, m in sys.modules.items():\n"
        "    if name.partition('.')[0] in ('workbench', 'sim', 'runtime', 'experiments'): print(m.__file__)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=reads.ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    named = {str(path) for path in modules_of(script)}
    without_effect = {str(reads.ROOT / name) for name in reads.WITHOUT_EFFECT}
    assert loaded
    assert set(loaded) <= named | without_effect
