"""The golden files: what vLLM 0.32 was seen to do, replayed against this cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cache.replay import main, replay_hashes, replay_operations

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TRACE = GOLDEN / "vllm_apc_trace.jsonl"
HASHES = GOLDEN / "vllm_block_hashes.json"


def test_two_thousand_operations_of_vllms_pool_replay_without_a_mismatch() -> None:
    assert replay_operations(TRACE.read_text().splitlines()) == {"operations": 2000, "mismatches": 0, "first": None}


def test_eight_hundred_hash_chains_of_vllm_are_reproduced_byte_for_byte() -> None:
    assert replay_hashes(HASHES.read_text()) == {"operations": 800, "mismatches": 0, "first": None}


def test_a_hash_file_with_one_digit_changed_does_not_replay() -> None:
    cases = json.loads(HASHES.read_text())
    case = next(case for case in cases["cases"] if case["hashes"])
    last = case["hashes"][-1]
    case["hashes"][-1] = last[:-1] + ("0" if last[-1] != "0" else "1")
    assert replay_hashes(json.dumps(cases))["mismatches"] == 1


@pytest.mark.parametrize("field", ["hit", "stored", "removed", "n_cached_hashes", "ok", "tokens"])
def test_a_trace_with_one_value_changed_does_not_replay(field: str) -> None:
    lines = TRACE.read_text().splitlines()
    number, record = next(
        (number, record)
        for number, record in ((number, json.loads(line)) for number, line in enumerate(lines) if number)
        if record["op"] == "admit" and record["ok"] and record.get(field) not in (None, [])
    )
    value = record[field]
    if isinstance(value, bool):
        record[field] = not value
    elif isinstance(value, int):
        record[field] = value + 1
    elif field == "tokens":
        record[field][0] += 1
    else:
        record[field][0] = ("0" if value[0][0] != "0" else "1") + value[0][1:-1] + ("0" if value[0][-1] != "0" else "1")
    lines[number] = json.dumps(record)
    report = replay_operations(lines)
    assert report["mismatches"] >= 1
    assert report["first"]["operation"] == record["i"]


def test_a_trace_of_another_pool_is_counted_to_its_end() -> None:
    lines = TRACE.read_text().splitlines()
    smaller = lines[0].replace('"num_blocks":33', '"num_blocks":20')
    report = replay_operations([smaller, *lines[1:]])
    assert report["operations"] == 2000
    assert report["mismatches"] > 100


def test_the_command_prints_json_and_its_exit_code_tells_a_mismatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(TRACE)]) == 0
    assert json.loads(capsys.readouterr().out)["mismatches"] == 0
    changed = tmp_path / "changed.jsonl"
    changed.write_text(TRACE.read_text().replace('"hit":0', '"hit":4', 1))
    assert main([str(changed)]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["field"] == "hit"
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    (tmp_path / "empty.jsonl").write_text("")
    assert main([str(tmp_path / "empty.jsonl")]) == 2


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cache.replay", "--hashes", str(HASHES)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"operations": 800, "mismatches": 0, "first": None}
