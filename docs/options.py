"""The reference of all config groups: the lines of `reference/options.md` and of one page for each group.

`python docs/tables.py` writes them. `tests/test_docs_reference.py` compares them, and says which key lacks what. What
they say is written once, elsewhere:

| column | from |
|---|---|
| what an option does, its paper | the first comment of its YAML |
| default | the YAML |
| effect of a key | the comment on its line; else the attribute's line in the docstring of the option's class |
| bound | `tests/refusals/refused.txt`, whose messages are tested against the program; `config/rules.py` |
| on resume | `config/resuming.py` |

Only the sentence about each group is here (`GROUPS`). Imports no torch.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docs.tables import as_code, filled
from stabletrain.config.resuming import GROUPS as ON_RESUME
from stabletrain.config.rules import ANY_KEY, ANY_TYPED, RULES, TYPES

ROOT = Path(__file__).parents[1]

CONF = ROOT / "conf"

GROUPS = {
    "activation_checkpointing": "Saves memory: activations are computed again in the backward pass, not kept.",
    "attention_gate": "A gate on the output of attention, against attention sinks and spikes.",
    "averaging": "An average of the weights over time, evaluated and saved beside the weights.",
    "check": "Checks before the first step: parameters, groups, data, number range.",
    "checkpoint": "When checkpoints are written, and how many are kept.",
    "clipping": "Bounds gradients, or updates, before they reach the weights.",
    "data": "What the model reads.",
    "determinism": "What is seeded, and whether kernels are deterministic.",
    "experiment": "A whole run or sweep by one name: it sets groups and keys.",
    "faults": "Faults that are injected on purpose, to see how a run survives them.",
    "forecast": "Says ahead of time when a monitored signal will reach its threshold.",
    "forensics": "What happens at an incident: the step is replayed, and the cause is named.",
    "guard": "Which updates are applied, and what follows a skipped one.",
    "init": "The initial weights.",
    "model": "What is trained.",
    "monitors": "What is measured inside the model; it changes nothing.",
    "norm_placement": "Where a transformer block has its norms.",
    "objective": "The loss, and what an evaluation reports beside it.",
    "optimizer": "How gradients become updates, with the learning rate and the weight decay.",
    "parallel": "Several processes: DDP or FSDP under torchrun.",
    "precision": "The number format of the forward and backward pass, and fp16's loss scaling.",
    "qkclip": "Bounds attention logits by scaling the query and key weights after an update.",
    "qknorm": "A norm of queries and keys, against growing attention logits.",
    "schedule": "The learning rate after the warmup.",
    "softcap": "Bounds attention logits and final logits by a tanh.",
    "softmax": "How attention scores become weights.",
    "stability": "A preset: sets several stability groups at once.",
    "wandb": "Logging to Weights & Biases.",
    "warmup": "The learning rate at the start of the run.",
    "zloss": "A penalty on log Z, or on the mean output embedding, against drifting output logits.",
}
"""What each group decides."""

MORE = {
    **{group: f"knobs/{group}.md" for group in ("activation_checkpointing", "averaging", "clipping", "determinism")},
    **{group: f"knobs/{group}.md" for group in ("faults", "guard", "init", "optimizer", "precision", "schedule")},
    **{group: f"knobs/attention.md#{group}" for group in ("attention_gate", "qkclip", "qknorm", "softcap", "softmax")},
    **{group: f"knobs/monitors.md#{group}" for group in ("check", "forecast", "monitors")},
    "norm_placement": "knobs/blocks.md#norm_placement",
    "stability": "knobs.md#stability-which-preset",
    "warmup": "knobs/schedule.md",
    "zloss": "knobs/loss.md",
}
"""Where in `reference/` more is said about a group: when it helps, what it costs, and how it acts with others."""

OFF = ("none", "off", "plain", "torch")
"""Options that do nothing stand first on a page, after the default."""


class Key(NamedTuple):
    """A key of an option.

    Attributes:
        name, default: as in the YAML.
        effect: what it does.
    """

    name: str
    default: str
    effect: str


class Option(NamedTuple):
    """An option of a group.

    Attributes:
        group, name: as typed: `group=name`.
        target: the class or function that it is built from; empty for a preset or an experiment.
        about: what it does, and when to use it.
        paper: where it is from; empty if nowhere.
        keys: its keys.
        sets: for a preset or an experiment: what it overrides, as typed on a command line.
        command: for an experiment: how it is started.
    """

    group: str
    name: str
    target: str
    about: str
    paper: str
    keys: Sequence[Key]
    sets: Sequence[str]
    command: str


# ---- reading


@cache
def options(group: str) -> list[Option]:
    """Returns the options of a group: the default first, then the one that does nothing, then by name."""
    first = defaults().get(group)
    names = [file.stem for file in sorted((CONF / group).glob("*.yaml"))]
    return [read(group, name) for name in sorted(names, key=lambda name: (name != first, name not in OFF, name))]


@cache
def defaults() -> dict[str, str]:
    """Returns the option of each group that `config.yaml` chooses."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE))


