import math

import pytest
import torch

from model.loss import next_token_loss


def test_uniform_logits_cost_log_of_the_vocabulary():
    loss, num_tokens = next_token_loss(torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.long))
    assert loss.item() == pytest.approx(6 * math.log(7), rel=1e-6)
    assert num_tokens.item() == 6


def test_unlabelled_positions_count_nowhere():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 1:4] = -100
    loss, num_tokens = next_token_loss(logits, labels)
    log_probs = logits.detach().double().log_softmax(-1)
    expected = -sum(
        log_probs[b, t, labels[b, t]] for b in range(2) for t in range(5) if labels[b, t] >= 0
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert num_tokens.item() == 7
    loss.backward()
    assert logits.grad[0, 1:4].eq(0).all() and logits.grad[1].ne(0).all()


def test_nothing_labelled_costs_nothing():
    loss, num_tokens = next_token_loss(torch.randn(1, 4, 7), torch.full((1, 4), -100))
    assert loss.item() == 0.0 and num_tokens.item() == 0


def test_split_of_a_batch_adds_up_to_the_whole():
    logits, labels = torch.randn(4, 6, 7), torch.randint(0, 7, (4, 6))
    labels[0, :5] = -100
    whole = next_token_loss(logits, labels)
    parts = [next_token_loss(*part) for part in zip(logits.split(1), labels.split(1), strict=True)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole[0])
    assert sum(count for _, count in parts) == whole[1]


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 4000, 3, dtype=torch.bfloat16)
    loss, _ = next_token_loss(logits, torch.zeros(1, 4000, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4000 * math.log(3), rel=1e-5)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 5\), got \(2, 4\)"):
        next_token_loss(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.long))
