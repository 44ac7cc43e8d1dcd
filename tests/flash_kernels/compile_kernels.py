"""Compile the attention kernels for GPUs that are not there, and print what they use: run by
test_compile.py.

A process of its own, because TRITON_INTERPRET is read when a kernel is decorated and must not be
set here. Arguments: JSON list of {kernel, arch, headdim, dtype, options}; prints one JSON object a
line.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_kernels.portable import attention_backward, attention_forward, dq
from flash_kernels.portable.dropout import key_repeat
from flash_kernels.portable.tile_choice import Tile, family_of_capability, table_tile

_KERNELS = {
    "forward": attention_forward.attention_forward_kernel,
    "dk_dv": attention_backward.dk_dv_kernel,
    "dq": dq.dq_kernel,
    "delta": attention_backward.delta_kernel,
}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_FLOATS = (
    "scale_log2", "softmax_scale", "softcap", "keep_scale", "inverse_keep_scale",
)  # fmt: skip
# Pointers that only exist with an option.
_OPTIONAL = {
    "cu_seqlens_q_ptr": "varlen", "cu_seqlens_k_ptr": "varlen", "lengths_k_ptr": "lengths",
    "alibi_ptr": "alibi", "lists": "sparse", "seed_ptr": "dropout", "column_keys_ptr": "dropout",
    "dlse_ptr": "dlse", "positions_ptr": "positions",
}  # fmt: skip
_INDICES = ("cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "lengths_k_ptr", "positions_ptr")


def target_of(arch: str) -> tuple[GPUTarget, str]:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64), "amd"
    number = int(arch.removeprefix("sm_"))
    return GPUTarget("cuda", number, 32), family_of_capability(number // 10, number % 10)


def build(kernel: str, arch: str, headdim: int, dtype: str, options: list[str], tile=None):
    """(compiled kernel, tile) with the table's tile, aligned pointers and strides."""
    function = _KERNELS[kernel]
    target, family = target_of(arch)
    if kernel == "delta":
        tile = Tile(64, 64, 4, 3)
    tile = (
        Tile(*tile)
        if tile
        else table_tile(kernel, family, headdim, _DTYPES[dtype], "dropout" in options)
    )
    constants = {
        "HEADDIM": headdim, "BLOCK_D": max(16, triton.next_power_of_2(headdim)), "GROUP_SIZE": 1,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "IS_VARLEN": "varlen" in options, "HAS_LENGTHS": "lengths" in options,
        "HAS_LEFT": "window" in options, "HAS_RIGHT": "causal" in options or "window" in options,
        "HAS_SOFTCAP": "softcap" in options, "HAS_ALIBI": "alibi" in options,
        "HAS_DROPOUT": "dropout" in options, "KEY_REPEAT": key_repeat(tile),
        "HAS_DLSE": "dlse" in options,
        "SCALE_IN_EXP": "softcap" not in options and "alibi" not in options,
        "PRECISE": dtype == "fp32", "PTX": family != "amd",
        "MASK_M": 128 if "sparse" in options else 0, "MASK_N": 128 if "sparse" in options else 0,
        "HAS_TOKENS": "tokens" in options,
    }  # fmt: skip
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
        elif name in _OPTIONAL and _OPTIONAL[name] not in options:
            signature[name], constexprs[(index,)] = "constexpr", None
        elif name.endswith("_ptr"):
            if name in _INDICES or "keys" in name:
                signature[name] = "*i32"
            elif name == "seed_ptr":
                signature[name] = "*i64"
            elif name in ("lse_ptr", "row_words_ptr", "dlse_ptr", "alibi_ptr"):
                signature[name] = "*fp32"
            else:
                signature[name] = f"*{dtype}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name == "lists":
            signature[name] = ("*i32", "*i32", "*i32", "*i8", "i32", "i32")
        elif name == "window" or name in ("lse_strides", "column_strides"):
            signature[name] = ("i32", "i32")
        elif name == "dlse_strides":
            signature[name] = ("i32", "i32", "i32")
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32")
            for part in range(3):
                attributes[(index, part)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    source = ASTSource(function, signature, constexprs, attributes)
    compiled = triton.compile(
        source, target=target, options={"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    )
    return compiled, tile


def figures(compiled, arch: str) -> dict:
    """Registers, spilled bytes and shared memory: from ptxas, or from the AMD assembly."""
    found = {"shared": compiled.metadata.shared}
    if arch.startswith("gfx"):
        assembly = compiled.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", assembly).group(1))
        found["spills"] = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly).group(1))
        return found
    number = int(arch.removeprefix("sm_"))
    name = arch + ("a" if number >= 90 else "")
    folder = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    # The older of the two does not read what later releases of Triton write.
    tools = ["ptxas-blackwell"] if number >= 100 else ["ptxas", "ptxas-blackwell"]
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "kernel.ptx")
        with open(path, "w") as file:
            file.write(compiled.asm["ptx"])
        for tool in tools:
            program = os.path.join(folder, tool)
            command = [program, "-v", f"--gpu-name={name}", path, "-o", path + ".cubin"]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode == 0:
                break
    if run.returncode != 0:
        raise RuntimeError(run.stderr[-500:])
    log = run.stderr
    found["registers"] = int(re.search(r"Used (\d+) registers", log).group(1))
    found["async_copies"] = len(re.findall(r"\bcp\.async\.c[ag]\.", compiled.asm["ptx"]))
    found["bit_packing"] = len(re.findall(r"\b(?:shl|or)\.b16\b", compiled.asm["ptx"]))
    found["spills"] = int(re.search(r"(\d+) bytes spill stores", log).group(1))
    return found


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        compiled, tile = build(**case)
        print(json.dumps({**case, "tile": tile, **figures(compiled, case["arch"])}), flush=True)
