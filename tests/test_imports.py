"""Imports point down only, and only to packages that `pyproject.toml` declares; tests import no module with flags.

::

    L5   generate  engine_options  completion  output  placement  prefix_cache  __init__      experiments ──► everything
    L4   decode                                                    checkpoints_tools ──► ddtree_jax
    L3   kimi ──► latent_attention     dflash
    L2   layers ──► projections   cache   tree   sampling   penalties   checkpoint   expert_layout   prompts
    L1   pallas/*
    L0   arguments   config   hosts   sharding   quant   tokenizer   sampling_params   vocabulary
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ddtree_jax", "checkpoints_tools", "experiments")
LEVELS = (
    ("arguments", "config", "hosts", "sharding", "quant", "tokenizer", "sampling_params", "vocabulary"),
    ("pallas",),
    ("layers", "projections", "cache", "tree", "sampling", "penalties", "checkpoint", "expert_layout", "prompts"),
    ("kimi", "latent_attention", "dflash"),
    ("decode",),
    ("completion", "engine_options", "output", "placement", "prefix_cache", "generate", "__init__"),
)
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}
# Imports inside a level that are meant; any other sibling is out of reach.
SIBLINGS = {
    "hosts": {"arguments"},
    "quant": {"config"},
    "tokenizer": {"arguments"},
    "sampling_params": {"arguments"},
    "vocabulary": {"sharding"},
    "pallas": {"pallas"},
    "layers": {"projections"},
    "kimi": {"latent_attention"},
    "checkpoint": {"expert_layout"},
    "output": {"completion"},
    "generate": {"completion", "engine_options", "output", "placement", "prefix_cache"},
    "__init__": {"completion", "generate"},
}
# Less than everything below: kernels take plain arrays, and the loop knows no model.
NARROW = {
    "pallas": {"quant", "pallas"},
    "decode": {"arguments", "cache", "tree", "sampling", "penalties", "sampling_params", "vocabulary"},
}
MODULE_OF = {"absl-py": "absl", "orbax-checkpoint": "orbax"}
NOT_IN_PACKAGE = {"safetensors", "absl", "torch"}
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common"}


def declared() -> tuple[set[str], set[str]]:
    """Top-level modules of the dependencies, and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def modules(requirements: list[str]) -> set[str]:
        names = (re.match(r"[\w.-]+", requirement)[0] for requirement in requirements)
        return {MODULE_OF.get(name, name) for name in names}

    extras = project["optional-dependencies"].values()
    return modules(project["dependencies"]), modules([requirement for extra in extras for requirement in extra])


def imports(source: str) -> Iterator[str]:
    """Full dotted names that a module imports, wherever in it. ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def faults(path: str, source: str) -> Iterator[str]:
    """What is wrong with a module's imports, a sentence each; ``path`` is relative to the repository's root."""
    folder, *inner = Path(path).with_suffix("").parts
    for name in imports(source):
        top, *rest = name.split(".")
        if name.startswith("."):
            yield f"{path} imports {name}: imports are absolute"
        elif name == "__future__.annotations":
            yield f"{path} imports {name}: annotations are checked at run time"
        elif top == "ddtree_jax" and folder == "ddtree_jax":
            yield from _layer_faults(path, inner[0], name, rest)
        elif top in FOLDERS:
            if FOLDERS.index(top) > FOLDERS.index(folder):
                yield f"{path} imports {name}: {folder} lies below {top}"
        elif top not in sys.stdlib_module_names:
            yield from _package_faults(path, folder, name, top)


def _layer_faults(path: str, module: str, name: str, rest: list[str]) -> Iterator[str]:
    # `from ddtree_jax import name` is a module, or else something that __init__ offers.
    imported = rest[0] if rest and rest[0] in LEVEL_OF else "__init__"
    if module not in LEVEL_OF:
        yield f"{path} has no level; give it one in {Path(__file__).name}"
    elif module in NARROW and imported not in NARROW[module]:
        yield f"{path} imports {name}: {module} may import {', '.join(sorted(NARROW[module]))} alone"
    elif LEVEL_OF[imported] >= LEVEL_OF[module] and imported not in SIBLINGS.get(module, ()):
        yield f"{path} (level {LEVEL_OF[module]}) imports {name} (level {LEVEL_OF[imported]}): imports point down only"


def _package_faults(path: str, folder: str, name: str, top: str) -> Iterator[str]:
    required, extra = declared()
    if folder == "ddtree_jax" and top in NOT_IN_PACKAGE:
        yield f"{path} imports {name}: the package does without {', '.join(sorted(NOT_IN_PACKAGE))}"
    elif top not in (required | extra if folder == "experiments" else required):
        yield f"{path} imports {name}: {top} is no dependency in pyproject.toml"
    elif "/pallas/" in path and top not in ("jax", "jaxlib", "jaxtyping", "numpy"):
        yield f"{path} imports {name}: kernels may import jax and what it is made of alone"


def modules() -> list[Path]:
    return [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports(folder):
    paths = [path for path in modules() if path.parts[0] == folder]
    assert paths
    found = [fault for path in paths for fault in faults(str(path), (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_every_level_exists():
    """A module that moved or was renamed must move in the table too."""
    found = {path.with_suffix("").parts[1] for path in modules() if path.parts[0] == "ddtree_jax"}
    assert found == set(LEVEL_OF)


def test_tests_are_checked_at_run_time_too():
    paths = sorted((ROOT / "tests").rglob("*.py"))
    assert paths
    assert not [path for path in paths if "__future__.annotations" in imports(path.read_text())]


def defines_flags(source: str) -> bool:
    """Whether importing a module defines absl's flags, which are one table a process: two modules may share a name."""
    waiting: list[ast.AST] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        is_script_part = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        if isinstance(node, ast.FunctionDef | ast.Lambda) or is_script_part:
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].startswith("DEFINE_"):
            return True
        waiting += ast.iter_child_nodes(node)
    return False