@cache
def run_keys() -> list[Key]:
    """Returns the keys that belong to no group."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    return [*keys_of(text.partition("\nhydra:")[0].partition("logging: none\n\n")[2], "")]


def read(group: str, name: str) -> Option:
    """Reads an option's YAML."""
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    head = []
    for line in lines:
        if not line.startswith("# "):
            break
        head.append(line.removeprefix("# "))
    commands = [line.strip() for line in head if line.startswith("  ")]
    prose = head[:1] if group == "experiment" else head
    about, paper = without_paper(joined(prose).partition(": ")[2])
    target = re.search(r"^_target_: (.*)$", text, re.MULTILINE)
    where = target[1] if target else ""
    if not paper and where:
        paper = ", ".join(dict.fromkeys(re.findall(r"arXiv [\d.]+\d", docstring(where).partition("\n\n")[0])))
    sets = [*overrides(lines[len(head) :])]
    keys = [] if group in ("stability", "experiment") else [*keys_of("\n".join(lines[len(head) :]), where)]
    return Option(group, name, where, about, paper, keys, sets, re.sub(r" {2,}.*", "", commands[0]) if commands else "")


def joined(lines: Sequence[str]) -> str:
    """Joins the lines of a comment. If the second begins with a capital letter, the first is a sentence."""
    first, *others = map(str.strip, lines)
    return " ".join([first + ("." if others and others[0][0].isupper() else ""), *others])


PAPER = r"\(([^()]*(?:arXiv [\d.]+\d|\w+(?: et al\.)? (?:19|20)\d\d)[^()]*)\)"
"""A paper in brackets."""


def without_paper(text: str) -> tuple[str, str]:
    """Splits a text into itself without its papers in brackets, and its papers."""
    found = [each[0] for each in re.finditer(PAPER, text)]
    rest = re.sub(" ?" + PAPER, "", text)
    more = re.findall(r"(?:[A-Z]\w+ et al\., )?arXiv [\d.]+\d", rest)
    return rest, "; ".join([*(each.strip(" ()").partition(";")[0] for each in found), *more])


def keys_of(text: str, target: str) -> Iterator[Key]:
    """Yields the keys of the outermost level of a YAML."""
    for name, default, comment in re.findall(r"^(\w+): ?(.*?)(?: +# (.*))?$", text, re.MULTILINE):
        if name not in ("_target_", "defaults"):
            yield Key(name, default or nested(text, name), comment or referred(default) or attribute(target, name))


def nested(text: str, name: str) -> str:
    """Returns the value of a key that lies on the lines below it."""
    found = re.search(rf"^{name}:\n((?:  .*\n?)+)", text, re.MULTILINE)
    return "[" + ", ".join(line.strip().removeprefix("- ") for line in found[1].splitlines()) + "]" if found else ""


def referred(default: str) -> str:
    """Describes a default that refers to another key or to a group."""
    found = re.fullmatch(r"\$\{([\w.]+)\}", default)
    return "" if not found else f"the chosen `{found[1]}`" if found[1] in GROUPS else f"the run's `{found[1]}`"


