"""Buffers of a user's model that the runtime computes with: they may differ from the configuration's."""

from torch import Tensor, nn

from runtime.frontend.architecture import Architecture


def held_buffers(model: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """By the runtime's names, as the model has them now.

    Raises:
        ValueError: one of another shape, or one that is saved with the model, changes what it computes and is
            unknown to the runtime.
    """
    known, found = architecture.adapter.buffers, dict[str, Tensor]()
    saved, where = model.state_dict().keys(), f"module {architecture.module.name!r}"
    for name, buffer in model.named_buffers():
        named = (
            name.removeprefix(start) for start in architecture.adapter.prefixes if name.startswith(start)
        )
        names = tuple(named)
        bare = next((each for each in names if each in known), None)
        if bare is not None and buffer.shape == known[bare].shape:
            found[bare] = buffer.detach().cpu()
        elif bare is not None:
            want, have = tuple(known[bare].shape), tuple(buffer.shape)
            raise ValueError(f"{where}: buffer {name!r} must have shape {want}, got {have}")
        elif name in saved and buffer.is_floating_point() and not _is_neutral(names, buffer, architecture):
            raise ValueError(
                f"{where}: {type(model).__name__} has the buffer {name!r}, which the runtime does not "
                f"compute with; it knows {', '.join(known) or 'none'}"
            )
    return found


def _is_neutral(names: tuple[str, ...], buffer: Tensor, architecture: Architecture) -> bool:
    neutral = architecture.adapter.neutral_buffers
    return any(name in neutral and bool((buffer == neutral[name]).all()) for name in names)
