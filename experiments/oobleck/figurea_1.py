"""Figure A.1: throughput of the other models on spot traces.

Paper:   I. Jang, dissertation, appendix A.3, Figure A.1; the figure's numbers are not printed.
Setup:   as Figure 2.10, with GPT-2 and GPT-3 Medium.
Given:   throughput by number of nodes, batch, time to recover and to save, as in the published simulator.
Differs: as Figure 2.10. The appendix says that Varuna matches Oobleck on these models; in ours it restarts
         at every change of nodes and stays behind.
Ours:    the failure simulator, about 2 s on one CPU core; the plot reads the series it writes.
"""

from experiments.harness.script import Parts, script
from experiments.oobleck.spot import drawing, spot_evidence, write_series

MODELS = ("GPT-2", "GPT-3 Medium")


@script()
def run() -> Parts:
    """All evidence of the figure; draws it."""
    evidence = spot_evidence(MODELS)
    evidence.figures["oobleck_figurea_1"] = drawing(write_series("oobleck/figurea_1", MODELS))
    return [evidence]
