"""vLLM as a peer of bench/engine.py, in a virtual environment of its own.

    PYTHON bench/peers/vllm_cpu.py FOLDER --threads 2

Reads one JSON object per line and answers each with ``{"seconds": ...}``: ``{"prompts": [[...]], "num_tokens": n,
"reset": true}``; ``reset`` empties the prefix cache first. The engine runs in this process, compiled as by default,
with the block size of 32 that vLLM wants on CPUs. Needs vllm-cpu and nothing of warmfront.
"""

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="do not compile: starts sooner, runs slower")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ |= {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to standard error

    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=options.folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=32,
        enable_prefix_caching=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        enforce_eager=options.eager,
        disable_log_stats=True,
    )
    print(json.dumps({"ready": f"vllm {vllm.__version__}"}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        if work["reset"]:
            llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=work["num_tokens"], ignore_eos=True, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]]
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - begin}), file=answers)


if __name__ == "__main__":
    main()
