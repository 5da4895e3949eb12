"""Does the validator let through a plan that deadlocks or computes something else?

Setup:   valid plans of many kinds (`mutant_pool`), each mutant one edit away from one of them
         (`mutant_operators`, `mutant_exchanges`); the validator is `plan.accept`: check, lower,
         deadlock, memory.
Judge:   `mutant_judge`, which shares no code with the validator's checks, on every accepted mutant; on the
         refused ones too, as far as it can execute them, to find valid plans that were refused. A sample of
         accepted and of deadlock-refused mutants is run on gloo with a short timeout.
Rows:    edits of lowered plans (`mutant_rows`), which no file can contain; `check_deadlock` alone checks
         those, and promises only that no rank waits for ever.
Run:     python -m experiments.fidelity.mutants [--count 10000] [--seed 0] [--json]
"""

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from experiments.fidelity import mutant_exchanges  # noqa: F401  (its operators join the others)
from experiments.fidelity.mutant_judge import judge
from experiments.fidelity.mutant_meaning import Meaning, meaning_of
from experiments.fidelity.mutant_operators import OPERATORS
from experiments.fidelity.mutant_pool import pool
from experiments.fidelity.mutant_rows import ROW_OPERATORS
from experiments.fidelity.mutant_runs import Sample, run_samples
from experiments.fidelity.mutant_verdict import Judgement, Verdict
from experiments.harness.command import Found, bench
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable
from workbench.timing.accept import accept

RESULT = Path(__file__).parents[1] / "results" / "fidelity_mutants.json"
PLAN_OPERATORS = tuple(OPERATORS)
ROW_SHARE = 0.25  # of the mutants that are of rows
MOST_DRAWS = 100  # of a parent for one operator
MOST_NAMED = 20


class Gate(StrEnum):
    """The check that refused a mutant, or that none did."""

    ACCEPTED = "accepted"
    CHECK = "refused by check"
    LOWER = "refused by lower"
    DEADLOCK = "refused by deadlock"
    MEMORY = "refused by memory or attention"
    CRASH = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One edited plan; `plan` is None for an edit of rows."""

    number: int
    parent: str
    operator: str
    plan: Plan | None
    lowered: Lowered | None


@dataclass(slots=True)
class Tally:
    """All reported counts."""

    by_operator: Counter[tuple[str, Gate, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    false_accepts: list[str] = field(default_factory=list)
    false_rejects: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    rows_of_other_meaning: int = 0

    def as_json(self) -> dict[str, object]:
        gates: Counter[str] = Counter()
        verdicts: Counter[str] = Counter()
        for (_, gate, verdict), count in self.by_operator.items():
            gates[gate] += count
            verdicts[f"{gate}: {verdict}"] += count
        names = sorted({name for name, _, _ in self.by_operator})
        ordered = sorted(self.seconds)
        return {
            "num_mutants": sum(gates.values()),
            "num_accepted": gates[Gate.ACCEPTED],
            "false_accepts": len(self.false_accepts),
            "false_accepts_named": self.false_accepts[:MOST_NAMED],
            "crashes": len(self.crashes),
            "crashes_named": self.crashes[:MOST_NAMED],
            "false_rejects": sum(self.false_rejects.values()),
            "false_rejects_by_reason": dict(self.false_rejects.most_common(MOST_NAMED)),
            "rows_of_other_meaning": self.rows_of_other_meaning,
            "by_verdict": dict(sorted(verdicts.items())),
            "by_operator": {
                name: {
                    f"{gate}: {verdict}": count
                    for (operator, gate, verdict), count in sorted(self.by_operator.items())
                    if operator == name
                }
                for name in names
            },
            "validator_p50_s": statistics.median(ordered),
            "validator_p95_s": ordered[int(len(ordered) * 0.95)],
        }


def mutants(plans: Sequence[tuple[str, Plan]], count: int, seed: int) -> Iterator[Mutant]:
    """Yield mutants: operators in turn, random parents; an edit that changes nothing is redrawn."""
    rng = random.Random(seed)
    lowered = {name: lower(plan) for name, plan in plans}
    for number in range(count):
        is_row = rng.random() < ROW_SHARE
        yield _mutant_of_rows(plans, lowered, number, rng) if is_row else _mutant(plans, number, rng)


def _mutant(plans: Sequence[tuple[str, Plan]], number: int, rng: random.Random) -> Mutant:
    """Apply the operator whose turn it is or, where it fits none of many plans, the next one."""
    for turn in range(len(PLAN_OPERATORS) * MOST_DRAWS):
        operator = PLAN_OPERATORS[(number + turn // MOST_DRAWS) % len(PLAN_OPERATORS)]
        name, plan = rng.choice(plans)
        mutated = operator(plan, rng)
        if mutated is not None and mutated != plan:
            return Mutant(number=number, parent=name, operator=operator.__name__, plan=mutated, lowered=None)
    raise ValueError("no operator changes any of the plans")


def _mutant_of_rows(
    plans: Sequence[tuple[str, Plan]], lowered: Mapping[str, Lowered], number: int, rng: random.Random
) -> Mutant:
    for turn in range(len(ROW_OPERATORS) * MOST_DRAWS):
        edit = ROW_OPERATORS[(number + turn // MOST_DRAWS) % len(ROW_OPERATORS)]
        name, _ = rng.choice(plans)
        rows = edit(lowered[name], rng)
        if rows is not None and rows != lowered[name]:
            return Mutant(number=number, parent=name, operator=edit.__name__, plan=None, lowered=rows)
    raise ValueError("no operator changes any of the plans' rows")


def validate(mutant: Mutant) -> tuple[Gate, str]:
    """Return the validator's verdict and message."""
    try:
        if mutant.plan is not None:
            accept(mutant.plan)
        else:
            assert mutant.lowered is not None
            check_deadlock(mutant.lowered)
    except ValueError as error:
        return _gate(mutant), str(error).splitlines()[0]
    except Exception as error:  # a crash is a finding, whatever it is
        return Gate.CRASH, f"{type(error).__name__}: {error}"
    return Gate.ACCEPTED, ""


