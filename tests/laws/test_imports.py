"""Law 7: imports point one way, and what reaches outside stands in its own room."""

import ast
from pathlib import Path

import pytest

import stabletrain

PACKAGE = Path(stabletrain.__file__).parent
ROOT = PACKAGE.parent

NOUNS = {"records", "errors"}
MAY_SEE = {
    "records": set(),
    "errors": set(),
    "moved": set(),
    "ranks": NOUNS,
    "config": NOUNS | {"moved", "ranks", "stability"},
    "arguments": NOUNS,
    "mistakes": NOUNS | {"arguments", "config"},
    "commands": NOUNS | {"arguments", "ranks"},
    "last_words": NOUNS | {"ranks"},
    "sweep": NOUNS | {"arguments", "mistakes", "tracking"},
    "launch": NOUNS | {"arguments", "commands", "ranks", "last_words", "mistakes", "config", "sweep", "build", "loop"},
    "tools": NOUNS,
    "step": NOUNS | {"tools", "watch"},
    "evaluate": NOUNS | {"tools"},
    "watch": NOUNS | {"machine"},
    "machine": NOUNS,
    "stability": NOUNS | {"watch", "machine"},
    "models": NOUNS,
    "data": NOUNS,
    "state": NOUNS,
    "tracking": NOUNS,
    "parallel": NOUNS | {"ranks", "state"},
    "compare": NOUNS | {"tracking"},
    "faults": NOUNS | {"state"},
    "forensics": NOUNS | {"ranks", "step", "tools", "watch", "stability", "state", "tracking", "parallel", "machine"},
    "job": NOUNS | {"tools", "machine", "state", "tracking", "watch", "forensics", "parallel", "compare"},
    "recovery": NOUNS | {"job", "data", "state", "tracking"},
    "report": NOUNS | {"job", "step", "forensics", "watch", "machine"},
    "loop": NOUNS | {"last_words", "job", "step", "evaluate", "machine", "recovery", "report"},
    "summary": NOUNS | {"arguments", "commands", "models", "ranks"},
    "agreement": NOUNS | {"config", "ranks", "machine"},
    "trial": NOUNS | {"machine", "step", "tools"},
    "build": NOUNS
    | {
        "agreement",
        "arguments",
        "compare",
        "config",
        "job",
        "summary",
        "tools",
        "stability",
        "watch",
        "models",
        "data",
        "state",
        "machine",
        "tracking",
        "faults",
        "forensics",
        "parallel",
        "ranks",
        "trial",
    },
    "overrides": NOUNS | {"arguments", "mistakes", "config"},
    "rerun": NOUNS
    | {
        "overrides",
        "config",
        "moved",
        "agreement",
        "tools",
        "stability",
        "machine",
        "forensics",
        "tracking",
        "parallel",
    },
    "cli": NOUNS
    | {"rerun", "forensics", "agreement", "compare", "config", "data", "models", "state", "tracking", "machine"},
    "slurm": NOUNS | {"arguments", "commands", "config", "mistakes", "ranks", "sweep"},
    "train": NOUNS | {"launch", "ranks"},
}
"""Room -> rooms of the package it may import, besides its own. A new room is added here, deliberately."""

ONLY = {
    "hydra": {"train", "build", "config", "launch", "mistakes", "overrides", "cli", "slurm", "sweep"},
    "omegaconf": {
        "train",
        "agreement",
        "build",
        "config",
        "launch",
        "arguments",
        "mistakes",
        "overrides",
        "rerun",
        "cli",
        "slurm",
        "sweep",
    },
    "wandb": {"tracking/wandb", "tracking/account", "tracking/wandb_report"},
    "wandb_workspaces": {"tracking/wandb_report"},
    "rich": {"tracking/progress", "compare/table", "compare/command"},
    "pandas": {"compare/frames", "compare/table", "compare/cells", "compare/pages/comparison"},
    "orjson": {"compare/reading/columns", "compare/reading/runs"},
    "joblib": {"compare/reading/runs"},
    "yaml": {"compare/reading/settings"},
    "matplotlib": {"compare/picture"},
    "torchvision": {"models/resnet", "data"},
    "sklearn": {"data"},
}
"""Library -> rooms or files that may import it."""

TORCH_FREE = [
    "arguments",
    "commands",
    "moved",
    "last_words",
    "ranks",
    "config",
    "mistakes",
    "launch",
    "errors",
    "__init__",
]
TORCH_FREE += [f"sweep/{name}" for name in ("grid", "lines", "member", "record", "start")]


def files():
    return [*sorted(PACKAGE.rglob("*.py")), ROOT / "train.py"]


def place(file):
    """`stability/guard` for a file of the package, `train` for train.py."""
    base = PACKAGE if file.is_relative_to(PACKAGE) else ROOT
    return file.relative_to(base).with_suffix("").as_posix()


def imports(file, *, top_level_only=False):
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}: imports are written out, not relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", files(), ids=place)
def test_a_room_sees_only_what_lies_below_it(file):
    room = place(file).split("/")[0]
    if room == "__init__":
        seen = {name.split(".")[1] for name in imports(file)}
        assert seen == {"moved"}, "stabletrain/__init__.py imports nothing else, so that --help stays fast"
        return
    assert room in MAY_SEE, f"the room {room} is new: say in MAY_SEE what it may import"
    for name in imports(file):
        if name.startswith("stabletrain.") and (seen := name.split(".")[1]) != room:
            assert seen in MAY_SEE[room], f"{place(file)} imports {name}"


@pytest.mark.parametrize("library", ONLY)
def test_a_library_stays_in_its_room(library):
    users = {place(file) for file in files() if any(name.split(".")[0] == library for name in imports(file))}
    assert users, f"nothing uses {library} any more: take it out of ONLY and of pyproject.toml"
    strays = {user for user in users if user not in ONLY[library] and user.split("/")[0] not in ONLY[library]}
    assert not strays


def test_there_is_no_circle_between_rooms():
    edges = {room: {seen for seen in sees if seen in MAY_SEE} for room, sees in MAY_SEE.items()}
    order: list[str] = []

    def visit(room, above):
        assert room not in above, f"a circle: {' -> '.join([*above, room])}"
        if room not in order:
            for seen in sorted(edges[room]):
                visit(seen, [*above, room])
            order.append(room)

    for room in edges:
        visit(room, [])
    assert order.index("records") < order.index("step") < order.index("job") < order.index("loop")


@pytest.mark.parametrize("name", TORCH_FREE)
def test_what_answers_a_typo_does_not_load_torch(name):
    for imported in imports(PACKAGE / f"{name}.py", top_level_only=True):
        assert imported.split(".")[0] not in ("torch", "torchvision", "numpy"), f"{name} imports {imported}"
