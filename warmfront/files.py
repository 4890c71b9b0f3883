"""Files that people give to a command: read whole, or refused with one line that says what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from warmfront.errors import WrongUse


def fault_of(error: Exception) -> str:
    """What is wrong with a file or a line of it, in words for whoever wrote it."""
    match error:
        case OSError(strerror=str(reason)):
            return reason
        case UnicodeDecodeError():
            return f"no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        case KeyError(args=(name,)):
            return f"{name} is missing"
        case json.JSONDecodeError():
            return f"no JSON: {error.msg.lower()} at character {error.pos + 1}"
        case yaml.MarkedYAMLError(problem=str(problem), problem_mark=yaml.Mark() as mark):
            return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).split())


def read_text(path: Path, what: str) -> str:
    """A file's text. Raises ``WrongUse`` that begins with ``what``, the flag and the path."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(f"{what}: {fault_of(error)}") from error


def read_yaml(path: Path) -> Any:
    """A file's content. Raises ``ValueError`` with its path, ``OSError``."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # PyYAML raises more than its own
        raise ValueError(f"{path}: {fault_of(error)}") from error


def read_secret(path: str) -> str:
    """The one line of a secret's file. Raises ``WrongUse`` when there is none."""
    secret = read_text(Path(path), f"the secret in {path}").strip()
    if not secret:
        raise WrongUse(f"{path} is empty: a secret was expected there")
    return secret
