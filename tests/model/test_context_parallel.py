"""Context parallelism on one process; tests/test_distributed.py has several."""

import pytest
import torch
import torch.distributed as dist

from flash_kernels import flash_attention
from model.attention import sdpa_attention
from model.bert import BERT
from model.block_sparse import BlockSparseAttention
from model.context_parallel import ContextParallel, split_sequences
from model.gpt import GPT, places
from model.recompute import set_recompute
from model.wandb_media import pattern_pictures


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_gpt(nheads=4, attention=sdpa_attention):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, dim=16 * nheads, nheads=nheads, depth=2, max_seqlen=32)
    return GPT(**sizes, attention=attention).eval()


@torch.no_grad()
def test_alone_a_process_has_the_whole_sequence(one_process):
    model = make_gpt()
    ids = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = model.hidden(ids)
    context = split_sequences(model, 1, "heads", 32)
    context.connect()
    positions = context.positions(32)
    assert torch.equal(positions, torch.arange(32)) and context.rank == 0
    torch.testing.assert_close(model.hidden(ids, positions=positions), expected)


@torch.no_grad()
def test_documents_are_packed_in_shares_as_in_rows(one_process):
    model = make_gpt()
    ids = torch.randint(0, 50, (2, 32), generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([[0, 5, 20, 32, 32], [0, 30, 32, 32, 32]], dtype=torch.int32)
    expected = model.hidden(ids, cu_seqlens=cu_seqlens)
    context = split_sequences(model, 1, "heads", 32, packed=True)
    options = dict(positions=context.positions(32), seqlen=32, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(model.hidden(ids, **options), expected)


def test_positions_count_from_the_start_of_the_document():
    cu_seqlens = torch.tensor([[0, 3, 3, 8, 8], [0, 8, 8, 8, 8]], dtype=torch.int32)
    found = places(cu_seqlens, torch.tensor([0, 2, 3, 7]))
    assert found.tolist() == [[0, 2, 0, 4], [0, 2, 3, 7]]


def test_a_ring_cuts_no_block_and_no_pattern_of_a_document():
    pattern = dict(name="sliding_window", left=8, right=0, block_m=16, block_n=16)
    model = make_gpt(attention=BlockSparseAttention(pattern, 32))
    with pytest.raises(NotImplementedError, match="attention=flash alone: use method=heads"):
        split_sequences(model, 1, "ring", 32, packed=True)
    with pytest.raises(ValueError, match="a multiple of 64 tokens, got 32 and blocks of 16 x 16"):
        split_sequences(model, 2, "ring", 32)


def test_a_split_model_still_shows_its_patterns():
    pattern = dict(name="sliding_window", left=8, right=0, block_m=16, block_n=16)
    model = make_gpt(attention=BlockSparseAttention(pattern, 32))
    split_sequences(model, 1, "ring", 32)
    assert list(pattern_pictures(model)) == ["sliding_window"]


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_is_recomputed_with_the_same_dropout(one_process, packed, how):
    """Block-sparse, and within documents."""
    pattern = dict(name="sliding_window", left=8, right=0, block_m=16, block_n=16)
    attention = flash_attention if packed else BlockSparseAttention(pattern, 32)
    model = make_gpt(nheads=1, attention=attention).train()
    for block in model.blocks:
        block.attention.dropout = 0.3
    context = split_sequences(model, 1, "ring", 32, packed=packed)
    options = dict(positions=context.positions(32), seqlen=32)
    if packed:
        options["cu_seqlens"] = torch.tensor([[0, 5, 32]], dtype=torch.int32)
    found = []
    for recompute in ("none", how):
        set_recompute(model, recompute)
        torch.manual_seed(3)
        loss = model.hidden(torch.arange(32)[None], **options).square().mean()
        found.append(torch.autograd.grad(loss, model.blocks[0].attention.qkv.weight)[0])
    assert torch.equal(*found)


def test_groups_must_divide_the_processes(one_process):
    with pytest.raises(ValueError, match="size=2 must divide the number of processes, 1"):
        ContextParallel(2, "heads").connect()


def test_a_ring_needs_our_kernels():
    attention = ContextParallel(1, "ring").attention(sdpa_attention)
    with pytest.raises(
        NotImplementedError, match="works with attention=flash and .*: use method=heads"
    ):
        attention(*torch.zeros(3, 1, 4, 2, 8))


@pytest.mark.parametrize(
    "options,message",
    [
        ((0, "heads", 32), "size must be at least 1, got 0"),
        ((2, "rows", 32), "must be one of heads, ring, got 'rows'"),
        ((3, "heads", 33), "size=3 must divide the model's 4 heads; method=ring serves any"),
        ((4, "heads", 30), "seqlen=30 must be a multiple of 4"),
        ((4, "ring", 28), "seqlen=28 must be a multiple of 8"),
    ],
)
def test_what_cannot_be_split_says_so(options, message):
    with pytest.raises(ValueError, match=message):
        split_sequences(make_gpt(), *options)


def test_only_gpts_are_split():
    bert = BERT(vocab_size=50, dim=32, nheads=4, depth=1, max_seqlen=32, mlp_dim=64)
    with pytest.raises(ValueError, match="splits a GPT's sequences, got BERT"):
        split_sequences(bert, 2, "heads", 32)
