"""How idle OpenMP threads should wait: decode speed of one engine alone and of two on the same cores, per setting.

    python -P bench/idle_threads.py [--threads 2] [--rounds 3] [--steps 24]

Threads that spin at a barrier answer sooner and take the core from whoever has work. Each setting runs in processes of
its own; all take turns, and the best round counts. One JSON line per setting: tokens per second at batch 1 and 8.
"""

import argparse
import json
import os
import subprocess
import sys
import time

SETTINGS: dict[str, dict[str, str]] = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 300": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "300"},
    "spin 3,000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"},
    "spin 30,000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "30000"},
    "spin 300,000": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "300000"},  # libgomp's own default
}
BATCHES = (1, 8)


def child(threads: int, steps: int) -> None:
    """Load, then decode at each batch size whenever a line comes in."""
    import torch

    from worker.batch import SamplingParams, SequenceSlice, StepBatch
    from worker.loading import default_model_path, load_model
    from worker.model_runner import ModelRunner

    torch.set_num_threads(threads)
    loaded = load_model(default_model_path(), dtype="bfloat16", device=torch.device("cpu"))
    runner = ModelRunner(loaded, num_blocks=64, block_size=16)

    def step(size: int, position: int) -> None:
        rows = [
            SequenceSlice(
                request_id="",
                token_ids=[7],
                start=position,
                block_ids=range(1 + 7 * row, 8 + 7 * row),
                sampling=SamplingParams(temperature=0),
            )
            for row in range(size)
        ]
        runner.execute(StepBatch(slices=rows))

    print("ready", flush=True)
    for _ in sys.stdin:
        rates = []
        for size in BATCHES:
            begin = time.perf_counter()
            for position in range(64, 64 + steps):
                step(size, position)
            rates.append(size * steps / (time.perf_counter() - begin))
        print(json.dumps(rates), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.threads, options.steps)
        return
    arguments = [f"--threads={options.threads}", f"--steps={options.steps}", "--child"]
    command = [sys.executable, "-P", __file__, *arguments]
    engines: dict[str, list[subprocess.Popen[str]]] = {}
    for name, setting in SETTINGS.items():
        environment = os.environ | setting
        engines[name] = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
    everyone = [one for pair in engines.values() for one in pair]
    try:
        for one in everyone:
            _line(one)
        best: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for name, pair in engines.items():
                for count in (1, 2):
                    for one in pair[:count]:
                        assert one.stdin is not None
                        one.stdin.write("go\n")
                        one.stdin.flush()
                    rates = [json.loads(_line(one)) for one in pair[:count]]
                    slowest = [min(column) for column in zip(*rates, strict=True)]
                    before = best.get((name, count), [0.0] * len(BATCHES))
                    best[name, count] = [max(pair) for pair in zip(before, slowest, strict=True)]
        for name in engines:
            figures = {
                f"batch_{size}_{'alone' if count == 1 else 'two_at_once'}": round(best[name, count][index], 1)
                for count in (1, 2)
                for index, size in enumerate(BATCHES)
            }
            print(json.dumps({"figure": "decode, tokens per second of the slower engine", "waiting": name} | figures))
    finally:
        for one in everyone:
            one.kill()
            one.wait()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


if __name__ == "__main__":
    main()
