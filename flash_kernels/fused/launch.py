"""Where the fused kernels run, and how many programs share the rows of a reduction."""

import contextlib

import torch
import triton
from torch import Tensor

from ..portable.dropout import row_keys_kernel

_WARPS_PER_SM = 32
# Triton decides at decoration whether a kernel is compiled or interpreted.
_IS_INTERPRETED = not isinstance(row_keys_kernel, triton.JITFunction)


def check_device(*tensors: Tensor | None) -> None:
    """Raise ValueError for tensors that lie on several devices, or where no kernel runs."""
    devices = [t.device for t in tensors if t is not None]
    can_run = _IS_INTERPRETED or devices[0].type == "cuda"
    if not can_run or any(device != devices[0] for device in devices):
        places = ", ".join(str(device) for device in devices)
        raise ValueError(f"the tensors of a fused step must lie on one GPU, got {places}")


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def num_programs(device: torch.device, num_warps: int) -> int:
    """Programs that fill a device; each adds up its own rows, so that sums repeat bit for bit."""
    if device.type != "cuda":
        return 8
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms * max(1, _WARPS_PER_SM // num_warps)
