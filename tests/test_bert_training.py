"""BERT from text to a falling loss: data, model, loss and optimizer together."""

import random

import pytest
import torch

from data.masked_lm import MaskedLMData
from model.bert import BERT
from model.bert_loss import bert_loss, mean_loss, micro_batches
from model.optim import lamb


@pytest.mark.slow
def test_masked_words_of_a_regular_text_are_learned(tmp_path):
    words = ["alpha", "beta", "gamma", "delta", "river", "mountain", "seven", "running"]
    generator = random.Random(0)
    for i in range(30):
        word = generator.choice(words)
        sentence = f"{word} {word} {word} {word} {word} {word}. "
        (tmp_path / f"{i}.txt").write_text(sentence * generator.randint(2, 8))
    data = MaskedLMData(
        source=str(tmp_path),
        seqlen=32,
        batch_tokens=32 * 8,
        root=str(tmp_path / "store"),
        val_fraction=0.1,
    )
    data.prepare_data()
    data.setup()
    torch.manual_seed(0)
    model = BERT(
        vocab_size=data.vocab_size,
        max_seqlen=32,
        depth=1,
        dim=16,
        nheads=2,
        resid_dropout=0.0,
        attn_dropout=0.0,
    )
    optimizer = lamb(model, lr=0.1)
    losses = []
    for _, batch in zip(range(25), data.train_dataloader(), strict=False):
        for piece in micro_batches(batch, 4):
            loss = mean_loss(bert_loss(model, piece)) / 2
            loss.backward()
        losses.append(loss.item() * 2)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 9.0  # log of the vocabulary and of 2
    assert sum(losses[-5:]) / 5 < 5.0
    with torch.no_grad():
        sums = [bert_loss(model, batch) for batch in data.val_dataloader()]
    correct = sum(s.mlm_correct for s in sums) / sum(s.num_masked for s in sums)
    assert correct > 0.1
