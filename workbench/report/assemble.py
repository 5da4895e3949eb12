"""Assemble the page's template, style, scripts and data into one file."""

import re
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from workbench.report.palette import DARK, LIGHT

_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) (\w+)", re.MULTILINE)


def page(*, title: str, body: str, data: str) -> str:
    """The whole page; `title` and `body` are HTML, `data` the elements that hold the data."""
    colours = {"light": _properties(LIGHT), "dark": _properties(DARK)}
    parts = {"style": Template(_text("style.css")).substitute(colours), "script": script("main")}
    return Template(_text("page.html")).substitute(parts, title=title, body=body, data=data)


def script(main: str) -> str:
    """Bundle a module and all its imports into one script, each as a function that returns its exports.

    Modules import by `import { a, b } from "./name.js";` and export where they define; a page opened from a
    file cannot fetch them separately.

    Raises:
        ValueError: a module with another form of import or export.
    """
    done: dict[str, str] = {}
    _add(main, done)
    return "\n".join(done.values())


def _add(name: str, done: dict[str, str]) -> None:
    text = _text(f"{name}.js")
    for _, imported in _IMPORT.findall(text):
        if imported not in done:
            _add(imported, done)
    inside = _IMPORT.sub(r"const { \1 } = module_\2;", text)
    exported = [export for _, export in _EXPORT.findall(inside)]
    inside = _EXPORT.sub(r"\1 \2", inside)
    if re.search(r"^(import|export)\b", inside, re.MULTILINE):
        raise ValueError(f"{name}.js: want imports and exports of names alone, each in one line")
    if exported:
        inside = f"const module_{name} = (() => {{\n{inside}\nreturn {{ {', '.join(exported)} }};\n}})();"
    done[name] = inside


def _properties(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def _text(name: str) -> str:
    return files("workbench.report.page").joinpath(name).read_text(encoding="utf-8")
