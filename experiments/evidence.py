"""What one kind of evidence amounts to, gathered row by row and joined into an outcome."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from experiments.paper import Claim, Outcome, PaperNumber, Provenance, Unstated, judge


@dataclass(slots=True)
class Evidence:
    """Numbers of the paper, values of ours, ranges over what is unstated, claims, notes."""

    paper: list[PaperNumber] = field(default_factory=list)
    ours: dict[str, float] = field(default_factory=dict)
    unstated: dict[str, Unstated] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plan_hashes: list[str] = field(default_factory=list)

    def add(self, number: PaperNumber, ours: float, unstated: Unstated | None = None) -> None:
        """One row of the report."""
        self.paper.append(number)
        self.ours[number.key] = ours
        if unstated is not None:
            self.unstated[number.key] = unstated

    def claim(self, text: str, holds: bool) -> None:  # noqa: FBT001  (the claim's own truth)
        """One claim of the report."""
        self.claims.append(Claim(text, holds))


def outcome_of(script: str, parts: Iterable[Evidence], *, profile: str | None = None) -> Outcome:
    """All evidence of a script, judged together."""
    parts = tuple(parts)
    return judge(
        script,
        [number for part in parts for number in part.paper],
        {key: value for part in parts for key, value in part.ours.items()},
        [claim for part in parts for claim in part.claims],
        underspecified={key: value for part in parts for key, value in part.unstated.items()},
        notes=[note for part in parts for note in part.notes],
        provenance=Provenance(
            plan_hashes=tuple(dict.fromkeys(h for part in parts for h in part.plan_hashes)), profile=profile
        ),
    )
