"""Guards of our recipes: small versions, as train.py runs them, learn what they are taught."""

from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

import train

CONFIGS = Path(__file__).parents[1] / "configs"
# The pilot's model: its bright pixels are a third of the tokens that a CPU would have to read.
SMALL = (
    "experiment=lra_pathfinder recipe=fast trainer=cpu model.depth=4 model.dim=64 model.nheads=2 "
    "model.mlp_dim=128 model.rotary_wavelengths=[4.0,64.0] data.level=6 data.background_up_to=16 "
    "data.batch_size=64 data.num_workers=0 data.prepare_workers=0 callbacks.checkpoints=null"
).split()


def fit(folder, *overrides):
    """(data, task, trainer) of a run in this process."""
    places = [f"runs_root={folder}/runs", f"data.root={folder}/data"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [*SMALL, *places, *overrides])
    _, _, data, task, trainer = train.build(cfg)
    trainer.fit(task, data, weights_only=True)
    return data, task, trainer


@pytest.mark.slow
def test_the_dense_target_teaches_which_pixels_are_on_a_long_snake(tmp_path, one_thread):
    """The first thing that is learned, long before any label."""
    options = ["data.num_train=1500", "data.num_val=64", "data.num_test=0", "model.depth=2"]
    options += ["model.dim=32", "data.batch_size=32", "optimizer.lr=1e-2", "trainer.max_steps=120"]
    data, task, trainer = fit(tmp_path, *options, "trainer.val_check_interval=120")
    batch = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    seen = batch["dense_labels"][batch["input_ids"] > 0]
    shares = np.bincount(seen, minlength=3) / len(seen)
    guess = float(-(shares * np.log(shares)).sum())  # loss of the best constant
    loss = float(trainer.callback_metrics["val/dense_loss"])
    assert loss < 0.8 * guess, (loss, guess)


@pytest.mark.slow
@pytest.mark.long
def test_small_pathfinder_is_learned_above_what_its_discs_tell(tmp_path, one_thread):
    """Labels that the discs' positions do not tell, so that the floor is a half."""
    options = ["data.balanced=true", "data.num_train=20000", "data.num_val=1000"]
    options += ["trainer.max_steps=1200", "task.final_lr_fraction=0.3", "data.num_test=0"]
    data, task, trainer = fit(tmp_path, *options, "trainer.val_check_interval=1200")
    print(data.comparison("val").line)
    assert trainer.callback_metrics["val/accuracy"] > 0.65


@pytest.mark.slow
@pytest.mark.long
def test_labels_alone_teach_longer_snakes_after_short_ones(tmp_path, one_thread):
    """recipe=labels, at the end on snakes of 6 paddles, whose discs tell nothing of the labels."""
    options = ["recipe=labels", "data.curriculum=[[3,0,600],[4,0,400]]", "data.batch_size=64"]
    options += ["data.num_distractors=0", "data.balanced=true", "data.num_train=40000"]
    options += ["data.num_val=1000", "data.num_test=0", "trainer.max_steps=1800"]
    data, task, trainer = fit(tmp_path, *options, "trainer.val_check_interval=1800")
    print(data.comparison("val").line)
    assert trainer.callback_metrics["val/accuracy"] > 0.65
