"""Plans that are run to calibrate, and never judged."""

from experiments.fidelity.cases import (
    LONG_TOKENS,
    PAIR,
    Case,
    Machine,
    Part,
    halves,
    image_work,
    long_work,
    mixed_lengths_work,
    text_work,
    three_work,
)
from experiments.fidelity.work import LLM, Cuts, plan_of, this_machine
from workbench.cost.hardware import Link
from workbench.schedule.choice import Schedule, ScheduleKind


def rehearsals(link: Link, machine: Machine | None = None) -> tuple[Case, ...]:
    """Plans executed to calibrate: similar to the judged ones, at least one per job, none of them equal.

    `machine` makes the cluster that their ranks run on; None: this machine's cores.
    """
    cluster = this_machine(link, PAIR) if machine is None else machine(Part.REHEARSAL, link)
    text, images, frozen = text_work(), image_work("everything"), image_work("projector")
    three, lengths, long = three_work(), mixed_lengths_work(), long_work(LONG_TOKENS[0])
    two = (2,) * 4
    replicas: list[Cuts] = [{LLM: ((8, (rank,)),)} for rank in range(PAIR)]
    whole: list[Cuts] = [{"vision": ((6, (rank,)),), LLM: ((6, (rank,)),)} for rank in range(PAIR)]
    beside: Cuts = {"vision": ((6, (0,)),), LLM: ((3, (0,)), (3, (1,)))}
    both: Cuts = {"vision": ((6, (0,)),), "audio": ((4, (1,)),), LLM: ((2, (0,)), (3, (1,)))}
    split = Schedule(kind=ScheduleKind.ZB_H1)
    plans = {
        "6 | 2 layers, 4 microbatches": (text, plan_of(text, cluster, halves(6, 8), samples=two)),
        "6 | 2 layers, 8 microbatches": (text, plan_of(text, cluster, halves(6, 8), samples=(1,) * 8)),
        "2 replicas, 2 microbatches": (text, plan_of(text, cluster, replicas, samples=(4, 4))),
        "2 replicas with encoders": (images, plan_of(images, cluster, whole, samples=(2, 2, 1, 1))),
        "zb-h1, 5 | 3 layers": (text, plan_of(text, cluster, halves(5, 8), samples=two, schedule=split)),
        "encoder + 3 | 3": (images, plan_of(images, cluster, beside, samples=(1,) * 6)),
        "encoder + 3 | 3, projector": (frozen, plan_of(frozen, cluster, beside, samples=(1,) * 6)),
        "image + 2 | audio + 3": (three, plan_of(three, cluster, both, samples=(1,) * 6)),
        "2 | 4 layers": (lengths, plan_of(lengths, cluster, halves(2, 6), samples=(1,) * 8)),
        "2 | 4 layers of 512": (long, plan_of(long, cluster, halves(2, 6), samples=(1,) * 4)),
    }
    return tuple(
        Case(name=f"{work.name}, {name}", job=work.name, part=Part.REHEARSAL, plan=plan)
        for name, (work, plan) in plans.items()
    )
