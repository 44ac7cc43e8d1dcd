import pytest
import torch

from model.attention import sdpa_attention
from model.self_attention import KVCache, SelfAttention


def test_self_attention_passes_views_and_its_options():
    calls = []

    def spy(q, k, v, **options):
        calls.append((q, k, v, options))
        return sdpa_attention(q, k, v, **options)

    layer = SelfAttention(12, 3, causal=True, dropout=0.25, attention=spy, softmax_scale=0.5)
    x = torch.randn(2, 5, 12)
    layer(x)
    layer.eval()(x)
    (q, k, v, training), (*_, evaluating) = calls
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert q.shape == (2, 5, 3, 4) and q.stride(-1) == 1
    assert training == {"causal": True, "softmax_scale": 0.5, "dropout_p": 0.25}
    assert evaluating == {"causal": True, "softmax_scale": 0.5, "dropout_p": 0.0}
    # The head h of q is rows h * headdim onwards of the first third of the projection.
    projected = x @ layer.qkv.weight.T + layer.qkv.bias
    torch.testing.assert_close(q[:, :, 1], projected[..., 4:8])
    torch.testing.assert_close(k[:, :, 2], projected[..., 12 + 8 : 12 + 12])


def test_self_attention_with_cache_equals_without():
    torch.manual_seed(0)
    layer = SelfAttention(12, 3, causal=True)
    x = torch.randn(2, 7, 12)
    cache, parts = KVCache(8), []
    with torch.no_grad():
        for part in x.split([3, 1, 3], dim=1):
            parts.append(layer(part, kv_cache=cache))
            cache.advance(part.shape[1])
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))
        with pytest.raises(ValueError, match="holds 8 tokens, got 9"):
            layer(x[:, :2], kv_cache=cache)
