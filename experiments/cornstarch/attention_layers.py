"""One attention layer on the papers' testbed: masks, owners of tokens, kernels, and their times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.cornstarch.modelled import A40
from sim.attention.gpu import compute_units
from sim.attention.pieces import Order, Split
from sim.attention.policies import AttentionRun, Gpu, Kernel, Wires, launches_of, simulate_attention
from sim.attention.price import gpu_of, row_tiles, wires_of
from workbench.balance.tokens.policies import contiguous, longest_first, random_blocks, zigzag
from workbench.cost.model import CostModel
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP
from workbench.masks.bitfield import Bitfield
from workbench.masks.builders import encoder_embedded, encoder_prepended, multimodal_packed
from workbench.masks.tiles import Tiles, classify, row_work
from workbench.model.layer import Attention, LayerKind
from workbench.model.model_graph import Module

BLOCK = 128
GPUS_PER_NODE = 4
PRECISION = "bfloat16"
SPLIT_KEYS = 4096  # of a piece: the authors' released kernel, 16 pieces a row at 64k
WHOLE_STEP = "recompute and backward timed too"  # where the passes that are timed are not stated

Owners = npt.NDArray[np.int32]

MASKS: Mapping[str, Callable[..., Bitfield]] = {
    "EP": encoder_prepended,
    "EE": encoder_embedded,
    "MP": multimodal_packed,
}

STATIC = Kernel(order=Order.STATIC, split=Split.NONE)
FIXED = Kernel(order=Order.STATIC, split=Split.FIXED)
STREAMS = Kernel(order=Order.STATIC, split=Split.NONE, streams=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetting:
    """What the papers leave open about one layer.

    Args:
        num_ranks: ranks of the context-parallel group.
        tp: tensor-parallel degree.
        kv_heads_per_launch: heads gathered and computed together.
    """

    num_ranks: int = 8
    tp: int = 1
    kv_heads_per_launch: int = 1


@dataclass(frozen=True, slots=True)
class MaskTiles:
    """A mask of one sequence on itself, cut into tiles."""

    tiles: Tiles
    num_tokens: int

    def owners(self, policy: str, num_ranks: int, seed: int) -> Owners:
        """The owner of every block under a policy of v1 Table 4."""
        work = row_work(self.tiles)
        if policy == "random":
            return random_blocks(work, num_ranks, seed=seed)
        return {"lpt": longest_first, "naive_ring": contiguous, "zigzag": zigzag}[policy](work, num_ranks)


def tiles_of(mask: Bitfield) -> MaskTiles:
    """The tiles of a mask, 128 x 128."""
    return MaskTiles(classify(mask, mask, BLOCK, BLOCK), len(mask))


def attention_of(module: Module) -> Attention:
    """The self-attention of a module's first block."""
    block = next(layer for layer in module.layers if layer.kind is LayerKind.BLOCK)
    return next(operator for operator in block.operators if isinstance(operator, Attention))


class Testbed:
    """Simulates attention layers on nodes of four A40s with 25 GB/s between nodes."""

    __test__ = False

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._num_units = compute_units(A40)

    @property
    def backward_over_forward(self) -> float:
        """Attention's backward time over its forward, by FLOP and the profile's rate."""
        return ATTENTION_BACKWARD_FLOP / self.cost.profile.attention_backward_rate

    @property
    def step_over_forward(self) -> float:
        """Attention time of forward, recomputation and backward, over the forward."""
        return 2.0 + self.backward_over_forward

    def run(
        self, mask: MaskTiles, owners: Owners, operator: Attention, setting: LayerSetting, kernel: Kernel
    ) -> AttentionRun:
        """Simulate the forward of one layer, with blocks owned as in `owners`."""
        num_slots = max(1, mask.num_tokens // SPLIT_KEYS) if kernel.split is Split.FIXED else 1
        rows = row_tiles(mask.tiles, num_slots=num_slots)
        launches = launches_of(operator, tp=setting.tp, kv_heads_per_launch=setting.kv_heads_per_launch)
        gpu = self.gpu(operator)
        wires = self._wires(mask, owners, operator, setting)
        tiles = [rows[owners == rank] for rank in range(setting.num_ranks)]
        return simulate_attention(tiles, launches, gpu, Wires(gather_s=wires.gather_s), kernel)

    def gpu(self, operator: Attention) -> Gpu:
        """An A40 at the profile's rate."""
        return gpu_of(self.cost, operator, precision=PRECISION, num_units=self._num_units)

    def _wires(self, mask: MaskTiles, owners: Owners, operator: Attention, setting: LayerSetting) -> Wires:
        whole = setting.num_ranks * setting.tp <= GPUS_PER_NODE
        link = self.cost.profile.machine_link("intra" if whole else "inter").link
        tokens = np.bincount(owners, minlength=setting.num_ranks) * BLOCK
        launches = launches_of(operator, tp=setting.tp, kv_heads_per_launch=setting.kv_heads_per_launch)
        shares: Sequence[int] = tokens.tolist()
        return wires_of(self.cost, operator, launches, shares, precision=PRECISION, link=link)
