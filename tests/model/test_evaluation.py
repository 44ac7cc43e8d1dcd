"""model/evaluation.py: windows by arithmetic, losses against the logits of one window at a time.

tests/model/test_hf.py compares with transformers' GPT-2."""

import math

import numpy as np
import pytest
import torch

from model.evaluation import extend_context, score_endings, text_losses, windows
from model.gpt import GPT
from tests.training import randomize

VOCAB, POSITIONS = 61, 24


def make_gpt():
    """Random, and of opinions: its likeliest tokens have a probability of a half."""
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, max_seqlen=POSITIONS, depth=2, dim=16, nheads=2)
    return randomize(model, scale=0.5)


@pytest.fixture(scope="module")
def model():
    return make_gpt()


def document(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, num_tokens)


@torch.no_grad()
def log_probs(model, ids):
    """Of each token after the first, seeing all before it: (num_tokens - 1,), and of all tokens."""
    ids = torch.as_tensor(ids)[None]
    log_p = model(ids[:, :-1])[0].double().log_softmax(-1)
    return log_p.gather(1, ids[0, 1:, None])[:, 0], log_p


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 9, 10, 31, 64])
@pytest.mark.parametrize("context, stride", [(8, 8), (8, 4), (8, 3), (8, 1), (1, 1), (7, 5)])
def test_windows_score_every_token_once_with_context(num_tokens, context, stride):
    seen = []
    for start, length, num_scored in windows(num_tokens, context, stride):
        assert 0 <= start and length <= context and start + length < num_tokens
        targets = range(start + length - num_scored + 1, start + length + 1)
        for target in targets:
            sees = target - start
            assert sees == target or sees >= context - stride + 1
        seen += targets
    assert seen == list(range(1, num_tokens))


def test_context_as_long_as_the_document_is_the_full_context_loss(model):
    ids = document(20)
    expected = -float(log_probs(model, ids)[0].sum())
    for context, stride in ((19, 19), (19, 1), (POSITIONS, 5)):
        losses = text_losses(model, [ids], context=context, stride=stride)
        assert losses.num_tokens == 19
        assert losses.nll == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
@pytest.mark.parametrize("context, stride, skip", [(6, 6, 0), (6, 2, 0), (12, 5, 3), (6, 4, 9)])
def test_sliding_windows_match_one_window_at_a_time(model, context, stride, skip, batch_tokens):
    """Target t of a window from s sees tokens s ... t - 1; documents do not see each other."""
    documents = [document(n, seed=n) for n in (41, 1, 13, 2, 7)]
    expected, number = 0.0, 0
    for ids in documents:
        end = 0
        while end < len(ids) - 1:
            previous, end = end, min(end + (stride if end else context), len(ids) - 1)
            start = max(0, end - context)
            found, _ = log_probs(model, ids[start : end + 1])
            for target in range(previous + 1, end + 1):
                if target > skip:
                    expected -= float(found[target - start - 1])
                    number += 1
    scored = []
    losses = text_losses(
        model, documents, context=context, stride=stride, skip=skip,
        batch_tokens=batch_tokens, chunk_tokens=7, on_tokens=scored.append,
    )  # fmt: skip
    assert losses.num_tokens == number == sum(scored)
    assert losses.nll == pytest.approx(expected, rel=1e-5)


def test_every_context_scores_the_same_tokens(model):
    documents = [document(50), document(9)]
    sizes = {text_losses(model, documents, context=c, stride=3, skip=4)[1] for c in (3, 8, 24)}
    assert sizes == {49 - 4 + 8 - 4}


def test_endings_match_the_logits(model):
    texts = [(document(n, seed=n), scored) for n, scored in ((9, 3), (4, 1), (40, 5), (25, 24))]
    favourite = document(6, seed=1)
    for i in (4, 5):  # an ending of the likeliest tokens
        favourite[i] = int(log_probs(model, favourite[: i + 1])[1][-1].argmax())
    texts.append((favourite, 2))
    for batch_tokens in (1, 50, 1000):
        scores = score_endings(model, texts, batch_tokens=batch_tokens)
        for (ids, num_scored), score in zip(texts, scores, strict=True):
            ids = ids[-POSITIONS - 1 :]
            found, log_p = (part[-num_scored:] for part in log_probs(model, ids))
            assert score.nll == pytest.approx(-float(found.sum()), rel=1e-5)
            assert score.is_greedy == bool((found == log_p.amax(-1)).all())
        assert scores[-1].is_greedy and not scores[3].is_greedy


def test_longer_positions_keep_the_loss_of_short_contexts(model):
    ids = document(60)
    short = text_losses(model, [ids], context=20, stride=20)
    longer = make_gpt()
    extend_context(longer, 50)
    assert longer.max_seqlen == 50 and longer.config["max_seqlen"] == 50
    assert text_losses(longer, [ids], context=20, stride=20) == short
    assert math.isfinite(text_losses(longer, [ids], context=50, stride=10).nll)
    table = longer.embeddings.positions.weight
    assert torch.equal(table[24:48], table[:24]), "the table repeats"


def test_refusals(model):
    ids = document(30)
    with pytest.raises(ValueError, match="stride must be from 1 to context = 8, got 9"):
        text_losses(model, [ids], context=8, stride=9)
    with pytest.raises(ValueError, match="at most the model's 24 positions, got 25"):
        text_losses(model, [ids], context=25, stride=1)
    with pytest.raises(ValueError, match="must be longer than skip . 1 = 30 tokens, none is"):
        text_losses(model, [ids], context=8, stride=8, skip=29)
    with pytest.raises(ValueError, match="a token to start from, got 0 tokens"):
        list(windows(0, 4, 4))
    for num_scored in (0, 30, 25):
        with pytest.raises(ValueError, match="with one before it, and fit the model's 24"):
            score_endings(model, [(ids, num_scored)])
