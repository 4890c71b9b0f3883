"""Chat messages to prompt text, by the model's own Jinja template.

Templates come with model files, which strangers write: they run in a sandbox that can neither call out nor change
what it is given. The names a template may use are those that transformers offers.
"""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from warmfront_pb.v1 import inference_pb2

from router.errors import InvalidRequestError, UnsupportedError

_CONTINUE_MARK = "\x00continue here\x00"


class ChatTemplate:
    """A compiled template. Raises ``UnsupportedError`` for one that does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        self._knows_developers = "developer" in source
        try:
            self._template = environment.from_string(source)
            # They are copied for each rendering, which a ChainMap makes slow.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[inference_pb2.ChatMessage], continue_final_message: bool = False) -> str:
        """The prompt text. Raises ``InvalidRequestError`` for messages the template refuses."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if not self._knows_developers:  # OpenAI's newer name for what most models were trained to call system
            for turn in turns:
                if turn["role"] == "developer":
                    turn["role"] = "system"
        if continue_final_message:
            # The mark shows where the last message ends in the rendered text, whatever the template puts after it.
            turns[-1]["content"] += _CONTINUE_MARK
        try:
            text = self._template.render(
                messages=turns, add_generation_prompt=not continue_final_message, **self._special_tokens
            )
        except _TemplateRefusal as refusal:
            raise InvalidRequestError(f"messages: the chat template says: {refusal}", param="messages") from None
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidRequestError(
                f"messages: the chat template cannot render them: {error}", param="messages"
            ) from error
        if continue_final_message:
            text, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise InvalidRequestError(
                    "continue_final_message: the chat template drops the last message, so it cannot be continued",
                    param="continue_final_message",
                )
        return text


class _TemplateRefusal(jinja2.TemplateError):
    pass


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
