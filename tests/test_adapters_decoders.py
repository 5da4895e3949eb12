"""Language models of the papers against transformers' own: loss and gradients, whole and split."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere2 import modeling_cohere2 as cohere2
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeAttention
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

from experiments.doors.detours import DETOURS
from runtime.models.adapter import PLACEHOLDER, Context, MicrobatchData
from runtime.models.attention import Packing, pack, packed_sdpa
from runtime.models.choose import ADAPTERS, adapter_of
from runtime.models.decoder import DecoderAdapter
from runtime.models.delta_net import DELTA_NETS
from runtime.models.mixture import Experts, WideRouter
from runtime.models.norm import replace_parts, widen_norms
from runtime.models.wide_float import in_float64
from runtime.step.stage_module import StageInput, StageModule
from runtime.step.weight_gradient import SplitBackward
from tests import cross_models, paper_models, tiny_models
from tests.test_adapters import build, relative
from tests.test_adapters_llama4 import LLAMA4
from workbench.data.sample import Sample, Segment
from workbench.model.families.family import LanguageModel
from workbench.model.families.registry import ARCHITECTURES
from workbench.model.model_graph import TEXT

# Built by transformers inside composites alone; held against them by checkpoints of those.
INSIDE = (
    "qwen2_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
    "glm4v_text",
    "glm4v_moe_text",
    "glm_ocr_text",
    "paddleocr_vl_text",
    "cosmos3_edge_text",
    "cohere_compass_text",
)
ROTATED = (Ernie4_5Attention, Ernie4_5_MoeAttention)  # through float32
NOT_AUTO = {"mistral4": Mistral4ForCausalLM}  # which transformers finds under no name
# Every family that no other test holds against transformers is tried by its examples.
ELSEWHERE = (*tiny_models.DECODERS.values(), *paper_models.DECODERS.values(), LLAMA4, cross_models.LANGUAGE)
CASES = {
    **paper_models.DECODERS,
    **{
        name: {"model_type": kind, **example.config}
        for kind, family in ARCHITECTURES.items()
        if isinstance(family, LanguageModel) and family.runs(ADAPTERS)
        if kind not in {config["model_type"] for config in ELSEWHERE} | set(INSIDE)
        for name, example in family.examples.items()
    },
}

# Modules of transformers that round float64 inside.
ROUNDING = (DeepseekV2Attention, Gemma4TextRouter, GraniteMoeHybridMambaLayer, NemotronHForCausalLM)
F64 = torch.float64
IN_FIRST_PASS = (
    ".gate.weight",
    ".router.weight",
    "_proj_bias",
    "conv1d",
    ".conv.conv.",
)  # matrices whose gradients are not left for later
SAMPLES = (Sample(1, (Segment(TEXT, 0, 9, 9),)), Sample(2, (Segment(TEXT, 0, 6, 6),)))


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """What papers write down, in the inputs' own type; transformers' own rounds to float32."""
    del module
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    if indices is not None:
        is_out = torch.ones(indices.shape[0], 1, *scores.shape[2:], dtype=torch.bool)
        is_out.scatter_(-1, indices.long()[:, None], False)
        scores = scores.masked_fill(is_out, float("-inf"))
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2), None
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Cohere 2 in float64 where it converts to float32."""
    for owner, name, replacement in DETOURS:
        if owner in (cohere2, cohere2.Cohere2LayerNorm):
            monkeypatch.setattr(owner, name, replacement)


