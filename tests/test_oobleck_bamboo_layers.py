"""Bytes of Bamboo's blocks against what autograd keeps of blocks written in the same operators."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.oobleck.modelled import kept_bytes
from experiments.oobleck.table2_1 import bamboo_kept_bytes, block_bytes_per_token

# Shape suffixes: B = samples, T = tokens, D = width, H = heads, K = width of a head.
WIDTH, HEADS, TOKENS, SAMPLES, RATE = 64, 4, 48, 3, 0.1
CPU_MASK_BYTES = 4  # a mask is a tensor of floats on the CPU, of single bytes on a GPU


def spelled_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    mean, deviation = x_BTD.mean(-1, keepdim=True), x_BTD.std(-1, keepdim=True)
    return weight_D * (x_BTD - mean) / (deviation + 1e-6) + bias_D


class Block(nn.Module):
    """Pre-norm: one attention or two, the second over another sequence, then a ReLU network."""

    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(WIDTH) * value) for _ in range(attentions + 1) for value in (1, 0)
        )
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 * attentions))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attentions = attentions

    def attend(self, place: int, x_BTD: Tensor, other_BTD: Tensor) -> Tensor:
        q_layer, k_layer, v_layer, out = self.projections[4 * place : 4 * place + 4]
        q_BHTK, k_BHTK, v_BHTK = (
            layer(given).view(SAMPLES, TOKENS, HEADS, -1).transpose(1, 2)
            for layer, given in ((q_layer, x_BTD), (k_layer, other_BTD), (v_layer, other_BTD))
        )
        scores = torch.matmul(q_BHTK, k_BHTK.transpose(-2, -1)) / math.sqrt(WIDTH // HEADS)
        weights = functional.dropout(functional.softmax(scores, dim=-1), RATE)
        mixed_BTD = torch.matmul(weights, v_BHTK).transpose(1, 2).contiguous().view(SAMPLES, TOKENS, WIDTH)
        return out(mixed_BTD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        other_BTD = torch.sqrt(1 - x_BTD) if self.attentions == 2 else None
        for index in range(self.attentions):
            y_BTD = spelled_norm(x_BTD, self.norms[2 * index], self.norms[2 * index + 1])
            read_BTD = y_BTD if other_BTD is None or index == 0 else other_BTD
            x_BTD = x_BTD + functional.dropout(self.attend(index, y_BTD, read_BTD), RATE)
        y_BTD = spelled_norm(x_BTD, self.norms[-2], self.norms[-1])
        hidden = functional.dropout(functional.relu(self.up(y_BTD)), RATE)
        return x_BTD + functional.dropout(self.down(hidden), RATE)


@pytest.mark.parametrize("attentions", [1, 2])
def test_a_block_keeps_what_autograd_keeps(attentions):
    block = Block(attentions)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        wide = tensor.shape[-1:] != (1,)  # single numbers per token: a norm's mean and deviation
        if storage.data_ptr() not in own and wide and tensor.dim() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x_BTD = (torch.rand(SAMPLES, TOKENS, WIDTH) * 0.5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out_BTD = block(x_BTD)
    out_BTD.sum().backward()
    each = block_bytes_per_token(WIDTH, HEADS, TOKENS, attentions, CPU_MASK_BYTES)
    assert sum(kept.values()) == SAMPLES * TOKENS * each


def test_bamboo_keeps_more_than_fused_kernels_and_in_proportion_to_samples():
    for model in ("BERT-Large", "GPT-2"):
        ours, fused = bamboo_kept_bytes(model, 2), kept_bytes(model, 2)
        assert all(mine >= theirs for mine, theirs in zip(ours, fused, strict=True))
        assert ours[1] == 2 * bamboo_kept_bytes(model, 1)[1]
