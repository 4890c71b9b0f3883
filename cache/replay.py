"""Check this cache against what another engine was seen to do: ``python -m cache.replay [--hashes] FILE``.

Without a flag FILE holds operations on a vLLM block pool with the state after each (JSON lines, see
tests/golden/vllm_apc_trace.jsonl); with ``--hashes`` it holds block-hash chains (tests/golden/vllm_block_hashes.json).
Prints ``{"operations": n, "mismatches": n, "first": ...}``; exit code 1 on any mismatch, 2 for a file that cannot be
read. Compared are hit length, success, the number of cached hashes, and the hashes whose first copy came or whose
last copy went. The pool runs as plain LRU, without reuse inside a block, blocks visible at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cache.block_hash import HashScheme, extra_keys, index_key
from cache.events import Cleared, Removed, Stored
from cache.prefix_cache import PrefixCache


def replay_operations(lines: Iterable[str]) -> dict[str, Any]:
    """Drive a fresh pool with the operations of a trace whose first line is its header."""
    records = (json.loads(line) for line in lines if line.strip())
    try:
        header = next(records)["header"]
    except (StopIteration, KeyError, TypeError) as error:
        raise ValueError("the first line is no header") from error
    scheme = HashScheme(header["algo"], header["block_size"], header["seed_for_none_hash"])
    pool = _Pool(PrefixCache(header["num_blocks"], scheme, policy="lru"))
    report = _Report()
    if scheme.root.hex() != header["none_hash"]:
        report.mismatch("header", "root", header["none_hash"], scheme.root.hex())
    for record in records:
        report.num_operations += 1
        try:
            pairs = pool.compare(record)
        except (KeyError, ValueError) as error:
            # After a mismatch the trace may go on with a request that does not run here.
            report.mismatch(record.get("i"), record.get("op", "op"), "an operation that can be done", repr(error))
            continue
        for field, expected, seen in pairs:
            if expected != seen:
                report.mismatch(record.get("i"), field, expected, seen)
                break
    return report.as_json()


def replay_hashes(text: str) -> dict[str, Any]:
    """Hash every chain of a file again."""
    report = _Report()
    for number, case in enumerate(json.loads(text)["cases"]):
        report.num_operations += 1
        scheme = HashScheme(case["algorithm"], case["block_size"], case["seed"])
        extra = case.get("extra_keys")
        if extra is not None:
            extra = [keys and tuple(tuple(key) for key in keys) for keys in extra]
        hashes = [block_hash.hex() for block_hash in scheme.block_hashes(case["token_ids"], extra)]
        if scheme.root.hex() != case["root"]:
            report.mismatch(number, "root", case["root"], scheme.root.hex())
        elif hashes != case["hashes"]:
            report.mismatch(number, "hashes", case["hashes"], hashes)
    return report.as_json()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cache.replay", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hashes", action="store_true", help="FILE holds hash chains")
    parser.add_argument("file", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        text = options.file.read_text(encoding="utf-8")
        result = replay_hashes(text) if options.hashes else replay_operations(text.splitlines())
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{options.file}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(json.dumps(result))  # noqa: T201
    return 1 if result["mismatches"] else 0


class _Report:
    def __init__(self) -> None:
        self.num_operations = 0
        self.num_mismatches = 0
        self.first: dict[str, Any] | None = None

    def mismatch(self, operation: Any, field: str, expected: Any, seen: Any) -> None:
        self.num_mismatches += 1
        if self.first is None:
            self.first = {"operation": operation, "field": field, "expected": expected, "seen": seen}

    def as_json(self) -> dict[str, Any]:
        return {"operations": self.num_operations, "mismatches": self.num_mismatches, "first": self.first}


class _Pool:
    """Our pool beside the trace's, whose events name every copy of a hash: they are counted to become logical."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.num_copies: Counter[str] = Counter()

    def compare(self, record: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Do one operation; (field, the trace's value, ours) for everything comparable."""
        operation = record["op"]
        pairs: list[tuple[str, Any, Any]] = []
        if operation == "admit":
            pairs += self._admit(record)
        elif operation == "append":
            pairs.append(("ok", record["ok"], self._append(record)))
        elif operation == "free":
            self.cache.free(record["id"])
        elif operation == "reset":
            for request_id in record.get("freed_first", ()):
                self.cache.free(request_id)
            pairs.append(("ok", record["ok"], self.cache.reset()))
        else:
            raise ValueError(f"operation {operation!r} is none of admit, append, free, reset")
        pairs.append(("n_cached_hashes", record["n_cached_hashes"], self.cache.num_cached_blocks))
        return pairs + self._compare_events(record)

    def _admit(self, record: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        tokens = record["tokens"]
        size = self.cache.scheme.block_size
        chain = self.cache.scheme.chain(tokens, extra_keys(len(tokens), size, cache_salt=record["salt"]))
        pairs: list[tuple[str, Any, Any]] = [("hit", record["hit"], self.cache.match(chain))]
        if "hashes" in record:
            pairs.append(("hashes", record["hashes"], [block_hash.hex() for block_hash in chain.hashes]))
        admission = self.cache.admit(record["id"], chain)
        if admission is not None:
            self.cache.commit(record["id"], len(chain))
            pairs.append(("hit", record["hit"], admission.num_cached_tokens))
        pairs.append(("ok", record["ok"], admission is not None))
        return pairs

    def _append(self, record: dict[str, Any]) -> bool:
        ok = self.cache.append(record["id"], record["tokens"])
        if ok:
            self.cache.commit(record["id"], self.cache.num_tokens(record["id"]))
        else:
            self.cache.free(record["id"])
        return ok

    def _compare_events(self, record: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        gone = []
        for name in record["removed"]:
            self.num_copies[name] -= 1
            if not self.num_copies[name]:
                gone.append(_key(name))
        come = []
        for name in record["stored"]:
            self.num_copies[name] += 1
            if self.num_copies[name] == 1:
                come.append(_key(name))
        if record.get("cleared"):
            self.num_copies.clear()
        batch = self.cache.take_events()
        events = batch.events if batch else ()
        removed = [key for event in events if isinstance(event, Removed) for key in event.keys]
        stored = [key for event in events if isinstance(event, Stored) for key in event.keys]
        cleared = any(isinstance(event, Cleared) for event in events)
        return [
            ("removed", sorted(gone), sorted(removed)),
            ("stored", sorted(come), sorted(stored)),
            ("cleared", bool(record.get("cleared")), cleared),
        ]


def _key(name: str) -> int:
    return index_key(bytes.fromhex(name))


if __name__ == "__main__":
    sys.exit(main())
