"""Verdicts of a comparison with a paper, the printed tables, and what printed times imply."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cornstarch.modelled_tables import all_implied_stages, implied_stages
from experiments.harness import record
from experiments.harness.causes import open_cause
from experiments.harness.outcome import Bound, Claim, Evidence, PaperNumber, Unstated, Verdict, outcome_of
from experiments.harness.printed import REFERENCE, claim_value, is_true, printed_rows
from experiments.harness.script import reproduce

HUNDRED = PaperNumber("printed/x", 100.0, "ms", "Table 1", 0.05)


def named(low: float, high: float) -> Unstated:
    return Unstated.over("batch", {"many": high, "one": low})


def verdict_of(ours, unstated=None):
    values = {} if ours is None else {"printed/x": ours}
    given_unstated = {} if unstated is None else {"printed/x": unstated}
    return outcome_of("p/t", [Evidence(paper=[HUNDRED], ours=values, unstated=given_unstated)])


@pytest.mark.parametrize(
    ("ours", "unstated", "expected", "status"),
    [
        pytest.param(104.9, None, Verdict.OK, 0, id="within"),
        pytest.param(105.0, None, Verdict.OK, 0, id="edge"),
        pytest.param(105.2, None, Verdict.OFF, 1, id="above"),
        pytest.param(94.8, None, Verdict.OFF, 1, id="below"),
        pytest.param(None, None, Verdict.MISSING, 1, id="missing"),
        pytest.param(None, Unstated("batch", 1.0, 200.0), Verdict.MISSING, 1, id="range-without-value"),
        pytest.param(104.0, Unstated("batch", 90.0, 180.0), Verdict.OK_AT_DEFAULT, 0, id="default-fits"),
        pytest.param(180.0, named(90.0, 180.0), Verdict.IN_RANGE, 0, id="some-setting-fits"),
        pytest.param(180.0, named(104.0, 200.0), Verdict.IN_RANGE, 0, id="edge-within-tolerance"),
        pytest.param(180.0, named(120.0, 200.0), Verdict.OFF, 1, id="no-setting-fits"),
        pytest.param(180.0, named(90.0, 181.0), Verdict.UNDETERMINED, 0, id="wider-than-twice"),
        pytest.param(104.0, named(50.0, 101.0), Verdict.UNDETERMINED, 0, id="wide-though-default-fits"),
        pytest.param(180.0, named(0.0, 180.0), Verdict.UNDETERMINED, 0, id="from-nothing"),
        pytest.param(
            180.0, Unstated("batch", 90.0, 180.0), Verdict.OFF, 1, id="nameless-ends-excuse-nothing"
        ),
    ],
)
def test_verdict(ours, unstated, expected, status):
    outcome = verdict_of(ours, unstated)
    assert outcome.rows[0].verdict is expected
    assert outcome.verdict is expected
    assert outcome.exit_status == status


def test_off_is_shown_with_its_place():
    text = record.table(verdict_of(150.0))
    assert "OFF (Table 1)" in text
    assert "1.50" in text


def test_a_range_is_shown_with_both_ends_and_their_settings():
    text = record.table(verdict_of(180.0, named(90.0, 170.0)))
    assert "in range (Table 1); unstated: batch; ours 90 (one) .. 170 (many)" in text


@pytest.mark.parametrize(
    ("bound", "ours", "expected"),
    [
        pytest.param(Bound(what="stage times", low=101.0), 100.0, Verdict.REFUTED, id="below"),
        pytest.param(Bound(what="stage times", high=99.0), 200.0, Verdict.REFUTED, id="above"),
        pytest.param(Bound(what="stage times", low=100.0, high=100.0), 200.0, Verdict.OFF, id="inside"),
        pytest.param(Bound(what="stage times", low=101.0), None, Verdict.MISSING, id="nothing-of-ours"),
    ],
)
def test_a_bound_of_the_papers_own_numbers_refutes(bound, ours, expected):
    values = {} if ours is None else {"printed/x": ours}
    outcome = outcome_of("p/t", [Evidence(paper=[HUNDRED], ours=values, bounds={"printed/x": bound})])
    assert outcome.verdict is expected
    assert ("by the paper's own numbers" in record.table(outcome)) == (expected is Verdict.REFUTED)


def test_what_is_off_says_why():
    evidence = Evidence(causes={"modelled/*": "another kernel", "printed/?": "another link"})
    evidence.add(HUNDRED, 200.0)
    assert "cause: another link" in record.table(outcome_of("p/t", [evidence]))
    assert "cause: not known" in record.table(verdict_of(200.0))


def test_a_claim_that_fails_says_why():
    evidence = Evidence(causes={"tall: *": "no headroom"})
    evidence.claim("tall: it wins", holds=False)
    evidence.claim("wide [1]: it wins", holds=False, cause="another link")
    evidence.claim("flat: it wins", holds=False)
    outcome = outcome_of("p/t", [evidence])
    assert [claim.cause for claim in outcome.claims] == ["no headroom", "another link", ""]
    assert outcome.idle_causes == ()
    text = record.table(outcome)
    assert "claim: tall: it wins FAILS; cause: no headroom" in text
    assert "claim: flat: it wins FAILS; cause: not known" in text
    kept = record.as_record(outcome)
    assert [claim["cause"] for claim in kept["claims"]] == ["no headroom", "another link", ""]
    older = kept | {"claims": [{"text": "it wins", "holds": False}]}
    del older["idle_causes"]
    assert record.judged_again(older)["claims"][0]["cause"] == ""


def test_a_claims_own_cause_goes_before_a_pattern():
    evidence = Evidence(causes={"*: it wins": "no headroom"})
    evidence.claim("wide: it wins", holds=False, cause="another link")
    evidence.claim("flat: it wins", holds=False)
    assert [claim.cause for claim in outcome_of("p/t", [evidence]).claims] == ["another link", "no headroom"]


def test_a_cause_of_nothing_is_dropped_and_shown():
    evidence = Evidence(causes={"printed/*": "another kernel", "tall: *": "no headroom"})
    evidence.add(HUNDRED, 100.0)
    evidence.claim("tall: it wins", holds=True)
    evidence.claim("wide [1]: it wins", holds=True, cause="another link")
    outcome = outcome_of("p/t", [evidence])
    assert [claim.cause for claim in outcome.claims] == ["", ""]
    assert outcome.idle_causes == ("printed/*", "tall: *")
    assert "idle cause: nothing of tall: * is off or fails" in record.table(outcome)


def test_the_cause_of_an_open_claim_names_where_it_holds():
    ours = {"causal": 1.2, "lambda": 0.9, "blocks": 0.8}
    text = open_cause(ours, lambda ratio: ratio < 1, "the mask")
    assert text.startswith("open: it holds at 2 of 3 settings of the mask,")
    assert text.endswith("such as lambda (0.9)")
    text = open_cause(ours, lambda ratio: ratio > 2, "the mask")
    assert text.startswith("at none of 3 settings of the mask,")
    assert text.endswith("0.8 (blocks) .. 1.2 (causal)")


def test_missing_is_never_filled_in():
    kept = record.as_record(verdict_of(None))
    assert kept["rows"][0]["ours"] is None
    assert kept["ours"] == {}
    assert kept["verdict"] == "MISSING"


def test_failed_claim_is_off_though_all_rows_agree():
    claims = [Claim("it wins", False)]
    outcome = outcome_of("p/t", [Evidence(paper=[HUNDRED], ours={"printed/x": 100.0}, claims=claims)])
    assert outcome.verdict is Verdict.OFF
    assert "it wins FAILS" in record.table(outcome)


def test_a_script_with_claims_alone_counts_them():
    """It has no rows whose verdicts could be counted."""
    claims = [Claim("it wins", False), Claim("it ends", True), Claim("it starts", True)]
    last = record.table(outcome_of("p/t", [Evidence(paper=[], ours={}, claims=claims)])).splitlines()[-1]
    assert last == "p/t: OFF (2 claims hold, 1 claims fail)"
    rows = record.table(outcome_of("p/t", [Evidence(paper=[HUNDRED], ours={"printed/x": 100.0})]))
    assert rows.splitlines()[-1] == "p/t: ok (1 ok)"


def test_worst_verdict_wins():
    numbers = [PaperNumber(f"printed/{k}", 1.0, "s", "T", 0.1) for k in "abc"]
    ours = {"printed/a": 1.0, "printed/b": 2.0}
    assert outcome_of("p/t", [Evidence(paper=numbers, ours=ours)]).verdict is Verdict.MISSING
    assert outcome_of("p/t", [Evidence(paper=numbers[:2], ours=ours)]).verdict is Verdict.OFF


def test_a_range_shows_the_likeliest_value_and_spans_all():
    evidence = Evidence()
    evidence.add_range(HUNDRED, {"8": 180.0, "1": 90.0, "16": 200.0}, "batch")
    (row,) = outcome_of("p/t", [evidence]).rows
    assert row.ours == 180.0
    assert row.unstated == Unstated("batch", 90.0, 200.0, "1", "16")
    assert row.verdict is Verdict.UNDETERMINED
    evidence = Evidence()
    evidence.add_range(HUNDRED, [180.0, 90.0, 200.0], "batch")
    (row,) = outcome_of("p/t", [evidence]).rows
    assert row.unstated == Unstated("batch", 90.0, 200.0)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: PaperNumber("x", 0.0, "s", "T", 0.1), id="zero"),
        pytest.param(lambda: PaperNumber("x", 1.0, "s", "T", 1.5), id="tolerance"),
        pytest.param(lambda: Unstated("", 1.0, 2.0), id="unnamed"),
        pytest.param(lambda: Unstated("tp", 2.0, 1.0), id="empty-range"),
        pytest.param(lambda: Unstated("tp", 1.0, float("nan")), id="nan-range"),
        pytest.param(lambda: outcome_of("s", [Evidence(paper=[HUNDRED, HUNDRED])]), id="twice"),
        pytest.param(lambda: outcome_of("s", [Evidence(unstated={"y": Unstated("tp", 1, 2)})]), id="unknown"),
        pytest.param(lambda: outcome_of("s", [Evidence(bounds={"y": Bound(what="z")})]), id="bound-of-none"),
        pytest.param(lambda: PaperNumber("x", 1.0, "s", "T", 0.1).kind, id="evidence"),
        pytest.param(lambda: reproduce(["no_such_paper"]), id="no-script"),
        pytest.param(lambda: printed_rows("no_such_table"), id="no-table"),
        pytest.param(lambda: claim_value("no_such_claim"), id="no-claim"),
        pytest.param(lambda: is_true("yes"), id="no-boolean"),
    ],
)
def test_refuses(build):
    with pytest.raises(ValueError):
        build()


def test_result_file_round_trips(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.write(verdict_of(102.0))
    kept = json.loads(path.read_text())
    assert path.name == "p_t.json"
    assert kept["ours"] == {"printed/x": 102.0}
    assert {"commit", "command", "plan_hashes", "profile", "seeds", "device", "date"} <= kept.keys()
    assert kept["rows"][0]["verdict"] == "ok"
    assert kept["rows"][0]["evidence"] == "by the paper's stage times"
    assert record.judged_again(kept) == kept


@pytest.mark.parametrize("name", sorted(path.stem for path in REFERENCE.glob("*.csv")))
def test_printed_table_parses(name):
    rows = printed_rows(name)
    assert rows
    units = ("_ms", "_s", "_x", "_b", "_pp", "_tp", "_cp", "_per_gpu")
    for row in rows:
        for column, cell in row.items():
            if column.endswith(units) and cell:
                assert float(cell) >= 0, (name, column, cell)


def test_printed_sizes():
    assert len(printed_rows("cornstarch_icml_table2")) == 18
    assert [len(printed_rows(f"cornstarch_v1_table{n}")) for n in (3, 9, 10, 11)] == [12, 36, 12, 12]
    assert claim_value("cs_icml_frozen_pp_max") == 2.46


@given(
    total=st.floats(1.0, 1e4),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_implied_counts_are_the_true_ones_up_to_a_factor(total, counts):
    found = implied_stages([total / count for count in counts], max_stages=6, max_spread=0.01)
    assert found is not None
    ratios = {count / other for count, other in zip(found.counts, counts, strict=True)}
    assert max(ratios) - min(ratios) < 1e-12
    assert max(ratios) <= 1


def test_all_counts_that_fit_are_found_and_no_others():
    """Totals of 12: one, two and three stages, or twice as many; with at most 4 only the first."""
    for most, expected in ((6, [(1, 2, 3), (2, 4, 6)]), (4, [(1, 2, 3)])):
        found = all_implied_stages([12.0, 6.0, 4.0], max_stages=most, max_spread=0.01)
        assert [each.counts for each in found] == expected


@given(st.lists(st.floats(1.0, 10.0), min_size=2, max_size=3))
def test_no_smaller_counts_fit(times):
    """Oracle: every combination of counts, smallest count of the slowest row first."""
    found = implied_stages(times, max_stages=4, max_spread=0.05)
    slowest = max(range(len(times)), key=times.__getitem__)
    fits = [
        counts
        for counts in product(range(1, 5), repeat=len(times))
        if max(c * t for c, t in zip(counts, times, strict=True))
        <= 1.05 * min(c * t for c, t in zip(counts, times, strict=True))
    ]
    if found is None:
        assert not fits
    else:
        assert found.counts in fits
        assert found.counts[slowest] == min(counts[slowest] for counts in fits)
