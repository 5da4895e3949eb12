"""Plan files: exact round trip, a hash of the content, and one clear line for every damage."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.plans import disjoint_plan, sample, sealed, two_encoders
from workbench.cost.hardware import Link
from workbench.cost.products import ProductFormat
from workbench.data.sample import WHERE_SET
from workbench.model.block_modules import BlockModule
from workbench.plan.boundaries import Boundaries
from workbench.plan.codec import dumps, loads, plan_hash, read_plan, write_plan
from workbench.plan.kernels import Kernels
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import KeyExchange, ModuleSettings, Precision, Recompute, Settings, Sharding
from workbench.schedule.sharded import ReshardAfter

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


def test_whole_numbers_of_python_code_come_back_as_the_floats_that_they_are():

    whole = replace(
        PLAN, cluster=replace(PLAN.cluster, inter=Link(name="inter", bytes_per_s=50_000_000_000, latency_s=0))
    )
    as_floats = replace(
        PLAN, cluster=replace(PLAN.cluster, inter=Link(name="inter", bytes_per_s=5e10, latency_s=0.0))
    )
    assert loads(dumps(whole)) == whole
    assert plan_hash(whole) == plan_hash(as_floats)
    assert dumps(whole) == dumps(as_floats)


def test_hash_follows_the_content_and_no_name():
    assert plan_hash(replace(PLAN, strategy="another")) == plan_hash(PLAN)
    slower = replace(PLAN.cluster, intra=replace(PLAN.cluster.intra, bytes_per_s=1e6))
    assert plan_hash(replace(PLAN, cluster=slower)) != plan_hash(PLAN)
    other = disjoint_plan(two_encoders(), [sample(i, images=i % 2) for i in range(4)], CUTS)
    assert plan_hash(other) != plan_hash(PLAN)


SET = {  # of every field with a default
    Settings: {
        "kernels": Kernels.EAGER,
        "optimizer_precision": Precision.FLOAT64,
        "boundaries": Boundaries.BROKERS,
        "optimizer": Optimizer.MUON,
    },
    ModuleSettings: {
        "recompute": Recompute.FULL,
        "sharding": Sharding.PARAMETERS,
        "instances": 2,
        "key_exchange": KeyExchange.ALL_TO_ALL,
        "sequence_parallel": True,
        "computed_again": (BlockModule.NORM,),
        "collective_pieces": 2,
        "reshard_after": ReshardAfter.STEP,
        "recompute_layers": 2,
        "products": ProductFormat.FP8,
    },
}
WANTS = {  # settings without which one means nothing
    "reshard_after": {"sharding": Sharding.PARAMETERS},
    "recompute_layers": {"recompute": Recompute.FULL},
}


def test_every_setting_is_tried():
    for kind, values in SET.items():
        assert values.keys() == {each.name for each in fields(kind)} - {"module", "modules", "precision"}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, values in SET.items() for name in values])
def test_a_setting_comes_back_and_changes_the_hash_and_later_ones_are_said_only_where_they_are_set(
    kind, name
):
    whole, changed = replace(PLAN.settings, precision=Precision.BFLOAT16), {name: SET[kind][name]}
    if kind is ModuleSettings:
        module = ModuleSettings(module="llm", **WANTS.get(name, {}))
        changed = {"modules": (replace(module, **changed),)}
        whole = replace(whole, modules=(module,))
    before, after = (replace(PLAN, settings=each) for each in (whole, replace(whole, **changed)))
    assert loads(dumps(after)) == after != before
    assert plan_hash(after) != plan_hash(before)
    (field,) = [each for each in fields(kind) if each.name == name]
    assert (f'"{name}"' in dumps(before)) == (WHERE_SET not in field.metadata)


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


@examples(150)
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
