"""What the doors' experiments ask."""

from math import log

import pytest

from experiments.doors import families, whole_models
from experiments.doors.export import TRAINED, megatron_losses, parsed, plans_of
from experiments.doors.export_jobs import export_jobs
from experiments.doors.whole_configs import CONFIGS
from experiments.doors.whole_models import LOSSES, original
from workbench.export.registry import BY_NAME
from workbench.model.composites.registry import COMPOSITES
from workbench.plan.runnable import check_runnable


def test_every_plan_is_said_or_refused_for_a_reason():
    made = plans_of([job for job in export_jobs() if job.name == "mixtral"])
    for target in (BY_NAME["fsdp2"], BY_NAME["torchrun"]):
        record = parsed(target, made)
        assert record["tried"] == len(made) > 0
        assert record["said"] + record["refused"] == record["tried"]
        assert sum(record["reasons"].values()) == record["refused"]
        assert all(record["reasons"])


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", TRAINED)
def test_megatron_trains_two_modules(strategy):
    """From random weights: a loss near that of guessing."""
    losses = megatron_losses(strategy)
    if losses is None:
        pytest.skip("not held: the package index gives no packages of the systems")
    assert losses == [pytest.approx(log(128), rel=0.1)] * 2


def test_counts_are_of_kinds_all_of_whose_configurations_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are held one by one by the tests of checkpoints; here a cheap one stands for each."""
    errors = dict.fromkeys(LOSSES, 0.0) | {"llava": 1e-3}
    monkeypatch.setattr(families, "loss_error", errors.__getitem__)
    found = families.families_measured()
    assert found["families_total"] == found["families_split_equal"] == len(COMPOSITES)
    kinds = {CONFIGS[name]["model_type"] for name in LOSSES}
    assert found["families_loss_equal"] == len(kinds) - 1 >= 8


def test_a_split_that_loses_a_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert families.is_split_equal(CONFIGS["llava"])
    wider = {**CONFIGS["llava"]["text_config"], "intermediate_size": 81}
    monkeypatch.setattr(whole_models, "original", lambda config: original({**config, "text_config": wider}))
    assert not families.is_split_equal(CONFIGS["llava"])


def test_losses_of_the_runtime_equal_those_of_the_whole() -> None:
    """Of one; of all: test_composites_weights."""
    assert families.loss_error("voxtral") <= families.MOST_APART


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_are_said_to_run(name: str) -> None:
    """As their losses are compared."""
    check_runnable(families.plan_of(name))
