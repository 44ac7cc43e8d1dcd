import pytest
import torch

from flash_kernels import flash_attention
from model.attention import Packing, pack, reference_attention
from model.bert import BERT, BERT_BASE, BERT_LARGE, ROBERTA
from tests.training import randomize

SIZES = {"vocab_size": 61, "max_seqlen": 16, "depth": 2, "dim": 24, "nheads": 3}
LENGTHS = torch.tensor([16, 1, 9, 0, 5])


def make_bert(**changes):
    torch.manual_seed(0)
    return randomize(BERT(**{**SIZES, **changes}))


def make_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (5, 16), generator=generator)
    segments = torch.randint(0, 2, (5, 16), generator=generator)
    return ids, segments


def padded_and_packed(model):
    """Hidden states of the real tokens, each way, and cu_seqlens."""
    ids, segments = make_batch()
    padded = model.hidden(ids, segment_ids=segments, lengths=LENGTHS)
    packed_ids, cu_seqlens = pack(ids, LENGTHS)
    packed = model.hidden(
        packed_ids,
        segment_ids=pack(segments, LENGTHS)[0],
        cu_seqlens=cu_seqlens,
        max_seqlen=16,
    )
    return pack(padded, LENGTHS)[0], packed, cu_seqlens


@pytest.mark.parametrize("position_offset", [0, 2])
def test_padded_and_packed_are_equal_with_gradients(position_offset):
    model = make_bert(position_offset=position_offset)
    padded, packed, _ = padded_and_packed(model)
    torch.testing.assert_close(padded, packed, rtol=0, atol=1e-5)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(3))
    parameters = [p for name, p in model.named_parameters() if name.startswith(("emb", "blocks"))]
    grads = [torch.autograd.grad((x * weights).sum(), parameters) for x in (padded, packed)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [flash_attention, reference_attention])
def test_injected_attentions_agree(attention):
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    expected, _, _ = padded_and_packed(make_bert())
    for got in padded_and_packed(make_bert(attention=attention))[:2]:
        torch.testing.assert_close(expected, got, rtol=0, atol=1e-4)


def test_padding_tokens_change_nothing():
    model = make_bert()
    ids, _ = make_batch()
    other = torch.where(torch.arange(16) < LENGTHS[:, None], ids, 60 - ids)
    a, b = (pack(model(x, lengths=LENGTHS), LENGTHS)[0] for x in (ids, other))
    assert torch.equal(a, b)


def test_heads_compute_masked_positions_only():
    model = make_bert(vocab_multiple=64)
    padded, packed, cu_seqlens = padded_and_packed(model)
    positions = torch.tensor([0, 7, 16, 20])
    logits = model.mlm_logits(packed, positions)
    assert logits.shape == (4, 61) and len(model.head_weight) == 64
    torch.testing.assert_close(logits, model.mlm_logits(packed)[positions])
    ids, segments = make_batch()
    hidden = model.hidden(ids, segment_ids=segments)
    torch.testing.assert_close(
        model.mlm_logits(hidden, torch.tensor([16, 35])),
        model.mlm_logits(hidden)[[1, 2], [0, 3]],
    )


def test_pooler_reads_first_tokens_of_either_way():
    model = make_bert()
    ids, segments = make_batch()
    hidden = model.hidden(ids, segment_ids=segments, lengths=LENGTHS)
    packed, cu_seqlens = padded_and_packed(model)[1:]
    a, b = model.pooled(hidden), model.pooled(packed, cu_seqlens=cu_seqlens)
    real = LENGTHS > 0
    torch.testing.assert_close(a[real], b[real], rtol=0, atol=1e-5)
    assert model.nsp_logits(a).shape == (5, 2)
    # A trailing filler sequence has no token at all.
    filled = torch.cat([cu_seqlens, cu_seqlens[-1:]])
    assert model.pooled(packed, cu_seqlens=filled).isfinite().all()


def test_default_segments_are_zero():
    model = make_bert()
    ids, _ = make_batch()
    assert torch.allclose(model(ids), model(ids, segment_ids=torch.zeros_like(ids)), atol=1e-6)


def test_positions_restart_in_every_packed_sequence():
    cu_seqlens = torch.tensor([0, 3, 3, 5, 6, 6], dtype=torch.int32)
    assert Packing(cu_seqlens, 3).positions(6).tolist() == [0, 1, 2, 0, 1, 0]


def test_published_sizes():
    with torch.device("meta"):
        base, large = BERT(**BERT_BASE), BERT(**BERT_LARGE)
        roberta = BERT(**{**BERT_BASE, **ROBERTA})
    padding = {768: 6 * 768 + 6, 1024: 6 * 1024 + 6}  # 30522 -> 30528 rows, decoder bias too
    # transformers' BertForPreTraining has 110,106,428 and 336,226,108 parameters.
    assert base.num_params() - padding[768] == 110_106_428
    assert large.num_params() - padding[1024] == 336_226_108
    assert roberta.embeddings.positions.weight.shape == (514, 768)
    assert BERT(**{**SIZES, "dim": 12}).config.keys() >= {"mlp_dim", "norm_eps", "nsp_head"}


def test_initial_weights():
    model = BERT(**{**SIZES, "dim": 96, "vocab_size": 1000})
    assert abs(model.embeddings.tokens.weight[:1000].std() - 0.02) < 1e-3
    assert model.embeddings.tokens.weight[1000:].eq(0).all()
    assert abs(model.blocks[0].qkv.weight.std() - 0.02) < 1e-3
    assert model.mlm.bias.eq(0).all() and model.nsp.bias.eq(0).all()


def test_dropout_is_active_in_training_only():
    model = make_bert(resid_dropout=0.5)
    ids, _ = make_batch()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    model = make_bert(resid_dropout=0.0, attn_dropout=0.5).train()
    assert not torch.equal(model(ids), model(ids))


def test_wrong_arguments_are_refused():
    for changes, words in [
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"resid_dropout": 1.0}, r"resid_dropout must be a number in \[0, 1\)"),
        ({"nheads": 5}, r"dim \(24\) must be a multiple of nheads \(5\)"),
        ({"position_offset": -1}, "position_offset must not be negative"),
        ({"pooler": False}, "nsp_head reads the pooler"),
    ]:
        with pytest.raises(ValueError, match=words):
            BERT(**{**SIZES, **changes})
    bare = make_bert(pooler=False, nsp_head=False, mlm_head=False)
    hidden = bare(make_batch()[0])
    for call, words in [
        (lambda: bare.pooled(hidden), "must have a pooler"),
        (lambda: bare.nsp_logits(hidden[:, 0]), "must have an NSP head"),
        (lambda: bare.mlm_logits(hidden), "must have an MLM head"),
        (lambda: bare(torch.zeros(1, 17, dtype=torch.int64)), "at most max_seqlen = 16"),
        (lambda: bare(torch.zeros(17, dtype=torch.int64)), r"got input_ids \(17,\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