@pytest.fixture(autouse=True, scope="module")
def _plain() -> None:
    ALL_ATTENTION_FUNCTIONS.register("plain", plain_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("plain", eager_mask)


def original(name: str, ours: StageModule) -> nn.Module:
    """transformers' whole model with our weights, its norms and routers in float64."""
    adapter = ours.adapter
    assert isinstance(adapter, DecoderAdapter)
    family = adapter.family
    config = family.config.from_dict(CASES[name])
    config._experts_implementation = "eager"  # the others know no float64
    auto = NOT_AUTO.get(config.model_type, AutoModelForCausalLM)
    make = auto.from_config if auto is AutoModelForCausalLM else auto._from_config
    theirs = make(config, attn_implementation="plain").to(F64).eval()
    if family.norm is not None:
        widen_norms(theirs, family.norm, family.norm_offset)
    if family.router is not None:
        replace_parts(theirs, family.router, family.own_router)
    for module in theirs.modules():
        if isinstance(module, (*DELTA_NETS, *ROUNDING, *ROTATED)):
            module.forward = in_float64(module.forward)
    theirs.to(F64)
    theirs.tie_weights()
    weights = {key: value.detach() for key, value in ours.named_weights()}
    missing, unexpected = theirs.load_state_dict(weights | ours.named_constants(), strict=False)
    assert not unexpected
    assert set(missing) <= set(adapter.aliases)
    return theirs


def loss_of(theirs: nn.Module, ids_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Summed over the samples, each run alone."""
    losses = []
    for ids in ids_T.split(lengths):
        logits = theirs(input_ids=ids[None]).logits[0]
        losses.append(functional.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("name", list(CASES))
def test_two_samples_of_a_decoder_equal_transformers(name: str) -> None:
    ours, _, data = build(tiny_models.llm(CASES[name]), F64, *SAMPLES)
    for constant in ours.named_constants().values():
        constant.copy_(torch.linspace(-0.2, 0.2, constant.numel()).view_as(constant))
    theirs = original(name, ours)
    expected = loss_of(theirs, data.input_ids, data.tokens_in)
    expected.backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    original_grads = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    trained = {key: weight for key, weight in ours.named_weights() if weight.requires_grad}
    assert {key for key, _ in ours.named_weights()} - set(trained) == set(gradients) - set(original_grads)
    scale = torch.stack([grad.norm() for grad in original_grads.values()]).norm()

    loss = ours(StageInput(None, data))
    assert relative(loss, expected) <= 1e-10
    loss.backward()
    for key, parameter in trained.items():
        assert (parameter.grad - original_grads[key]).norm() <= 1e-10 * scale, key
        parameter.grad = None

    parted = SplitBackward(ours)
    loss = ours(StageInput(None, data))
    with parted.leaving() as work:
        loss.backward(torch.ones_like(loss))
    late = {key for key, parameter in trained.items() if parameter.grad is None}
    work.run()
    assert late, "no weight's gradient was left for the second pass"
    for key, parameter in trained.items():
        assert (parameter.grad - original_grads[key]).norm() <= 1e-10 * scale, key
        assert key in late or parameter.ndim == 1 or any(part in key for part in IN_FIRST_PASS), key


@pytest.mark.parametrize(("name", "scales_features"), [("granite", True), ("gemma3", False)])
def test_features_of_encoders_are_scaled_where_they_are_in_transformers(
    name: str, scales_features: bool
) -> None:
    """Granite multiplies all embeddings, Gemma those of tokens."""
    adapter = adapter_of(tiny_models.llm(CASES[name]))
    first = adapter.first().double()
    ids_T, place = torch.tensor([3, PLACEHOLDER, PLACEHOLDER, 5]), torch.tensor([1, 2])
    data = MicrobatchData(items=(), tokens_in=(4,), tokens_out=(4,), input_ids=ids_T, placed={"seen": place})
    features_ED = torch.randn(2, adapter.config.hidden_size, dtype=F64)
    y_TD = first(None, {"seen": features_ED}, Context(data=data, packing=pack((4,), "cpu")))
    scale = adapter.config.embedding_multiplier if name == "granite" else adapter.config.hidden_size**0.5
    torch.testing.assert_close(y_TD[0], first.embed_tokens.weight[3] * scale)
    torch.testing.assert_close(y_TD[place], features_ED * (scale if scales_features else 1.0))


def test_only_chosen_experts_run() -> None:
    """Rows of the experts: tokens x experts per token, not tokens x experts."""
    ours, _, data = build(tiny_models.llm(paper_models.DECODERS["mixtral"]), F64, *SAMPLES)
    rows: list[int] = []
    for module in ours.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    ours(StageInput(None, data))
    assert any(isinstance(each, WideRouter) for each in ours.modules())
    assert rows == [15 * 2] * 2  # tokens x experts of each token, in every layer


@pytest.mark.parametrize("window", [None, 3])
def test_a_soft_cap_far_above_all_scores_changes_nothing(window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 11, 8, dtype=F64) for heads in (4, 2, 2))
    packing: Packing = pack((5, 6), "cpu")
    rule = {"is_causal": True, "sliding_window": window}
    plain, _ = packed_sdpa(nn.Identity(), q, k, v, packing, **rule)
    capped, _ = packed_sdpa(nn.Identity(), q, k, v, packing, softcap=1e6, **rule)
    bent, _ = packed_sdpa(nn.Identity(), q, k, v, packing, softcap=0.5, **rule)
    assert relative(capped, plain) <= 1e-10
    assert relative(bent, plain) > 1e-2


def test_decoders_that_cannot_run_are_refused() -> None:
    def refused(name: str, message: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=message):
            adapter_of(tiny_models.llm(paper_models.DECODERS[name] | changes))

    refused("opt", "opt: word_embed_proj_dim must be 32, got 16", word_embed_proj_dim=16)
    refused("opt", "opt: do_layer_norm_before must be True, got False", do_layer_norm_before=False)
    refused("gpt2", "gpt2: add_cross_attention must be false", add_cross_attention=True)
    refused("gemma3", "use_bidirectional_attention must be false", use_bidirectional_attention=True)
    refused("mixtral", "a token's experts must be at most 5, got 6", num_experts_per_tok=6)
    scaled = {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}
    refused("gemma3", "rope type 'dynamic' depends on the longest", rope_parameters=scaled)


def test_samples_longer_than_a_table_of_positions_are_refused() -> None:
    short = paper_models.GPT2 | {"n_positions": 8}
    ours, _, data = build(tiny_models.llm(short), F64, *SAMPLES)
    with pytest.raises(ValueError, match=r"item \(1, 0\): module 'llm' takes up to 8 tokens, got 9"):
        ours(StageInput(None, data))


def test_soft_caps_do_not_run_under_masks() -> None:
    class Masked:
        def attend(self, q_HTD: Tensor, *_: Tensor, **__: object) -> Tensor:
            return q_HTD

    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"under a mask or over several ranks has no soft cap, got 2\.0"):
        packed_sdpa(nn.Identity(), q, q, q, Masked(), softcap=2.0)
