"""Random DAGs of modules of square layers, for tests of the model graph and the frozen rule."""

from hypothesis import strategies as st

from workbench.model.layer import Layer, LayerKind, Matmul
from workbench.model.model_graph import Edge, ModelGraph, Module

WIDTH = 3


def chain(name: str, trainable: list[bool]) -> Module:
    """Layers of one square matmul each."""
    matmul = Matmul(name="linear", in_features=WIDTH, out_features=WIDTH)
    layers = tuple(
        Layer(
            name=f"layer.{index}",
            kind=LayerKind.BLOCK,
            operators=(matmul,),
            out_width=WIDTH,
            trainable=flag,
        )
        for index, flag in enumerate(trainable)
    )
    return Module(name=name, modality=name, layers=layers)


@st.composite
def dag_models(draw: st.DrawFn) -> ModelGraph:
    """1 to 5 modules of 1 to 4 layers; edges leave and enter anywhere; listing order is shuffled."""
    flags = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=5))
    modules = [chain(f"m{index}", trainable) for index, trainable in enumerate(flags)]
    edges = []
    for target in range(len(modules)):
        for source in range(target):
            if draw(st.booleans()):
                after = draw(st.integers(0, len(modules[source].layers) - 1))
                before = draw(st.integers(0, len(modules[target].layers) - 1))
                edges.append(
                    Edge(source=f"m{source}", target=f"m{target}", after_layer=after, before_layer=before)
                )
    listed = draw(st.permutations(modules))
    return ModelGraph(name="random", modules=tuple(listed), edges=tuple(draw(st.permutations(edges))))