def overrides(lines: Iterable[str]) -> Iterator[str]:
    """Yields what a preset or an experiment sets, as typed on a command line."""
    path: list[str] = []
    for line in lines:
        if found := re.match(r"( *)- override /([\w/]+)(?:@[\w.]+)?: \"?(\w+)", line):
            yield f"{found[2]}={found[3]}"
        elif found := re.match(r"( *)([\w./]+):(?: +([^#]*?))?(?: +#.*)?$", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if found[3] and (path[0] != "hydra" or "params" in path):
                yield f"{'.'.join(path).removeprefix('hydra.sweeper.params.')}={found[3]}"


# ---- docstrings, without an import


@cache
def classes(module: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Returns the classes and functions of a module, or of all modules of a package, by name."""
    place = ROOT / module.replace(".", "/")
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    files = [file for file in files if file.is_file()]  # the core is tested without the folder beside it
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def docstring(target: str) -> str:
    """Returns the docstring of a class or function, with those of its base classes below."""
    module, _, name = target.rpartition(".")
    parts, names = [], [name]
    for each in names:
        node = classes(module).get(each)
        if node is not None:
            parts.append(ast.get_docstring(node) or "")
            names += [base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)]
    return "\n\n".join(parts)


def attribute(target: str, name: str) -> str:
    """Returns what a docstring says of an attribute or argument; empty if it says nothing."""
    if not target:
        return ""
    found = re.search(rf"^ +(?:\w+, )*{name}(?:, \w+)*: (.*(?:\n {{6,}}.*)*)", docstring(target), re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).rstrip(".") if found else ""


# ---- bounds

BOUNDS = [
    (r"(?:is|are) outside ([\[(].*?[\])])(?=[ :;,]|$)", "in {}"),
    (r"(?:is|are) not ([^:;]* in [\[(].*?[\])])(?=[ :;,]|$)", "{}"),
    (r"is not between (\S+) and ([^\s:;,]+)", "in ({}, {})"),
    (r"is not a finite number above ([^\s:;,]+)", "finite, > {}"),
    (r"is not a whole number of at least ([^\s:;,]+)", "≥ {}"),
    (r"is not above ([^\s:;,]+)", "> {}"),
    (r"is above ([\d.]+\d|\d)(?=[ :;,]|$)", "≤ {}"),
    (r"is not below (\S+?): with ([\w.]+=\w+)", "< {} with {}"),
    (r"is not below ([\w.]+\w)", "< {}"),
    (r"is below (-?[\d.]*\d)(?=[ :;,]|$)", "≥ {}"),
    (r">= ([\w.]+)=", "< {}"),
    (r"is unknown: (?:choose|use) (\w+(?: or \w+)+)", "{}"),
    (r"is not one of ([\w, ]+\w)", "{}"),
    (r"is none of (\w+(?:, \w+)+)", "{}"),
    (r"is neither (\w+ nor \w+)", "{}"),
    (r"is not (auto, [^;]*)", "{}"),
    (r"is not (\d n \+ \d)", "{}"),
    (r"is not a device: use ([^;]*)", "{}"),
    (r"is not a (multiple of [\w.]+)", "{}"),
    (r"does not (divide) ([\w.]+)=", "must {} {}"),
]
"""What a message says of a value that is refused, and the bound that follows from it."""


def bound(message: str) -> str:
    """Returns the bound that a message of refusal names; empty if it names none."""
    for pattern, words in BOUNDS:
        if found := re.match(pattern, message):
            parts = [re.sub(r"([a-z][\w.]*)=[^\s,)\]]+(?=[,)\]]|$)", r"\1", part) for part in found.groups()]
            if " with " in words:
                parts = [*found.groups()]
            text = words.format(*parts)
            return choices(text) if words == "{}" and "(" not in text else text
    return ""


def choices(words: str) -> str:
    """Returns `a, b or c` as a list of codes; what is not one word stays as it is."""
    parts = re.split(r",? or |,? nor |, ", words)
    return ", ".join(code(part) if re.fullmatch(r"[\w:]+", part) else part for part in parts)


@cache
def bounds() -> dict[tuple[str, str], list[str]]:
    """Returns the bounds of each key, by option and key: `("zclip", "clipping.alpha")`."""
    found: dict[tuple[str, str], list[str]] = {}
    from tests.refusals.table import read as refusals

    for _, command, message in refusals():
        said = re.match(r"([\w.]+)=\S.*? ((?:is|are|does|>=) .*)", message)
        if said and (text := bound(said[2])):
            group = said[1].partition(".")[0]
            chosen = re.search(rf"\b{group}=(\w+)", command)
            option = chosen[1] if chosen else defaults().get(group, "")
            found.setdefault((option, said[1]), []).append(text)
    for rule in RULES:
        if rule.keys not in (ANY_KEY, ANY_TYPED):
            text = bound(re.sub("^{override} ", "", rule.message))
            for key in rule.keys.split() if text else []:
                found.setdefault(("", key), []).append(text)
    return {place: [*dict.fromkeys(texts)] for place, texts in found.items()}


def bound_of(option: Option, key: Key) -> str:
    """Returns the bounds of a key of an option; without any, what kind of value it takes.

    If no refusal is recorded for this option, its bounds are those of the same key in options of the same class, or in
    any.
    """
    name = f"{option.group}.{key.name}" if option.group else key.name
    keys = {f"{option.group}.{each.name}" for each in option.keys}
    found = {which: texts for (which, other), texts in bounds().items() if other == name}
    same = [each.name for each in (options(option.group) if option.group else []) if each.target == option.target]
    own = found.get(option.name) or [each for which in same for each in found.get(which, [])]
    others = [each for texts in found.values() for each in texts]
    others = [each for each in others if not (found := re.search(r" with ([\w.]+)=", each)) or found[1] in keys]
    shared = bounds().get(("", name), [])
    texts = [*dict.fromkeys([*(own or others), *shared])]
    return ", ".join(sorted(texts, key=lambda text: not text.startswith((">", "≥", "finite")))) or kind(
        name, key.default
    )


def kind(name: str, default: str) -> str:
    """Says what kind of value a key takes, from its default, or from the rule about its type."""
    for rule in TYPES:
        if name in rule.keys.split():
            return re.sub(r"^{override} is not ", "", rule.message) + (", or null" if default == "null" else "")
    if default in ("true", "false"):
        return "true, false"
    if re.fullmatch(r"-?\d+", default):
        return "a whole number"
    if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?|\.nan|\.inf", default):
        return "a number"
    return "a list" if default.startswith("[") else ""


# ---- the pages


def overview() -> Iterator[str]:
    """Yields the paragraphs of `reference/options.md`."""
    yield MADE
    yield "# All options"
    yield (
        "Type `group=option` to choose an option, and `group.key=value` to set one of its keys. "
        "`python train.py --help` lists the options, and the values of those chosen on its command line."
    )
    yield "```bash\npython train.py clipping=zclip clipping.z_threshold=3.0 steps=200\n```"
    yield (
        "A value out of its bound, a key that does nothing, and an option that does not fit the others are refused "
        "before anything is built: [what is refused](refused.md). Which of these to set: "
        "[which knobs for which trouble](../evidence/which_knobs.md)."
    )
    yield "## Groups"
    rows = []
    for group in GROUPS:
        names = [each.name for each in options(group)]
        others = ", ".join(f"`{name}`" for name in names[1:])
        rows.append([f"[`{group}`](options/{group}.md)", GROUPS[group].rstrip("."), f"`{names[0]}`", others])
    yield table(["group", "what it decides", "default", "other options"], rows)
    yield "## Keys of the run"
    yield "These belong to no group: type `steps=2000`."
    yield key_table([Option("", "", "", "", "", run_keys(), [], "")], "")


def page(group: str) -> Iterator[str]:
    """Yields the paragraphs of a group's page."""
    found = options(group)
    yield MADE
    yield f"# `{group}`"
    more = f" [When it helps, and how it acts](../{MORE[group]})." if group in MORE else ""
    yield f"{GROUPS[group]} The default is `{group}={found[0].name}`.{more} [All groups](../options.md)"
    yield "## Options"
    if group == "experiment":
        yield (
            "The file of each, `conf/experiment/<option>.yaml`, begins with its commands, and with what was measured, "
            "if anything was."
        )
        yield table(
            ["option", "what it is", "command", "sets"],
            [[f"`{each.name}`", text(each.about), code(each.command), codes(each.sets)] for each in found],
        )
    elif group == "stability":
        yield table(
            ["option", "what it is for", "sets", "paper"],
            [[f"`{each.name}`", text(each.about), codes(each.sets), papers(each.paper)] for each in found],
        )
    else:
        rows = [[f"`{each.name}`", text(each.about), papers(each.paper)] for each in found]
        yield table(["option", "what it does", "paper"], rows)
    if any(each.keys for each in found):
        yield "## Keys"
        keys = key_table(found, "../../")
        several = re.search(r"`, `[^`]+` \([a-z]", keys)
        first = " A default belongs to the options named after it; the first one, to all others." if several else ""
        yield f"Type `{group}.<key>=<value>`, for a key of the chosen option.{first}"
        yield keys
    if rules := [rule for rule in RULES if any(key.partition(".")[0] == group for key in rule.keys.split())]:
        rules = [rule for rule in rules if rule not in TYPES and not bound(re.sub("^{override} ", "", rule.message))]
        rows = []
        for rule in rules:
            keys = [key for key in rule.keys.split() if key.partition(".")[0] == group]
            message = re.sub(r"^{(override|chosen|typed|key)}:? ", "", rule.message)
            fix = filled(rule.fix).replace("<key>", keys[0] if len(keys) == 1 else "<key>")
            rows.append([codes(keys), escaped(as_code(filled(message))), escaped(as_code(fix))])
        if rows:
            yield "## What is refused"
            yield table(["key", "what is wrong", "fix"], rows)
    row = ON_RESUME[group]
    yield "## On resume"
    yield (
        f"Another option of this group is *{row.kind}* in a resumed run: {as_code(row.text)}"
        f"{f'; {as_code(row.fix)}' if row.fix else ''}. [What a resume may change](../resume.md)"
    )


MADE = "<!-- Written by python docs/tables.py from conf/ and the tables of the package. Do not edit. -->"


def key_table(found: Sequence[Option], up: str) -> str:
    """Returns the table of the keys of some options. Options in which a key means the same share a row."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for option in found:
        for key in option.keys:
            place = (key.name, bound_of(option, key), key.effect)
            rows.setdefault(place, {}).setdefault(key.default, []).append(option.name)
    having = [option.name for option in found if option.keys]
    several = len(having) > 1
    kinds = {kind: [each.name for each in found if modality(each) == kind] for kind in ("tokens", "images")}
    lines = []
    order = [*dict.fromkeys(name for name, _, _ in rows)]
    for (name, limits, effect), by_default in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        names = [each for each in having if any(each in others for others in by_default.values())]
        shared = codes(names)
        if names == having:
            shared = "all with keys" if several else ""
        elif of_kind := [kind for kind, those in kinds.items() if names == those]:
            shared = f"all for {of_kind[0]}"
        (first, _), *later = by_default.items()
        values = [code(first), *(f"{code(value)} ({', '.join(those)})" for value, those in later)]
        cells = [f"`{name}`", ", ".join(values), escaped(as_code(limits)), text(effect, up)]
        lines.append([cells[0], shared, *cells[1:]] if several else cells)
    return table(["key", *(["of"] if several else []), "default", "bound", "effect"], lines)


def modality(option: Option) -> str:
    """Returns the kind of data that an option is for; empty if it does not say."""
    return next((key.default for key in option.keys if key.name == "modality"), "")


def text(words: str, up: str = "../../") -> str:
    """Returns a comment of a YAML as Markdown, with links to papers and pages."""
    words = re.sub(r"torchrun --nproc_per_node=N train.py(?: \w+=\w+)*|pip install [^\"]*\"[^\"]*\"", r"`\g<0>`", words)
    words = re.sub(r"'([^' ]*\*[^' ]*)'", r"`\1`", words)
    words = re.sub(r"(?<![\w`])[\w./]+=<[^>]*>", lambda found: f"`{found[0]}`", words)
    words = re.sub(r"(?<!`)\[[\w, .*]*\*[\w, .*]*\]", lambda found: f"`{found[0]}`", words)
    words = escaped(as_code(words))
    words = re.sub(r"\bdocs/((?:\w+/)*(\w+)\.md)", rf"[\2.md]({up}\1)", words).replace(f"{up}reference/", up[3:])
    return linked(words)


def papers(words: str) -> str:
    """Returns papers as links."""
    return linked(escaped(words))


def linked(words: str) -> str:
    """Returns a text with its arXiv numbers as links."""
    return re.sub(r"(?:arXiv )?\b(\d{4}\.\d{4,5})\b", r"[arXiv \1](https://arxiv.org/abs/\1)", words)


def escaped(words: str) -> str:
    """Returns a text that a table of Markdown shows as it is."""
    parts = re.split(r"(`[^`]*`)", words.replace("|", "\\|"))
    return "".join(each if each.startswith("`") else each.replace("<", "&lt;") for each in parts)


def code(words: str) -> str:
    """Returns a text as code; nothing if it is empty."""
    return f"`{words}`".replace("|", "\\|") if words else ""


def codes(words: Iterable[str]) -> str:
    """Returns texts as code, with commas."""
    return ", ".join(map(code, words))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown, without the columns that are empty in every row."""
    rows = [*rows]
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    lines = [[head[place] for place in kept], ["---"] * len(kept), *([row[place] for place in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pages() -> dict[str, str]:
    """Returns the pages of this reference, by their place in `docs/`."""
    found = {"reference/options.md": overview(), **{f"reference/options/{group}.md": page(group) for group in GROUPS}}
    return {place: "\n\n".join(map(wrapped, paragraphs)) + "\n" for place, paragraphs in found.items()}


def wrapped(paragraph: str) -> str:
    """Returns a paragraph in lines of at most 120 characters; a table or a block of code stays as it is."""
    if paragraph.startswith(("|", "```", "<!--")):
        return paragraph
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)
