"""Table 2.1: which models run under which system, by the memory model.

Paper:   I. Jang, dissertation, section 2.7.1, Table 2.1: microbatch sizes, X where not even 1 fits.
Setup:   30 A40 with 40 GB as printed, one per node, float32 tensors (TF32 is a mode of computing).
Given:   microbatches, twice the model states and no recomputation for Bamboo (section 2.7.1).
Differs: sequence lengths are not printed (the models' own: 512, 1024, 2048), nor are pipeline depths: Varuna
         and Oobleck may take any, Bamboo the 6 nodes by which its throughput changes. Attention stores its
         scores, as kernels of that time did. Bamboo runs the layers of its own repository, single operators
         with a second attention in GPT-2, though 24 such blocks have more weights than the 345 million
         printed; a redundant stage stores its activations too. BERT-Large with twice the starred microbatch
         is 13 % below the limit in ours: context, buffers of communication and gaps between allocations are
         not in the model, as no source states them.
Ours:    bytes of the busiest stage, under a second on one CPU core.
"""

from dataclasses import dataclass

from experiments.harness.outcome import Evidence
from experiments.harness.printed import PrintedRow, is_true, printed_rows
from experiments.harness.script import Parts, script
from experiments.oobleck import modelled
from experiments.oobleck.systems import MOST_NODES
from workbench.model.layer import Attention, Layer, LayerKind

# What Bamboo's own layers keep of a microbatch, spelled out in single PyTorch operators.
# Source: github.com/uclasystem/bamboo @b44c579, external/deepspeed/DeepSpeedExamples/pipeline_parallelism
# (bert.py, gpt2.py): norms out of mean, deviation, difference, product and quotient; stored scores; ReLU;
# dropout behind every sublayer, on the scores and inside the feed-forward network. A block of its GPT-2
# has a second attention, over as many tokens. What an operator keeps is what its derivative reads.
MASK_BYTES = 1  # of a dropped element
NORM = 4  # tensors: input, difference, product with the weight, result
ATTENTION = 4  # queries, keys, values, what the output projection reads
FEED_FORWARD = 8  # ReLU and its dropped result, each four times as wide
FEED_FORWARD_MASK = 4


def has_two_attentions(model: str) -> bool:
    """Whether a block is one of Bamboo's GPT-2."""
    return model != "BERT-Large"


def block_bytes_per_token(width: int, heads: int, tokens: int, attentions: int, mask_bytes: int) -> int:
    """Bytes a token of one block, kept from forward to backward; single numbers per token are left out.

    Per attention a norm, the attention, a dropout mask and 2 stored scores with a mask; a norm, the
    feed-forward network and its two masks; for a second attention also its context.
    """
    tensors = attentions * (NORM + ATTENTION) + NORM + FEED_FORWARD + (attentions - 1)
    masks = attentions + FEED_FORWARD_MASK + 1
    scores = attentions * heads * tokens * (2 * modelled.ELEMENT_BYTES + mask_bytes)
    return width * (tensors * modelled.ELEMENT_BYTES + masks * mask_bytes) + scores


def bamboo_kept_bytes(model: str, microbatch: int) -> tuple[int, ...]:
    """[layers] kept bytes of a microbatch; embedding and head, missing in Bamboo's files, as elsewhere."""
    return tuple(
        _block_bytes(model, layer, microbatch) if layer.kind is LayerKind.BLOCK else kept_bytes
        for layer, kept_bytes in zip(
            modelled.graph(model).modules[0].layers, modelled.kept_bytes(model, microbatch), strict=True
        )
    )


def bamboo_parameters(model: str) -> tuple[int, ...]:
    """[layers] weights, with four more square matrices for a second attention."""
    return tuple(
        layer.num_parameters + 4 * layer.out_width * (layer.out_width + 1)
        if layer.kind is LayerKind.BLOCK and has_two_attentions(model)
        else layer.num_parameters
        for layer in modelled.graph(model).modules[0].layers
    )


def _block_bytes(model: str, layer: Layer, microbatch: int) -> int:
    heads = next(operator.num_heads for operator in layer.operators if isinstance(operator, Attention))
    attentions = 2 if has_two_attentions(model) else 1
    per_token = block_bytes_per_token(layer.out_width, heads, modelled.TOKENS[model], attentions, MASK_BYTES)
    return microbatch * modelled.TOKENS[model] * per_token


BAMBOO_CASES = (("BERT-Large", 4), ("BERT-Large", 8), ("GPT-2", 1), ("GPT-2", 2), ("GPT-3 Medium", 1))
CARD_BYTES = 48e9  # of an A40; section 2.7.1 prints 40 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """[layers] bytes of weights, gradients and optimizer; bytes of a microbatch until its backward."""

    states: tuple[int, ...]
    kept: tuple[int, ...]


def memory_of(model: str, microbatch: int, system: str) -> LayerMemory:
    """Memory of a model's layers: Bamboo's from its repository, the others' from transformers."""
    layers = modelled.graph(model).modules[0].layers
    if system == "bamboo":
        parameters, kept_bytes = bamboo_parameters(model), bamboo_kept_bytes(model, microbatch)
    else:
        parameters = tuple(layer.num_parameters for layer in layers)
        kept_bytes = modelled.kept_bytes(model, microbatch)
    return LayerMemory(states=tuple(count * modelled.STATE_BYTES for count in parameters), kept=kept_bytes)


