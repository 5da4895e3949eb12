"""Table 2.2: average throughput while nodes fail one by one, from 30 to 15.

Paper:   I. Jang, dissertation, section 2.7.2, Table 2.2.
Setup:   30 nodes with one A40 each; one is lost every 6 h, 1 h or 10 min and none comes back.
Given:   throughput by number of nodes, batch, time to recover and to save, as in the published simulator;
         its traces of losses.
Differs: the rules of the simulation are our own (`sim.failures.simulate`): the iteration that a failure hits
         is lost, Varuna goes back to its last checkpoint, and recovering takes its time. The text leaves room
         for more: cells that depend on it are UNDERSPECIFIED, with our range over these readings. The
         published simulator, restated rule by rule, gives all 21 cells within 3 %: there Varuna trains
         on while it restarts, saves right after and stops where two restarts overlap, and iterations of
         Bamboo last half as long again after the loss of a node that only waited: its gap of 8 %.
Ours:    the failure simulator, 2 s on one CPU core.
"""

from experiments.harness.outcome import Evidence
from experiments.harness.script import Parts, script
from experiments.oobleck.published_rules import SLOWDOWN, restated_average
from experiments.oobleck.runs import average_rows, controlled, restated_rows, runs
from experiments.oobleck.systems import INTERVALS, MODELS, trace

SYSTEMS, BAMBOO_MODELS = ("bamboo", "varuna", "oobleck"), ("BERT-Large", "GPT-2")


def claims_evidence() -> Evidence:
    """Evidence on the claims of section 2.7.2 and of the table."""
    evidence = Evidence()
    for model in MODELS:
        rates = {
            (name, interval): controlled(name, model, interval).samples_per_s
            for name in SYSTEMS
            if runs(name, model)
            for interval in INTERVALS
        }
        best = all(rates["oobleck", interval] >= 0.98 * rate for (_, interval), rate in rates.items())
        evidence.claim(f"{model}: Oobleck beats or matches (within 2 %) the others everywhere;", best)
        falls = [rates["varuna", i] / rates["varuna", "6h"] for i in INTERVALS]
        kept_shares = [rates["oobleck", i] / rates["oobleck", "6h"] for i in INTERVALS]
        evidence.claim(
            f"{model}: frequent failures cost Varuna more ({1 - falls[-1]:.0%}) "
            f"than Oobleck ({1 - kept_shares[-1]:.0%});",
            falls[-1] < kept_shares[-1],
        )
    return evidence


def bamboo_evidence() -> Evidence:
    """Evidence on the gap between Bamboo's printed averages and its own throughputs."""
    evidence, happens = Evidence(), trace("failures_6h")
    for model in BAMBOO_MODELS:
        slow, steady = (restated_average("bamboo", model, happens, slowdown) for slowdown in (SLOWDOWN, 1.0))
        ours = controlled("bamboo", model, "6h").samples_per_s
        evidence.claim(
            f"Bamboo, {model}, 6 h: by the published rules {slow:.4g}, without iterations that last half as "
            f"long again {steady:.4g}, which is ours ({ours:.4g}) within 1 %;",
            abs(steady / ours - 1) <= 0.01,
        )
    return evidence


@script()
def run() -> Parts:
    table, where = "oobleck_table2_2", "Table 2.2"
    return [average_rows(table, where), restated_rows(table, where), claims_evidence(), bamboo_evidence()]
