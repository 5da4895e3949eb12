"""Part: plans rehearsed, then others predicted, then those executed: each rank's actions on one device.

The predictions are a cell of their own between rehearsals and judged plans, and its row has the hash of the
file. A judged plan runs only with exactly that file.
"""

import datetime
import hashlib
import json
from dataclasses import asdict

from experiments.fidelity.emulated import Execution, execute_emulated, predict, rehearsed
from experiments.gpu_day.campaign import Cell, Extent, Measured, Session
from experiments.gpu_day.environment import facts
from experiments.gpu_day.jobs import DRAWN, Named
from experiments.gpu_day.jobs import judged as judged_plans
from experiments.gpu_day.jobs import rehearsed as rehearsed_plans
from experiments.gpu_day.layers import cells as layer_cells
from experiments.gpu_day.predictions import (
    JUDGED,
    PREDICTED,
    REHEARSAL,
    Foretold,
    Predictions,
    read_predictions,
    write_predictions,
)
from experiments.gpu_day.profile import LAYERS, measured_profile, values_in
from experiments.gpu_day.store import rows_in
from runtime.world.device import device_of, kind_of_device
from workbench.cost.profile import Profile
from workbench.job.matching import check_profile
from workbench.metrics import time_by_kind
from workbench.plan.codec import plan_hash
from workbench.trace import Trace
from workbench.trace_json import dumps, loads

PART = "plans"
STEPS = {Extent.FULL: 4, Extent.SMALL: 2}
ROUNDS = {Extent.FULL: 2, Extent.SMALL: 1}  # of all judged plans, so that drift meets all alike
BOUND_S = 240.0


def cells(session: Session) -> tuple[Cell, ...]:
    """Rehearsals, the predictions, and round by round the plans that they are of.

    Raises:
        ValueError: rows of layers were not measured yet, nor tried.
    """
    tried = rows_in(session.folder, LAYERS)
    untried = [cell.key for cell in layer_cells(session) if cell.key not in tried]
    if untried:
        raise ValueError(f"{len(untried)} rows of {LAYERS} were not measured yet; want --only {LAYERS} first")
    rounds = range(1, ROUNDS[session.extent] + 1)
    return (
        *(Cell(f"{REHEARSAL}: {named.name}", BOUND_S) for named in rehearsed_plans(session)),
        Cell(PREDICTED, BOUND_S),
        *(
            Cell(f"{JUDGED}, round {number}: {named.name}", BOUND_S)
            for number in rounds
            for named in judged_plans(session)
        ),
    )


def measure(session: Session, key: str) -> Measured:
    """One of them.

    Raises:
        ValueError: a plan that does not fit or was not predicted, predictions that are missing or were
            changed, or a profile of another device.
    """
    profile = measured_profile({LAYERS: values_in(session.folder, LAYERS)})
    check_profile(profile, kind_of_device(device_of(session.device)))
    if key == PREDICTED:
        return _forecast(session, profile)
    named = next(
        named
        for named in (*rehearsed_plans(session), *judged_plans(session))
        if key.endswith(f": {named.name}")
    )
    if key.startswith(REHEARSAL):
        return _rehearse(session, named, profile)
    return _judge(session, named, profile)


def _rehearse(session: Session, named: Named, profile: Profile) -> Measured:
    predicted = predict(named.plan, profile)
    executed = _execute(session, named, profile)
    values = {
        "kind": REHEARSAL,
        "plan": named.name,
        "plan_hash": predicted.plan_hash,
        "profile_hash": profile_hash(profile),
        "predicted_s": predicted.seconds,
        "executed_s": list(executed.steps_s),
        "losses": list(executed.losses),
        "simulated": dumps(predicted.simulated),
        "steps": [dumps(step) for step in executed.steps],
    }
    return Measured(values, f"{predicted.seconds / executed.seconds - 1:+.1%} before it was rehearsed")


def _forecast(session: Session, measured: Profile) -> Measured:
    profile = _with_rehearsals(session, measured)
    predictions_of_plans = []
    for named in judged_plans(session):
        predicted = predict(named.plan, profile)
        predictions_of_plans.append(
            Foretold(
                plan=named.name,
                plan_hash=predicted.plan_hash,
                predicted_s=predicted.seconds,
                kinds_s=_kinds_s(predicted.simulated),
            )
        )
    predictions = Predictions(
        profile_hash=profile_hash(profile),
        device_name=facts(session)["device_name"],
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plans=tuple(predictions_of_plans),
    )
    write_predictions(predictions, session.folder)
    values = {"kind": PREDICTED, "digest": predictions.digest, "profile_hash": predictions.profile_hash}
    return Measured(values, f"{len(predictions_of_plans)} plans, none of them run yet")


def _judge(session: Session, named: Named, profile: Profile) -> Measured:
    digest = values_in(session.folder, PART).get(PREDICTED, {}).get("digest", "")
    prediction = read_predictions(session.folder, digest).of(plan_hash(named.plan))
    executed = _execute(session, named, profile)
    error = prediction.predicted_s / executed.seconds - 1
    values = {
        "kind": JUDGED,
        "plan": named.name,
        "plan_hash": prediction.plan_hash,
        "digest": digest,
        "predicted_s": prediction.predicted_s,
        "executed_s": list(executed.steps_s),
        "losses": list(executed.losses),
        "kinds_s": _kinds_s(executed.trace),
    }
    return Measured(values, f"{error:+.1%}: {executed.seconds:.4g} s", -abs(error))


def _execute(session: Session, named: Named, profile: Profile) -> Execution:
    return execute_emulated(
        named.plan, device_of(session.device), steps=STEPS[session.extent], profile=profile, drawn=DRAWN
    )


def _with_rehearsals(session: Session, profile: Profile) -> Profile:
    """The profile that predictions are made from.

    Raises:
        ValueError: a rehearsal is missing, or was compared with another profile.
    """
    rows = values_in(session.folder, PART)
    runs = []
    for named in rehearsed_plans(session):
        row = rows.get(f"{REHEARSAL}: {named.name}")
        if row is None or row["profile_hash"] != profile_hash(profile):
            raise ValueError(f"plan {named.name!r} was not rehearsed with this profile: nothing is predicted")
        steps = tuple(loads(step) for step in row["steps"])
        executed = Execution(trace=steps[0], steps=steps, losses=tuple(row["losses"]))
        runs.append((predict(named.plan, profile), executed))
    return rehearsed(profile, runs)


def profile_hash(profile: Profile) -> str:
    """SHA-256 of all that it says."""
    return hashlib.sha256(json.dumps(asdict(profile), sort_keys=True).encode()).hexdigest()


def _kinds_s(trace: Trace) -> dict[str, float]:
    return {kind.value: seconds for kind, seconds in time_by_kind(trace).items()}
