"""Loading of Python callables by reference, and references to callables that users pass.

In: `module:function`, `module`, `file.py:function` or `file.py`; or a function. Out: the function; or the reference by which another
process finds it. Invariant: only what another process can import has a reference; a file is imported once, whichever of its functions are
loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from spangrad.agent.decorator import mark_of
from spangrad.errors import AgentError

T = TypeVar("T")
_FALLBACK_NAME = "_spangrad_agent"
"""Name of a file's module where the file's own name is taken."""
_DYNAMIC = re.compile(rb"import\s*\*|\b(__getattr__|__path__|__dict__|__import__|exec|globals|import_module|modules|setattr|vars)\b")
"""Words of a module's source that may give it names or submodules that the source does not hold."""


def load(reference: str) -> Callable[..., Any]:
    """Import `module:function` or `file.py:function` (the function may be a dotted path).

    Raises:
        AgentError: there is no such module or attribute, importing it failed, or it is not callable.
    """
    module_name, path = split(reference)
    if not (module_name and path):
        raise AgentError(f"{reference!r} does not name a callable: give it as module:function.")
    function = _imported(reference, lambda module: _named(module, path))
    if not callable(function):
        raise AgentError(f"{reference!r} is {type(function).__name__}, which cannot be called: name a function.")
    return function


def load_agent(reference: str) -> tuple[Callable[..., Any], Callable[..., Any] | str | None]:
    """Return the agent that a reference names, and the evaluator that its decorator names.

    Without a function the reference means the one that the module or file has decorated with `@spangrad.rollout`.

    Raises:
        AgentError: as `load`; or nothing is decorated, or several functions are.
    """
    module_name, path = split(reference)
    agent = load(reference) if path is not None or not module_name else _only_marked(reference, _imported(reference, _marked))
    mark = mark_of(agent)
    return agent, None if mark is None else mark.evaluator


def split(reference: str) -> tuple[str, str | None]:
    """Return a reference's module or file, and its function. None: it names no function; `""`: it names an empty one."""
    module_name, colon, path = reference.rpartition(":")
    return (module_name, path) if colon and "/" not in path else (reference, None)


def require(reference: str, directory: Path) -> None:
    """Refuse a reference that cannot be loaded, as far as the sources show it, those in `directory` first: no module is imported.

    Raises:
        AgentError: there is no such module, or its source does not hold the name.
    """
    module_name, path = split(reference)
    file = Path(module_name) if is_file(reference) else _module_file(module_name, directory)
    name = (path or "").partition(".")[0]
    # A module of a zip archive is no file; Python reads other letters by an encoding, and in a normal form, that it alone knows.
    if file is None or not file.is_file() or not name.isascii() or not name:
        return
    source = file.read_bytes()
    if not (re.search(rb"\b%b\b" % re.escape(name.encode()), source) or _DYNAMIC.search(source)):
        raise AgentError(f"{file} does not hold {name!r}, which {reference!r} names. Define it there, or fix the name.")


