"""Hook of mkdocs: pages made from docstrings and from conf/. Nothing is imported, sources are read."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
MODULES = {  # page: modules, in the order of reading
    "artifacts": [
        "bundle", "loading", "checks", "diff", "hub", "format", "parts/dense", "parts/sparse", "parts/lowrank",
        "parts/banded", "parts/sketch", "parts/center", "parts/rotate", "parts/window", "fields", "geometry",
        "order", "codes", "codebooks", "model", "errors",
    ],
    "runtime": [
        "hf", "hf_load", "hf_model", "hf_decoder", "cache", "engine", "requests", "sampling", "codec", "pages",
        "attention", "project", "pack", "pack_units", "pack_factors", "jit", "lm_eval/scoring", "lm_eval/model",
    ],
    "calib": [
        "pipeline", "config", "early", "choices", "collect", "tap", "evaluate", "data", "signposts", "report/observe",
    ],
}  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for package, names in MODULES.items():
        body = "\n\n".join(module(package, name) for name in names)
        _add(files, config, package, f"# {package}\n\n{body}\n")
    _add(files, config, "configuration", configuration())
    return files


def _add(files: Files, config: Any, name: str, text: str) -> None:
    files.append(File.generated(config, f"reference/{name}.md", content=text))


def module(package: str, name: str) -> str:
    """A module: its docstring, then every public class and function with what it takes."""
    tree = ast.parse((ROOT / package / f"{name}.py").read_text())
    parts = [f"## {package}.{name.replace('/', '.')}", _plain(ast.get_docstring(tree))]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            parts += _described(node, "###", "")
    return "\n\n".join(parts)


def _described(node: ast.FunctionDef | ast.ClassDef, level: str, owner: str) -> list[str]:
    parts = [f"{level} {owner}{node.name}", f"```text\n{_signature(node)}\n```", _plain(ast.get_docstring(node))]
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and ast.get_docstring(inner):
                parts += _described(inner, "####", f"{node.name}.")
    return parts


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({ast.unparse(node.args)}){result}"
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *(f"    {f}" for f in fields)])


def _plain(text: str | None) -> str:
    """A docstring as it stands: columns of names and meanings are aligned by hand."""
    return f"```text\n{text}\n```" if text else ""


def configuration() -> str:
    """Every choice of every group of conf/, and its comment."""
    parts = [
        "# Configuration",
        "What `python -m calib` takes; its schema is [calib.config](calib.md#calibconfig).",
        "## config.yaml",
    ]
    parts.append(_yaml(ROOT / "conf/config.yaml"))
    for group in sorted(path for path in (ROOT / "conf").iterdir() if path.is_dir()):
        parts.append(f"## {group.name}=")
        for path in sorted(group.rglob("*.yaml")):
            parts += [f"### {group.name}={path.relative_to(group).with_suffix('')}", _yaml(path)]
    return "\n\n".join(parts) + "\n"


def _yaml(path: Path) -> str:
    return f"```yaml\n{re.sub(r'```', '', path.read_text()).strip()}\n```"
