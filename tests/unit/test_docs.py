"""The documentation says what is there: links, names, numbers and generated parts are compared with
the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from sojourn.errors import all_errors
from sojourn.model import Limits, Policy
from sojourn.node.setup.host_packages import NEEDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATE = ROOT / "docs" / "operate.md"
DESIGN = ROOT / "docs" / "design.md"
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

MIB = 1024**2


@cache
def writer() -> ModuleType:
    """scripts/write_docs.py."""
    spec = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts" / "write_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """A page without its fenced blocks, where a bracket is no link and a number sign no heading."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


@cache
def functions(path: Path) -> set[str]:
    """The functions of a test file, and the methods of its classes."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def section_of(page: Path, heading: str) -> str:
    """One section of a page."""
    return page.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


# -- generated parts --------------------------------------------------------------------------


def test_the_table_of_verbs_is_current() -> None:
    assert writer().design_with_table(DESIGN.read_text()) == DESIGN.read_text(), (
        "run scripts/write_docs.py"
    )


def test_the_reference_of_the_command_line_is_current() -> None:
    assert writer().REFERENCE.read_text() == writer().cli_reference(), "run scripts/write_docs.py"


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        place, _, anchor = target.partition("#")
        assert "://" not in place, f"{target}: the project speaks of itself alone"
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|scripts|src)/[\w./*-]+?)(?:::(\w+))?`", page.read_text())
    for path, function in named:
        assert (ROOT / path).exists(), path
        assert not function or function in functions(ROOT / path), f"{path}::{function}"


def test_every_invariant_names_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| `(tests/[^`]+::test_\w+)` \|$", DESIGN.read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 25
    section = section_of(DESIGN, "Invariants")
    assert section.count("\n| ") == len(rows) + 1, "a row without number or test"


def test_every_hazard_page_is_listed() -> None:
    pages = {page.name for page in (ROOT / "docs" / "hazards").glob("*.md")} - {"README.md"}
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/hazards/README.md").read_text()))
    assert listed == pages


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_that_are_shown_exist(page: Path) -> None:
    reference = writer().cli_reference()
    headings = set(re.findall(r"^## (sojourn [a-z ]+)$", reference, re.MULTILINE))
    groups = {"sojourn"}
    for heading in headings:
        words = heading.split()
        groups |= {" ".join(words[:length]) for length in range(2, len(words))}
    for shown in re.findall(r"(?<![\w/.-])(?<!from )sojourn((?: [a-z]+){1,3})", code_of(page)):
        name = "sojourn"
        for word in shown.split():
            if name not in groups:
                break  # what follows a command's name are its arguments
            name = f"{name} {word}"
            assert name in headings | groups, f"{name} in {page.name}"


def code_of(page: Path) -> str:
    """What a page shows in code, that is not Python or a configuration."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:console)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    return "\n".join([*fenced, *inline])


# -- operate.md -------------------------------------------------------------------------------


def test_every_variable_is_explained() -> None:
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        used.update(re.findall(r'"(SOJOURN_[A-Z_]+)"', path.read_text()))
    table = section_of(OPERATE, "Variables")
    assert set(re.findall(r"`(SOJOURN_[A-Z_]+)`", table)) == used


def test_exit_codes_are_those_of_the_errors() -> None:
    section = section_of(OPERATE, "Exit codes")
    told = {int(code) for code in re.findall(r"\b(1\d\d) [a-z]", section)} - {128}
    assert told == {error.exit_code for error in all_errors().values()}


def test_error_codes_that_are_named_exist() -> None:
    section = section_of(OPERATE, "When something is wrong")
    named = set(re.findall(r"^\| `([a-z_]+)`", section, re.MULTILINE))
    assert named and named <= set(all_errors())


def test_what_set_up_installs_is_listed() -> None:
    section = section_of(OPERATE, "What set-up installs")
    assert [need.package for need in NEEDS if need.package not in section] == []


# -- README -----------------------------------------------------------------------------------


def test_limits_and_policies_are_listed_with_their_defaults() -> None:
    told = _defaults(section_of(ROOT / "README.md", "Limits and policy"))
    assert told.pop("retention") == "see below"
    policy = msgspec.to_builtins(Policy())
    rules = policy.pop("retention")
    assert told == msgspec.to_builtins(Limits()) | policy
    assert _defaults(section_of(OPERATE, "What is kept of histories")) == rules


def _defaults(section: str) -> dict[str, object]:
    """The fields and defaults of a section's tables."""
    rows = dict(re.findall(r"^\| (`.+?`) \| (.+?) \|", section, re.MULTILINE))
    told = {}
    for names, values in rows.items():
        fields = re.findall(r"`(\w+)`", names)
        told.update(zip(fields, values.split(", "), strict=True))
    return {name: _value(text) for name, text in told.items()}


def _value(text: str) -> object:
    text = text.strip("`")
    number, _, unit = text.partition(" ")
    if unit in ("GiB", "MiB"):
        return int(number) * MIB * (1024 if unit == "GiB" else 1)
    if unit == "s":
        return float(number)
    words: dict[str, object] = {"None": None, "true": True}
    if text in words:
        return words[text]
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
