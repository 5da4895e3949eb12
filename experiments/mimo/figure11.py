"""Figure 11: in bfloat16 too, layouts follow the baseline; in float32 they stay in its range of rounding.

Paper:   Karnati et al., Figure 11 and appendix C.2: BF16 placement and layout comparisons, LLM frozen (a)
         and trained (b); "in both cases, the modified runs follow the corresponding colocated homogeneous
         baseline". No number is printed, and no tolerance.
Setup:   the tiny LLaVA of `loss_curves` on gloo processes. bfloat16 with gradients, weights and moments
         of the optimizer in float32, gradients clipped to 1; and all curves of Figures 6, 10, 12 and 13
         in float32.
Ours:    the baseline is run again in eight orders of its sums: microbatches come in another order, and
         tensor-parallel ranks contribute other parts. At every step these losses span a range. Reported is at
         how many steps a layout's loss lies inside; also, at how many steps each order of the baseline lies
         inside the range of all others, which is what equal arithmetic amounts to. Added after the first run,
         in float32: four more runs of the baseline whose samples are grouped into other microbatches, of four
         and of two, because layouts with replicas group them so.
Rule:    fixed before the first run. A layout follows the baseline if its loss differs from the mean over the
         orders by no more than 1e-3 of the loss in bfloat16 (whose numbers are 4e-3 apart), and by no more
         than 1e-5 in float32 (parity's bound), at every step.
Differs: 50 steps instead of 1000 (100 in float32), 16 samples instead of 96, the same ones in every
         step; the schedule of Table A6 over these steps, its warm-up in proportion.
Run:     python -m experiments.mimo.figure11 [--json] [--steps N] [--limit-s N] [--fresh]

Curves are stored as each run ends, by plan hash, optimizer and steps, so an interrupted command resumes.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.command import Found, bench
from experiments.harness.drawing import PLOTS, save
from experiments.harness.figure import GREY, LIGHT, Band, Grid, Line, Lines
from experiments.harness.record import RESULTS
from experiments.mimo.figure11_runs import IN_ORDER, Arithmetic, Mix, Played, optimizer, plan_of, train
from experiments.mimo.kept_runs import Kept, Record
from experiments.mimo.loss_curves import BASELINE
from experiments.mimo.loss_curves_runs import Run, runs
from runtime.world.pool import Pool
from workbench.plan.codec import plan_hash
from workbench.report.palette import PAPER, mixed, module_hues

FEW = 4  # layouts up to which each has a name and a hue of its own
MIDDLE = mixed(GREY, PAPER, 0.5)
Curves = Mapping[Played, Sequence[float]]
Hues = Mapping[str, str]  # by layout, the same in all panels


def drawing(curves: Curves) -> Grid:
    """Two columns (LLM frozen, trained): losses in bfloat16, then deviations of either arithmetic."""
    hues = module_hues(tuple(dict.fromkeys(played.run.config for played in curves)))
    columns = []
    for trains_llm in (False, True):
        same = {p: losses for p, losses in curves.items() if p.run.trains_llm is trains_llm}
        by_kind = {kind: {p: x for p, x in same.items() if p.arithmetic is kind} for kind in Arithmetic}
        title = "LLM trained" if trains_llm else "LLM frozen"
        columns.append(
            [_losses(title, by_kind[Arithmetic.BFLOAT16], hues)]
            + [
                _deviations(f"{title}, {kind.value}", kind_curves, hues)
                for kind, kind_curves in by_kind.items()
            ]
        )
    return Grid(rows=list(zip(*columns, strict=True)), panel_inches=(6.5, 3.6))


def _losses(title: str, curves: Curves, hues: Hues) -> Lines:
    first = {played.run.config: losses for played, losses in curves.items() if played.order == 0}
    lines = [
        Line(x=range(len(losses)), y=losses, colour=hues[name], label=name) for name, losses in first.items()
    ]
    return Lines(title=title, x="step", y="loss in bfloat16", lines=lines)


def _band(curves: Sequence[Sequence[float]], mean: Sequence[float], *, colour: str, label: str) -> Band:
    steps = list(zip(mean, zip(*curves, strict=True), strict=True))
    low, high = ([pick(losses) / m - 1 for m, losses in steps] for pick in (min, max))
    return Band(x=range(len(mean)), low=low, high=high, colour=colour, label=label)


def _deviations(title: str, curves: Curves, hues: Hues) -> Lines:
    baseline = {played: losses for played, losses in curves.items() if played.run.config == BASELINE}
    orders = [losses for played, losses in baseline.items() if played.mix is Mix.MICROBATCHES]
    grouped = [losses for played, losses in baseline.items() if played.mix is Mix.SAMPLES]
    y = "(loss - mean) / mean"
    if len(orders) < 2:
        return Lines(title=title, x="step", y=y, lines=())
    mean = [statistics.fmean(step_losses) for step_losses in zip(*orders, strict=True)]
    bands = [_band(orders, mean, colour=MIDDLE, label="baseline, orders of its sums")]
    if grouped:
        all_curves = [*orders, *grouped]
        bands.insert(0, _band(all_curves, mean, colour=LIGHT, label="baseline, other groupings too"))
    layouts = [played for played in curves if played.run.config != BASELINE]
    lines = [
        Line(
            x=range(len(mean)),
            y=[loss / m - 1 for loss, m in zip(curves[played], mean, strict=True)],
            colour=hues[played.run.config],
            width=0.7,
            label=played.run.config if len(layouts) < FEW else "",
        )
        for played in layouts
    ]
    label = title if len(layouts) < FEW else f"{title}: {len(layouts)} layouts"
    return Lines(title=label, x="step", y=y, lines=lines, bands=bands)


BOUNDS = {Arithmetic.BFLOAT16: 1e-3, Arithmetic.FLOAT32: 1e-5}  # of the loss
STEPS = 50
ORDERS = 8  # besides that of the data
GROUPINGS = 4
KEPT = Kept(RESULTS / "mimo_figure11_curves.jsonl", key="key", done="losses")
SUMMARY = RESULTS / "mimo_figure11.json"


def is_baseline(run: Run) -> bool:
    return run.config == BASELINE


def chosen() -> tuple[Played, ...]:
    """All curves: for each arithmetic the baselines in all orders, then the layouts.

    In bfloat16 those of Figure 11, which are the placements and layouts of Figures 6 and 10.
    """
    curves: list[Played] = []
    controlled = [run for run in runs() if run.figure in ("6", "10")]
    for arithmetic in Arithmetic:
        played = controlled if arithmetic is Arithmetic.BFLOAT16 else runs()
        curves += [
            Played(run=run, arithmetic=arithmetic, order=order)
            for run in filter(is_baseline, controlled)
            for order in range(IN_ORDER, ORDERS + 1)
        ]
        curves += [
            Played(run=run, arithmetic=arithmetic, order=order, mix=Mix.SAMPLES)
            for run in filter(is_baseline, controlled if arithmetic is Arithmetic.FLOAT32 else ())
            for order in range(1, GROUPINGS + 1)
        ]
        curves += [Played(run=run, arithmetic=arithmetic) for run in played if not is_baseline(run)]
    return tuple(curves)


Curve = Sequence[float]


def steps_inside(curve: Curve, other_curves: Sequence[Curve]) -> int:
    """The number of steps at which a loss is inside the range of the others'."""
    return sum(min(losses) <= loss <= max(losses) for loss, *losses in zip(curve, *other_curves, strict=True))