def least_peak_bytes(model: str, system: str, microbatch: int) -> int:
    """Peak bytes of the fullest GPU, at the pipeline depth where they are least."""
    memory = memory_of(model, microbatch, system)
    if system == "bamboo":
        return redundant_peak_bytes(model, microbatch, memory)
    return min(_peak_bytes(model, microbatch, memory, depth) for depth in range(1, MOST_NODES + 1))


def redundant_peak_bytes(model: str, microbatch: int, memory: LayerMemory) -> int:
    """Peak bytes where stages also hold their successor's states and microbatches, without recomputation."""
    stages = _even_cut(len(memory.kept), modelled.BAMBOO_DEPTH)
    bytes_of_stages = []
    for index, layers in enumerate(stages):
        in_flight = min(len(stages) - index, modelled.GLOBAL_BATCH[model] // microbatch)
        bytes_of_stages.append(sum(memory.states[layer] + in_flight * memory.kept[layer] for layer in layers))
    return max(
        own_bytes + bytes_of_stages[(index + 1) % len(bytes_of_stages)]
        for index, own_bytes in enumerate(bytes_of_stages)
    )


def _peak_bytes(model: str, microbatch: int, memory: LayerMemory, depth: int) -> int:
    """Peak bytes with inputs of all layers in flight, and the recomputed layer."""
    boundary = (
        microbatch
        * modelled.TOKENS[model]
        * modelled.graph(model).modules[0].layers[0].out_width
        * modelled.ELEMENT_BYTES
    )
    stages = _even_cut(len(memory.kept), depth)
    peak = 0
    for index, layers in enumerate(stages):
        in_flight = min(len(stages) - index, modelled.GLOBAL_BATCH[model] // microbatch)
        activations = in_flight * boundary * len(layers) + max(memory.kept[layer] for layer in layers)
        peak = max(peak, sum(memory.states[layer] for layer in layers) + activations)
    return peak


def _even_cut(num_layers: int, depth: int) -> list[range]:
    layers_per_stage = -(-num_layers // min(depth, num_layers))
    return [
        range(first, min(first + layers_per_stage, num_layers))
        for first in range(0, num_layers, layers_per_stage)
    ]


def cell(row: PrintedRow) -> tuple[str, bool, float]:
    """A cell's name, whether ours fits as printed, and our bytes."""
    model, system = row["model"], row["system"]
    microbatch = int(row["microbatch_samples"] or 1)
    num_bytes = least_peak_bytes(model, system, microbatch)
    return f"{model}, {system}, microbatch {microbatch}", num_bytes <= modelled.MEMORY_BYTES, num_bytes


def memory_evidence() -> Evidence:
    """Evidence with one claim per cell: fits or not, as printed."""
    evidence = Evidence()
    for row in printed_rows("oobleck_table2_1"):
        name, fits, num_bytes = cell(row)
        runnable = is_true(row["runnable"])
        key = f"modelled/{row['model'].replace(' ', '-')}/{row['system']}/peak_bytes"
        evidence.ours[key] = num_bytes
        verb = "fits" if runnable else "does not fit"
        evidence.claim(f"{name} {verb} into 40 GB (ours {num_bytes / 1e9:.1f} GB);", fits is runnable)
        if is_true(row["largest_runnable_microbatch"]):
            more = 2 * int(row["microbatch_samples"])
            double = least_peak_bytes(row["model"], row["system"], more)
            evidence.claim(
                f"{name} is the largest, {more} does not fit (ours {double / 1e9:.1f} GB);",
                double > modelled.MEMORY_BYTES,
                cause="context, buffers of communication and gaps between allocations are not in the model, "
                f"as no source states them: {1 - double / modelled.MEMORY_BYTES:.0%} of the memory is left "
                "for them",
            )
    return evidence


def layers_evidence() -> Evidence:
    """Evidence on Bamboo's bytes with transformers' layers, and with the card's whole memory."""
    evidence = Evidence()
    for model, microbatch in BAMBOO_CASES:
        peak = least_peak_bytes(model, "bamboo", microbatch)
        other = redundant_peak_bytes(model, microbatch, memory_of(model, microbatch, "oobleck"))
        key = f"modelled/{model.replace(' ', '-')}/bamboo/microbatch_{microbatch}"
        evidence.ours |= {f"{key}/own_layers_bytes": peak, f"{key}/transformers_layers_bytes": other}
        evidence.notes.append(
            f"{model}, Bamboo, microbatch {microbatch}: {peak / 1e9:.1f} GB with its repository's layers, "
            f"{other / 1e9:.1f} GB with transformers'; the card's 48 GB {_verb(peak, CARD_BYTES)}"
        )
    return evidence


def _verb(num_bytes: int, capacity_bytes: float) -> str:
    return "hold it" if num_bytes <= capacity_bytes else "do not hold it"


@script()
def run() -> Parts:
    return [memory_evidence(), layers_evidence()]
