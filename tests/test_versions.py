"""Files of earlier versions of plans and traces are read as what they were, by a written map of names.

`tests/golden/version_1` was written by commit 2aeb338, the last with that version: a plan whose encoders
leave the device, one whose weights are sharded in two instances, what the simulator made of them with
`seconds`, and what a step from seed 0 gave; bytes of memory in `hsdp.trace` since then count the gradient
that a projector is given once, no longer twice. Version 2 has today's names of actions; its hashes, as
those of version 1, cover the strategy's name.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.world.pool import Pool
from sim.step.engine import simulate
from tests.guard import project
from tests.guard.stored import Stored, compare
from workbench import trace_json
from workbench.explain.timeline import timeline
from workbench.plan.codec import dumps, hash_of_version, is_hash_of, loads, named_hash, plan_hash
from workbench.schedule.action import (
    MEANING,
    NEWEST,
    SPELLINGS,
    STEP,
    Action,
    Activity,
    Number,
    Pass,
    TaskKind,
    parse_action,
)
from workbench.timing.accept import accept

FOLDER = Path(__file__).parent / "golden" / "version_1"
NAMES = ("offload", "hsdp")
RENAMED = {  # version 1 -> version 2, of stage 3
    "3UNSHARD": "3ONLOAD",
    "3RESHARD": "3OFFLOAD",
    "3UNSHARD7": "3ALL_GATHER7",
    "3RESHARD7": "3FREE7",
    "3REDUCE_GRAD7": "3REDUCE_SCATTER7",
}
KEPT = ("3F7", "3B7", "3I7", "3W7", "3REDUCE_GRAD", "STEP")


def text_of(name: str, kind: str) -> str:
    return (FOLDER / f"{name}.{kind}.json").read_text(encoding="utf-8")


def seconds(action: Action) -> float:
    """Of an action, by its name of version 1."""
    return 1e-3 * (1 + sum(SPELLINGS[1].write(action).encode()) % 97)


def renamed(text: str) -> str:
    """A file of version 1 as one of version 2, by text alone."""
    text = re.sub(r'("schema_version": ?)1\b', r"\g<1>2", text)
    for old, new in RENAMED.items():
        pattern = old.replace("3", r"\b(\d+)").replace("7", r"(\d+)\b")
        numbers = new.replace("3", r"\g<1>").replace("7", r"\g<2>")
        text = re.sub(pattern if old.endswith("7") else rf"{pattern}\b", numbers, text)
    return text


def renamed_event(event: dict) -> dict:
    """Of a trace: a span is named after its action, and its category is the action's kind."""
    if "action" not in event.get("args", {}):
        return event
    action = renamed(event["args"]["action"])
    of_action = {"name": f"PP:{action}", "cat": re.sub("[0-9]", "", action)}
    return event | of_action | {"args": event["args"] | {"action": action}}


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_version_1_has_the_same_bytes_under_the_map(name: str) -> None:
    old = text_of(name, "plan")
    plan = loads(old)
    assert dumps(plan, version=1) == old
    assert dumps(plan, version=2) == renamed(old) != old
    assert loads(dumps(plan, version=2)) == loads(dumps(plan)) == plan
    assert named_hash(plan) == json.loads(old)["hash"]


@pytest.mark.parametrize("version", sorted(SPELLINGS))
def test_the_hash_leaves_out_the_strategys_name_since_version_3(version: int) -> None:
    plan = loads(text_of("hsdp", "plan"))
    other = replace(plan, strategy="another")
    assert plan_hash(plan) == plan_hash(other)
    assert (hash_of_version(plan, version) == hash_of_version(other, version)) == (version >= 3)
    assert json.loads(dumps(plan, version))["hash"] == hash_of_version(plan, version)
    assert is_hash_of(hash_of_version(plan, version), plan)
    assert not is_hash_of(named_hash(other), plan)
    hashes = {plan_hash(plan), named_hash(plan)}
    foreign = (hashes - {hash_of_version(plan, version)}).pop()
    with pytest.raises(ValueError, match="content does not have the hash"):
        loads(dumps(plan, version).replace(hash_of_version(plan, version), foreign))


