"""Trains once for each list of overrides in a JSON argument, in one process or those of torchrun.

Importing and joining take longer than a small training.
"""

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

import train

CONFIGS = Path(train.__file__).parent / "configs"

if __name__ == "__main__":
    for overrides in json.loads(sys.argv[1]):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = compose("train", overrides)
        train.main(cfg)
