"""Balance across and inside GPUs in Cornstarch (ICML): Table 3, Figure 8, Table 7, Figures 6 and 9."""

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean

from experiments.cornstarch import attention_layers
from experiments.cornstarch.modelled import TIME_REL_TOL, a40_cost
from experiments.cornstarch.models import llm_family
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import printed_rows
from sim.attention.policies import AttentionRun, Kernel
from workbench.cost.model import CostModel
from workbench.cost.roofline import RowWork, Work
from workbench.model.layer import Attention, LayerKind
from workbench.model.model_graph import Module
from workbench.timing.attention import AttentionTime, without_attention

POLICIES: Mapping[str, tuple[str, Kernel]] = {
    "causal_cp": ("zigzag", attention_layers.STATIC),
    "inter_gpu_only": ("lpt", attention_layers.STATIC),
    "intra_gpu_only": ("zigzag", attention_layers.FIXED),
    "cornstarch": ("lpt", attention_layers.FIXED),
    "inter_gpu_multistreams": ("lpt", attention_layers.STREAMS),
}
BASELINE = "causal_cp"
FOUR = tuple(POLICIES)[:4]

MAIN = ("EE", attention_layers.LayerSetting(num_ranks=8))
OTHERS = (
    *(
        (kind, attention_layers.LayerSetting(num_ranks=ranks))
        for kind in attention_layers.MASKS
        for ranks in (4, 8, 16)
    ),
    ("EE", attention_layers.LayerSetting(num_ranks=8, kv_heads_per_launch=2)),
)
SEEDS = range(5)
RANGE_SEEDS = range(2)
UNSTATED = "ranks, mask, heads per gather"

GAIN_REL_TOL = 0.05

Times = Mapping[str, float]  # seconds of one attention layer, forward, by policy
Setting = tuple[str, attention_layers.LayerSetting]  # kind of mask


def setting_name(setting: Setting) -> str:
    """A description of a setting."""
    kind, layer = setting
    return f"{kind}, {layer.num_ranks} ranks, {layer.kv_heads_per_launch} of the key-value heads a gather"


NAMES = ("the setting shown", *map(setting_name, OTHERS))  # of `PolicyTable.times`


def llm_of(name: str) -> Module:
    """ "LLM-S" and so on."""
    return llm_family()[name.removeprefix("LLM-")]()


@cache
def mask_of(kind: str, num_tokens: int, seed: int) -> attention_layers.MaskTiles:
    return attention_layers.tiles_of(attention_layers.MASKS[kind](num_tokens, seed=seed))


def run_policy(
    bed: attention_layers.Testbed, llm: Module, num_tokens: int, setting: Setting, policy: str, seed: int = 0
) -> AttentionRun:
    """One attention layer under one policy."""
    kind, layer = setting
    owners_policy, kernel = POLICIES[policy]
    mask = mask_of(kind, num_tokens, seed)
    owners = mask.owners(owners_policy, layer.num_ranks, seed)
    return bed.run(mask, owners, attention_layers.attention_of(llm), layer, kernel)


def attention_times(
    bed: attention_layers.Testbed,
    llm: Module,
    num_tokens: int,
    setting: Setting,
    policies: Sequence[str],
    seeds: range,
) -> Times:
    """Seconds of the slowest rank, averaged over masks."""
    return {
        policy: fmean(run_policy(bed, llm, num_tokens, setting, policy, seed).makespan_s for seed in seeds)
        for policy in policies
    }


def rest_s(cost: CostModel, llm: Module, num_tokens: int, setting: Setting) -> tuple[int, float]:
    """The LLM's number of attentions, and forward seconds of everything else on one rank."""
    _, layer = setting
    work = Work((RowWork(num_tokens, num_tokens, 0),))
    free = AttentionTime(forward_s=0.0, backward_s=0.0)
    total = 0.0
    for one in llm.layers:
        attention_times = {op.name: free for op in one.operators if isinstance(op, Attention)}
        bare = without_attention(one, attention_times)
        total += cost.layer_time(
            bare, work, tp=1, cp=layer.num_ranks, precision=attention_layers.PRECISION
        ).forward_s
    return sum(one.kind is LayerKind.BLOCK for one in llm.layers), total


def model_times(cost: CostModel, llm: Module, num_tokens: int, setting: Setting, times: Times) -> Times:
    """Forward seconds of the whole LLM."""
    count, other_s = rest_s(cost, llm, num_tokens, setting)
    return {policy: count * seconds + other_s for policy, seconds in times.items()}


