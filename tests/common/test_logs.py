from __future__ import annotations

import json
import logging

from common.logs import JsonFormatter


def line(form: str, *args: object) -> dict[str, object]:
    """The fields of a line as JSON, without those that every line has."""
    record = logging.LogRecord("router.dispatch", logging.INFO, "", 0, form, args, None)
    found: dict[str, object] = json.loads(JsonFormatter().format(record))
    assert found.pop("message") == record.getMessage()
    assert found.pop("time")
    assert (found.pop("level"), found.pop("logger")) == ("INFO", "router.dispatch")
    return found


def test_the_fields_of_a_request_s_line_are_fields_of_its_json() -> None:
    form = "request request=%s status=%s replica=%s prompt_tokens=%d cached_tokens=%s queue_s=%.3f ttft_s=%s%s"
    assert line(form, "12", "OK", "w0", 40, 32, 0.00049, "1.250", " trace=abc") == {
        "request": "12",
        "status": "OK",
        "replica": "w0",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "queue_s": 0.0,
        "ttft_s": 1.25,
        "trace": "abc",
    }
    absent = line(form, "12", "CANCELLED", "-", 40, "-", 0.2, "-", "")
    assert [absent[name] for name in ("replica", "cached_tokens", "ttft_s")] == [None, None, None]
    assert "trace" not in absent


def test_a_value_that_looks_like_fields_stays_one_value() -> None:
    assert line("bad batch replica=%s error=%r", "w0", "it is 'x' level=FATAL replica=w9") == {
        "replica": "w0",
        "error": "it is 'x' level=FATAL replica=w9",
    }
    assert line("request=%s failed: %s%s", "r", "it said status=OK", "") == {"request": "r"}


def test_what_a_line_says_outright_is_a_field_and_the_names_that_every_line_has_are_kept() -> None:
    assert line("replica=%s state=READY share=%.3f", "w0", float("nan")) == {
        "replica": "w0",
        "state": "READY",
        "share": None,
    }
    assert line("redis=emptied: writing anew") == {"redis": "emptied"}
    assert line("the level=%s is %d %% of max_model_len=%d", "high", 5, 80) == {"max_model_len": 80}
    assert line("nothing here") == {}
