"""Node counts of templates with which any number of remaining nodes can be used in full."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.elastic.chain import LayerChain
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.template import Template
from workbench.float_sum import float_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpecification:
    """Templates of `smallest`, smallest + 1, ..., `largest` nodes for a job on `num_nodes` nodes.

    Oobleck chapter, section 2.4.1.1 and appendix A.1: consecutive node counts from n0 to N - f n0 cover
    every N' from (f + 1) n0 to N with f + 1 pipelines or more. Differs: the source asks for p > n0 - 1
    counts. With the largest at N - f n0 that is not needed, because f + 1 pipelines reach every N' on their
    own; if the model's layers cap the largest count (no stage spans nodes, so a pipeline has at least a
    layer per node), this is checked for every N'.

    Args:
        num_nodes: N at the start.
        num_faults: f, simultaneous node failures to survive.
        smallest: n0, nodes of the smallest pipeline that fits.
        most: the largest pipeline that fits; None: limited by N alone.

    Raises:
        ValueError: f < 0, n0 < 1, N < (f + 1) n0, or an N' that no templates add up to.
    """

    num_nodes: int
    num_faults: int
    smallest: int
    most: int | None = None

    def __post_init__(self) -> None:
        if self.num_faults < 0:
            raise ValueError(f"failures to tolerate must be >= 0, got {self.num_faults}")
        if self.smallest < 1:
            raise ValueError(f"the smallest pipeline has at least one node, got {self.smallest}")
        if self.num_nodes < self.threshold:
            bearable = self.num_nodes // self.smallest - 1
            remedy = (
                f"faults {bearable}, or {self.threshold} nodes"
                if bearable >= 0
                else f"at least {self.threshold} nodes"
            )
            raise ValueError(
                f"number of nodes {self.num_nodes}, of which a pipeline needs {self.smallest}: faults "
                f"{self.num_faults} wants {self.num_faults + 1} pipelines; want {remedy}"
            )
        for left in range(self.threshold, self.num_nodes + 1):
            if not self.covers(left):
                raise ValueError(
                    f"{left} nodes cannot be split into {self.num_faults + 1} or more pipelines of "
                    f"{self.smallest}..{self.largest} nodes: want a model of at least "
                    f"{2 * self.smallest - 1} layers, or more memory so that smaller pipelines fit"
                )

    @property
    def threshold(self) -> int:
        """(f + 1) n0: with fewer nodes training cannot keep f + 1 copies and stops."""
        return (self.num_faults + 1) * self.smallest

    @property
    def largest(self) -> int:
        """N - f n0: the size of one pipeline when all others have n0."""
        free = self.num_nodes - self.num_faults * self.smallest
        return free if self.most is None else min(free, self.most)

    @property
    def sizes(self) -> range:
        """Node counts of the templates; its length is p."""
        return range(self.smallest, self.largest + 1)

    def covers(self, num_nodes: int) -> bool:
        """Whether at least f + 1 pipelines can use `num_nodes` nodes in full.

        r pipelines of n0..n_max nodes use any number from r n0 to r n_max.
        """
        return any(
            replicas * self.smallest <= num_nodes <= replicas * self.largest
            for replicas in range(self.num_faults + 1, num_nodes // self.smallest + 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSet:
    """The specification and a template for each of its sizes, planned once per job."""

    specification: NodeSpecification
    templates: tuple[Template, ...]

    def of_size(self, num_nodes: int) -> Template:
        """The template with `num_nodes` nodes."""
        return self.templates[num_nodes - self.specification.smallest]

    def check_bytes(self, layer_bytes: Sequence[int]) -> None:
        """Raise ValueError unless there is one byte count per layer."""
        num_layers = self.templates[0].num_layers
        if len(layer_bytes) != num_layers:
            raise ValueError(f"want bytes of {num_layers} layers, got {len(layer_bytes)} counts")


def plan_templates(chain: LayerChain, gpus_per_node: int, num_nodes: int, num_faults: int) -> TemplateSet:
    """All templates of a job, exact, in one pass; n0 is the fewest nodes with memory for the model.

    Raises:
        ValueError: the model fits no template, or what NodeSpecification refuses.

    Complexity: that of `exact_templates` for N nodes.
    """
    templates = exact_templates(chain, gpus_per_node, range(1, min(num_nodes, chain.num_layers) + 1))
    if not templates:
        raise ValueError(_no_fit(chain, gpus_per_node, num_nodes))
    smallest = min(templates)
    most = _consecutive_until(templates, smallest)
    specification = NodeSpecification(
        num_nodes=num_nodes, num_faults=num_faults, smallest=smallest, most=most
    )
    return TemplateSet(
        specification=specification, templates=tuple(templates[size] for size in specification.sizes)
    )


def _consecutive_until(templates: Mapping[int, Template], smallest: int) -> int:
    largest = smallest
    while largest + 1 in templates:
        largest += 1
    return largest


def _no_fit(chain: LayerChain, gpus_per_node: int, num_nodes: int) -> str:
    """Why no template exists, with what would work."""
    heaviest = max((min(layer_bytes), layer) for layer, layer_bytes in enumerate(chain.held_bytes or ((0,),)))
    if heaviest[0] > chain.capacity_bytes:
        return (
            f"the model fits no template: layer {heaviest[1]} alone needs {heaviest[0]} bytes per GPU, "
            f"a GPU has {chain.capacity_bytes:.0f}: want GPUs of that size, or wider stages"
        )
    needed = (
        min(
            float_sum(column) * width
            for column, width in zip(zip(*chain.held_bytes, strict=True), chain.widths, strict=True)
        )
        if chain.held_bytes
        else 0
    )
    free = num_nodes * gpus_per_node * chain.capacity_bytes
    return (
        f"the model fits no template of up to {num_nodes} nodes of {gpus_per_node} GPUs: it needs about "
        f"{needed} bytes, they have {free:.0f}; want more nodes, GPUs of more memory, or smaller microbatches"
    )