def _module_file(module_name: str, directory: Path) -> Path | None:
    """Return the source file of a module. None: it has none, or only an import shows it.

    Raises:
        AgentError: there is no such module.
    """
    where: Sequence[str] = [str(directory.resolve()), *sys.path]
    file: Path | None = None
    for package in accumulate(module_name.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(package, where)
        if spec is None:
            if "." in package:
                is_known = file is not None and _DYNAMIC.search(file.read_bytes()) is not None
            else:
                is_known = importlib.util.find_spec(package) is not None  # by an editable installation, for one
            if is_known:
                return None
            raise AgentError(f"there is no module {package!r} in {directory.resolve()} or on Python's path. Write it, or fix the name.")
        where = spec.submodule_search_locations or []
        file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    return file


def source_file(reference: str) -> Path:
    """Return the source file of the module that a reference names, looked for in the working directory first, without running it.

    Raises:
        AgentError: there is no such file, or the module has no Python source.
    """
    module_name, _ = split(reference)
    if module_name.endswith(".py"):
        file = Path(module_name)
    else:
        try:
            spec = _find_spec(module_name)
        except Exception as error:  # looking for `package.module` may run the package
            raise AgentError(f"{module_name!r} cannot be looked for: {type(error).__name__}: {error}. Fix the package.") from error
        if spec is None:
            raise AgentError(f"there is no module {module_name!r} in {Path.cwd()} or on Python's path. Write it, or fix the name.")
        file = Path(spec.origin or "")
    if file.suffix != ".py" or not file.is_file():
        raise AgentError(f"{module_name!r} has no source file in Python ({file}). Name a module that is a .py file.")
    return file.resolve()


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module in the working directory or on Python's path; packages around it are imported only where neither has it."""
    importlib.invalidate_caches()  # the file may have been written a moment ago
    where: Sequence[str] = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for package in accumulate(name.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(package, where)
        if spec is None:
            return importlib.util.find_spec(name)
        where = spec.submodule_search_locations or []
    return spec


def is_file(reference: str) -> bool:
    """Return whether a reference names a Python file, not a module."""
    return split(reference)[0].endswith(".py")


def reference_of(function: Callable[..., Any], what: str) -> tuple[str, Path]:
    """Return the reference by which another process finds a function, and the directory in which its module is looked for.

    `what` is the function's role, for messages.

    Raises:
        AgentError: it is a lambda, a closure, a method or an object, or was typed in: no other process can import it.
    """
    name = getattr(function, "__qualname__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not isinstance(name, str) or module is None or hasattr(function, "__self__"):
        raise AgentError(
            f"{what} is {function!r:.200}, which the worker processes cannot import. Give a function that stands at the top level of a "
            "file."
        )
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside another function"
        raise AgentError(
            f"{what} {name!r} of {module.__name__} is {kind}, and the worker processes cannot import it. Define it with `def` at the top "
            "level of its file."
        )
    try:
        attribute = attrgetter(name)(module)
    except AttributeError:
        attribute = None
    if attribute is not function:
        raise AgentError(
            f"{what} {name!r} is not what {module.__name__} has under that name, so the worker processes would run something else. "
            "Give the function that stands there."
        )
    spec = module.__spec__
    if module.__name__ == "__main__" and spec is None:
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).exists():
            raise AgentError(
                f"{what} {name!r} was typed in, not read from a file, and the worker processes cannot import it. Put it into a file."
            )
        return f"{Path(file).resolve()}:{name}", Path(file).resolve().parent
    # `python -m package.module` runs it as __main__, under the name that its specification has.
    dotted = spec.name if module.__name__ == "__main__" and spec is not None else module.__name__
    file = getattr(module, "__file__", None)
    if file is None:
        raise AgentError(f"{what} {name!r} is of {dotted}, which is no file: the worker processes cannot import it.")
    path = Path(file).resolve()
    depth = dotted.count(".") + (path.name == "__init__.py")
    return f"{dotted}:{name}", path.parents[depth]


def _imported(reference: str, read: Callable[[ModuleType], T]) -> T:
    """Import the module that a reference names, and return what `read` gets from it."""
    try:
        return read(_module(split(reference)[0]))
    except Exception as error:  # importing an agent runs its code
        if _passed_code(error):
            traceback.print_exc()
        raise AgentError(f"{reference!r} cannot be loaded from {sys.path[0]}: {type(error).__name__}: {error}") from error


def _passed_code(error: Exception) -> bool:
    """Return whether an import failed inside a module's code, of which a traceback names the place."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    begun = any(not file.startswith("<frozen importlib") for file in files - {__file__, importlib.__file__})
    return begun or isinstance(error, SyntaxError)  # the line that cannot be read is no frame


def _module(module_name: str) -> ModuleType:
    if not module_name.endswith(".py"):
        return importlib.import_module(module_name)
    file = Path(module_name).resolve()
    for module in list(sys.modules.values()):  # an entry may be anything; None blocks an import
        # This process's __main__ is the agent host's, or a program's that has only begun: not the file as a module.
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # as Python does for a script
    name = file.stem if file.stem.isidentifier() and file.stem not in sys.modules else _FALLBACK_NAME
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _named(module: ModuleType, path: str) -> Any:
    """Return the attribute of the module with that name, else the function that it has decorated by that name."""
    try:
        return attrgetter(path)(module)
    except AttributeError:
        if (marked := _marked(module).get(path)) is None:
            raise
        return marked


def _marked(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the module's decorated functions, by name; imported ones count only where it has none of its own."""
    marked = {mark.name: value for value in vars(module).values() if (mark := mark_of(value)) is not None}
    return {name: function for name, function in marked.items() if function.__module__ == module.__name__} or marked


def _only_marked(reference: str, marked: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if len(marked) == 1:
        return next(iter(marked.values()))
    if marked:
        raise AgentError(f"{reference!r} has several agents: {', '.join(sorted(marked))}. Name one, as {reference}:{min(marked)}.")
    raise AgentError(
        f"{reference!r} has no function that is decorated with @spangrad.rollout. Decorate the agent, or name it: {reference}:FUNCTION."
    )
