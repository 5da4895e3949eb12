"""All targets, in the order in which they are listed."""

from workbench.export import fsdp2, megatron, torchrun, torchtitan
from workbench.export.target import Target

TARGETS: tuple[Target, ...] = (
    megatron.TARGET,
    torchtitan.TARGET,
    fsdp2.TARGET,
    torchrun.TARGET,
)

BY_NAME: dict[str, Target] = {target.name: target for target in TARGETS}
