"""Gathers and reductions of weights that stay for a step run beside the passes and hold up none."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.launch import run_lowered
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from tests.test_fsdp import sharded_parameters
from tests.test_fsdp_plan import actions
from tests.test_parity import SEED, mixed
from tests.test_reshard_after import of_layers
from tests.test_sim_sweep import assert_equal_times
from tests.tiny_valm import tiny_batch
from workbench.plan.lower import lower
from workbench.schedule.action import STEP, Action, Pass
from workbench.schedule.sharded import ReshardAfter, waits_of, with_rounds


def test_gathers_of_a_step_wait_for_no_pass() -> None:
    """They run one after another beside the first forwards, in the order in which these need them."""
    programs = {(0, 1, 2): actions("0F0 1F0 2F0 2B0 1B0 0B0")}
    units, trained = [(0,), (1,), (2,)], [0, 1, 2]
    kept = with_rounds(programs, units, trained, dict.fromkeys(range(3), ReshardAfter.STEP))
    assert kept[0, 1, 2][:6] == actions("0ALL_GATHER0 1ALL_GATHER0 2ALL_GATHER0 0F0 1F0 2F0")
    behind_another = with_rounds(programs, units, trained, {0: ReshardAfter.STEP, 2: ReshardAfter.STEP})
    assert behind_another[0, 1, 2][:6] == actions("0ALL_GATHER0 1ALL_GATHER0 2ALL_GATHER0 0F0 1F0 1FREE0")


@given(
    gathers_s=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    pass_s=st.integers(1, 3),
    more=st.integers(0, 2),
)
def test_a_large_layer_is_gathered_while_small_ones_compute(
    gathers_s: list[int], pass_s: int, more: int
) -> None:
    """A forward starts once its own and all earlier gathers are done, and the forward before it."""
    plan = of_layers(5, 1 + more, ReshardAfter.STEP)
    gather_s = {s.id: each for r in (0, 1) for s, each in zip(plan.chain["llm", r], gathers_s, strict=True)}

    def duration_s(action: Action) -> float:
        if action.kind is Pass.ALL_GATHER:
            return float(gather_s[action.stage or 0])
        return float(pass_s) if action.kind in (Pass.F, Pass.B) and action.stage in gather_s else 0.0

    end_s = gathered_s = 0
    for each in gathers_s:
        gathered_s += each
        end_s = max(end_s, gathered_s) + pass_s
    assert assert_equal_times(lower(plan), duration_s) == end_s + 5 * pass_s * (1 + 2 * more)


def test_only_the_step_waits_for_the_reductions_of_a_step() -> None:
    """And sums over instances, for their own stage. Passes wait for a module that reduces every round."""
    program = actions(
        "2B0 2FREE0 2REDUCE_SCATTER0 1B0 1FREE0 1REDUCE_SCATTER0 2REDUCE_GRAD 0B0 0FREE0 0REDUCE_SCATTER0 "
        "1REDUCE_GRAD 3B0 3FREE0 3REDUCE_SCATTER0 4B0 STEP"
    )
    scatter = {action.stage: action for action in program if action.kind is Pass.REDUCE_SCATTER}
    kept = waits_of(program, {0, 1, 2})
    assert kept == {
        Action(2, Pass.REDUCE_GRAD): (scatter[2],),
        Action(1, Pass.REDUCE_GRAD): (scatter[1],),
        STEP: tuple(scatter.values()),
    }
    between = waits_of(program, {1, 3})
    assert between[Action(3, Pass.B, 0)] == (scatter[2],)
    assert Action(4, Pass.B, 0) not in between


@given(
    scatters_s=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    sum_s=st.integers(0, 5),
    pass_s=st.integers(1, 3),
    more=st.integers(0, 2),
    instances=st.sampled_from((1, 2)),
)
def test_reductions_hold_up_no_pass(
    scatters_s: list[int], sum_s: int, pass_s: int, more: int, instances: int
) -> None:
    """Each follows its backward and the reductions before it; sums follow the next layer's backward, too."""
    plan = of_layers(4, 1 + more, ReshardAfter.STEP, instances)
    scatter_s = {
        stage.id: each
        for replica in plan.replicas("llm")
        for stage, each in zip(plan.chain["llm", replica], scatters_s, strict=True)
    }
    taken = {Pass.F: pass_s, Pass.B: pass_s, Pass.REDUCE_GRAD: sum_s}

    def duration_s(action: Action) -> float:
        if action.kind is Pass.REDUCE_SCATTER:
            return float(scatter_s[action.stage or 0])
        return float(taken.get(action.kind, 0) if action.stage in scatter_s else 0)

    computed_s = 4 * pass_s * (1 + 2 * more)  # of all but the last backward
    scattered_s = summed_s = 0
    for layer in reversed(range(4)):
        computed_s += pass_s
        scattered_s = max(scattered_s, computed_s) + scatters_s[layer]
        followed_s = computed_s + (pass_s if layer else 0)
        summed_s = max(summed_s, followed_s, scattered_s) + (sum_s if instances > 1 else 0)
    assert assert_equal_times(lower(plan), duration_s) == max(computed_s, scattered_s, summed_s)


def test_passes_of_a_run_do_not_wait_for_reductions_either(pool: Pool) -> None:
    """Rank 0 has one short sample, its peers long ones: it is done before they come to a reduction."""
    plan = sharded_parameters(
        mixed("llm"),
        tiny_batch((1, 100, 100, 100), (0,) * 4),
        replicas=4,
        instances=2,
        reshard_after=ReshardAfter.STEP,
    )
    (trace,) = run_lowered(lower(plan), RunSettings(seed=SEED, timeout_s=30.0), pool=pool).traces
    own = [span for span in trace.spans if span.rank == 0]
    scatters = [span.end_s for span in own if span.action.kind is Pass.REDUCE_SCATTER]
    sums = {span.action.stage: span.start_s for span in own if span.action.kind is Pass.REDUCE_GRAD}
    assert max(span.end_s for span in own if span.action.kind is Pass.B) < min(scatters)
    assert len(sums) == len(scatters) == 6
    assert min(sums.values()) > min(scatters)
    (step,) = (span for span in own if span.action == STEP)
    assert step.start_s >= max(scatters)
