"""Who may import whom, read from the source: the parts stay independent of each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"flash_kernels", "model", "data", "scripts", "tests", "train"}
MAY_IMPORT = {  # of our own parts
    "flash_kernels": {"flash_kernels"},
    "model": {"model", "flash_kernels"},
    "data": {"data"},
    "train": {"model", "data", "flash_kernels"},
    "scripts": {"scripts", "model", "data", "flash_kernels", "train"},
}
LIGHTNING_HOMES = {
    "train.py",
    "model/task.py",
    "model/callbacks.py",
    "model/checkpoint.py",
    "model/classification_task.py",
    "model/guard.py",
    "model/loggers.py",
    "model/results.py",
    "model/saving.py",
    "model/wandb_logger.py",
    "model/wandb_media.py",
}


def sources() -> list[str]:
    files = [ROOT / "train.py"]
    for part in ("flash_kernels", "model", "data", "scripts"):
        files += (ROOT / part).rglob("*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files)


def imported_roots(source: str) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            # A library that is lifted into other trees imports itself relatively; no one else does.
            assert part_of(source) == "flash_kernels", f"{source}: imports are absolute"
            assert node.level < len(Path(source).parts), f"{source}: leaves its package"
            roots.add("flash_kernels")
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.split(".")[0])
    return roots


def part_of(source: str) -> str:
    return source.removesuffix(".py").split("/")[0]


@pytest.mark.parametrize("source", sources())
def test_parts_import_only_what_they_may(source):
    roots = imported_roots(source)
    part = part_of(source)
    forbidden = (roots & OURS) - MAY_IMPORT[part]
    assert not forbidden, f"{source} imports {forbidden}"
    if "hydra" in roots or "omegaconf" in roots:
        assert source == "train.py" or part == "scripts"
    if "lightning" in roots:
        assert source in LIGHTNING_HOMES or part in ("data", "scripts")
    if part == "flash_kernels":
        outside = roots - set(__import__("sys").stdlib_module_names) - {"torch", "triton"}
        assert outside <= {"flash_kernels"}, f"{source} imports {outside}"


def test_every_part_has_sources():
    assert {part_of(source) for source in sources()} == set(MAY_IMPORT)


def test_no_package_marker_under_tests():
    """tests/model/__init__.py would shadow the model package."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
