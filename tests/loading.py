"""What tests of data modules share: one as a process of a run has it, and batches it loads."""

import itertools
from types import SimpleNamespace

import torch


def placed(data, rank=0, world_size=1, global_step=0):
    """The data module as process `rank` has it after `global_step` steps of its run."""
    data.trainer = SimpleNamespace(
        global_rank=rank,
        local_rank=rank,
        world_size=world_size,
        global_step=global_step,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data


def opened(data, *place, **place_by_name):
    """The same, prepared."""
    placed(data, *place, **place_by_name)
    data.prepare_data()
    data.setup("fit")
    return data


def take(loader, count):
    return list(itertools.islice(loader, count))
