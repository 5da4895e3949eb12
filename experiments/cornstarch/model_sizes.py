"""Parameter counts of the zoo's Cornstarch models against both papers' Table 1."""

from experiments.cornstarch.models import encoder_family, llm_family
from experiments.harness.outcome import Evidence, PaperNumber, Unstated
from experiments.harness.printed import PrintedRow, printed_rows
from workbench.model.layer import LayerKind
from workbench.model.model_graph import Module

REL_TOL = 0.02  # or half a unit of the last printed digit, where that is coarser
BILLION = 1e9


def size_evidence(table: str) -> Evidence:
    """One row per model: billions of parameters."""
    evidence = Evidence()
    for row in printed_rows(table):
        _add(evidence, row)
    return evidence


def _add(evidence: Evidence, row: PrintedRow) -> None:
    printed = float(row["n_params_b"])
    key = f"modelled/{row['model_arch'].replace(' ', '-')}/{row['size']}/parameters"
    tolerance = max(REL_TOL, half_unit(row["n_params_b"]) / printed)
    number = PaperNumber(key, printed, "1e9", "Table 1", tolerance)
    size = row["size"][0].upper()
    llm = llm_family()[size]()
    if row["modality"] == "llm":
        _check_shape(llm, row)
        evidence.add(number, llm.num_parameters / BILLION)
        return
    encoder = encoder_family(row["model_arch"])[size](llm.layers[0].out_width)
    _check_shape(encoder, row)
    bare = without_projector(encoder) / BILLION
    whole = encoder.num_parameters / BILLION
    evidence.add(number, bare, Unstated("whether the projector counts", bare, whole))


def half_unit(printed: str) -> float:
    """Half a unit of the last printed digit: "8" is good to 0.5, "0.6" to 0.05."""
    return 0.5 * 10.0 ** -len(printed.partition(".")[2])


def without_projector(module: Module) -> int:
    """Parameters of an encoder's layers before its projector."""
    return sum(layer.num_parameters for layer in module.layers if layer.kind is not LayerKind.PROJECTOR)


def _check_shape(module: Module, row: PrintedRow) -> None:
    blocks = [layer for layer in module.layers if layer.kind is LayerKind.BLOCK]
    ours, printed = (len(blocks), blocks[0].out_width), (int(row["n_layers"]), int(row["hidden_size"]))
    if ours != printed:
        raise ValueError(
            f"{row['model_arch']} {row['size']}: layers x width is {printed} in print, {ours} in the zoo"
        )
