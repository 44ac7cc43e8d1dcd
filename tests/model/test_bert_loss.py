import pytest
import torch

from model.attention import pack
from model.bert import BERT
from model.bert_files import load_bert
from model.bert_loss import (
    Sums,
    bert_loss,
    masked_positions,
    mlm_loss,
    nsp_loss,
    piece_of,
    with_host_counts,
)
from tests.training import randomize

SIZES = {"vocab_size": 61, "max_seqlen": 16, "depth": 2, "dim": 24, "nheads": 3}
LENGTHS = torch.tensor([16, 2, 9, 5])


def mean_loss(sums):
    return sums.mlm_loss / sums.num_masked.clamp(min=1) + sums.nsp_loss / sums.num_pairs.clamp(
        min=1
    )


def make_batch():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 61, (4, 16), generator=generator)
    is_real = torch.arange(16) < LENGTHS[:, None]
    is_masked = (torch.rand(4, 16, generator=generator) < 0.4) & is_real
    return {
        "input_ids": torch.where(is_masked, 2, ids),
        "labels": torch.where(is_masked, ids, -100),
        "segment_ids": torch.randint(0, 2, (4, 16), generator=generator),
        "lengths": LENGTHS,
        "nsp_labels": torch.tensor([1, 0, 0, 1]),
    }


def packed(batch):
    rows = {key: pack(batch[key], LENGTHS)[0] for key in ("input_ids", "labels", "segment_ids")}
    cu_seqlens = pack(batch["labels"], LENGTHS)[1]
    return {
        **rows,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": 16,
        "nsp_labels": batch["nsp_labels"],
    }


def make_model(**changes):
    torch.manual_seed(0)
    return randomize(BERT(**{**SIZES, **changes}))


def loss_and_grads(model, batch, **options):
    sums = bert_loss(model, batch, **options)
    grads = torch.autograd.grad(mean_loss(sums), list(model.parameters()))
    return sums, grads


def test_total_loss_and_gradients_are_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=61,
        num_hidden_layers=2,
        hidden_size=24,
        num_attention_heads=3,
        intermediate_size=96,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = randomize(transformers.BertForPreTraining(config))
    theirs.save_pretrained(tmp_path)
    ours = load_bert(tmp_path)
    batch = make_batch()
    expected = theirs(
        input_ids=batch["input_ids"],
        token_type_ids=batch["segment_ids"],
        attention_mask=(torch.arange(16) < LENGTHS[:, None]).long(),
        labels=batch["labels"],
        next_sentence_label=batch["nsp_labels"],
    ).loss
    expected.backward()
    for form in (batch, packed(batch)):
        ours.zero_grad()
        loss = mean_loss(bert_loss(ours, form))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-4)
        loss.backward()
        for got, wanted in [
            (ours.head_weight.grad[:61], theirs.bert.embeddings.word_embeddings.weight.grad),
            (ours.mlm.bias.grad[:61], theirs.cls.predictions.bias.grad),
            (ours.pooler.weight.grad, theirs.bert.pooler.dense.weight.grad),
            (ours.blocks[0].mlp.up.weight.grad, theirs.bert.encoder.layer[0].intermediate.dense
             .weight.grad),
        ]:  # fmt: skip
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)
        assert ours.head_weight.grad[61:].eq(0).all()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_chunks_change_nothing(chunk_tokens):
    model, batch = make_model(), make_batch()
    whole, whole_grads = loss_and_grads(model, batch)
    sums, grads = loss_and_grads(model, packed(batch), chunk_tokens=chunk_tokens)
    for a, b in zip((*whole, *whole_grads), (*sums, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert sums.num_masked == (batch["labels"] != -100).sum() and sums.num_pairs == 4


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3, 4], [0, 3, 4], [0, 4]])
@pytest.mark.parametrize("form", [dict, packed])
def test_pieces_add_up(cuts, form):
    model, batch = make_model(), with_host_counts(form(make_batch()))
    pieces = [piece_of(batch, slice(*ends)) for ends in zip(cuts, cuts[1:], strict=False)]
    assert [len(piece["nsp_labels"]) for piece in pieces] == [
        stop - start for start, stop in zip(cuts, cuts[1:], strict=False)
    ]
    for piece in pieces:
        assert torch.equal(piece["masked_positions"], masked_positions(piece["labels"]))
    with torch.no_grad():
        whole = bert_loss(model, form(make_batch()))
        sums = Sums(*(sum(x) for x in zip(*(bert_loss(model, p) for p in pieces), strict=True)))
    for a, b in zip(whole, sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [dict, packed])
def test_autocast_keeps_losses_in_float32(form):
    model, batch = make_model(), form(make_batch())
    exact = bert_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        sums = bert_loss(model, batch)
    assert sums.mlm_loss.dtype == sums.nsp_loss.dtype == torch.float32
    torch.testing.assert_close(mean_loss(sums), mean_loss(exact), rtol=0.05, atol=0)


def test_counts_of_correct_predictions():
    model, batch = make_model(), make_batch()
    hidden = model.hidden(batch["input_ids"])
    best = model.mlm_logits(hidden).argmax(-1)
    labels = torch.where(torch.arange(16) < 3, best, -100)
    labels[0, 0] = (best[0, 0] + 1) % 61
    assert [int(x) for x in mlm_loss(model, hidden, labels, chunk_tokens=4)[1:]] == [12, 11]
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    loss, num_pairs, correct = nsp_loss(logits, torch.tensor([0, 0, -100]))
    assert (int(num_pairs), int(correct)) == (2, 1)
    assert loss.item() == pytest.approx(2 * torch.tensor(1.0).exp().add(1).log().item() - 1)


def test_nothing_masked_gives_zero_loss_and_gradients():
    model, batch = make_model(), make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["nsp_labels"] = torch.full((4,), -100)
    sums, grads = loss_and_grads(model, batch)
    assert sums.mlm_loss == 0 and sums.nsp_loss == 0 and sums.num_masked == 0
    assert all(grad.eq(0).all() for grad in grads)


def test_model_without_nsp_head_has_masked_loss_only():
    model = make_model(nsp_head=False, pooler=False, num_segments=1, position_offset=2)
    batch = make_batch()
    del batch["nsp_labels"]
    sums, _ = loss_and_grads(model, batch)
    assert sums.num_pairs == 0 and mean_loss(sums) == sums.mlm_loss / sums.num_masked


def test_arguments_are_checked():
    model, batch = make_model(), make_batch()
    hidden = model.hidden(batch["input_ids"])
    with pytest.raises(ValueError, match=r"\(4, 16\), got \(64,\)"):
        mlm_loss(model, hidden, batch["labels"].flatten())
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        mlm_loss(model, hidden, batch["labels"], chunk_tokens=0)
    assert masked_positions(torch.tensor([[-100, 3], [0, -100]])).tolist() == [1, 2]