def test_tests_import_no_flags():
    sources = {".".join(path.with_suffix("").parts): (ROOT / path).read_text() for path in modules()}
    waiting = {name for path in (ROOT / "tests").rglob("*.py") for name in imports(path.read_text())}
    found, reached = [], set()
    while waiting:
        name = waiting.pop()
        # `from a import b` is the module a.b, or something of the module a.
        module = name if name in sources else name.rpartition(".")[0]
        if module in sources and module not in reached:
            reached.add(module)
            waiting |= set(imports(sources[module]))
            found += [module] if defines_flags(sources[module]) else []
    assert "experiments.generate" in reached
    assert not found, f"{found} define flags when imported, and tests import them"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("_A = flags.DEFINE_string('a', None, '')", True),
        ("if True:\n    DEFINE_bool('a', True, '')", True),
        ("if __name__ == '__main__':\n    _A = flags.DEFINE_string('a', None, '')", False),
        ("def define_flags(values):\n    flags.DEFINE_string('a', None, '', flag_values=values)", False),
    ],
)
def test_flags_are_found(source, is_found):
    assert defines_flags(source) == is_found


def test_no_file_has_a_vague_name():
    folders = [*FOLDERS, "tests"]
    names = [
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if VAGUE & {path.stem, path.parent.name}
    ]
    assert not names


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("ddtree_jax/kimi.py", "from ddtree_jax import dflash", "imports ddtree_jax.dflash (level 3)"),
        ("ddtree_jax/dflash.py", "from ddtree_jax.kimi import Kimi", "imports ddtree_jax.kimi.Kimi (level 3)"),
        ("ddtree_jax/cache.py", "import ddtree_jax.decode", "imports ddtree_jax.decode (level 4)"),
        ("ddtree_jax/tree.py", "def late():\n    from ddtree_jax import Engine", "imports ddtree_jax.Engine (level 5)"),
        ("ddtree_jax/tree.py", "from ddtree_jax import cache", "imports ddtree_jax.cache (level 2)"),
        ("ddtree_jax/decode.py", "from ddtree_jax.kimi import Kimi", "decode may import arguments, cache"),
        (
            "ddtree_jax/pallas/mla.py",
            "from ddtree_jax.config import KimiConfig",
            "pallas may import pallas, quant alone",
        ),
        ("ddtree_jax/pallas/mla.py", "import flax.nnx", "kernels may import jax and what it is made of alone"),
        ("ddtree_jax/checkpoint.py", "from safetensors import safe_open", "the package does without absl, safetensors"),
        ("ddtree_jax/generate.py", "import absl.flags", "the package does without absl, safetensors"),
        ("ddtree_jax/generate.py", "import checkpoints_tools.convert", "ddtree_jax lies below checkpoints_tools"),
        ("ddtree_jax/layers.py", "import scipy.special", "scipy is no dependency"),
        ("ddtree_jax/layers.py", "from . import cache", "imports are absolute"),
        ("ddtree_jax/layers.py", "from __future__ import annotations", "annotations are checked at run time"),
        ("ddtree_jax/extras.py", "from ddtree_jax import tree", "has no level"),
        (
            "checkpoints_tools/convert.py",
            "from experiments import generate",
            "checkpoints_tools lies below experiments",
        ),
        ("checkpoints_tools/convert.py", "import optax", "optax is no dependency"),
    ],
)
def test_faults_are_found(path, source, fault):
    found = list(faults(path, source))
    assert len(found) == 1 and fault in found[0] and found[0].startswith(path), found


def test_what_is_allowed_is_no_fault():
    source = "import jax.numpy as jnp\nfrom ddtree_jax.config import X\nfrom ddtree_jax.pallas.mla import mla"
    assert list(faults("ddtree_jax/kimi.py", source)) == []
    assert list(faults("experiments/generate.py", "import optax\nfrom absl import app\nimport checkpoints_tools")) == []
