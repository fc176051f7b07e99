"""The vocabulary of docs/glossary.md holds in the code: unique class names, names that say what they hold, docstrings that stand alone."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
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


@cache
def modules(package: str) -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in sorted((ROOT / package).rglob("*.py"))]


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a module binds, with its line; those of short comprehensions left out."""
    short = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        and (node.end_lineno or node.lineno) - node.lineno < SHORT_LINES
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in short:
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Docstrings of a module, its classes, functions and fields, with their lines."""
    for node in ast.walk(tree):
        for text in ast.iter_child_nodes(node):
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                yield text.value.value, text.lineno


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_bound_names_of_packages_are_not_banned(package: str) -> None:
    assert [
        f"{path}:{line}: {name}"
        for path, tree in modules(package)
        for name, line in bound_names(tree)
        if name in BANNED or name.strip("_") in FIGURATIVE
    ] == []


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_docstrings_begin_with_a_verb_or_a_noun_phrase(package: str) -> None:
    wrong = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in modules(package)
        for text, line in docstrings(tree)
        if re.split(r"[^\w']", text, maxsplit=1)[0].lower() in BEGINNINGS
    ]
    assert wrong == []


@pytest.mark.parametrize("package", [*PACKAGES, *BESIDE])
def test_docstrings_of_packages_have_no_figures(package: str) -> None:
    wrong = [
        f"{path}:{line}: {match[0]}"
        for path, tree in modules(package)
        for text, line in docstrings(tree)
        if (match := FIGURES.search(text))
    ]
    assert wrong == []


def test_names_of_tests_follow_subject_condition_expectation() -> None:
    names = [
        (f"{path}:{node.lineno}", node.name)
        for path, tree in modules("tests")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
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
        for path, tree in modules(package):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_package_folders_have_at_most_15_files() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {str(folder.relative_to(ROOT)): count for folder in folders if (count := len(list(folder.glob("*.py")))) > MOST_FILES} == {}


UNITS = {"_seconds": "second", "_bytes": "byte", "_days": "day", "_tokens": "token"}


def fields(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Class, name and docstring of each field of a section of settings."""
    for section in ast.walk(tree):
        if isinstance(section, ast.ClassDef) and any(isinstance(base, ast.Name) and base.id == "Section" for base in section.bases):
            for field, after in zip(section.body, [*section.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    yield section.name, field.target.id, str(after.value.value) if documented else ""  # pyright: ignore


def test_each_setting_has_a_sentence_with_its_unit() -> None:
    everything = [field for path, tree in modules("spangrad") if path.startswith("spangrad/settings/") for field in fields(tree)]
    assert len(everything) > 200
    wrong = [
        f"{section}.{name}: {text!r}"
        for section, name, text in everything
        if len(text.split()) < 4
        or not text.rstrip().endswith((".", ")"))
        or any(unit not in text.lower() for ending, unit in UNITS.items() if name.endswith(ending))
    ]
    assert wrong == []
