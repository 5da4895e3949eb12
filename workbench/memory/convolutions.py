"""Convolutions that models count as products: neighbouring rows read the same elements of their input."""

from workbench.model.diffusion import GROUP_NORM_TENSORS
from workbench.model.layer import Layer, LayerKind, Matmul, Pointwise

# Rows that read an element, kernel over stride in each direction: of the stems of Whisper, a conformer and
# Qwen3-Omni, and of a UNet, which has convolutions in blocks and head, too.
_ROWS = {
    LayerKind.EMBED: {
        "conv1": 3.0,
        "conv2": 1.5,
        **dict.fromkeys(("conv.0", "conv2d1", "conv2d2", "conv2d3"), 2.25),
        "conv_in": 9.0,
    },
    LayerKind.BLOCK: {
        **{middle + name: 9.0 for middle in ("", "first.", "second.") for name in ("conv1", "conv2")},
        "downsample": 2.25,
        "upsample": 9.0,
    },
    LayerKind.HEAD: {"conv_out": 9.0},
}


def input_width(layer: Layer, operator: Matmul) -> float:
    """Return the elements of a product's input for each of its rows; all that it reads, if no convolution."""
    return operator.in_features / _ROWS.get(layer.kind, {}).get(operator.name, 1.0)


def num_read(operator: Pointwise) -> int:
    """Return the tensors that a norm or an activation reads; two kernels of a UNet's norm read one each."""
    name = operator.name.rpartition(".")[2]
    return GROUP_NORM_TENSORS.get(name, max(1, operator.num_passes - 1))
