"""Plan files: exact round trip, a hash of the content, and one clear line for every damage."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plans import disjoint_plan, sample, sealed, two_encoders
from workbench.plan.codec import dumps, loads, plan_hash, read_plan, write_plan

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}
PLAN = disjoint_plan(two_encoders(), [sample(i, images=i % 3) for i in range(4)], CUTS)
TEXT = dumps(PLAN)


def edited(edit) -> str:
    document = json.loads(TEXT)
    edit(document)
    return json.dumps(document)


def resealed(edit) -> str:
    """Edit the plan and give the file the hash of its new content: only the content is wrong."""
    document = json.loads(TEXT)
    edit(document["plan"])
    return json.dumps(sealed(document))


def test_round_trip_is_exact_and_text_is_stable():
    assert loads(TEXT) == PLAN
    assert dumps(loads(TEXT)) == TEXT
    assert plan_hash(loads(TEXT)) == json.loads(TEXT)["hash"]


def test_hash_follows_the_content_and_no_name():
    assert plan_hash(replace(PLAN, strategy="another")) == plan_hash(PLAN)
    other = disjoint_plan(two_encoders(), [sample(i, images=i % 2) for i in range(4)], CUTS)
    assert plan_hash(other) != plan_hash(PLAN)


def test_file_round_trip(tmp_path):
    write_plan(PLAN, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not JSON", id="empty"),
        pytest.param("[]", "not a plan file", id="list"),
        pytest.param("{}", "not a plan file", id="object"),
        pytest.param(
            edited(lambda d: d.update(schema_version=9)), "schema version 9, want 1 to 3", id="version"
        ),
        pytest.param(edited(lambda d: d.update(hahs=1)), "unknown key 'hahs'; did you mean 'hash'", id="key"),
        pytest.param(edited(lambda d: d.pop("plan")), "missing key 'plan'", id="no-plan"),
        pytest.param(edited(lambda d: d["plan"]["stages"][0].update(id=7)), "corrupt", id="hash"),
        pytest.param(resealed(lambda p: p.update(stagse=[])), "plan: unknown key 'stagse'", id="plan-key"),
        pytest.param(resealed(lambda p: p.pop("stages")), "plan: missing key 'stages'", id="plan-missing"),
        pytest.param(
            resealed(lambda p: p["stages"][0].update(id="0")), r"plan.stages\[0\].id: want int", id="type"
        ),
        pytest.param(
            resealed(lambda p: p["programs"][0]["actions"].append("0X1")), "bad action '0X1'", id="action"
        ),
        pytest.param(
            resealed(lambda p: p["settings"].update(precision="int3")),
            "settings.precision: want one of",
            id="enum",
        ),
        pytest.param(
            resealed(
                lambda p: p["model"]["edges"].append(
                    {"source": "llm", "target": "vision", "after_layer": 3, "before_layer": 0}
                )
            ),
            "edges must be acyclic, got the cycle",
            id="cycle",
        ),
    ],
)
def test_damage_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        loads(text)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cut_or_flipped_files_never_load_as_another_plan(data):
    """The strategy's name decides nothing and is not sealed."""
    if data.draw(st.booleans()):
        broken = TEXT[: data.draw(st.integers(0, len(TEXT) - 3))]
    else:
        at = data.draw(st.integers(0, len(TEXT) - 2))
        broken = TEXT[:at] + data.draw(st.sampled_from('0129[]{},x"')) + TEXT[at + 1 :]
    try:
        found = loads(broken)
    except ValueError:
        return
    assert replace(found, strategy=PLAN.strategy) == PLAN
