"""Compile the fused kernels for GPUs that are not there and print what they use: run by
test_fused.py.

A process of its own, without the interpreter. Arguments: names of GPUs, as compile_kernels.py takes
them; prints one JSON object a kernel and GPU.
"""

import importlib
import json
import sys
from pathlib import Path

import triton
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))
from compile_kernels import figures, target_of  # noqa: E402

from flash_kernels.fused import cross_entropy, gelu, mlp  # noqa: E402

# The package has a function of the same name.
residual_norm = importlib.import_module("flash_kernels.fused.residual_norm")
_FLOATS = ("eps", "keep_scale")
_TYPES = {
    "seed_ptr": "*i64", "labels_ptr": "*i64", "losses_ptr": "*fp32", "mean_ptr": "*fp32",
    "rstd_ptr": "*fp32", "residual_ptr": "*fp32", "total_ptr": "*fp32", "dtotal_ptr": "*fp32",
    "dresidual_ptr": "*fp32", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "dweight_ptr": "*fp32",
    "dbias_ptr": "*fp32", "sums_ptr": "*fp32",
}  # fmt: skip


def cases() -> list[tuple]:
    """(name, kernel, constants), as the launchers choose them."""
    found = []
    for dim in (768, 1600, 8192):
        dropout = {"HAS_DROPOUT": True}
        tile = residual_norm._tile(dim, 2048, per_thread=16)
        kernel = residual_norm.residual_norm_kernel
        found.append((f"residual_norm {dim}", kernel, {**tile, **dropout, "HAS_BIAS": True}))
        tile = residual_norm._tile(dim, 1024, per_thread=8)
        kernel = residual_norm.residual_norm_backward_kernel
        found.append((f"its backward {dim}", kernel, {**tile, **dropout, "HAS_DTOTAL": True}))
    tile = {"ROWS": gelu._ROWS, "COLUMNS": gelu._COLUMNS, "num_warps": gelu._NUM_WARPS}
    for tanh in (False, True):
        found.append((f"bias_gelu {tanh}", gelu.bias_gelu_kernel, {**tile, "TANH": tanh}))
        kernel = gelu.bias_gelu_backward_kernel
        found.append((f"its backward {tanh}", kernel, {**tile, "TANH": tanh}))
    tile = {"ROWS": mlp._ROWS, "COLUMNS": mlp._COLUMNS, "num_warps": mlp._NUM_WARPS}
    found.append(("column_sums", mlp.column_sums_kernel, tile))
    tile = {"BLOCK": cross_entropy._BLOCK, "VECTOR": cross_entropy._VECTOR}
    tile["num_warps"] = cross_entropy._NUM_WARPS
    found.append(("cross_entropy", cross_entropy.softmax_gradient_kernel, tile))
    return found


def main() -> None:
    for arch in sys.argv[1:]:
        target, _ = target_of(arch)
        for name, kernel, constants in cases():
            signature, constexprs, attributes = {}, {}, {}
            for index, argument in enumerate(kernel.arg_names):
                if argument in constants:
                    signature[argument] = "constexpr"
                    constexprs[(index,)] = constants[argument]
                elif argument.endswith("_ptr"):
                    signature[argument] = _TYPES.get(argument, "*bf16")
                    attributes[(index,)] = [["tt.divisibility", 16]]
                else:
                    signature[argument] = "fp32" if argument in _FLOATS else "i32"
                    if argument in ("dim", "stride"):
                        attributes[(index,)] = [["tt.divisibility", 16]]
            source = ASTSource(kernel, signature, constexprs, attributes)
            compiled = triton.compile(
                source, target=target, options={"num_warps": constants["num_warps"]}
            )
            found = {"kernel": name, "arch": arch, **figures(compiled, arch)}
            if not arch.startswith("gfx"):
                found["wide"] = compiled.asm["ptx"].count(".v4.b32")
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
