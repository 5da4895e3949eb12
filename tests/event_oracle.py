"""The simulator's semantics by brute force: look at everything, at every instant, until nothing changes.

No event queue and no code of the simulator. State is plain dicts; a rule is a method that
returns whether it changed anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.plan.lowered import Lowered
from workbench.schedule.action import COMPUTE, Action, Pass

RankAction = tuple[int, Action]


@dataclass
class Times:
    """What the oracle found: (start, end) per rank and action, (ready, start, end) per row that travelled."""

    actions: dict[RankAction, tuple[float, float]]
    rows: dict[int, tuple[float, float, float]]
    stuck: set[RankAction]


def brute_force(lowered: Lowered, duration_s: Callable[[Action], float]) -> Times:
    oracle = Oracle(lowered, duration_s)
    oracle.run()
    return Times(
        actions={key: (oracle.start_s[key], oracle.end_s[key]) for key in oracle.end_s},
        rows={
            row: (oracle.ready_s[row], oracle.sent_s[row], oracle.there_s[row])
            for row in oracle.there_s
            if row in oracle.sent_s
        },
        stuck=oracle.everything - set(oracle.end_s),
    )


@dataclass
class Oracle:
    lowered: Lowered
    duration_s: Callable[[Action], float]
    now: float = 0.0
    place: dict[int, int] = field(default_factory=dict)  # rank -> next action of its program
    start_s: dict[RankAction, float] = field(default_factory=dict)
    end_s: dict[RankAction, float] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    link_free_s: dict[int, float] = field(default_factory=dict)  # by row: when it leaves its link
    there_s: dict[int, float] = field(default_factory=dict)
    group_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    work_left: dict[RankAction, float] = field(default_factory=dict)  # node clock at which it ends
    clock: dict[int, float] = field(default_factory=dict)  # node -> work done by each active rank
    clock_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.lowered.plan
        self.programs = dict(plan.program)
        self.place = dict.fromkeys(self.programs, 0)
        self.everything = {(r, action) for r, actions in self.programs.items() for action in actions}
        self.node = {rank: plan.cluster.node_of(rank) for rank in range(plan.cluster.num_ranks)}
        self.shared = {
            index: node.num_cores
            for index, node in enumerate(plan.cluster.nodes)
            if node.num_cores is not None and node.num_cores < node.num_ranks
        }
        self.clock = dict.fromkeys(self.shared, 0.0)
        self.clock_at = dict.fromkeys(self.shared, 0.0)

    def run(self) -> None:
        rules = (self.finish_work, self.end_actions, self.land, self.start_actions, self.reduce)
        while True:
            while any(rule() for rule in rules):
                pass
            if self.arbitrate():
                continue
            times = self.next_times()
            if not times:
                return
            self.now = min(times)

    def next_times(self) -> list[float]:
        ends = [end for _, end in self.group_s.values()]
        ends += [self.private_end(key) for key in self.running() if not self.is_on_cores(key)]
        ends += [self.shared_end(node) for node in self.shared if self.on_node(node)]
        ends += [*self.link_free_s.values(), *self.there_s.values()]
        return [time for time in ends if time > self.now]

    # compute -----------------------------------------------------------------------------

    def ranks_of(self, rank: int, action: Action) -> tuple[int, ...]:
        return (rank,) if action.stage is None else self.lowered.plan.stage[action.stage].flat_ranks

    def running(self) -> list[RankAction]:
        compute = (*COMPUTE, Pass.STEP)
        return [k for k in self.start_s if k not in self.end_s and k[1].kind in compute]

    def is_on_cores(self, key: RankAction) -> bool:
        return self.node[key[0]] in self.shared

    def private_end(self, key: RankAction) -> float:
        return self.start_s[key] + self.duration_s(key[1])

    def start_actions(self) -> bool:
        changed = False
        for rank, program in self.programs.items():
            action = program[self.place[rank]] if self.place[rank] < len(program) else None
            if action is None or (rank, action) in self.start_s:
                continue
            if action.kind is Pass.REDUCE_GRAD:
                self.place[rank] += 1  # issued; `reduce` does it
                changed = True
            elif self.may_start(rank, action):
                for member in self.ranks_of(rank, action):
                    self.start_s[member, action] = self.now
                    if self.is_on_cores((member, action)):
                        self.bring_up(self.node[member])
                        clock = self.clock[self.node[member]]
                        self.work_left[member, action] = clock + self.duration_s(action)
                changed = True
        return changed

    def may_start(self, rank: int, action: Action) -> bool:
        if action.kind is Pass.STEP:
            reductions = [a for a in self.programs[rank] if a.kind is Pass.REDUCE_GRAD]
            return all((rank, reduction) in self.end_s for reduction in reductions)
        for member in self.ranks_of(rank, action):
            program = self.programs[member]
            if self.place[member] == len(program) or program[self.place[member]] != action:
                return False
        rows = self.lowered.inputs.get(action, ())
        return all(row in self.there_s and self.there_s[row] <= self.now for row in rows)

    def end_actions(self) -> bool:
        changed = False
        for rank, action in self.running():
            members = self.ranks_of(rank, action)
            if (rank, action) in self.end_s or not all(self.has_worked((m, action)) for m in members):
                continue
            for member in members:
                self.end_s[member, action] = self.now
                self.place[member] += 1
            for row in self.lowered.outputs.get(action, ()):
                if self.lowered.transfers[row].after is None:
                    self.make_ready(row)
            changed = True
        return changed

    def has_worked(self, key: RankAction) -> bool:
        if self.is_on_cores(key):
            return key not in self.work_left
        return self.private_end(key) <= self.now

    # shared cores ------------------------------------------------------------------------

    def on_node(self, node: int) -> list[float]:
        return [left for (rank, _), left in self.work_left.items() if self.node[rank] == node]

    def shared_end(self, node: int) -> float:
        """Predicted from the last instant at which somebody started or ended there."""
        active = self.on_node(node)
        rate = min(1.0, self.shared[node] / len(active))
        return self.clock_at[node] + (min(active) - self.clock[node]) / rate

    def bring_up(self, node: int) -> None:
        """Set the node's clock to now: to exactly the first end when that is predicted for now."""
        active = self.on_node(node)
        if active:
            rate = min(1.0, self.shared[node] / len(active))
            passed = self.clock[node] + (self.now - self.clock_at[node]) * rate
            is_end = self.now == self.shared_end(node)
            self.clock[node] = min(active) if is_end else min(passed, *active)
        else:
            self.clock[node] = 0.0
        self.clock_at[node] = self.now

    def finish_work(self) -> bool:
        changed = False
        for node in self.shared:
            if self.on_node(node) and self.shared_end(node) <= self.now:
                self.bring_up(node)
                done = [
                    key
                    for key, left in self.work_left.items()
                    if self.node[key[0]] == node and left <= self.clock[node]
                ]
                for key in done:
                    del self.work_left[key]
                changed = True
        return changed

    # rows --------------------------------------------------------------------------------

    def make_ready(self, row: int) -> None:
        self.ready_s[row] = self.now
        transfer = self.lowered.transfers[row]
        if transfer.destination_ranks == (transfer.source_rank,):
            self.there_s[row] = self.now

    def land(self) -> bool:
        """A row that is there lets the broadcast go that hands it on."""
        changed = False
        for transfer in self.lowered.transfers:
            row, after = transfer.row, transfer.after
            if row in self.ready_s or after is None:
                continue
            if after in self.there_s and self.there_s[after] <= self.now:
                self.make_ready(row)
                changed = True
        return changed

    def link_of(self, row: int) -> tuple[str, int]:
        transfer = self.lowered.transfers[row]
        home = self.node[transfer.source_rank]
        if {self.node[rank] for rank in transfer.destination_ranks} == {home}:
            return "port of rank", transfer.source_rank
        return "nic of node", home

    def arbitrate(self) -> bool:
        waiting = [row for row in self.ready_s if row not in self.sent_s and row not in self.there_s]
        busy = {self.link_of(row) for row, free_s in self.link_free_s.items() if free_s > self.now}
        best: dict[tuple[str, int], int] = {}
        for row in waiting:
            link = self.link_of(row)
            if link in busy:
                continue
            if link not in best or (self.ready_s[row], row) < (self.ready_s[best[link]], best[link]):
                best[link] = row
        for link, row in best.items():
            cluster = self.lowered.plan.cluster
            channel = cluster.intra if link[0] == "port of rank" else cluster.inter
            self.sent_s[row] = self.now
            transmit_s = self.lowered.transfers[row].num_bytes / channel.bytes_per_s
            self.link_free_s[row] = self.now + transmit_s
            self.there_s[row] = self.link_free_s[row] + channel.latency_s
        return bool(best)

    # reductions --------------------------------------------------------------------------

    def queue(self, rank: int) -> list[tuple[Action, int | None]]:
        """All-reduces that the rank has issued, in order; None for a REDUCE_GRAD without any."""
        issued = self.programs[rank][: self.place[rank]]
        found: list[tuple[Action, int | None]] = []
        for action in issued:
            if action.kind is Pass.REDUCE_GRAD:
                covered = self.lowered.reductions.get(action, ())
                mine = [g for g in covered if rank in self.lowered.groups[g].ranks]
                found += [(action, group) for group in mine] or [(action, None)]
        return found

    def head(self, rank: int) -> tuple[Action, int | None] | None:
        for action, group in self.queue(rank):
            done = (rank, action) in self.end_s
            if not done and not (group in self.group_s and self.group_s[group][1] <= self.now):
                return action, group
        return None

    def reduce(self) -> bool:
        changed = False
        for rank in self.programs:
            head = self.head(rank)
            if head is not None and head[1] is None:
                changed |= self.reduce_alone(rank, head[0])
            elif head is not None and head[1] not in self.group_s:
                changed |= self.reduce_together(head[1])
            changed |= self.end_reductions(rank)
        return changed

    def reduce_alone(self, rank: int, action: Action) -> bool:
        """Nothing to reduce on this rank, or a plan that does not say what."""
        price_s = 0.0 if action in self.lowered.reductions else self.duration_s(action)
        self.start_s.setdefault((rank, action), self.now)
        alone = -1 - rank - 1000 * action.stage
        if alone not in self.group_s:
            self.group_s[alone] = (self.now, self.now + price_s)
            return True
        if self.group_s[alone][1] <= self.now:
            self.end_s[rank, action] = self.now
            return True
        return False

    def reduce_together(self, group: int) -> bool:
        ranks = self.lowered.groups[group].ranks
        heads = [self.head(rank) if rank in self.programs else None for rank in ranks]
        if any(head is None or head[1] != group for head in heads):
            return False
        for rank, head in zip(ranks, heads, strict=True):
            self.start_s.setdefault((rank, head[0]), self.now)
        self.group_s[group] = (self.now, self.now + self.price_of(group))
        return True

    def price_of(self, group: int) -> float:
        """The longest part that any REDUCE_GRAD gives it: price x elements / elements of its busiest rank."""
        groups = self.lowered.groups
        parts = []
        for action, covered in self.lowered.reductions.items():
            if group in covered:
                busiest = max(
                    sum(groups[g].num_elements for g in covered if rank in groups[g].ranks)
                    for rank in self.lowered.plan.stage[action.stage].flat_ranks
                )
                parts.append(self.duration_s(action) * (groups[group].num_elements / busiest))
        return max(parts)

    def end_reductions(self, rank: int) -> bool:
        changed = False
        for action in {action for action, _ in self.queue(rank)}:
            groups = [g for a, g in self.queue(rank) if a == action]
            ended = all(g in self.group_s and self.group_s[g][1] <= self.now for g in groups if g is not None)
            if None not in groups and ended and (rank, action) not in self.end_s:
                self.end_s[rank, action] = self.now
                changed = True
        return changed
