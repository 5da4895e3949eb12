"""Where stages of learned sparse attention may begin: not behind an indexer whose choice they read."""

from workbench.model.chosen_keys import reads_choice
from workbench.plan.plan import Plan, Sharding
from workbench.plan.stage import Stage


def check_choices(plan: Plan, stage: Stage) -> None:
    """Raise ValueError where a stage begins with a layer that reads the keys that an earlier stage chose.

    Complexity: O(operators of the module) if so, else of one layer.
    """
    module, first = plan.model.module(stage.module), stage.layers[0]
    if not reads_choice(module.layers[first]):
        return
    if plan.settings.of(module.name).shards_parameters:
        raise ValueError(
            f"module {module.name!r}: sharded parameters make a stage of every layer, and {module.name}."
            f"{module.layers[first].name} reads keys that another one chose; want sharding "
            f"{Sharding.OPTIMIZER.value!r} or {Sharding.NONE.value!r}, got {Sharding.PARAMETERS.value!r}"
        )
    nearest = min(module.stage_starts[1:], key=lambda index: (abs(index - first), index))
    raise ValueError(
        f"stage {stage.id}: {module.name}.{module.layers[first].name} reads keys that an earlier layer "
        f"chose, so no stage begins with it; want another first layer than {first}, nearest: {nearest}"
    )
