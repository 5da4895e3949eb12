"""Multimodal models that users compose of unimodal transformers models.

Source: Cornstarch v1, section 3 and Listings 1 and 2; ICML version, Listing 1. It runs in one
process (`MultimodalModule.forward`), and on the ranks of a plan through `runtime.frontend.parallel`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.frontend.alone import features_of, sample_loss
from runtime.frontend.architecture import Architecture, architecture_of
from runtime.frontend.batch import EncoderInput, PreparedBatch, prepare
from runtime.frontend.callbacks import BeforeEncoder, BeforeLLM
from runtime.frontend.items import reader_of
from runtime.frontend.stage import AfterCallback, AroundProjector
from runtime.frontend.tiles import words_of
from runtime.models.projector import PROJECTORS, kind_of
from workbench.data.sample import Item
from workbench.model.families.tiles import NEWLINE
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph, Module, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable

LLM = "llm"  # the language model's name in plans
_MERGER = ("post_layernorm", "downsample", "merger")  # parts of a tower's own merger; GLM-4V's has all
_DERIVED = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")


class ModalityModule(nn.Module):
    """A unimodal model and, for an encoder, the projector behind it.

    Both parts start trainable. A part is frozen by `.train(mode=False)`, by `requires_grad_(False)` on it
    or on some of its weights, or by `trainable`; the status is read again for every step.

    Args:
        model: a transformers model.
        projector: "mlp", "linear", or a module of one of those two classes; new ones are initialised
            like torch's linear layers. "merger": the one at the end of Qwen's vision towers, part of the
            model. None: the language model.
        proj: another spelling of `projector`.
        trainable: which parts are trainable.
        tiles: says that images come as an overview and tiles, whose features the projector puts together row
            by row, each ended by the weight `image_newline`, as LLaVA-NeXT and LLaVA-OneVision do. It may say
            `image_grid_pinpoints` and `vision_aspect_ratio`, as their configurations do. None: items stand in
            the text as they are.
        preprocess_callback: before the encoder: maps its inputs to its inputs. One image may become
            several, rows of a tensor with one more dim. It runs where the batch is prepared.
        postprocess_module_callback: between encoder and projector, inside the stage that holds the
            projector; see `AroundProjector` for its arguments.
        postprocess_projector_callback: after the projector, likewise.

    Raises:
        ValueError: an unknown projector, both spellings at once, a status that names a missing part.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        projector: str | nn.Module | None = None,
        *,
        proj: str | nn.Module | None = None,
        trainable: Trainable | str = Trainable.ALL,
        tiles: Mapping[str, Any] | None = None,
        preprocess_callback: BeforeEncoder | None = None,
        postprocess_module_callback: AfterCallback | None = None,
        postprocess_projector_callback: AfterCallback | None = None,
    ) -> None:
        super().__init__()
        if projector is not None and proj is not None:
            raise ValueError(
                f"'proj' is another spelling of 'projector': give one, got {projector} and {proj}"
            )
        chosen = proj if projector is None else projector
        self.kind = None if chosen is None else kind_of(chosen)
        self.module = model
        self.projector = chosen if isinstance(chosen, nn.Module) else None
        self.trainable, self.tiles = Trainable(trainable), words_of(tiles)
        self.image_newline: nn.Parameter | None = None
        self.preprocess_callback = preprocess_callback
        self.around = AroundProjector(
            after_encoder=postprocess_module_callback, after_projector=postprocess_projector_callback
        )
        self.train()
        if self.tiles and (self.kind is None or self.around != AroundProjector()):
            raise ValueError("tiles are put together by a projector, around which there are no callbacks")
        if self.kind == Projector.MERGER and postprocess_module_callback is not None:
            raise ValueError("projector 'merger' is part of its model: there is nothing between the two")
        if self.trainable is not Trainable.ALL:
            model.requires_grad_(requires_grad=False)
        if self.trainable is Trainable.PROJECTOR and self.kind == Projector.MERGER:
            for part in (part for name, part in model.named_children() if name in _MERGER):
                part.requires_grad_(requires_grad=True)
        if self.trainable is Trainable.NONE and self.projector is not None:
            self.projector.requires_grad_(requires_grad=False)

    def graph(self, name: str, llm_width: int | None) -> Module:
        """The module as in plans, all layers trainable; an encoder needs `llm_width`, the LLM none."""
        config = json.loads(self.module.config.to_json_string(use_diff=False))
        kept = {key: value for key, value in config.items() if key not in _DERIVED and value is not None}
        kept |= self.tiles
        if (self.kind is None) != (llm_width is None):
            raise ValueError(
                f"module {name!r} is {'the language model' if llm_width is None else 'an encoder'}: want "
                f"{'no' if llm_width is None else 'a'} projector, got {self.kind}"
            )
        return module_from_config(
            kept,
            name=name,
            modality=TEXT if llm_width is None else name,
            projector=None if self.kind is None else Projector(self.kind),
            llm_width=llm_width,
        )

    def fit_projector(self, module: Module) -> None:
        """Create the projector once the language model's width is known, or check the given one.

        Raises:
            ValueError: the given projector does not fit.
        """
        if self.kind is None or self.kind == Projector.MERGER:
            return
        widths = (module.layers[-2].out_width, module.layers[-1].out_width)
        fresh = PROJECTORS[self.kind](*widths)
        if self.projector is None:
            self.projector = fresh.to(self.module.dtype)
            self.projector.requires_grad_(requires_grad=self.trainable is not Trainable.NONE)
        if self.tiles and self.image_newline is None:
            first = torch.randn(widths[1], dtype=self.module.dtype) * widths[1] ** -0.5
            is_trained = self.trainable is not Trainable.NONE
            self.image_newline = nn.Parameter(first, requires_grad=is_trained)
        want = {name: tuple(weight.shape) for name, weight in fresh.named_parameters()}
        have = {name: tuple(weight.shape) for name, weight in self.projector.named_parameters()}
        if want != have:
            raise ValueError(f"module {module.name!r}: its projector must have weights {want}, got {have}")

    def weights(self, architecture: Architecture) -> dict[str, nn.Parameter]:
        """Name in a plan -> the user's parameter, for every weight of the plan's module.

        Raises:
            ValueError: the model lacks one, or has it in another shape.
        """
        shapes = architecture.shapes
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            for prefix in architecture.adapter.prefixes:
                bare = name.removeprefix(prefix)
                if name.startswith(prefix) and bare in shapes:
                    parameters.setdefault(bare, parameter)
        if self.projector is not None:
            parameters |= {f"projector.{name}": p for name, p in self.projector.named_parameters()}
        if self.image_newline is not None:
            parameters[NEWLINE] = self.image_newline
        for name, shape in shapes.items():
            if name not in parameters or tuple(parameters[name].shape) != shape:
                have = tuple(parameters[name].shape) if name in parameters else "none"
                raise ValueError(
                    f"module {architecture.module.name!r}: {type(self.module).__name__} must have a weight "
                    f"{name!r} of shape {shape}, got {have}"
                )
        return {name: parameters[name] for name in shapes}

    def trains(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether the weight of that name in a plan is currently trained."""
        part = self.projector if name.startswith(("projector.", NEWLINE)) else self.module
        assert part is not None
        return parameter.requires_grad and part.training

    @property
    def held(self) -> tuple[PreTrainedModel, nn.Module | None, nn.Parameter | None]:
        """Its model, its projector, and the token that ends rows of tiles."""
        return self.module, self.projector, self.image_newline

    def untrained_weights(self) -> Iterator[nn.Parameter]:
        """Weights of parts that are not in training mode; `image_newline` follows the projector."""
        for part in (self.module, self.projector):
            if part is not None and not part.training:
                yield from part.parameters()
        if self.image_newline is not None and self.projector is not None and not self.projector.training:
            yield self.image_newline


EncoderModule = ModalityModule  # the ICML version's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Output of a forward through the whole model: the mean loss of the batch's next text tokens."""

    loss: Tensor


class MultimodalModule(nn.Module):
    """Encoders, groups of encoders, and one language model.

    An encoder `vision` is also the attribute `vision_encoder`; in a group `senses`, its name in plans,
    batches and specifications is `senses.vision`.

    Args:
        encoders: by name; a value that is a `MultimodalModule` without language model is a group.
        language_model: with or without its wrapper; None in a group.
        token_ids: encoder -> its placeholder token in `input_ids`, one per token of the encoder.
        preprocess_callback: before the language model: `(encoder_outputs, inputs)` -> inputs. It runs where
            the batch is prepared: outputs have shapes but no values (meta device).

    Raises:
        ValueError: a name, width or type that does not fit, equal token ids, a model within a model.
    """

    def __init__(
        self,
        encoders: Mapping[str, "ModalityModule | MultimodalModule"],
        language_model: PreTrainedModel | ModalityModule | None = None,
        *,
        token_ids: Mapping[str, int] | None = None,
        preprocess_callback: BeforeLLM | None = None,
    ) -> None:
        super().__init__()
        for name, encoder in encoders.items():
            _check_encoder(name, encoder)
            self.add_module(f"{name}_encoder", encoder)
        if isinstance(language_model, PreTrainedModel):
            language_model = ModalityModule(language_model)
        self.names = tuple(encoders)
        self._known: dict[str, Architecture] = {}
        self.language_model = language_model
        self.preprocess_callback = preprocess_callback
        self.token_ids = dict(token_ids or {})
        for name, encoder in encoders.items():
            if isinstance(encoder, MultimodalModule):
                self.token_ids |= {f"{name}.{inner}": token for inner, token in encoder.token_ids.items()}
        if language_model is not None:
            self._fit(language_model)

    def _fit(self, language_model: ModalityModule) -> None:
        width = language_model.graph(LLM, None).layers[0].out_width
        leaves = dict(self.leaves())
        for name, leaf in leaves.items():
            leaf.fit_projector(leaf.graph(name, width))
        for name, token in self.token_ids.items():
            if name not in leaves:
                raise ValueError(f"token_ids names {name!r}; there are {', '.join(leaves) or 'no encoders'}")
            alike = [other for other, its in self.token_ids.items() if its == token]
            if len(alike) > 1:
                raise ValueError(f"encoders {' and '.join(alike)} share token {token}: give each its own")
        types = {name: part.module.dtype for name, part in self.parts().items()}
        if len(set(types.values())) > 1:
            raise ValueError(f"all models must be of one dtype, got {types}")

    def leaves(self) -> Iterator[tuple[str, ModalityModule]]:
        """Yield (name in plans, encoder), of groups too."""
        for name in self.names:
            encoder = getattr(self, f"{name}_encoder")
            if isinstance(encoder, MultimodalModule):
                yield from ((f"{name}.{inner}", leaf) for inner, leaf in encoder.leaves())
            else:
                yield name, encoder

    def parts(self) -> dict[str, ModalityModule]:
        """Name in plans -> module, the language model last; ValueError for a group, which has none."""
        if self.language_model is None:
            raise ValueError("a group of encoders cannot run by itself: want a language_model, got None")
        return {**dict(self.leaves()), LLM: self.language_model}

    def architectures(self) -> dict[str, Architecture]:
        """Name in plans -> the part's architecture."""
        if not self._known:
            parts = self.parts()
            llm = parts[LLM].graph(LLM, None)
            width = llm.layers[0].out_width
            encoders = [part.graph(name, width) for name, part in parts.items() if name != LLM]
            self._known = {module.name: architecture_of(module) for module in (*encoders, llm)}
        return self._known

    def weights(self) -> dict[str, dict[str, nn.Parameter]]:
        """Name in plans -> weight's name in a plan -> the user's parameter."""
        architectures = self.architectures()
        return {name: part.weights(architectures[name]) for name, part in self.parts().items()}

    def graph(self) -> ModelGraph:
        """The model as plans describe it: a layer is trainable where any of its weights currently is."""
        weights = self.weights()
        *encoders, llm = [
            self._flagged(architecture, weights[name]) for name, architecture in self.architectures().items()
        ]
        return connect("multimodal", *([encoder, llm] for encoder in encoders), [llm])

    def _flagged(self, known: Architecture, weights: Mapping[str, nn.Parameter]) -> Module:
        part = self.parts()[known.module.name]
        trained = {name: part.trains(name, weight) for name, weight in weights.items()}
        flags = [any(trained[name] for name in names) for names in known.layers]
        layers = (replace(x, trainable=on) for x, on in zip(known.module.layers, flags, strict=True))
        return replace(known.module, layers=tuple(layers))

    def prepare(self, batch: Mapping[str, Any]) -> PreparedBatch:
        """The batch after the callbacks in front; see `runtime.frontend.batch.prepare`."""
        known = self.architectures()
        inputs = {
            name: self._input(name, part, known[name]) for name, part in self.parts().items() if name != LLM
        }
        return prepare(batch, inputs, self.preprocess_callback)

    def _input(self, name: str, part: ModalityModule, known: Architecture) -> EncoderInput:
        reader = reader_of(part.module, known.adapter)
        return EncoderInput(
            keys=reader.input_keys(part.module),
            adapter=reader,
            width=self.architectures()[LLM].module.layers[0].out_width,
            token_id=self.token_ids.get(name),
            before=part.preprocess_callback,
        )

    def forward(self, batch: Mapping[str, Any]) -> ModelOutput:
        """Run the user's own models on the batch in one process, item by item and sample by sample.

        Differs: the runtime switches dropout off; here a model in training mode applies its own.
        """
        prepared, known = self.prepare(batch), self.architectures()
        features: dict[tuple[str, Item], Tensor] = {}
        with self._frozen_parts():
            for name, part in self.leaves():
                reader, held = reader_of(part.module, known[name].adapter), part.held
                features |= features_of(name, held, part.around, reader, prepared)
            llm = self.parts()[LLM].module
            sums = [
                sample_loss(llm, tuple(known.values()), prepared, index, features)
                for index in range(len(prepared.samples))
            ]
        count = sum(num for _, num in sums)
        if not count:
            raise ValueError("the batch has no text token to predict")
        return ModelOutput(loss=torch.stack([loss for loss, _ in sums]).sum() / count)

    @contextmanager
    def _frozen_parts(self) -> Iterator[None]:
        """Disable gradients of the weights of parts that are not in training mode, as on the ranks."""
        weights = (weight for part in self.parts().values() for weight in part.untrained_weights())
        frozen = [weight for weight in weights if weight.requires_grad]
        for weight in frozen:
            weight.requires_grad = False
        try:
            yield
        finally:
            for weight in frozen:
                weight.requires_grad = True


def _check_encoder(name: str, encoder: object) -> None:
    if not name.isidentifier() or name in (TEXT, LLM):
        raise ValueError(f"encoder name must be an identifier other than {TEXT!r} and {LLM!r}, got {name!r}")
    if isinstance(encoder, MultimodalModule):
        if encoder.language_model is not None:
            raise ValueError(
                f"encoder {name!r} is a model with a language model of its own; plans have one language model"
            )
        if encoder.preprocess_callback is not None:
            raise ValueError(f"group {name!r}: the callback before the LLM belongs to the whole model")
    elif not isinstance(encoder, ModalityModule):
        raise ValueError(
            f"encoder {name!r}: want a ModalityModule or a MultimodalModule, got {type(encoder).__name__}"
        )
