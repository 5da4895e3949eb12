"""What eager layers keep of their own input, of nothing upstream, of bent logits, and under a mask."""

import pytest
import torch

from tests.test_memory_eager import (
    BLOCK,
    CONFIGS,
    LAST,
    LENGTHS,
    NEEDS,
    WIDTH,
    accounted_bytes,
    module_of,
    saved_bytes,
)
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.memory.eager import eager_kept
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs


def test_account_of_a_head_with_bent_logits():
    of_head = "gemma2", LAST, NEEDS["trained, through"], LENGTHS["equal"]
    saved = saved_bytes(*of_head, torch.float32)
    assert saved <= accounted_bytes(*of_head) <= 1.02 * saved


def test_frozen_with_nothing_upstream_saves_nothing():
    for name in CONFIGS:
        nothing = Needs(False, False)
        assert saved_bytes(name, BLOCK, nothing, LENGTHS["equal"], torch.float32) == 0
        assert accounted_bytes(name, BLOCK, nothing, LENGTHS["equal"]) == 0


@pytest.mark.parametrize("name", ["llama", "siglip"])
def test_a_layers_own_input_is_named(name: str):
    """It is what the layer before hands over: one hidden tensor, kept once."""
    setting = Setting(Work((RowWork(128, 128, 128),)), Grid(), 4, is_gathered=False)
    block = module_of(name).layers[BLOCK]
    assert eager_kept(block, NEEDS["frozen, through"], setting).input_bytes == 128 * WIDTH * 4
    # A trained RMS norm that gradients do not pass keeps what it made of its input, not the input.
    first = eager_kept(block, NEEDS["trained, first"], setting).input_bytes
    assert first == (0 if name == "llama" else 128 * WIDTH * 4)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("name", ["llama", "mistral, window", "phi", "gpt2"])
def test_account_of_blocks_under_a_mask(name: str, needs: Needs, lengths: tuple[int, ...]):
    """One mask over all tokens, whatever the items' lengths: never less, and within 2 %."""
    saved = saved_bytes(name, BLOCK, needs, lengths, torch.float32, mask="prefix_lm(prefix=8)")
    num_tokens = sum(lengths)
    accounted = accounted_bytes(name, BLOCK, needs, lengths, masked_tokens=num_tokens)
    assert saved <= accounted <= 1.02 * saved
    assert accounted > accounted_bytes(name, BLOCK, needs, lengths)
