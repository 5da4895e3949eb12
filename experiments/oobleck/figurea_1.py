"""Figure A.1: throughput of the other models on spot traces.

Paper:   I. Jang, dissertation, appendix A.3, Figure A.1; the figure's numbers are not printed.
Setup:   as Figure 2.10, with GPT-2 and GPT-3 Medium.
Given:   throughput by number of nodes, batch, time to recover and to save, as in the published simulator.
Differs: as Figure 2.10. The appendix says that Varuna matches Oobleck on these models; in ours it restarts
         at every change of nodes and stays behind.
Ours:    the failure simulator, about 2 s on one CPU core; the plot reads the series it writes.
Run:     python -m experiments.oobleck.figurea_1
"""

from experiments import paper
from experiments.evidence import outcome_of
from experiments.oobleck.spot import draw, spot_evidence, write_series
from experiments.paper import Outcome

MODELS = ("GPT-2", "GPT-3 Medium")


def run() -> Outcome:
    """All evidence of the figure; draws it."""
    draw(write_series("oobleck/figurea_1", MODELS))
    return outcome_of("oobleck/figurea_1", [spot_evidence(MODELS)])


def main() -> int:
    return paper.command(run)


if __name__ == "__main__":
    raise SystemExit(main())
