"""Steps of a transformer around attention, each one pass over memory forward and one backward."""

from .cross_entropy import linear_cross_entropy
from .gelu import bias_gelu
from .mlp import gelu_mlp
from .residual_norm import residual_norm

__all__ = ["bias_gelu", "gelu_mlp", "linear_cross_entropy", "residual_norm"]
