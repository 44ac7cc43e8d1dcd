"""Compile the Hopper kernels with no GPU, through their launchers, and print what the machine code
holds: run by test_hopper_compile.py.

A process of its own, because TRITON_INTERPRET is read when a kernel is decorated and must not be
set here. A stand-in for Triton's driver names sm_90, and every launch stops after the compilation.
Arguments: JSON list of {direction, headdim, dtype, options}; prints one JSON object a kernel.
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
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flash_kernels import BlockMask
from flash_kernels.hopper import launch
from flash_kernels.portable.launch import Problem, WalkedMask

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OPERANDS = re.compile(r"^@!?U?P\w+\s+")
compiled = []


class HopperDriver:
    """What compiling asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only():
    driver.set_active(HopperDriver())
    launch_kernel = JITFunction.run

    def run(self, *args, warmup, **options):
        kernel = launch_kernel(self, *args, warmup=True, **options)
        if self.fn.__module__.startswith("flash_kernels.hopper"):
            compiled.append(kernel)
        return kernel

    JITFunction.run = run


def tool(name: str, *arguments: str) -> str:
    """Output and warnings of a program that Triton's wheel brings."""
    folder = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    run = subprocess.run([os.path.join(folder, name), *arguments], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(run.stderr[-500:])
    return run.stdout + run.stderr


def opcode(instruction: str) -> str:
    return _OPERANDS.sub("", instruction).split()[0]


def loops_with_products(code: str) -> list[list[str]]:
    """Instructions of each innermost loop that holds matrix instructions."""
    instructions, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
    for end, instruction in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if jump and labels.get(jump[1], end + 1) <= end:
            loops.append((labels[jump[1]], end + 1))
    # A jump back from cold code behind the partitions is no loop of ours.
    loops = [
        (begin, end)
        for begin, end in loops
        if any(opcode(i).startswith("HGMMA") for i in instructions[begin:end])
        and not any(opcode(i).startswith("USETMAXREG") for i in instructions[begin:end])
    ]
    return [
        instructions[begin:end]
        for begin, end in loops
        if not any(
            other != (begin, end) and begin <= other[0] and other[1] <= end for other in loops
        )
    ]


def describe_loop(instructions: list[str]) -> dict:
    """What the overlap of products and softmax shows in, for one loop."""
    waits = [i for i, text in enumerate(instructions) if "WARPGROUP.DEPBAR" in text]
    codes = [opcode(text) for text in instructions]
    names = [code.split(".")[0] for code in codes]
    return {
        "length": len(instructions),
        "products": names.count("HGMMA"),
        "exponentials": names.count("MUFU"),
        "spills": names.count("STL") + names.count("LDL"),
        "barriers": sum(code.startswith("BAR.SYNC") for code in codes),
        "named_arrivals": sum(code.startswith("BAR.ARV") for code in codes),
        # Behind the wait for the scores and the one for dP^T: dv, dk and dq, in flight together.
        "products_at_end": names[waits[1] :].count("HGMMA") if len(waits) > 1 else 0,
        # Between the wait for the scores and the wait for the other products.
        "exponentials_between_waits": names[waits[0] : waits[1]].count("MUFU")
        if len(waits) > 1
        else 0,
    }


def figures(kernel) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "kernel.ptx")
        with open(path, "w") as file:
            file.write(kernel.asm["ptx"])
        output = path + ".cubin"
        try:
            log = tool("ptxas", "-v", "--gpu-name=sm_90a", path, "-o", output)
        except RuntimeError:  # written for a later ptxas
            log = tool("ptxas-blackwell", "-v", "--gpu-name=sm_90a", path, "-o", output)
        with open(output, "wb") as file:
            file.write(kernel.asm["cubin"])
        code = tool("nvdisasm", "-c", output)
    return {
        "shared": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spills": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        "warnings": [line for line in log.splitlines() if "C75" in line or "warning" in line],
        "products": len(re.findall(r"\bHGMMA\b", code)),
        "asynchronous_arrivals": kernel.asm["ptx"].count("cp.async.mbarrier.arrive"),
        "loops": [describe_loop(loop) for loop in loops_with_products(code)],
    }


def launch_case(direction, headdim, dtype, options, seqlen_q=200, seqlen_k=200):
    """options: "long" takes the tile of long sequences; 68 heads have more row tiles than an H200
    multiprocessors."""
    if "long" in options:
        seqlen_q = seqlen_k = 600
    shape = (400,) if "varlen" in options else (2, seqlen_q)
    q = torch.zeros(*shape, 68, headdim, dtype=_DTYPES[dtype])
    shape = (400,) if "varlen" in options else (2, seqlen_k)
    k = torch.zeros(*shape, 34, headdim, dtype=_DTYPES[dtype])
    more = {}
    if "dropout" in options:
        more.update(dropout_seed=torch.zeros(1, dtype=torch.int64), dropout_p=0.1)
    if "causal" in options:
        more["window_right"] = 0
    if "window" in options:
        more.update(window_left=70, window_right=9)
    if "varlen" in options:
        steps = torch.tensor([0, 200, 400], dtype=torch.int32)
        more.update(cu_seqlens_q=steps, cu_seqlens_k=steps, max_seqlen_q=200, max_seqlen_k=200)
    if "positions" in options:
        more["positions"] = (torch.zeros(400, dtype=torch.int32),) * 2
    if "lengths" in options:
        more["lengths_k"] = torch.zeros(2, dtype=torch.int32)
    if "blocks" in options or "tokens" in options:
        blocks = torch.ones(2, 2, dtype=torch.bool)
        tokens = torch.eye(seqlen_q, seqlen_k) > 0 if "tokens" in options else None
        mask = BlockMask.from_dense(
            blocks, seqlen_q=seqlen_q, seqlen_k=seqlen_k, token_mask=tokens
        ).restricted()
        more["blocks"] = WalkedMask(
            mask.rows, mask.cols, mask.token_masks, mask.block_m, mask.block_n
        )
    problem = Problem(q, k, k, softmax_scale=0.1, **more)
    if direction == "forward":
        launch.attention_forward(problem)
    else:
        lse = torch.zeros(problem.lse_shape)
        launch.attention_backward(problem, torch.zeros_like(q), None, torch.zeros_like(q), lse)


if __name__ == "__main__":
    compile_only()
    for case in json.loads(sys.argv[1]):
        compiled.clear()
        launch_case(**case)
        for kernel in compiled:
            print(json.dumps({**case, "kernel": kernel.name, **figures(kernel)}), flush=True)
