"""The vocabulary of docs/glossary.md holds in the code: unique class names, names that say what they hold, docstrings that stand alone."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "spangrad",
    "commands",
    "span_processors",
    "gateway",
    "collector",
    "runner",
    "transition_builder",
    "trainer",
    "prompts",
    "dashboards",
    "page",
    "recipes",
)
BESIDE = ("tests", "benchmarks", "examples", "packaging")
"""Directories beside the product, whose names say what they hold as well, and whose docstrings stand alone."""
BANNED = {"one", "said", "told", "some", "theirs", "mine", "found", "made", "wanted"}
FIGURATIVE = {
    "mourn", "mourning", "heirs", "road", "roads", "dice", "champion", "fate", "fates", "loose", "heard", "given_back", "moves", "torn",
    "whose", "aim", "aimed", "standing", "speakers", "spoken", "thought", "thoughts", "uppers", "twice", "slim", "straight", "seam",
    "seams", "hang", "gone", "orphans", "witnesses", "doubtful", "obeyed", "lived", "grown", "came", "lent", "spared", "strayed", "lay",
    "here", "who", "making", "say", "tell", "looks", "looked", "sound", "farewell", "crowd", "roof", "kin", "dear", "lot", "aside",
    "hurry",
}  # fmt: skip
"""Figures of speech that stood for terms of the field."""
SHORT_LINES = 2
"""Longest comprehension, in lines, that may bind a banned name."""
MOST_FILES = 15
BEGINNINGS = [
    "what",
    "who",
    "whom",
    "whose",
    "which",
    "how",
    "why",
    "when",
    "where",
    "whether",
    "that",
    "of",
    "in",
    "on",
    "at",
    "by",
    "for",
    "with",
    "without",
    "from",
    "to",
    "into",
    "as",
    "until",
    "if",
    "whoever",
    "whatever",
    "wherever",
]
FIGURES = re.compile(r"\b(nobody|somebody|whoever|whose word|mends?|mended|somebody's|nobody's)\b", re.IGNORECASE)
LONGEST_TEST_NAME = 80
TEST_BEGINNINGS = re.compile(
    r"test_(a|an|the|its?|th(is|at|ese|ose)|of|nothing|no_one|every_one|(no|some|every)body|wh(at|o|om|ose|ich|y|en|ere|ether)|how"
    r"|wh(o|at|ere)ever)_"
)
"""A test's name begins with the function or behaviour that it tests, never with these."""
TEST_FIGURES = re.compile(
    r"_((no|some|any|every)body|wh(o|at|ere|ich)ever|what|whom?|how|told|tells?|said|says?|ours|theirs|mine|ones|mend(s|ed|able)?|mourned"
    r"|dear|poison|holds_up|held_up|let_go|goes_on|go_on|gives_up|all_the_same)(_|$)"
)
"""Words and figures of speech that no test's name holds."""


Placed = list[tuple[str, int]]
"""Names or texts, with their lines."""


@dataclass
class Module:
    """Names and texts of a module: its tree, which is much larger, is not kept."""

    path: str
    names: Placed
    """Every name that it binds; those of short comprehensions left out."""
    docstrings: Placed
    """Docstrings of itself, its classes, functions and fields."""
    functions: Placed
    classes: list[str]
    """Names of its public classes, but for those within others."""
    settings: list[tuple[str, str, str]]
    """Class, name and docstring of each field of a section of settings."""


@cache
def modules(package: str) -> list[Module]:
    return [module_of(path) for path in sorted((ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> Module:
    tree = ast.parse(path.read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    module = Module(str(path.relative_to(ROOT)), [], [], [], classes, [])
    short, nodes = set[ast.AST](), list[ast.AST]([tree])
    for node in nodes:  # the list grows meanwhile: each node stands in it before those that it holds
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if node not in short:
                module.names.append((name, node.lineno))
            case ast.arg(arg=name):
                module.names.append((name, node.lineno))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                module.names.append((name, node.lineno))
                module.functions.append((name, node.lineno))
            case ast.ClassDef(name=name):
                module.names.append((name, node.lineno))
                module.settings += fields(node)
            case (
                ast.ListComp(generators=generators)
                | ast.SetComp(generators=generators)
                | ast.DictComp(generators=generators)
                | ast.GeneratorExp(generators=generators)
            ) if (node.end_lineno or node.lineno) - node.lineno < SHORT_LINES:
                short.update(name for generator in generators for name in ast.walk(generator.target))
            case ast.Expr(value=ast.Constant(value=str(text))):
                module.docstrings.append((text, node.lineno))
            case _:
                pass
        nodes += ast.iter_child_nodes(node)
    return module


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_bound_names_of_packages_are_not_banned(package: str) -> None:
    assert [
        f"{module.path}:{line}: {name}"
        for module in modules(package)
        for name, line in module.names
        if name in BANNED or name.strip("_") in FIGURATIVE
    ] == []


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_docstrings_begin_with_a_verb_or_a_noun_phrase(package: str) -> None:
    wrong = [
        f"{module.path}:{line}: {text.splitlines()[0]}"
        for module in modules(package)
        for text, line in module.docstrings
        if re.split(r"[^\w']", text, maxsplit=1)[0].lower() in BEGINNINGS
    ]
    assert wrong == []


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_docstrings_of_packages_have_no_figures(package: str) -> None:
    wrong = [
        f"{module.path}:{line}: {match[0]}"
        for module in modules(package)
        for text, line in module.docstrings
        if (match := FIGURES.search(text))
    ]
    assert wrong == []


def test_names_of_tests_follow_subject_condition_expectation() -> None:
    names = [(f"{module.path}:{line}", name) for module in modules("tests") for name, line in module.functions if name.startswith("test_")]
    assert len(names) > 1500
    wrong = [
        f"{place}: {name}"
        for place, name in names
        if len(name) > LONGEST_TEST_NAME or TEST_BEGINNINGS.match(name) or TEST_FIGURES.search(name)
    ]
    assert wrong == []


def test_public_class_names_are_unique() -> None:
    homes = defaultdict[str, list[str]](list)
    for package in PACKAGES:
        for module in modules(package):
            for name in module.classes:
                homes[name].append(module.path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_package_folders_have_at_most_15_files() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {str(folder.relative_to(ROOT)): count for folder in folders if (count := len(list(folder.glob("*.py")))) > MOST_FILES} == {}


UNITS = {"_seconds": "second", "_bytes": "byte", "_days": "day", "_tokens": "token"}


def fields(section: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Class, name and docstring of each field of a section of settings."""
    if any(isinstance(base, ast.Name) and base.id == "Section" for base in section.bases):
        for field, after in zip(section.body, [*section.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                yield section.name, field.target.id, str(after.value.value) if documented else ""  # pyright: ignore


def test_each_setting_has_a_sentence_with_its_unit() -> None:
    everything = [field for module in modules("spangrad") if module.path.startswith("spangrad/settings/") for field in module.settings]
    assert len(everything) > 200
    wrong = [
        f"{section}.{name}: {text!r}"
        for section, name, text in everything
        if len(text.split()) < 4
        or not text.rstrip().endswith((".", ")"))
        or any(unit not in text.lower() for ending, unit in UNITS.items() if name.endswith(ending))
    ]
    assert wrong == []
