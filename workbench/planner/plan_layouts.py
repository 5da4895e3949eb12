"""Reads module layouts off a plan's stages."""

from dataclasses import replace
from enum import StrEnum

from workbench.job.joint_layouts import LayoutFields
from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import Plan
from workbench.planner.layout_choice import degrees_of


class Placing(StrEnum):
    """Whether layouts give a module's rank offset and replicas, or leave them open."""

    LEFT = "left to the strategy"
    GIVEN = "given"


def layouts_of(plan: Plan, replicas: int, placing: Placing) -> tuple[ModuleLayout, ...]:
    """The layout of every module, in the model's order.

    Where placing is GIVEN, rank offsets are given, and dp where it differs from `replicas`.
    """
    layouts = []
    for module in plan.model.modules:
        layout = degrees_of(plan, module.name).layout
        ranks = [rank for stage in plan.stages if stage.module == module.name for rank in stage.flat_ranks]
        layouts.append(
            replace(
                layout,
                dp=None if placing is Placing.LEFT or layout.dp == replicas else layout.dp,
                rank_offset=min(ranks) if placing is Placing.GIVEN else None,
            )
        )
    return tuple(layouts)


def joint_replicas_of(plan: Plan) -> int:
    """The number of joint replicas in each replica of the language model, see `Stage`."""
    llm = plan.model.llm.name
    return plan.chain[llm, plan.replicas(llm)[0]][0].joint_replicas


def microbatch_samples(plan: Plan) -> int:
    """Samples per microbatch of one replica of the language model, rounded to a divisor of its batch.

    Each joint replica counts by itself.
    """
    llm = plan.model.llm.name
    num_joint = joint_replicas_of(plan)
    counts = [len(each.items) for each in plan.microbatches if each.module == llm]
    share = max(1, len(plan.batch) // (len(plan.replicas(llm)) * num_joint))
    mean = sum(counts) / len(counts) / num_joint
    return min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: (abs(n - mean), n))


def fields_of(plan: Plan, microbatch_samples: int, placing: Placing) -> LayoutFields:
    """The fields of a job that a plan's stages decide.

    Args:
        microbatch_samples: of one replica of the language model, each joint one counted by itself.
        placing: as in `layouts_of`.
    """
    replicas, num_joint = len(plan.replicas(plan.model.llm.name)), joint_replicas_of(plan)
    layouts = layouts_of(plan, replicas, placing)
    return LayoutFields(layouts, replicas, microbatch_samples * num_joint, num_joint)
