"""How many programs share the rows of a reduction."""

import torch

_WARPS_PER_SM = 32


def num_programs(device: torch.device, num_warps: int) -> int:
    """Programs that fill a device; each adds up its own rows, so that sums repeat bit for bit."""
    if device.type != "cuda":
        return 8
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms * max(1, _WARPS_PER_SM // num_warps)
