"""The CUDA kernels compile to machine code, for which no GPU is needed: the interpreter runs what no compiler takes."""

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from worker.attention import triton_paged  # noqa: E402

NUMBERS = {"bfloat16": "*bf16", "float32": "*fp32", "int8": "*i8", "fp8": "*u8"}
CASES = [  # activations, KV, channels of a head, compute capability
    ("bfloat16", "bfloat16", 64, 90),
    ("bfloat16", "bfloat16", 80, 80),
    ("float32", "float32", 128, 90),
    ("bfloat16", "int8", 64, 80),
    ("bfloat16", "fp8", 64, 80),
]


@pytest.mark.parametrize(("dtype", "kept", "head_dim", "capability"), CASES)
@pytest.mark.parametrize("kernel", ["_prefill", "_decode", "_join"])
def test_the_kernels_compile(dtype: str, kept: str, head_dim: int, capability: int, kernel: str) -> None:
    is_scaled = kept in ("int8", "fp8")
    numbers, pages = NUMBERS[dtype], NUMBERS[kept]
    scales = "*bf16" if is_scaled else numbers
    types = {"out": numbers, "queries": numbers, "keys": pages, "values": pages, "scale": "fp32", "table_width": "i32"}
    types |= {"key_scales": scales, "value_scales": scales, "answers": "*fp32", "weights": "*fp32"}
    fixed: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "group": 4, "block_size": 16, "is_scaled": is_scaled}
    fixed |= {"head_dim": head_dim, "wide_head": triton.next_power_of_2(head_dim), "is_fp8": kept == "fp8"}
    fixed |= {"key_tile": triton_paged.KEY_TILE, "max_parts": triton_paged.MAX_PARTS}
    fixed |= {"least_part": triton_paged.LEAST_PART}
    fixed["tile_rows"] = triton_paged.PREFILL_ROWS if kernel == "_prefill" else triton_paged.DECODE_ROWS
    function = getattr(triton_paged, kernel)
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in fixed else types.get(name, "*i32") for name in function.arg_names},
        constexprs={(at,): fixed[name] for at, name in enumerate(function.arg_names) if name in fixed},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
