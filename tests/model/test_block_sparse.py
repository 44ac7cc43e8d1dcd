import pytest
import torch

from model.block_sparse import PATTERNS, BlockSparseAttention, layer_attention
from model.gpt import GPT

DENSE = {"name": "sliding_window", "left": None, "right": None, "block_m": 16, "block_n": 16}
LOCAL = {"name": "sliding_window", "left": 3, "right": 0, "block_m": 16, "block_n": 16}


def make_gpt(attention, depth=2):
    torch.manual_seed(0)
    return GPT(vocab_size=61, dim=32, nheads=2, max_seqlen=40, depth=depth, attention=attention)


def on_device(model, ids):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter serves the CPU
    return model.to(device).eval(), ids.to(device)


@torch.no_grad()
def test_a_pattern_of_all_blocks_is_the_dense_model():
    from model.attention import reference_attention

    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    model, ids = on_device(make_gpt(reference_attention), ids)
    sparse, _ = on_device(make_gpt(BlockSparseAttention(DENSE, 40)), ids)
    sparse.load_state_dict(model.state_dict())  # the weights do not know of the pattern
    expected = model.logits(model.hidden(ids))
    torch.testing.assert_close(sparse.logits(sparse.hidden(ids)), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_each_layer_has_its_own_pattern():
    attention = BlockSparseAttention(DENSE, 40, layers=[LOCAL, DENSE])
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 61
    one, ids = on_device(make_gpt(attention, depth=1), ids)
    changed = changed.to(ids.device)
    # One layer with a window of 4 keys: token 0 reaches positions 0 to 3 only.
    difference = (one.hidden(ids) - one.hidden(changed)).abs().amax(-1)[0]
    assert (difference[:4] > 0).all() and not difference[4:].any()
    two, _ = on_device(make_gpt(attention), ids)
    assert (two.hidden(ids) - two.hidden(changed))[0, 39].any(), "the second layer sees all"


@torch.no_grad()
def test_generation_with_a_cache_equals_generation_without():
    from model.generation import generate

    ids = torch.randint(0, 61, (1, 5), generator=torch.Generator().manual_seed(1))
    model, ids = on_device(make_gpt(BlockSparseAttention(LOCAL, 40)), ids)
    outs = [generate(model, ids, 6, temperature=0.0, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*outs)


def test_layer_attention_leaves_a_plain_function_alone():
    assert layer_attention(torch.add, 3) is torch.add


@pytest.mark.parametrize(
    "pattern,words",
    [
        ({"name": "spiral"}, "one of " + ", ".join(PATTERNS)),
        ({"name": "butterfly", "size": 3}, "butterfly got a wrong option: .*'size'"),
        ({"name": "strided"}, "strided got a wrong option: .*stride"),
    ],
)
def test_wrong_patterns_say_what_to_do(pattern, words):
    with pytest.raises(ValueError, match=words):
        BlockSparseAttention(pattern, 512)
