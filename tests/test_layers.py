"""Imports go down the layers: a file imports from its own layer or a lower one, and torch's private modules live in one
folder."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = [  # lowest first; the longest prefix of a module's name decides
    {
        "autopar.collector",
        "autopar.errors",
        "autopar.mesh",
        "autopar.layout",
        "autopar.hardware",
        "autopar.hardware_model",
        "autopar.hardware_profiles",
        "autopar.schedule",
        "autopar.units",
    },
    {
        "autopar._torch",
        "autopar.allocations",
        "autopar.autocast",
        "autopar.idioms",
        "autopar.zero_tangents",
        "autopar.ops",
        "autopar.ops_matmul",
        "autopar.ops_batch_norm",
        "autopar.ops_nf4",
        "autopar.ops_quant",
        "autopar.ops_random",
        "autopar.graph",
        "autopar.calls",
        "autopar.capture",
        "autopar.experts",
        "autopar.fake_state",
        "autopar.frontend",
        "autopar.quiet",
        "autopar.refusals",
        "autopar.dtypes",
        "autopar.constants",
        "autopar.traced_forms",
        "autopar.value_checks",
        "autopar.attention_forms",
        "autopar.cross_entropy",
        "autopar.ops_ctc",
        "autopar.functions",
        "autopar.precision",
        "autopar.compact",
        "autopar.unroll",
        "autopar.quantized",
        "autopar.rules",
        "autopar.adapt",
    },
    {
        "autopar.cost",
        "autopar.pipeline_plan",
        "autopar.sharding",
        "autopar.plan",
        "autopar.plan_check",
        "autopar.plan_file",
        "autopar.planner",
        "autopar.axes",
    },
    {"autopar.passes"},
    {
        "autopar.debug",
        "autopar.codegen",
        "autopar.micro_batches",
        "autopar.pipeline",
        "autopar.verify",
        "autopar.simulate",
        "autopar.lower",
        "autopar.runtime",
        "autopar.storage",
    },
    {
        "autopar.api",
        "autopar.tracing",
        "autopar.accumulate",
        "autopar.pipeline_search",
        "autopar.pipeline_experts",
        "autopar.pipeline_meshes",
        "autopar.same_stages",
        "autopar.plan_arguments",
        "autopar.plan_pipeline",
        "autopar.asynchronous",
        "autopar.simulate_asynchronous",
        "autopar.estimate",
        "autopar.view",
        "autopar.simulated",
        "autopar.simulate_pipeline",
        "autopar.oracle",
        "autopar.explain_pipeline",
        "autopar.calibrate",
        "autopar.compare",
        "autopar.cli",
        "autopar.commands",
        "autopar",
    },
]
MODELS = "autopar.models"  # stands aside: used by the surface, uses only the vocabulary


def module_of(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("passes", "models"):
        parts = ["autopar", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    found = [(len(name), i) for i, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(found)[1] if found else None


def imports_of(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import outside of functions; imports inside functions are made late on purpose."""
    module = module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{name}.{alias.name}" for alias in node.names]
            found += [
                (node.lineno, n if layer_of(n) is not None and layer_of(n) != layer_of(name) else name) for n in names
            ]
    return found


FILES = [f for folder in ("autopar", "passes", "models") for f in sorted((ROOT / folder).rglob("*.py"))]


def test_every_file_has_a_layer():
    missing = [module_of(f) for f in FILES if layer_of(module_of(f)) is None and not module_of(f).startswith(MODELS)]
    assert not missing


def test_imports_go_down():
    wrong = []
    for file in FILES:
        module = module_of(file)
        for line, name in imports_of(file):
            if not name.startswith("autopar"):
                continue
            if module.startswith(MODELS):
                allowed = name.startswith(MODELS) or layer_of(name) == 0
            else:
                allowed = (
                    name.startswith(MODELS)
                    and layer_of(module) == len(LAYERS) - 1
                    or (layer_of(name) is not None and layer_of(name) <= layer_of(module))
                )
            if not allowed:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_private_torch_stays_in_one_folder():
    wrong = []
    for file in FILES:
        if file.parent.name == "_torch":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wrong += [
                f"{file.relative_to(ROOT)}:{node.lineno} {n}" for n in names if n.startswith("torch.") and "._" in n
            ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short():
    long = [f"{f.relative_to(ROOT)}: {n}" for f in FILES if (n := len(f.read_text().splitlines())) > 400]
    assert not long
