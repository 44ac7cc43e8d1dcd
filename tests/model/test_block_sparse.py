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


@pytest.mark.parametrize("patterns", [[DENSE], [LOCAL, DENSE]])
def test_bert_padded_and_packed(patterns):
    """Under a pattern of all blocks equal to the dense model; under a narrow one to each other."""
    from model.attention import pack, reference_attention
    from model.bert import BERT

    def make(attention):
        torch.manual_seed(0)
        return BERT(
            vocab_size=61, dim=32, nheads=2, max_seqlen=40, depth=2, mlp_dim=64,
            attention=attention,
        )  # fmt: skip

    ids = torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(1))
    model, ids = on_device(make(BlockSparseAttention(DENSE, 40, layers=patterns)), ids)
    lengths = torch.tensor([40, 7, 23], device=ids.device)
    padded = pack(model.hidden(ids, lengths=lengths), lengths)[0]
    tokens, cu_seqlens = pack(ids, lengths)
    packed = model.hidden(tokens, cu_seqlens=cu_seqlens, max_seqlen=40)
    torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-4)
    dense, _ = on_device(make(reference_attention), ids)
    expected = pack(dense.hidden(ids, lengths=lengths), lengths)[0]
    assert torch.allclose(padded, expected, rtol=1e-4, atol=1e-4) == (patterns == [DENSE])
    packed.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())


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
