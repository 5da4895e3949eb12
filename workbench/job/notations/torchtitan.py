"""torchtitan's `module_fqns_per_model_part`, which lists the submodules of every stage of the language model.

Source: torchtitan, `Parallelism.module_fqns_per_model_part` and the names of its Llama: tok_embeddings,
layers.0 to layers.N-1, norm, output (lm_head in later models).

The notation expresses only where the language model is cut. What layouts cannot express is refused: `norm`
apart from `output`, which are one layer here, and parts without layers.
"""

from collections.abc import Sequence
from typing import Any

from workbench.job.notations.checked_values import nearest_of

EMBEDDING, NORM, OUTPUT = "tok_embeddings", "norm", ("output", "lm_head")


def stage_layers_of(parts: Any, *, num_blocks: int) -> tuple[int, ...]:
    """The number of layers of every stage; embedding, transformer layers and head (norm, output) count one.

    Args:
        parts: [stages] lists of names, in the model's order.
        num_blocks: transformer layers of the model.

    Raises:
        ValueError: an unknown name, one out of order, or a missing one; the message names part and position.

    Complexity: O(layers).
    """
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise ValueError(f"module_fqns_per_model_part: want a list of lists of names, got {parts!r:.60}")
    expected = [EMBEDDING, *(f"layers.{index}" for index in range(num_blocks)), NORM, OUTPUT[0]]
    counts, done = [], 0
    for part, names in enumerate(parts):
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise ValueError(f"model part {part}: want a list of at least one name, got {names!r:.60}")
        start = done
        for position, name in enumerate(names):
            _check_name(str(name), expected, done, f"model part {part}, name {position}")
            done += 1
        last = expected[done - 1]
        if last == NORM:
            raise ValueError(
                f"model part {part}: {NORM!r} and {OUTPUT[0]!r} are one layer; put both in one part"
            )
        counts.append(done - start - (1 if last in OUTPUT else 0))
    if done < len(expected):
        raise ValueError(f"module_fqns_per_model_part ends before {expected[done]!r}")
    return tuple(counts)


def _check_name(name: str, expected: Sequence[str], done: int, where: str) -> None:
    if done == len(expected):
        raise ValueError(f"{where}: {name!r} stands behind the last one, {expected[-1]!r}")
    is_next = name == expected[done] or (expected[done] in OUTPUT and name in OUTPUT)
    if is_next:
        return
    if name not in (*expected, *OUTPUT):
        raise ValueError(f"{where}: no module {name!r}; {nearest_of(name, expected)}")
    raise ValueError(f"{where}: want {expected[done]!r} next, got {name!r}")


def parts_of(stage_layers: Sequence[int]) -> list[list[str]]:
    """The names of the submodules of stages.

    Raises:
        ValueError: not a module of an embedding, transformer layers and a head in stages of >= 1 layer.
    """
    num_layers = sum(stage_layers)
    if num_layers < 2 or min(stage_layers) < 1:
        raise ValueError(
            f"model parts want >= 1 layer each, with an embedding and a head, got {list(stage_layers)}"
        )
    names = [[EMBEDDING], *([f"layers.{index}"] for index in range(num_layers - 2)), [NORM, OUTPUT[0]]]
    parts, start = [], 0
    for count in stage_layers:
        parts.append([name for layer in names[start : start + count] for name in layer])
        start += count
    return parts
