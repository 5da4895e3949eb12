"""Figure 22: iteration time of one pipeline stage of the LLM with and without StepCCL, TP 4 and 8.

Paper:   Z. Zhang et al., "DistTrain", appendix A.1; the bars are not printed, the prose gives ranges.
Setup:   blocks of the three LLMs of Table 2, one sample of 8,192 tokens, A100-class GPUs, 300 GB/s NVLink.
Ours:    products and copies by the profile's tables, ring collectives over the link, `workbench.cost.overlap`.
Differs: pieces per product, sequence-parallel or whole activations, and whether 300 GB/s are both ways together
         or each are not stated or doubtful: fixed at 4, sequence-parallel (Figure 20 shows an all-gather) and
         together (as printed); each row has its range over 2 to 16 pieces, both cuts and both readings.
Run:     python -m experiments.disttrain.figure22 [--json]
"""

from dataclasses import dataclass, replace
from itertools import product

from experiments import paper
from experiments.disttrain.gains import claimed
from experiments.disttrain.systems import EVERYTHING, LLM_SHAPES, NVLINK, PROFILE, TOKENS
from experiments.evidence import Evidence, outcome_of
from experiments.paper import Outcome, PaperNumber, Unstated
from workbench.cost.execution import ActivationCut, Execution
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.overlap import pairs_of
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.graph.layer import Layer, LayerKind
from workbench.graph.zoo import from_shape
from workbench.plan.plan import Precision
from workbench.units import ms

TP_SIZES = (4, 8)
EACH_WAY = replace(NVLINK, name="NVLink, 300 GB/s each way", bytes_per_s=300e9)
REL_TOL = 0.02  # of gains printed as 1.1 to 1.17
UNSTATED = "pieces per product, cut of activations, reading of 300 GB/s"
SMALL_REMAP = 0.03  # of an iteration: what "usually negligible" is held against
BYTES = Precision.BFLOAT16.num_bytes
WORK = Work((RowWork(TOKENS, TOKENS, TOKENS * (TOKENS + 1) // 2),))


@dataclass(frozen=True, slots=True)
class Setting:
    """How StepCCL is used."""

    num_pieces: int
    cut: ActivationCut
    link: Link


NOMINAL = Setting(4, ActivationCut.SEQUENCE, NVLINK)
PLAUSIBLE = (
    NOMINAL,
    *(
        Setting(*each)
        for each in product((2, 4, 8, 16), ActivationCut, (NVLINK, EACH_WAY))
        if Setting(*each) != NOMINAL
    ),
)


class Bench:
    """Blocks of the LLMs on one machine."""

    def __init__(self) -> None:
        self._cost = CostModel(load_profile(PROFILE))

    def iteration_s(self, model: str, tp: int, link: Link, execution: Execution) -> float:
        """Forward and backward of one block over one sample: a stage has some number of them."""
        time = self._cost.executed(execution).layer_time(
            _block(model), WORK, tp=tp, cp=1, precision=Precision.BFLOAT16, link=link
        )
        return time.forward_s + time.backward_s(EVERYTHING)

    def gain(self, model: str, tp: int, setting: Setting) -> float:
        """Iteration without overlap over that with it."""
        serial = Execution(activations=setting.cut)
        together = replace(serial, overlap_pieces=setting.num_pieces)
        before_s, after_s = (self.iteration_s(model, tp, setting.link, run) for run in (serial, together))
        return before_s / after_s

    def remap_fraction(self, model: str, tp: int) -> float:
        """Remaps of an iteration over all of it, nominally."""
        pairs = pairs_of(_block(model), WORK, Grid(tp), BYTES, NOMINAL.cut)
        every = (*pairs.forward, *(pair for _, pair in pairs.backward))
        remap_s = sum(self._cost.moved_s(2 * BYTES * pair.remapped_elements) for pair in every)
        run = Execution(activations=NOMINAL.cut, overlap_pieces=NOMINAL.num_pieces)
        return remap_s / self.iteration_s(model, tp, NOMINAL.link, run)


def run() -> Outcome:
    """Gains of every model and setting, and what limits them."""
    bench, evidence = Bench(), Evidence()
    for tp in TP_SIZES:
        gains = {s: {model: bench.gain(model, tp, s) for model in LLM_SHAPES} for s in PLAUSIBLE}
        for end, pick in (("low", min), ("high", max)):
            every = [pick(of_setting.values()) for of_setting in gains.values()]
            claim = f"dt_stepccl_tp{tp}_{end}"
            number = PaperNumber(f"modelled/{claim}", claimed(claim), "x", "appendix A.1", REL_TOL)
            evidence.add(number, every[0], Unstated(UNSTATED, min(every), max(every)))
        for model, gain in gains[NOMINAL].items():
            key = f"modelled/{model}, TP {tp}"
            serial = Execution(activations=NOMINAL.cut)
            before_s = bench.iteration_s(model, tp, NOMINAL.link, serial)
            evidence.ours |= {
                f"{key}/block_ms": ms(before_s),
                f"{key}/overlapped_block_ms": ms(before_s / gain),
                f"{key}/gain": gain,
                f"{key}/remap_fraction": bench.remap_fraction(model, tp),
            }
    _claims(evidence, bench)
    return outcome_of("disttrain/figure22", [evidence], profile=PROFILE)


def _claims(evidence: Evidence, bench: Bench) -> None:
    settled = [(model, setting) for model in LLM_SHAPES for setting in PLAUSIBLE]
    evidence.claim(
        "StepCCL is faster in every model, TP size and setting",
        all(bench.gain(model, tp, setting) > 1 for model, setting in settled for tp in TP_SIZES),
    )
    evidence.claim(
        "the gain is larger at TP 8 than at TP 4 in every model and setting",
        all(bench.gain(model, 8, setting) > bench.gain(model, 4, setting) for model, setting in settled),
    )
    most = max(bench.remap_fraction(model, tp) for model in LLM_SHAPES for tp in TP_SIZES)
    evidence.claim(f"remaps take at most {most:.1%} of an iteration: negligible", most <= SMALL_REMAP)
    for tp in TP_SIZES:
        by_pieces = ", ".join(
            f"{pieces}: {bench.gain('MLLM-72B', tp, replace(NOMINAL, num_pieces=pieces)):.3f}"
            for pieces in (1, 2, 4, 8, 16, 32, 64)
        )
        evidence.notes.append(f"gain of MLLM-72B's LLM at TP {tp} by pieces per product: {by_pieces}")


def _block(model: str) -> Layer:
    layers = from_shape(LLM_SHAPES[model], module="llm").layers
    return next(layer for layer in layers if layer.kind is LayerKind.BLOCK)


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
