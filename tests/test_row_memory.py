"""What a row's layers keep, by precision and dropout, in closed form; published runs fit."""

import pytest

from experiments.public.published import Published, published
from sim.predict import iteration_s
from tests.test_predict import row
from workbench.llm_table.columns import read_row
from workbench.llm_table.predict import RowPredictor
from workbench.llm_table.row_model import model_of

TOKENS, WIDTH, LAYERS = 2 * 64, 256, 3
GPT = {"hidden": WIDTH, "layers": LAYERS, "heads": 4, "sequence": 64, "global_batch": 2, "micro_batch": 2}
PREDICTOR = RowPredictor(iteration_s)
MIXTURE = GPT | {"architecture": "llama", "experts": 8, "topk": 2, "expert_ffn": 64}


def peak_bytes(**cells: object) -> int:
    return PREDICTOR.predict(row(**GPT | {"gpu": "H100"} | cells)).peak_bytes


def test_masks_are_kept_with_dropout_alone():
    """Korthikanti et al. 2022, section 4.1: two masks of a byte an element a block."""
    masks = peak_bytes(dropout="yes") - peak_bytes(dropout="no")
    assert masks == 2 * TOKENS * WIDTH * LAYERS


@pytest.mark.parametrize(("precision", "element"), [("fp8", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5625)])
def test_inputs_of_narrow_products_are_kept_narrow(precision: str, element: float):
    """Of a GPT's products inputs are h, h, h and 4 h wide; what the attention makes is kept by it."""
    wide, narrow = (peak_bytes(precision=each, gpu="B200") for each in ("bf16", precision))
    spared = (2 - element) * (1 + 1 + 4) - element
    assert wide - narrow == pytest.approx(spared * WIDTH * TOKENS * LAYERS, rel=1e-3)


@pytest.mark.parametrize("degrees", [{"tp": 1}, {"tp": 2, "pp": 3}])
def test_one_replica_has_nobody_to_shard_with(degrees: dict[str, int]):
    """No weights come from others, so no unit of them is gathered beside one's own."""
    sizes = {peak_bytes(zero_stage=stage, **degrees) for stage in range(4)}
    assert len(sizes) == 1


def test_gradients_are_as_wide_as_they_are_added_up():
    wide, narrow = (peak_bytes(grad_precision=each) for each in ("fp32", "bf16"))
    layers = model_of(row(**GPT)).modules[0].layers
    tied = {parameter.name: parameter for layer in layers[:1] for parameter in layer.parameters()}
    own = [each for layer in layers[1:] for each in layer.parameters() if each.name not in tied]
    assert wide - narrow == 2 * sum(each.num_elements for each in (*tied.values(), *own))


def test_results_of_experts_are_kept_where_shares_multiply_them():
    """A row of the stream's width for each of a token's experts."""
    yes, no = (
        PREDICTOR.predict(row(**MIXTURE | {"gpu": "H100", "keeps_results": each})) for each in ("yes", "no")
    )
    assert yes.peak_bytes - no.peak_bytes == 2 * WIDTH * TOKENS * 2 * LAYERS
    assert yes.iteration_s == no.iteration_s


def _ran(data_set: str) -> list[Published]:
    return [each for each in published() if each.data_set == data_set and each.unscorable is None]


@pytest.mark.parametrize("data_set", ["megatron_bridge_ablations", "megatron_bridge", "fms_fsdp"])
def test_runs_that_were_published_fit(data_set: str):
    """Of a parameter all ranks together hold at least a weight and a gradient of two bytes and 12 of the
    optimizer, wherever these are sharded.
    """
    for each in {str(sorted(each.cells.items())): each for each in _ran(data_set)}.values():
        llm = read_row(each.cells)
        found, state = PREDICTOR.predict(llm), 16 * model_of(llm).num_parameters * (llm.lora_rank == 0)
        assert found.spare_bytes >= 0, each
        assert found.peak_bytes * llm.num_gpus >= state, each
