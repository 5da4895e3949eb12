"""The communication broker: what passes between units of unequal data parallelism, three ways and two paces.

Paper:   Z. Zhang et al., "DistTrain", sections 4.1 and 6: gcd of the data-parallel sizes many brokers, whose
         bandwidth grows with the training; asynchronous sends. Words only, no figure.
Setup:   Llama3-7B activations of 8,192 tokens; an A100 node's NICs (4 x 200 Gbit/s, section 7) shared by its
         8 GPUs. Figure 9's sizes (2, 3 and 1 replicas), and larger ones; both units equally fast on the
         whole; 12 microbatches for each replica of the larger unit, forward only.
Ours:    simulated by `sim.broker`.
Differs: which microbatch goes where is not printed: microbatch k to replica k modulo their number. Backward
         traffic, which goes the other way over the other half of each NIC, is left out.
"""

from dataclasses import dataclass

from experiments.harness.outcome import Claim, Evidence
from experiments.harness.script import script
from sim.broker import Boundary, Crossing, Sending, Topology, cross
from workbench.units import ms

SIZES = ((2, 3), (3, 1), (8, 4), (16, 24), (32, 32), (48, 36), (54, 18), (64, 96))
MICROBATCHES_EACH = 12
TOKENS, HIDDEN, BYTES = 8192, 4096, 2  # of one microbatch; bfloat16
NIC_BYTES_PER_S = 4 * 200e9 / 8 / 8  # of one GPU
LATENCY_S = 10e-6
STAGE_S = 0.1  # of a microbatch downstream
NEGLIGIBLE = 1.02


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of sizes."""

    boundary: Boundary
    found: dict[tuple[Topology, Sending], Crossing]

    @property
    def name(self) -> str:
        return f"{self.boundary.up_dp} to {self.boundary.down_dp}"

    @property
    def nic_load(self) -> float:
        """Of the one NIC that leaders have: above 1 it cannot carry what the units do."""
        return self.boundary.transmit_s * self.boundary.down_dp / self.boundary.down_s

    def over_best(self, topology: Topology, sending: Sending) -> float:
        """End over that of straight, asynchronous sends."""
        best = self.found[Topology.ALL_PAIRS, Sending.ASYNCHRONOUS].end_s
        return self.found[topology, sending].end_s / best


def case(up_dp: int, down_dp: int) -> Case:
    """Both units do as many microbatches a second."""
    boundary = Boundary(
        up_dp=up_dp,
        down_dp=down_dp,
        num_microbatches=MICROBATCHES_EACH * max(up_dp, down_dp),
        up_s=STAGE_S * up_dp / down_dp,
        down_s=STAGE_S,
        num_bytes=TOKENS * HIDDEN * BYTES,
        bytes_per_s=NIC_BYTES_PER_S,
        latency_s=LATENCY_S,
    )
    found = {(t, s): cross(boundary, t, s) for t in Topology for s in Sending}
    return Case(boundary, found)


def claims(cases: list[Case]) -> list[Claim]:
    """Who wins, and by what."""
    ahead = Sending.ASYNCHRONOUS
    scaled = all(
        each.found[Topology.BROKERS, ahead].busiest_s * each.boundary.num_brokers
        <= 2 * each.found[Topology.LEADERS, ahead].busiest_s + 1e-9
        for each in cases
    )
    return [
        Claim(
            f"brokers with asynchronous sends are within {NEGLIGIBLE - 1:.0%} of straight sends",
            all(each.over_best(Topology.BROKERS, ahead) <= NEGLIGIBLE for each in cases),
        ),
        Claim(
            "leaders are slower by what one NIC cannot carry, where it cannot",
            all(
                each.over_best(Topology.LEADERS, ahead) >= 0.9 * each.nic_load
                for each in cases
                if each.nic_load > 1
            ),
        ),
        Claim("the busiest NIC carries a share that falls with the number of brokers", scaled),
        Claim(
            "brokers never need more connections than all pairs",
            all(
                each.boundary.num_connections(Topology.BROKERS)
                <= each.boundary.num_connections(Topology.ALL_PAIRS)
                for each in cases
            ),
        ),
        Claim(
            "asynchronous sends pause nobody, synchronous ones someone in every case",
            all(
                (crossing.paused_s == 0.0) is (sending is ahead)
                for each in cases
                for (_, sending), crossing in each.found.items()
            ),
        ),
        Claim(
            "asynchronous sends are never slower",
            all(
                each.over_best(t, ahead) <= each.over_best(t, Sending.SYNCHRONOUS)
                for each in cases
                for t in Topology
            ),
        ),
    ]


def note(each: Case) -> str:
    """One line per pair of sizes."""
    ways = ", ".join(
        f"{topology} {each.over_best(topology, Sending.ASYNCHRONOUS):.2f} "
        f"({each.over_best(topology, Sending.SYNCHRONOUS):.2f} synchronous, "
        f"{each.boundary.num_connections(topology)} connections)"
        for topology in Topology
    )
    return f"{each.name} replicas, {each.boundary.num_brokers} brokers; time over the best: {ways}"


@script()
def run() -> Evidence:
    cases = [case(up_dp, down_dp) for up_dp, down_dp in SIZES]
    ours: dict[str, float] = {}
    for each in cases:
        for topology in Topology:
            key = f"simulated/{each.name}/{topology}"
            ours[f"{key}/connections"] = each.boundary.num_connections(topology)
            ours[f"{key}/busiest_nic_ms"] = ms(each.found[topology, Sending.ASYNCHRONOUS].busiest_s)
            for sending in Sending:
                ours[f"{key}/{sending}/over_best"] = each.over_best(topology, sending)
                ours[f"{key}/{sending}/paused_ms"] = ms(each.found[topology, sending].paused_s)
    return Evidence(ours=ours, claims=claims(cases), notes=[note(each) for each in cases])
