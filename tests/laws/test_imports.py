"""Law 7: imports point one way, and only a library's own rooms import it."""

import ast
from functools import cache
from pathlib import Path

import pytest

import stabletrain

PACKAGE = Path(stabletrain.__file__).parent
ROOT = PACKAGE.parent

NOUNS = {"records", "errors", "buffers", "importing", "model_tensors", "printable", "program", "several_optimizers"}
NOUNS |= {"stored"}

BESIDE = "beside"
"""The folder that the rest of the package never imports; `adapters` holds public names of it."""

MAY_SEE = {
    "records": set(),
    "errors": set(),
    "importing": set(),
    "in_flight": {"records"},
    "printable": set(),
    "several_optimizers": set(),
    "stored": {"errors"},
    "program": set(),
    "buffers": {"model_tensors"},
    "model_tensors": set(),
    "checksums": set(),
    "tools": NOUNS | {"guard/policy", "machine", "parallel", "stability"},
    "machine": NOUNS,
    "data": NOUNS,
    "models": NOUNS | {"stability"},
    "checkpoint": NOUNS,
    "tracking": NOUNS,
    "weights": NOUNS | {"checkpoint", "models"},
    "monitors": NOUNS | {"machine", "parallel"},
    "stability": NOUNS | {"checksums", "monitors", "machine", "parallel"},
    "parallel": NOUNS | {"checkpoint", "machine"},
    "step": NOUNS | {"in_flight", "monitors", "parallel", "stability", "tools"},
    "forensics": NOUNS
    | {"checkpoint", "guard/checks", "guard/policy", "machine", "monitors", "parallel", "tools", "stability", "step"}
    | {"tracking"},
    "guard/checks": NOUNS | {"checksums", "machine", "parallel", "stability"},
    "guard/policy": NOUNS | {"guard/checks", "monitors"},
    "guard": NOUNS
    | {
        "checkpoint",
        "extension",
        "forensics",
        "guard/checks",
        "guard/policy",
        "in_flight",
        "machine",
        "monitors",
        "parallel",
    }
    | {"stability", "step", "tools", "tracking"},
    "config": NOUNS | {"parallel", "stability", "weights"},
    "extension": NOUNS | {"config"},
    "trainer": NOUNS
    | {"checkpoint", "config", "data", "extension", "forensics", "guard", "guard/checks", "guard/policy", "in_flight"}
    | {"machine", "models", "monitors", "parallel", "tools", "stability", "step", "tracking", "weights"},
    "cli": NOUNS
    | {"checkpoint", "config", "data", "extension", "forensics", "guard", "machine", "models", "parallel", "tools"}
    | {"stability", "tracking", "trainer"},
    "api": NOUNS | {"cli", "config", "machine", "parallel", "tracking", "trainer"},
    "train": {"cli", "parallel"},
    "beside/adapters": NOUNS | {"guard"},
    "beside/comparison": NOUNS | {"extension", "tracking"},
    "beside/export": NOUNS | {"checkpoint", "config", "data", "models", "trainer", "weights"},
    "beside/faults": NOUNS | {"checkpoint", "extension", "tracking"},
    "beside/forecast": NOUNS | {"beside/comparison", "config", "extension", "forensics", "tracking"},
    "beside/preflight": NOUNS
    | {"checkpoint", "config", "data", "extension", "forensics", "guard", "guard/checks", "machine", "models"}
    | {"monitors", "parallel", "stability", "step", "tools", "tracking", "trainer"},
    "beside/rate_finder": NOUNS
    | {"beside/comparison", "config", "data", "extension", "guard/policy", "machine", "parallel", "stability", "step"}
    | {"tracking", "trainer"},
    "beside/script": NOUNS | {"beside/preflight", "guard", "guard/checks", "parallel", "tracking"},
    "beside/slurm": NOUNS
    | {"beside/comparison", "beside/sweep", "cli", "config", "data", "machine", "parallel", "tracking"},
    "beside/sweep": NOUNS | {"cli", "config", "extension", "machine", "parallel", "tracking"},
    "beside/whatif": NOUNS
    | {"beside/comparison", "checkpoint", "config", "data", "machine", "parallel", "tracking", "trainer"},
    "beside": NOUNS
    | {
        "beside/comparison",
        "beside/export",
        "beside/forecast",
        "beside/preflight",
        "beside/rate_finder",
        "beside/script",
        "beside/slurm",
        "beside/sweep",
        "beside/whatif",
    }
    | {"config", "extension", "tracking"},
    "adapters": {"beside/adapters"},
    "__main__": {"cli"},
}
"""Room -> other rooms of the package that it may import. A new room must be added here deliberately."""