def deviation(curve: Curve, other_curves: Sequence[Curve]) -> float:
    """The largest relative distance from the others' mean at any step."""
    pairs = ((loss, statistics.fmean(losses)) for loss, *losses in zip(curve, *other_curves, strict=True))
    return float(max(abs(loss - mean) / mean for loss, mean in pairs))


def verdicts(played: Sequence[Played], curves: Mapping[Played, Curve], steps: int) -> dict[str, Any]:
    """By arithmetic and trained modules: the range of the baseline, and every layout against it."""
    groups = []
    for arithmetic in Arithmetic:
        for trains_llm in (False, True):
            same = [p for p in played if p.arithmetic is arithmetic and p.run.trains_llm is trains_llm]
            groups.append(_group(arithmetic, same, curves, steps) | {"trains_llm": trains_llm})
    return {
        "steps": steps,
        "orders": ORDERS + 1,
        "groups": groups,
        "executed": len(curves),
        "curves": len(played),
        "holds": len(curves) == len(played) and all(not group["off"] for group in groups),
    }


def _group(
    arithmetic: Arithmetic, same: Sequence[Played], curves: Mapping[Played, Curve], steps: int
) -> dict[str, Any]:
    baseline = {
        p.order: curves[p] for p in same if is_baseline(p.run) and p in curves and p.mix is Mix.MICROBATCHES
    }
    grouped = [curves[p] for p in same if p.mix is Mix.SAMPLES and p in curves]
    group: dict[str, Any] = {"arithmetic": arithmetic.value, "bound": BOUNDS[arithmetic]}
    if len(baseline) < 2:
        return group | {"layouts": [], "off": ["the baseline's orders are missing"]}
    orders = list(baseline.values())
    inside = [steps_inside(curve, [other for other in orders if other is not curve]) for curve in orders]
    widths = [(max(losses) - min(losses)) / statistics.fmean(losses) for losses in zip(*orders, strict=True)]
    layouts: list[dict[str, Any]] = [
        {
            "name": p.run.name,
            "inside": steps_inside(curves[p], orders),
            "inside_groupings": steps_inside(curves[p], [*orders, *grouped]),
            "deviation": deviation(curves[p], orders),
        }
        for p in same
        if not is_baseline(p.run) and p in curves
    ]
    return group | {
        "range": {"median": statistics.median(widths), "most": max(widths)},
        "orders_inside_the_others": {"least": min(inside), "median": statistics.median(inside)},
        "groupings": len(grouped),
        "groupings_inside_the_others": [
            steps_inside(curve, [*orders, *(other for other in grouped if other is not curve)])
            for curve in grouped
        ],
        "orders_deviation": max(deviation(curve, orders) for curve in orders),
        "first_loss": orders[0][0],
        "last_loss": orders[0][steps - 1],
        "layouts": layouts,
        "off": [row["name"] for row in layouts if row["deviation"] > BOUNDS[arithmetic]],
    }


