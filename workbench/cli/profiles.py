"""Commands for profiles of devices: new, show, check."""

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.calibrate.device_sheet import check_sheet, read_sheet, shipped_sheet, shipped_sheets
from workbench.cli.console import print_result
from workbench.cli.options import Json
from workbench.cli.table_format import with_format_flag
from workbench.cost.profile import Profile, load_profile, parse_profile, write_profile
from workbench.report.tables import facts_table, fits_table, profile_record, unmeasured_text
from workbench.whole_file import check_writable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Create, show and check profiles of devices.",
)


@app.command("new")
@with_format_flag
def new_command(
    name: Annotated[str, typer.Argument(help="name of the profile", metavar="NAME")],
    from_sheet: Annotated[
        Path,
        typer.Option(
            "--from-sheet", help="data sheet: CSV file with the columns cell, value, standing, source"
        ),
    ],
    like: Annotated[str, typer.Option(help="profile of a measured device, whose tables are scaled")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="profile file to write; default: NAME.json")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a profile from the data sheet of a device that was not measured."""
    from workbench.calibrate.derived import profile_of

    path = output or Path(f"{name}.json")
    check_writable(path, from_sheet, like)
    profile = profile_of(read_sheet(from_sheet), like, name=name)
    write_profile(profile, path)
    _print_profile(profile, {"output": str(path)}, f"written to {path}", as_json=as_json)


@app.command("show")
@with_format_flag
def show_command(
    name: Annotated[str, typer.Argument(help="name of a shipped profile, or file", metavar="NAME")],
    as_json: Json = False,
) -> None:
    """Show the rates in a profile, their accuracy, and what was not measured."""
    _print_profile(load_profile(name), {}, as_json=as_json)


@app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(help="profile file, or data sheet (.csv)", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Check a profile or data sheet; report the first invalid field."""
    if file.suffix == ".csv":
        sheet = read_sheet(file)
        check_sheet(sheet, [shipped_sheet(name) for name in shipped_sheets()])
        record: dict[str, Any] = {"device": sheet.device, "presumed": list(sheet.presumed)}
        summary = f"{file}: valid; presumed: {', '.join(sheet.presumed) or 'nothing'}"
    else:
        profile = parse_profile(read_bounded(file, MOST_SETTINGS_BYTES), where=str(file))
        record = {"device": profile.device, "presumed": list(profile.presumed)}
        summary = f"{file}: valid; {len(profile.unmeasured)} costs were not measured"
    print_result({"file": str(file)} | record, summary, as_json=as_json)


def _print_profile(profile: Profile, extra: dict[str, Any], *texts: str, as_json: bool) -> None:
    tables, unmeasured = (facts_table(profile), fits_table(profile)), unmeasured_text(profile.unmeasured)
    print_result(profile_record(profile) | extra, *tables, unmeasured, *texts, as_json=as_json)
