"""Figure 1c: a pipeline balanced for training everything is slow once encoder and LLM are frozen.

Paper:   I. Jang et al., "Efficient Distributed MLLM Training with Cornstarch", ICML, section 2.2, Figure 1c.
Setup:   SigLIP and Llama 3.2 1B, 4 stages on 4 A40, 64 microbatches, times of Figure 1b.
Given:   Figure 1b's printed module times, spread evenly over the blocks of each module -> partitions of all
         layers into 4 stages, and their simulated iterations.
Differs: the figure is a timeline without numbers, so only its claim is checked: frozen, the partition
         that balances the all-trained pipeline is slower than the frozen-aware one.
Ours:    simulated on one CPU core, seconds.
"""

from collections.abc import Callable, Mapping, Sequence

from experiments.cornstarch.modelled import total
from experiments.cornstarch_icml.figure1b import figure
from experiments.harness.outcome import Evidence
from experiments.harness.printed import PrintedRow, is_true, printed_rows
from experiments.harness.printed_pipeline import PrintedRun, StageTimes, free_cluster, microbatched, run_plan
from experiments.harness.script import script
from workbench.balance.stages.partition import partition
from workbench.model.layer import LayerKind
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.build import with_programs
from workbench.plan.plan import Plan
from workbench.plan.stage import Stage

LayerTimes = Mapping[str, Sequence[StageTimes]]


def layer_plan(
    model: ModelGraph,
    times: LayerTimes,
    balanced: Callable[[StageTimes], float],
    num_ranks: int,
    num_microbatches: int,
) -> Plan:
    """One rank per part of the partition of all layers in model order.

    A part that crosses from one module into the next becomes two stages on the same rank.

    Args:
        model: a chain of modules.
        times: [layers] seconds by module.
        balanced: what of a layer's times the partition balances.
        num_ranks, num_microbatches: of the pipeline.
    """
    owners = [(module.name, index) for module in model.modules for index in range(len(module.layers))]
    cuts = partition([balanced(times[name][index]) for name, index in owners], num_ranks)
    stages: list[Stage] = []
    for rank, (first, end) in enumerate(cuts):
        for name in dict.fromkeys(owner for owner, _ in owners[first:end]):
            layer_indices = [index for owner, index in owners[first:end] if owner == name]
            layers = (layer_indices[0], layer_indices[-1] + 1)
            stages.append(Stage(id=len(stages), module=name, replica=0, layers=layers, ranks=((rank,),)))
    return with_programs(
        microbatched("printed-layers", model, free_cluster(num_ranks), tuple(stages), num_microbatches)
    )


NUM_STAGES = 4
NUM_MICROBATCHES = 64


def block_times(model: ModelGraph, row: PrintedRow) -> LayerTimes:
    """A row of Figure 1b, layer by layer; the backward of a frozen encoder is its projector's."""
    vision, llm = model.modules
    frozen = not is_true(row["encoder_trainable"])
    return {
        vision.name: _spread(
            vision,
            StageTimes.from_ms(row["enc_fwd_ms"], row["enc_bwd_ms"]),
            backward_in=LayerKind.PROJECTOR if frozen else LayerKind.BLOCK,
        ),
        llm.name: _spread(
            llm, StageTimes.from_ms(row["llm_fwd_ms"], row["llm_bwd_ms"]), backward_in=LayerKind.BLOCK
        ),
    }


def _spread(module: Module, whole: StageTimes, *, backward_in: LayerKind) -> tuple[StageTimes, ...]:
    kinds = [layer.kind for layer in module.layers]
    return tuple(
        StageTimes(
            whole.forward_s / kinds.count(LayerKind.BLOCK) if kind is LayerKind.BLOCK else 0.0,
            whole.backward_s / kinds.count(backward_in) if kind is backward_in else 0.0,
        )
        for kind in kinds
    )


@script()
def run() -> Evidence:
    """Iterations of the frozen model under both partitions, and of the all-trained one."""
    evidence = Evidence()
    rows = {is_true(row["llm_trainable"]): row for row in printed_rows("cornstarch_icml_figure1b")}
    models = figure().models()
    trained, frozen = models[False], models[True]
    trained_times, frozen_times = block_times(trained, rows[True]), block_times(frozen, rows[False])

    def run_with(model: ModelGraph, balance: LayerTimes, times: LayerTimes) -> PrintedRun:
        plan = layer_plan(model, balance, lambda time: time.total_s, NUM_STAGES, NUM_MICROBATCHES)
        return run_plan(plan, lambda stage: total(times[stage.module][slice(*stage.layers)]))

    runs = {
        "all_trained": run_with(trained, trained_times, trained_times),
        "frozen_unaware": run_with(frozen, trained_times, frozen_times),
        "frozen_aware": run_with(frozen, frozen_times, frozen_times),
    }
    for name, result in runs.items():
        evidence.ours[f"printed/{name}/iteration_s"] = result.iteration_s
        evidence.plan_hashes.append(result.plan_hash)
    slowdown = runs["frozen_unaware"].iteration_s / runs["frozen_aware"].iteration_s
    evidence.ours["printed/slowdown"] = slowdown
    seconds = ", ".join(f"{name} {result.iteration_s:.2f} s" for name, result in runs.items())
    evidence.notes.append(f"64 microbatches on 4 stages: {seconds}; unaware / aware {slowdown:.2f}")
    evidence.claim(
        "frozen, the partition for the all-trained model is slower than the frozen-aware one:", slowdown > 1
    )
    return evidence
