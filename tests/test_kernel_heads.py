"""Plans whose heads no attention kernel takes say so before they run on a GPU."""

from dataclasses import replace

import pytest

from tests.plans import disjoint_plan
from workbench.cost.hardware import Cluster
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT, ModelGraph
from workbench.plan.kernel_heads import HEAD_DIMS, check_kernel_heads
from workbench.plan.plan import Plan
from workbench.plan.runnable import refusal_to_run

CONFIG = {
    "model_type": "gemma4_text",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size_per_layer_input": 0,
}


def plan_of(*, wide: int = 512, cp: int = 1, mask: str = "causal", device: str = "H100") -> Plan:
    """Five blocks of six have heads of 32 and a window; the last one's are `wide`."""
    module = module_from_config(CONFIG | {"global_head_dim": wide}, name="llm", modality=TEXT)
    widths = {op.head_dim for each in module.layers for op in each.operators if isinstance(op, Attention)}
    assert widths == {32, wide}
    batch = [Sample(index, (Segment(TEXT, 0, 32, 32),), mask) for index in range(2)]
    model = ModelGraph(name="llm", modules=(module,))
    plan = disjoint_plan(model, batch, {"llm": (8,)}, grids={"llm": (cp, 1)})
    nodes = tuple(replace(node, device=device) for node in plan.cluster.nodes)
    cluster: Cluster = replace(plan.cluster, nodes=nodes)
    return replace(plan, cluster=cluster)


@pytest.mark.parametrize(("cells", "what"), [({"cp": 2}, "cp 2"), ({"mask": "full"}, "mask 'full'")])
def test_heads_of_512_are_refused_on_a_gpu_where_kernels_run_them(cells, what):
    words = f"attention with {what} runs on a GPU with heads of 32, 64, 72, 80, 96, 128, 192, 256, got 512"
    assert words in refusal_to_run(plan_of(**cells))
    assert refusal_to_run(plan_of(**cells, device="cpu")) == ""
    assert refusal_to_run(plan_of(**cells, wide=256)) == ""
    assert refusal_to_run(plan_of()) == ""


def test_every_width_of_the_kernels_is_taken_and_others_are_not():
    plan = plan_of(cp=2)
    for width in range(16, 272, 8):
        layers = tuple(
            replace(
                each,
                operators=tuple(
                    replace(op, head_dim=width) if isinstance(op, Attention) else op for op in each.operators
                ),
            )
            for each in plan.model.modules[0].layers
        )
        model = replace(plan.model, modules=(replace(plan.model.modules[0], layers=layers),))
        other = replace(plan, model=model)
        if width in HEAD_DIMS:
            check_kernel_heads(other, "cuda")
        else:
            with pytest.raises(ValueError, match=f"got {width}; such a plan runs on CPUs alone"):
                check_kernel_heads(other, "cuda")
