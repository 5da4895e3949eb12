"""What a checkpoint around a layer adds, from measured rows to the passes of a stage."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.cost_models import assert_planners_see_prices
from tests.plans import disjoint_plan, sample, two_encoders
from tests.test_fit import HEADER
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import (
    CopyRow,
    LayerRow,
    Measurement,
    read_measurement,
    write_measurement,
)
from workbench.cost.layer_time import CheckpointTime, LayerTime
from workbench.cost.model import CostModel, Work
from workbench.cost.profile import Profile, dump_profile, parse_profile
from workbench.cost.roofline import RowWork
from workbench.cost.signature import signature
from workbench.model.frozen import Needs
from workbench.model.layer import Layer
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.work import work_of
from workbench.planner.layer_cost import mean_cost
from workbench.timing.grid_links import GridCost, GridLinks
from workbench.timing.pass_times import pass_times
from workbench.timing.price import price

CUTS = {"vision": (1, 2), "audio": (2,), "llm": (2, 2)}
F, ONLY, THROUGH, WEIGHTS = 4e-3, 3e-3, 5e-3, 6e-3  # s of a row's columns
FORWARD, BACKWARD, IDLE = 0.5e-3, 0.75e-3, 0.125e-3  # s that a checkpoint adds
UNDER = {
    "recompute_forward_s": ONLY + FORWARD,
    "recompute_backward_s": F + THROUGH + WEIGHTS + BACKWARD,
    "recompute_idle_s": ONLY + IDLE,
}
BOTH, NOTHING = Needs(True, True), Needs(False, False)


def row_of(layer: Layer, size: RowWork, **under: float) -> LayerRow:
    return LayerRow(
        signature=signature(layer),
        precision="float32",
        rows=1,
        tokens_in=size.tokens_in,
        tokens_out=size.tokens_out,
        attention_area=size.attention_area,
        forward_s=F,
        forward_only_s=ONLY,
        input_grad_s=THROUGH,
        weight_grad_s=WEIGHTS,
        weight_only_s=WEIGHTS,
        **under,
    )


def plan_of(recompute: Recompute) -> Plan:
    """Stages: vision 0 (frozen) and 1 (frozen, then trainable), audio 2, llm 3 and 4."""
    modules = tuple(ModuleSettings(module=name, recompute=recompute) for name in ("vision", "audio", "llm"))
    plan = disjoint_plan(two_encoders(), [sample(0)], CUTS)
    return replace(plan, settings=Settings(precision=Precision.FLOAT32, modules=modules))


def measurement_of(plan: Plan, **under: float) -> Measurement:
    sizes = {m.module: work_of(plan, m).rows[0] for m in plan.microbatches}
    rows = {
        (signature(layer), sizes[module.name]): row_of(layer, sizes[module.name], **under)
        for module in plan.model.modules
        for layer in module.layers
    }
    return Measurement(HEADER, (*rows.values(), CopyRow(num_bytes=2**20, seconds=1e-4)))


def prices(plan: Plan, profile: Profile) -> dict[str, float]:
    return {str(action): s for action, s in price(lower(plan), CostModel(profile)).durations_s.items()}


def test_rows_and_profiles_keep_what_was_measured_and_old_ones_stay_as_they_are(tmp_path: Path) -> None:
    plan, path = plan_of(Recompute.FULL), tmp_path / "rows.jsonl"
    new, old = measurement_of(plan, **UNDER), measurement_of(plan)
    write_measurement(new, path)
    assert read_measurement(path) == new
    write_measurement(old, path)
    path.write_text(path.read_text().replace("".join(f', "{name}": null' for name in UNDER), ""))
    assert "recompute" not in path.read_text()
    assert read_measurement(path) == old
    assert "recompute" not in dump_profile(fit("old", [old]))
    profile = fit("new", [new])
    assert parse_profile(dump_profile(profile)) == profile
    point = profile.layers[0].points[0]
    assert {name: getattr(point, name) for name in UNDER} == UNDER


def test_a_recomputed_stage_takes_what_its_layers_take_under_checkpoints() -> None:
    plan = plan_of(Recompute.FULL)
    found, before = (prices(plan, fit("here", [measurement_of(plan, **of)])) for of in (UNDER, {}))
    assert (before["1F0"], before["1B0"]) == pytest.approx((2 * ONLY, F + WEIGHTS))
    assert found["1F0"] == pytest.approx(2 * ONLY + IDLE + FORWARD)  # the first layer has no gradient
    assert found["1B0"] == pytest.approx(F + WEIGHTS + BACKWARD)
    assert found["3F0"] == pytest.approx(2 * (ONLY + FORWARD))
    assert found["3B0"] == pytest.approx(2 * (F + THROUGH + BACKWARD))  # frozen, and gradients pass through
    assert found["0F0"] == before["0F0"] == pytest.approx(ONLY)  # no backward, so no checkpoint either


def test_without_recomputation_nothing_is_added() -> None:
    plan = plan_of(Recompute.NONE)
    assert prices(plan, fit("a", [measurement_of(plan, **UNDER)])) == prices(
        plan, fit("b", [measurement_of(plan)])
    )


def test_noise_never_makes_a_checkpoint_take_less_than_nothing() -> None:
    plan = plan_of(Recompute.FULL)
    less = {name: 0.9 * (seconds - 1e-3) for name, seconds in UNDER.items()}
    found, before = (prices(plan, fit("here", [measurement_of(plan, **of)])) for of in (less, {}))
    assert found == before


def test_between_measured_sizes_what_is_added_is_read_between_them() -> None:
    layer = two_encoders().module("llm").layers[0]
    rows = [row_of(layer, RowWork(n, n, n * n), **UNDER) for n in (64, 128, 256)]
    grown = [
        replace(
            row,
            **{
                name: row.tokens_in / 64 * s
                for name, s in asdict(row).items()
                if name.endswith("_s") and s is not None
            },
        )
        for row in rows
    ]
    for measured in (rows, grown):
        cost = CostModel(fit("here", [Measurement(HEADER, tuple(measured))]))
        added = cost.layer_time(
            layer, Work((RowWork(100, 100, 100**2),)), tp=1, cp=1, precision="float32"
        ).checkpoint
        assert added is not None
        factor = 1.0 if measured is rows else 100 / 64
        assert (added.forward_s, added.backward_s, added.idle_s) == pytest.approx(
            (factor * FORWARD, factor * BACKWARD, factor * IDLE), rel=0.05
        )


def test_sizes_without_such_a_measurement_add_nothing_beside_those_that_have_one() -> None:
    layer = two_encoders().module("llm").layers[0]
    sizes = [RowWork(n, n, n * n) for n in (64, 128)]
    rows = row_of(layer, sizes[0]), row_of(layer, sizes[1], **UNDER)
    cost = CostModel(fit("here", [Measurement(HEADER, rows)]))
    without, having = (
        cost.layer_time(layer, Work((size,)), tp=1, cp=1, precision="float32") for size in sizes
    )
    assert without.checkpoint == CheckpointTime(0.0, 0.0, 0.0)
    assert having.checkpoint is not None
    assert having.checkpoint.forward_s == pytest.approx(FORWARD)


def test_a_checkpoint_belongs_to_the_input_gradient_where_the_backward_is_split() -> None:
    times = [LayerTime(4.0, 5.0, 6.0, forward_only_s=3.0, checkpoint=CheckpointTime(0.5, 0.75, 0.25))] * 2
    found = pass_times(times, [NOTHING, BOTH], [True, True])
    assert [found.of(kind) for kind in ("F", "B", "I", "W")] == [6.75, 15.75, 9.75, 6.0]
    assert pass_times(times, [NOTHING, NOTHING], [True, True]).of("F") == 6.0
    assert pass_times(times, [NOTHING, BOTH], [False, False]).of("B") == 11.0


def test_parts_of_a_layer_are_computed_again_only_where_the_whole_layer_is_not() -> None:
    """Layers of 4 s, of which parts take 1 s: the second one is recomputed whole."""
    times = [LayerTime(4.0, 5.0, 6.0)] * 2
    found = pass_times(times, [BOTH, BOTH], [False, True], again_s=[1.0, 1.0])
    assert found.of("B") == 2 * 11.0 + 1.0 + 4.0


def test_planners_see_the_same_seconds_as_prices() -> None:
    plan = plan_of(Recompute.FULL)
    cost = CostModel(fit("here", [measurement_of(plan, **UNDER)]))
    assert_planners_see_prices(plan, cost)
    layer, work = plan.model.module("llm").layers[0], work_of(plan, plan.microbatches[-1])
    machine = GridCost(cost, 1, 1, Precision.FLOAT32, GridLinks(None, None))
    found = mean_cost(machine, layer, BOTH, [(work, 1.0)], recomputed=True)
    assert (found.forward_s, found.backward_s) == pytest.approx(
        (UNDER["recompute_forward_s"], UNDER["recompute_backward_s"])
    )
