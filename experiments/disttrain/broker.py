"""The communication broker between units of unequal data parallelism: three topologies, two ways to send.

Paper:   Z. Zhang et al., "DistTrain", sections 4.1 and 6: as many brokers as the gcd of the data-parallel
         sizes, whose bandwidth grows with the training; asynchronous sends. Words only, no figure.
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
    """A pair of unit sizes."""

    boundary: Boundary
    crossings: dict[tuple[Topology, Sending], Crossing]

    @property
    def name(self) -> str:
        return f"{self.boundary.up_dp} to {self.boundary.down_dp}"

    @property
    def nic_load(self) -> float:
        """Load of the leaders' one NIC: above 1 it cannot carry the units' rate."""
        return self.boundary.transmit_s * self.boundary.down_dp / self.boundary.down_s

    def over_best(self, topology: Topology, sending: Sending) -> float:
        """End time over that of direct, asynchronous sends."""
        best = self.crossings[Topology.ALL_PAIRS, Sending.ASYNCHRONOUS].end_s
        return self.crossings[topology, sending].end_s / best


def case(up_dp: int, down_dp: int) -> Case:
    """A case in which both units process equally many microbatches a second."""
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
    ends = {(t, s): cross(boundary, t, s) for t in Topology for s in Sending}
    return Case(boundary, ends)


def claims(cases: list[Case]) -> list[Claim]:
    """Claims on who wins, and by how much."""
    ahead = Sending.ASYNCHRONOUS
    scaled = all(
        one_case.crossings[Topology.BROKERS, ahead].busiest_s * one_case.boundary.num_brokers
        <= 2 * one_case.crossings[Topology.LEADERS, ahead].busiest_s + 1e-9
        for one_case in cases
    )
    return [
        Claim(
            f"brokers with asynchronous sends are within {NEGLIGIBLE - 1:.0%} of straight sends",
            all(one_case.over_best(Topology.BROKERS, ahead) <= NEGLIGIBLE for one_case in cases),
        ),
        Claim(
            "leaders are slower by what one NIC cannot carry, where it cannot",
            all(
                one_case.over_best(Topology.LEADERS, ahead) >= 0.9 * one_case.nic_load
                for one_case in cases
                if one_case.nic_load > 1
            ),
        ),
        Claim("the busiest NIC carries a share that falls with the number of brokers", scaled),
        Claim(
            "brokers never need more connections than all pairs",
            all(
                one_case.boundary.num_connections(Topology.BROKERS)
                <= one_case.boundary.num_connections(Topology.ALL_PAIRS)
                for one_case in cases
            ),
        ),
        Claim(
            "asynchronous sends pause nobody, synchronous ones someone in every case",
            all(
                (crossing.paused_s == 0.0) is (sending is ahead)
                for one_case in cases
                for (_, sending), crossing in one_case.crossings.items()
            ),
        ),
        Claim(
            "asynchronous sends are never slower",
            all(
                one_case.over_best(t, ahead) <= one_case.over_best(t, Sending.SYNCHRONOUS)
                for one_case in cases
                for t in Topology
            ),
        ),
    ]


def note(one_case: Case) -> str:
    """One line per pair of sizes."""
    listed = ", ".join(
        f"{topology} {one_case.over_best(topology, Sending.ASYNCHRONOUS):.2f} "
        f"({one_case.over_best(topology, Sending.SYNCHRONOUS):.2f} synchronous, "
        f"{one_case.boundary.num_connections(topology)} connections)"
        for topology in Topology
    )
    return f"{one_case.name} replicas, {one_case.boundary.num_brokers} brokers; time over the best: {listed}"


@script()
def run() -> Evidence:
    cases = [case(up_dp, down_dp) for up_dp, down_dp in SIZES]
    ours: dict[str, float] = {}
    for one_case in cases:
        for topology in Topology:
            key = f"simulated/{one_case.name}/{topology}"
            ours[f"{key}/connections"] = one_case.boundary.num_connections(topology)
            ours[f"{key}/busiest_nic_ms"] = ms(one_case.crossings[topology, Sending.ASYNCHRONOUS].busiest_s)
            for sending in Sending:
                ours[f"{key}/{sending}/over_best"] = one_case.over_best(topology, sending)
                ours[f"{key}/{sending}/paused_ms"] = ms(one_case.crossings[topology, sending].paused_s)
    return Evidence(ours=ours, claims=claims(cases), notes=[note(one_case) for one_case in cases])
