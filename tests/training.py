"""What tests of training share: a Trainer on the CPU, and weights before and after it."""

import torch
from lightning import Trainer

from model.checkpoint import AtomicCheckpointIO


def make_trainer(max_steps, callbacks, *, val_every=2, logger=False):
    return Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        val_check_interval=val_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
    )


def weights(task):
    return {name: value.clone() for name, value in task.model.state_dict().items()}


@torch.no_grad()
def randomize(model, seed=0, scale=0.2):
    """Every parameter far from its initial value: biases, norms and all."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param += scale * torch.randn(param.shape, generator=generator)
    return model.eval()
