"""Figure 4: two kinds of bubbles, those of idle encoders and generators and those that they cause in the LLM.

Paper:   Z. Zhang et al., "DistTrain", section 2.2; a drawing without numbers.
Setup:   Megatron-LM with one stage for the encoder, two for the LLM and one for the generator, 12
         microbatches; MLLM-15B with few small images (a), and with many large ones (b).
Ours:    simulated with seconds of the cost model: idle share of the stages while the pipeline is full, from
         the first generator forward to the last encoder forward.
Differs: stages and microbatches are chosen, not printed; warm-up and drain are left out: both have them.
"""

from experiments.disttrain.figure3 import MODULES
from experiments.disttrain.systems import PROFILE, Images, Systems, Workload
from experiments.harness.outcome import Evidence
from experiments.harness.printed_pipeline import StageTimes, passes_s, pipeline_plan
from experiments.harness.script import script
from sim.step.engine import simulate
from workbench.float_sum import float_sum
from workbench.model.model_graph import ModelGraph
from workbench.plan.lower import lower
from workbench.schedule.action import Pass

MODEL, LLM_PP, MICROBATCHES = "MLLM-15B", 2, 12
CASES = {
    "light": Workload(model=MODEL, images=Images(read=2, drawn=1), side_px=512),
    "heavy": Workload(model=MODEL, images=Images(read=2, drawn=2), side_px=2048),
}


def idle_fractions(model: ModelGraph, stages: tuple[StageTimes, StageTimes, StageTimes]) -> dict[str, float]:
    """Module -> idle share of its stages while the pipeline is full."""
    plan = pipeline_plan(model, {"encoder": 1, "llm": LLM_PP, "generator": 1}, MICROBATCHES)
    of_module = dict(zip(("encoder", "llm", "generator"), stages, strict=True))
    trace = simulate(lower(plan), passes_s(lambda stage: of_module[plan.stage[stage].module]))
    passes = [span for span in trace.spans if span.action.kind in (Pass.F, Pass.B)]
    last_rank = max(span.rank for span in passes)
    start_s = min(span.start_s for span in passes if span.rank == last_rank)
    end_s = max(span.end_s for span in passes if span.rank == 0 and span.action.kind is Pass.F)
    fractions: dict[str, list[float]] = {}
    for rank in range(last_rank + 1):
        busy_s = float_sum(
            max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
            for span in passes
            if span.rank == rank
        )
        module = plan.stages_on[rank][0].module
        fractions.setdefault(module, []).append(1 - busy_s / (end_s - start_s))
    return {module: float_sum(shares) / len(shares) for module, shares in fractions.items()}


@script(profile=PROFILE)
def run() -> Evidence:
    evidence = Evidence()
    idle: dict[str, dict[str, float]] = {}
    for case, workload in CASES.items():
        systems = Systems(workload)
        stages = systems.monolithic_stages(LLM_PP)
        idle[case] = idle_fractions(systems.model, stages)
        for module, share in idle[case].items():
            evidence.ours[f"modelled/{case}/{module}_idle"] = share
        times = ", ".join(
            f"{name} {stage.forward_s:.3f} + {stage.backward_s:.3f} s"
            for name, stage in zip(MODULES, stages, strict=True)
        )
        shares = ", ".join(f"{module} {share:.0%}" for module, share in idle[case].items())
        evidence.notes.append(f"{case}: {times}; idle while the pipeline is full: {shares}")
    light, heavy = idle["light"], idle["heavy"]
    evidence.claim(
        "(a) with few images encoder and generator idle more than the LLM",
        min(light["encoder"], light["generator"]) > light["llm"],
    )
    evidence.claim("(b) with large ones the LLM waits for them", heavy["llm"] > 2 * light["llm"])
    evidence.claim(
        "(b) the LLM's stages idle more than the slowest other", heavy["llm"] > min(heavy.values())
    )
    return evidence