class PolicyTable:
    """Our times for one length: the shown setting and plausible ones, for attention and model."""

    def __init__(self, bed: attention_layers.Testbed, num_tokens: int, policies: Sequence[str]) -> None:
        self.bed, self._num_tokens, self._policies = bed, num_tokens, policies
        self._found: dict[tuple[str, str], list[Times]] = {}

    def times(self, llm: str, scope: str) -> list[Times]:
        """Times of all settings, the shown one first."""
        if (llm, scope) not in self._found:
            module = llm_of(llm)
            settings_and_seeds = [(MAIN, SEEDS), *((setting, RANGE_SEEDS) for setting in OTHERS)]
            attention = [
                attention_times(self.bed, module, self._num_tokens, setting, self._policies, seeds)
                for setting, seeds in settings_and_seeds
            ]
            model = [
                model_times(self.bed.cost, module, self._num_tokens, setting, times)
                for (setting, _), times in zip(settings_and_seeds, attention, strict=True)
            ]
            self._found[llm, "attn"], self._found[llm, "model"] = attention, model
        return self._found[llm, scope]

    def gain(self, llm: str, policy: str, scope: str = "attn") -> float:
        """Gains of the shown setting over causal context parallelism."""
        return next(iter(self.gains(llm, policy, scope).values()))

    def gains(self, llm: str, policy: str, scope: str = "attn", over: str = BASELINE) -> dict[str, float]:
        """Gains over another policy by setting, the shown one first."""
        return {
            setting: times[over] / times[policy]
            for setting, times in zip(NAMES, self.times(llm, scope), strict=True)
        }


def a40_testbed() -> attention_layers.Testbed:
    return attention_layers.Testbed(a40_cost())


def policy_evidence(
    name: str, where: str, table: PolicyTable, *, scope: str | None = None, mark: str = ""
) -> Evidence:
    """Evidence on the baseline's times and gains over it, for every row of a printed table.

    Args:
        name: file of the printed table.
        where: its name in print.
        table: ours at that length.
        scope: scope of all rows, where the table has no column for it.
        mark: prefix of the LLM in keys.
    """
    evidence = Evidence()
    evidence.causes["modelled/*"] = (
        "in ours short rows make cutting worth more and balancing across GPUs cost less"
    )
    printed: dict[tuple[str, str], dict[str, float]] = {}
    for row in printed_rows(name):
        of_row = scope or row["scope"]
        time = row.get("time_ms") or row["model_time_ms"]
        printed.setdefault((row["llm"], of_row), {})[row["policy"]] = float(time)
    for (llm, of_rows), cells in printed.items():
        all_times = table.times(llm, of_rows)
        key = f"modelled/{mark}{llm}/{of_rows}"
        _add_baseline(evidence, f"{key}/{BASELINE}/time", cells[BASELINE], all_times, where, table)
        for policy in (policy for policy in cells if policy != BASELINE):
            gains = table.gains(llm, policy, of_rows)
            number = PaperNumber(
                f"{key}/{policy}/gain", cells[BASELINE] / cells[policy], "x", where, GAIN_REL_TOL
            )
            evidence.add_range(number, gains, UNSTATED)
        if of_rows == "attn":
            joint = sum(all(_fits(times, cells, policy) for policy in cells) for times in all_times)
            text = f"{mark}{llm}: {joint} of {len(all_times)} settings give all attention gains within 5 %"
            evidence.notes.append(text)
    return evidence


def _fits(times: Times, cells: Mapping[str, float], policy: str) -> bool:
    gain, printed = times[BASELINE] / times[policy], cells[BASELINE] / cells[policy]
    return abs(gain / printed - 1) <= GAIN_REL_TOL


def _add_baseline(
    evidence: Evidence,
    key: str,
    printed_ms: float,
    all_times: Sequence[Times],
    where: str,
    table: PolicyTable,
) -> None:
    """Add the baseline's time; whether the printed one is of a forward or a whole step is open too."""
    forward_ms = {
        setting: 1e3 * setting_times[BASELINE]
        for setting, setting_times in zip(NAMES, all_times, strict=True)
    }
    step_ms = {
        f"{setting}, {attention_layers.WHOLE_STEP}": time * table.bed.step_over_forward
        for setting, time in forward_ms.items()
    }
    number = PaperNumber(key, printed_ms, "ms", where, TIME_REL_TOL)
    evidence.add_range(number, forward_ms | step_ms, f"{UNSTATED}, passes that are timed")


def ratio_text(table: PolicyTable, llms: Sequence[str]) -> str:
    """Gains of the shown setting, as one line of text."""
    parts = [f"{llm} {policy} {table.gain(llm, policy):.2f}" for llm in llms for policy in FOUR[1:]]
    return "attention gains over causal CP at 8 ranks, EE: " + ", ".join(parts)