ONLY = {
    "hydra": {"train", "config", "cli", "trainer/build", "beside/slurm", "beside/sweep"},
    "omegaconf": {"api", "train", "config", "cli", "trainer/build", "beside/slurm", "beside/sweep", "beside/whatif"},
    "wandb": {"tracking/wandb", "tracking/wandb_setup", "beside/wandb_report"},
    "wandb_workspaces": {"beside/wandb_report"},
    "rich": {"tracking/progress", "beside/comparison/table", "beside/comparison/command"},
    "pandas": {
        "beside/comparison/api",
        "beside/comparison/by_setting",
        "beside/comparison/command",
        "beside/comparison/frames",
        "beside/comparison/table",
        "beside/comparison/pages/comparison",
    },
    "orjson": {"beside/comparison/reading/columns"},
    "jinja2": {"beside/comparison/pages/rendering"},
    "joblib": {"beside/comparison/reading/runs"},
    "pynvml": {"beside/card_meter"},
    "yaml": {"beside/comparison/reading/settings"},
    "matplotlib": {"beside/comparison/pictures"},
    "torchvision": {"models/resnet", "data", "beside/export/to_torchvision"},
    "sklearn": {"data"},
    "lightning": {"beside/adapters/lightning"},
    "transformers": {"beside/adapters/transformers", "beside/export/to_transformers"},
    "accelerate": {"beside/adapters/transformers"},
    "torchao": {"stability/precision/fp8_linear"},
}
"""Library -> rooms or files that may import it."""

TORCH_FREE = ["__init__", "errors", "printable", "program", "parallel/ranks", "parallel/failure_report"]
TORCH_FREE += ["machine/torch_builds", "cli/train", "cli/commands", "cli/failures", "cli/finished", "extension"]
TORCH_FREE += ["weights/place"]
TORCH_FREE += [f"config/{name}" for name in ("arguments", "checks", "error_texts", "make", "moved")]
TORCH_FREE += ["config/composed", "config/resuming", "config/rules"]
TORCH_FREE += [f"beside/sweep/{name}" for name in ("lines", "member", "plan", "running")]
TORCH_FREE += [f"beside/script/{name}" for name in ("check", "command", "start")]
TORCH_FREE += ["beside/commands", "beside/extension", "beside/wandb_report", "beside/wandb_sync"]


def files():
    return [*sorted(PACKAGE.rglob("*.py")), ROOT / "train.py"]


def room_of(path):
    """Returns the room of a place such as `guard/policy/skip`: the longest one that MAY_SEE names."""
    first, *rest = path.split("/")
    return f"{first}/{rest[0]}" if rest and f"{first}/{rest[0]}" in MAY_SEE else first


def place(file):
    """Returns `stability/init` for a file of the package, `train` for train.py."""
    base = PACKAGE if file.is_relative_to(PACKAGE) else ROOT
    return file.relative_to(base).with_suffix("").as_posix()


@cache
def imports(file, *, top_level_only=False):
    tree = ast.parse(file.read_text())
    names = []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}: imports are written out, not relative"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def strings(file):
    """Returns the strings of a file that are no docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in alone]


@pytest.mark.parametrize("file", files(), ids=place)
def test_a_room_sees_only_what_lies_below_it(file):
    room = room_of(place(file))
    if room == "__init__":
        names = imports(file, top_level_only=True)  # the public names are imported on first use
        seen = {name.split(".")[1] for name in names if name.startswith("stabletrain.")}
        assert not seen, f"stabletrain/__init__.py imports {min(seen)} at once, so that --help is slower"
        return
    assert room in MAY_SEE, f"the room {room} is new: say in MAY_SEE what it may import"
    for name in imports(file):
        if name.startswith("stabletrain.") and (seen := room_of(name.partition(".")[2].replace(".", "/"))) != room:
            assert seen in MAY_SEE[room], f"{place(file)} imports {name}"


def test_nothing_outside_names_the_folder_beside_a_run_but_its_one_door():
    words = f"stabletrain.{BESIDE}"
    outside = [file for file in files() if place(file).split("/")[0] not in (BESIDE, "adapters")]
    outside = [file for file in outside if BESIDE in file.read_text()]  # else it cannot: to parse them takes seconds
    found = {place(file) for file in outside if any(words in name for name in [*imports(file), *strings(file)])}
    # the door; the public name `compare`, looked up when it is used; and today's names of old import paths
    assert found == {"extension", "__init__", "config/moved"}
    assert {name for name in MAY_SEE if BESIDE in {seen.split("/")[0] for seen in MAY_SEE[name]}} <= {
        name for name in MAY_SEE if name.split("/")[0] in (BESIDE, "adapters")
    }


@pytest.mark.beside(when=lambda library: all(room.startswith(BESIDE) for room in ONLY[library]))
@pytest.mark.parametrize("library", ONLY)
def test_a_library_stays_in_its_room(library):
    users = {place(file) for file in files() if any(name.split(".")[0] == library for name in imports(file))}
    assert users, f"nothing uses {library} any more: take it out of ONLY and of pyproject.toml"
    strays = {user for user in users if user not in ONLY[library] and room_of(user) not in ONLY[library]}
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
    assert order.index("records") < order.index("step") < order.index("trainer") < order.index("cli")


@pytest.mark.beside(when=lambda name: name.startswith(BESIDE))
@pytest.mark.parametrize("name", TORCH_FREE)
def test_what_answers_a_typo_does_not_load_torch(name):
    for imported in imports(PACKAGE / f"{name}.py", top_level_only=True):
        assert imported.split(".")[0] not in ("torch", "torchvision", "numpy"), f"{name} imports {imported}"