def _gate(mutant: Mutant) -> Gate:
    """Return the part of `accept` that refused it."""
    if mutant.plan is None:
        return Gate.DEADLOCK
    for gate, step in ((Gate.CHECK, check), (Gate.LOWER, lower), (Gate.DEADLOCK, _deadlock)):
        try:
            step(mutant.plan)
        except ValueError:
            return gate
    return Gate.MEMORY


def _deadlock(plan: Plan) -> None:
    check_deadlock(lower(plan))


def judged(mutant: Mutant, meaning: Meaning, gate: Gate) -> Judgement | None:
    """Execute the mutant and judge it; None where it was refused and cannot be executed."""
    try:
        lowered = lower(mutant.plan) if mutant.plan is not None else mutant.lowered
        assert lowered is not None
        return judge(lowered, meaning)
    except Exception:  # what was refused owes nobody a well-behaved execution
        if gate is Gate.ACCEPTED:
            raise
        return None


def count_one(tally: Tally, mutant: Mutant, meaning: Meaning) -> tuple[Gate, Judgement | None]:
    """Validate, judge and count one mutant."""
    start_s = time.perf_counter()
    gate, reason = validate(mutant)
    if mutant.plan is not None:
        tally.seconds.append(time.perf_counter() - start_s)
    judgement = judged(mutant, meaning, gate)
    verdict = "not executable" if judgement is None else str(judgement.verdict)
    tally.by_operator[mutant.operator, gate, verdict] += 1
    name = f"{mutant.number}: {mutant.operator} on {mutant.parent}"
    if gate is Gate.CRASH:
        tally.crashes.append(f"{name}: {reason}")
    if gate is Gate.ACCEPTED:
        assert judgement is not None
        if mutant.plan is None and judgement.verdict is Verdict.OTHER:
            tally.rows_of_other_meaning += 1
        elif judgement.verdict is not Verdict.SAME:
            tally.false_accepts.append(f"{name}: {judgement.verdict}, {judgement.reason}")
    elif gate is not Gate.MEMORY and judgement is not None and judgement.verdict is Verdict.SAME:
        tally.false_rejects[f"{mutant.operator}: {_shape(reason)}"] += 1
    return gate, judgement


def _shape(reason: str) -> str:
    """The message without its numbers."""
    return " ".join("#" if any(c.isdigit() for c in word) else word for word in reason.split())[:90]


def _drawn(mutant: Mutant, parent: Plan, gate: Gate) -> Sample | None:
    """Return the mutant as a sample to execute, if it is of a kind to be executed."""
    if mutant.plan is None or gate not in (Gate.ACCEPTED, Gate.DEADLOCK):
        return None
    accepted = gate is Gate.ACCEPTED
    try:
        check_runnable(mutant.plan)
    except ValueError:  # it can be simulated alone
        return None
    return Sample(operator=mutant.operator, plan=mutant.plan, parent=parent, is_accepted=accepted)


def _is_needed(drawn: Sample, samples: Sequence[Sample], most: int) -> bool:
    """Whether the sample is used: limited per kind, from new parents, by operators not used recently."""
    kin = [sample for sample in samples if sample.is_accepted == drawn.is_accepted]
    rivals = kin[-len(PLAN_OPERATORS) // 4 :]
    return (
        len(kin) < most
        and all(sample.parent is not drawn.parent for sample in kin)
        and all(sample.operator != drawn.operator for sample in rivals)
    )


def _print(record: dict[str, object]) -> None:
    by_operator = record["by_operator"]
    assert isinstance(by_operator, dict)
    for name, verdicts in by_operator.items():
        print(f"{name:22s}" + ", ".join(f"{what} {count}" for what, count in verdicts.items()))
    for key in ("num_plans", "num_mutants", "num_accepted", "false_accepts", "false_accepts_named", "crashes",
                "crashes_named", "false_rejects", "false_rejects_by_reason", "rows_of_other_meaning",
                "accepted_run", "accepted_that_failed", "deadlocks_run", "deadlocks_that_ran"):  # fmt: skip
        print(f"{key}: {record[key]}")
    print(f"validator: p50 {record['validator_p50_s']:.4f} s, p95 {record['validator_p95_s']:.4f} s")


@bench(executed="mutants of each kind to run on gloo")
def run(count: int = 10_000, seed: int = 0, executed: int = 20) -> Found:
    plans = pool()
    by_name = dict(plans)
    meanings = {name: meaning_of(plan) for name, plan in plans}
    tally, samples = Tally(), list[Sample]()
    start_s = time.perf_counter()
    for mutant in mutants(plans, count, seed):
        gate, _ = count_one(tally, mutant, meanings[mutant.parent])
        drawn = _drawn(mutant, by_name[mutant.parent], gate)
        if drawn is not None and _is_needed(drawn, samples, executed):
            samples.append(drawn)
        if mutant.number % 1000 == 999:
            print(f"{mutant.number + 1} mutants, {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    record = tally.as_json() | {"num_plans": len(plans), "seed": seed}
    record |= run_samples(samples)
    _print(record)
    RESULT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    is_sound = not (record["false_accepts"] or record["crashes"] or record["accepted_that_failed"])
    return Found(record, holds=is_sound)
