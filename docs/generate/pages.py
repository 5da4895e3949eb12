"""Every generated file of the documentation, by its path under `docs/`; and the table inside the README."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from docs.generate import papers
from docs.generate.commands import commands_page
from docs.generate.evidence import evidence_page
from docs.generate.files import data_page, plan_page, profile_page, trace_page
from docs.generate.lists import models_page, schedules_page, strategies_page
from docs.generate.records import job_page
from docs.generate.results import ROOT
from docs.generate.summary import in_short, summary_table
from docs.generate.timeline import timelines_svg

DOCS = ROOT / "docs"
README = ROOT / "README.md"
TABLE_BEGINS, TABLE_ENDS = (
    "<!-- evidence: made by `python -m docs.generate` -->\n",
    "<!-- end of evidence -->\n",
)


def readme() -> str:
    """The README with its table of evidence as the result files have it."""
    before, begins, rest = README.read_text(encoding="utf-8").partition(TABLE_BEGINS)
    _, ends, behind = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(f"{README}: want the lines {TABLE_BEGINS.strip()!r} and {TABLE_ENDS.strip()!r}")
    return f"{before}{begins}\n{in_short()}\n\n{summary_table()}\n\n{ends}{behind}"


PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "../README.md": readme,
        "timelines.svg": timelines_svg,
        "evidence.md": evidence_page,
        **papers.pages(),
        "reference/commands.md": commands_page,
        "reference/job.md": job_page,
        "reference/plan.md": plan_page,
        "reference/profile.md": profile_page,
        "reference/trace.md": trace_page,
        "reference/data.md": data_page,
        "reference/strategies.md": strategies_page,
        "reference/schedules.md": schedules_page,
        "reference/models.md": models_page,
    }
)


def stale_pages() -> list[str]:
    """Those that are absent or differ from what the generator makes."""
    return [name for name, make in PAGES.items() if _kept(name) != make()]


def _kept(name: str) -> str | None:
    path = DOCS / name
    return path.read_text(encoding="utf-8") if path.is_file() else None
