"""Without a GPU the kernels run in Triton's interpreter, asked for before they are decorated."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
