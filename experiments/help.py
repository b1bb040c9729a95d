"""`--help` of programs with many flags, in groups. Parsing itself stays with the flat dataclass."""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from itertools import pairwise
from typing import Annotated

import tyro

from jaxdist.commands import VERBS, command_text

FLAT = 20  # flags that need no groups
ALL = "--help-all"


def asks_for_help(flags_type: type, prog: str, words: list[str]) -> bool:
    """Whether help is asked for that `print_help` prints: of many flags, or of a program with verbs. Other help is
    tyro's own, as that of a union of commands."""
    if not dataclasses.is_dataclass(flags_type) or not {"-h", "--help", ALL} & set(words):
        return False
    return len(dataclasses.fields(flags_type)) > FLAT or prog in VERBS


def print_help(flags_type: type, prog: str, words: list[str]) -> None:
    """Print the help and exit: with --help-all every flag, otherwise those that the class lists as COMMON.

    A program's own flags come first, then those that it shares with others.
    """
    common = getattr(flags_type, "COMMON", ())
    brief = bool(common) and ALL not in words
    described, titles = _described_fields(flags_type, brief), _titles(flags_type, own=prog.rpartition(" ")[2])
    groups: dict[str, list[tuple]] = {}
    for name in [name for name in common if name in titles] if brief else titles:
        groups.setdefault("common" if brief else titles[name], []).append(described[name])
    shared = {title for base in flags_type.__mro__[1:] for title in base.__dict__.get("GROUPS", {}).values()}
    ordered = sorted(groups, key=lambda title: title in shared)
    boxes = [(title, dataclasses.make_dataclass(title, groups[title], namespace={"__doc__": ""})) for title in ordered]
    grouped = dataclasses.make_dataclass("Grouped", boxes)
    description = " ".join(inspect.cleandoc(flags_type.__doc__).split())
    if verbs := VERBS.get(prog):
        description += f" With flags of their own: {', '.join(f'{prog} {verb}' for verb in verbs)}."
    if len(described) > sum(map(len, groups.values())):
        description += f" All {len(described)} flags: {ALL}."
    config = (tyro.conf.OmitArgPrefixes, *([tyro.conf.FlagCreatePairsOff] if brief else []))
    tyro.cli(grouped, prog=command_text(prog), args=["--help"], config=config, description=description)


def _titles(flags_type: type, own: str) -> dict[str, str]:
    """Field -> the title of its group: of the one that begins with it, or that of the field before it. GROUPS of a
    class: first field of a group -> its title."""
    declared: dict[str, str] = {}
    for cls in reversed(flags_type.__mro__):
        title = own
        for name in inspect.get_annotations(cls):
            title = cls.__dict__.get("GROUPS", {}).get(name, title)
            declared.setdefault(name, title)
    return {field.name: declared[field.name] for field in dataclasses.fields(flags_type)}


def _described_fields(flags_type: type, brief: bool) -> dict[str, tuple]:
    """Every field as `make_dataclass` takes it, with the text under it in the source, or its first sentence, as its
    help."""
    texts, hints = texts_of(flags_type), typing.get_type_hints(flags_type, include_extras=True)
    found = {}
    for field in dataclasses.fields(flags_type):
        hint = hints[field.name]
        if field.name in texts:
            text = texts[field.name]
            if brief and (first := re.match(r".+?\w\)?\.(?=\s)", text)):
                text = first[0]
            hint = Annotated[hint, tyro.conf.arg(help=text)]
        found[field.name] = (field.name, hint, dataclasses.field(default=field.default))
    return found


def texts_of(flags_type: type) -> dict[str, str]:
    """The string under each field, line breaks inside a paragraph removed; a subclass's own before its base's.

    A class that no source describes (`experiments.settings`) has them as TEXTS.
    """
    texts = {}
    for cls in reversed(flags_type.__mro__[:-1]):
        if "TEXTS" in cls.__dict__:
            texts |= cls.TEXTS
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for field, text in pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    paragraphs = inspect.cleandoc(said).split("\n\n")
                    texts[name] = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    return texts
