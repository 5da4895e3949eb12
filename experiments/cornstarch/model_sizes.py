"""Parameter counts of the zoo's Cornstarch models against both papers' Table 1.

Given:   printed layers and width -> parameters of the zoo's models; heads and MLP widths, which the tables
         do not print, are those of the published models of each family.
"""

from experiments.cornstarch.models import encoder_family, llm_family
from experiments.harness.outcome import Evidence
from experiments.harness.printed import PrintedRow
from experiments.harness.table import Cell, Table
from workbench.model.layer import LayerKind
from workbench.model.model_graph import Module

REL_TOL = 0.02  # or half a unit of the last printed digit, where that is coarser
BILLION = 1e9


def size_evidence(table: str) -> Evidence:
    """Evidence with one row per model: billions of parameters."""
    evidence = Table(
        csv=table,
        where="Table 1",
        key=lambda row: f"itself/{row['model_arch'].replace(' ', '-')}/{row['size']}/",
        cells={
            "parameters": Cell(
                column="n_params_b",
                unit="1e9",
                rel_tol=tolerance,
            )
        },
        compute=lambda row: {"parameters": parameters(row)},
        unstated="whether the projector counts",
    ).evidence()
    evidence.causes["itself/Phi4-Audio/*"] = (
        "the published encoder has 0.44e9 parameters, 0.46e9 with projector"
    )
    return evidence


def tolerance(printed: str) -> float:
    """The tolerance of a cell as printed."""
    return max(REL_TOL, half_unit(printed) / float(printed))


def parameters(row: PrintedRow) -> dict[str, float]:
    """Billions of parameters of an LLM, or of an encoder without and with its projector."""
    size = row["size"][0].upper()
    llm = llm_family()[size]()
    if row["modality"] == "llm":
        _check_shape(llm, row)
        return {"all": llm.num_parameters / BILLION}
    encoder = encoder_family(row["model_arch"])[size](llm.layers[0].out_width)
    _check_shape(encoder, row)
    return {
        "without the projector": without_projector(encoder) / BILLION,
        "with it": encoder.num_parameters / BILLION,
    }


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