# What exchanges hold counts since then from when the program comes to them, not from when their lane is free.
OTHER_MEMORY = ("offload", "hsdp")


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_same_times_and_memory_to_the_bit(name: str) -> None:
    lowered, memory = accept(loads(text_of(name, "plan")))
    trace = trace_json.loads(text_of(name, "trace"))
    again = simulate(lowered, seconds, memory=memory)
    same = replace(again, memory=trace.memory) if name in OTHER_MEMORY else again
    assert same == replace(trace, plan_hash=plan_hash(lowered.plan))
    assert trace.plan_hash == named_hash(lowered.plan)
    assert timeline(lowered, trace).end_s == timeline(lowered, again).end_s
    assert trace_json.loads(trace_json.dumps(trace)) == trace


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_version_1_has_the_same_events_under_the_map(name: str) -> None:
    old = json.loads(text_of(name, "trace"))
    new = json.loads(trace_json.dumps(trace_json.loads(text_of(name, "trace"))))
    arrows = {"weights", "gradients"}  # for viewers alone
    told = [event for event in new["traceEvents"] if event.get("cat") not in arrows]
    assert told == [renamed_event(event) for event in old["traceEvents"]]
    assert new["otherData"] == old["otherData"] | {"schema_version": NEWEST}


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_same_loss_and_weights(name: str, pool: Pool) -> None:
    """To the bit on the machine that ran it then; elsewhere within 1e-12."""
    stored = json.loads(text_of(name, "run"))
    before = Stored(stored["machine"], {name: {"run": stored["run"]}})
    accepted = project.accepted_plan(loads(text_of(name, "plan")), "A40")
    now = Stored(project.machine(), {name: {"run": project.run_facts(accepted, pool)}})
    assert compare(before, now, {name}).changed == {}


def test_the_map_is_this() -> None:
    """Names that meant two things, told apart by a number; nothing else changed."""
    for old, new in (*RENAMED.items(), *zip(KEPT, KEPT, strict=True)):
        action = SPELLINGS[1].read(old)
        assert action == parse_action(new)
        assert (SPELLINGS[1].write(action), str(action)) == (old, new)


@pytest.mark.parametrize("kind", Pass)
def test_what_a_kind_of_action_is_agrees_with_itself(kind: Pass) -> None:
    meaning = MEANING[kind]
    is_collective = meaning.activity is Activity.COLLECTIVE
    assert is_collective == (meaning.operation is not None)
    assert is_collective == (meaning.task in (TaskKind.FSDP, TaskKind.ALL_REDUCE))
    assert meaning.weights or meaning.activity not in (Activity.COPY, Activity.RELEASE)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(list(Pass)))
    is_numbered = MEANING[kind].number is not Number.NOTHING
    number = draw(st.integers(0, 10**6)) if is_numbered else None
    return STEP if kind is Pass.STEP else Action(draw(st.integers(0, 10**6)), kind, number)


@given(actions(), st.sampled_from(sorted(SPELLINGS)))
def test_every_version_gives_back_what_it_wrote(action: Action, version: int) -> None:
    assert SPELLINGS[version].read(SPELLINGS[version].write(action)) == action
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("version", "text"),
    [(1, "0ALL_GATHER0"), (1, "0ONLOAD"), (1, "0FREE0"), (2, "0UNSHARD0"), (2, "0RESHARD")]
    + [(version, text) for version in (1, 2) for text in ("0F", "F0", "0STEP", "STEP0", "", "0X0", "-1F0")],
)
def test_names_of_another_version_are_refused(version: int, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"bad action {text!r}: want <stage><F|B|I|W>")):
        SPELLINGS[version].read(text)


def test_an_old_plan_with_new_names_is_refused() -> None:
    mixed = renamed(text_of("hsdp", "plan")).replace('"schema_version": 2', '"schema_version": 1')
    with pytest.raises(ValueError, match="bad action '0ALL_GATHER0'"):
        loads(mixed)