def play(played: Sequence[Played], steps: int, limit_s: float) -> dict[Played, Curve]:
    """Play as many curves as time allows, reusing known ones; each new one is stored at once."""
    keys, known_records = {p: key_of(p, steps) for p in played}, KEPT.read()

    def record_of(p: Played, pool: Pool, _: Mapping[str, Record]) -> Record:
        return {"key": keys[p], "name": p.name, "losses": train(p, steps, pool)}

    missing = {key: p for p, key in keys.items() if key not in known_records}  # two may be one curve
    known_records |= {record["key"]: record for record in KEPT.play(missing.values(), record_of, limit_s)}
    return {p: known_records[key]["losses"] for p, key in keys.items() if key in known_records}


def key_of(played: Played, steps: int) -> str:
    """The key of everything that determines a curve."""
    settings = optimizer(played, steps)
    return f"{plan_hash(plan_of(played))}:{steps}:{settings.learning_rate}:{settings.clip_norm}:scheduled"


def report(result: Mapping[str, Any]) -> str:
    """The groups, as lines of text."""
    lines = []
    for group in result["groups"]:
        trained = "trained" if group["trains_llm"] else "frozen"
        lines.append(f"{group['arithmetic']}, LLM {trained}")
        if "range" in group:
            num, width = group["orders_inside_the_others"], group["range"]
            lines += [
                f"  loss {group['first_loss']:.6f} to {group['last_loss']:.6f}",
                f"  range of {result['orders']} orders of the baseline: median {width['median']:.1e}, most "
                f"{width['most']:.1e} of the loss",
                f"  each order inside the range of the others: {num['median']:g} of {result['steps']} steps, "
                f"at least {num['least']}; farthest from the mean {group['orders_deviation']:.1e}",
            ]
        if group.get("groupings"):
            inside = group["groupings_inside_the_others"]
            lines.append(
                f"  {group['groupings']} other groupings of the samples: each inside the range of the others "
                f"and the orders at {statistics.median(inside):g} steps, at least {min(inside)}"
            )
        for row in group["layouts"]:
            more = f" ({row['inside_groupings']} with groupings)" if group["groupings"] else ""
            far = f"farthest from the mean {row['deviation']:.1e}"
            lines.append(
                f"  {row['name']:45} inside at {row['inside']:3} of {result['steps']} steps{more}, {far}"
            )
        lines += [f"  OFF: {name}" for name in group["off"]]
    lines.append(f"{result['executed']} of {result['curves']} curves executed")
    lines.append(f"claim: every layout follows the baseline: {'holds' if result['holds'] else 'FAILS'}")
    return "\n".join(lines)


@bench(limit_s="stop after this, to resume later", fresh="run everything again")
def run(*, steps: int = STEPS, limit_s: float = 7200.0, fresh: bool = False) -> Found:
    if fresh:
        KEPT.path.unlink(missing_ok=True)
    played = chosen()
    curves = play(played, steps, limit_s)
    result = verdicts(played, curves, steps)
    print(report(result))
    save(drawing({p: curves[p] for p in played if p in curves}), PLOTS, "mimo_figure11")
    return Found(result, holds=result["holds"], out=SUMMARY)
