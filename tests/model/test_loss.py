import math

import pytest
import torch
from torch.nn import functional as F

from model.loss import linear_next_token_loss, next_token_loss


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


def chunked(hidden, weight, labels, vocab_size, chunk_tokens):
    return linear_next_token_loss(
        hidden, weight, labels, vocab_size=vocab_size, chunk_tokens=chunk_tokens
    )


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
def test_chunked_loss_and_gradients_equal_the_whole(chunk_tokens):
    """15 rows: chunks that divide them, that do not, and one that holds them all."""
    hidden = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)  # 2 rows of padding
    labels = torch.randint(0, 11, (3, 5))
    labels[1, 2:] = -100
    log_probs = (hidden @ weight[:11].T).log_softmax(-1)
    keep = labels >= 0
    expected = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0][keep].sum()
    expected_grads = torch.autograd.grad(expected * 0.3, (hidden, weight))
    loss, num_tokens = chunked(hidden, weight, labels, 11, chunk_tokens)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert num_tokens.item() == 12
    grads = torch.autograd.grad(loss * 0.3, (hidden, weight))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-9)
    assert grads[1][11:].eq(0).all() and grads[0][1, 2:].eq(0).all()
    with torch.no_grad():
        again, _ = chunked(hidden, weight, labels, 11, chunk_tokens)
    torch.testing.assert_close(again, loss.detach(), rtol=1e-6, atol=0)


def test_chunked_loss_under_autocast_is_as_exact_as_the_plain_one():
    """Both against fp64: at most twice the error of the plain computation in bf16."""
    hidden, weight = torch.randn(1, 64, 32), torch.randn(101, 32)
    labels = torch.randint(0, 101, (1, 64))

    def results(loss_of, hidden, weight, autocast):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def plain(hidden, weight):
        return next_token_loss(F.linear(hidden, weight), labels)[0]

    def ours(hidden, weight):
        return chunked(hidden, weight, labels, 101, 16)[0]

    def exact(hidden, weight):
        log_probs = (hidden.double() @ weight.double().T).log_softmax(-1)
        return -log_probs.gather(-1, labels[..., None]).sum()

    truth = results(exact, hidden, weight, False)
    for ours_got, plain_got, true in zip(
        results(ours, hidden, weight, True),
        results(plain, hidden, weight, True),
        truth,
        strict=True,
    ):
        budget = 2 * (plain_got.double() - true).abs().max()
        assert (ours_got.double() - true).abs().max() <= budget


def test_chunked_loss_compiles_without_a_graph_break():
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    weight = torch.randn(16, 8, requires_grad=True)
    labels = torch.randint(0, 16, (2, 6))
    compiled = torch.compile(
        lambda h, w: chunked(h, w, labels, 16, 5)[0], fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad(chunked(hidden, weight, labels, 16, 5)[0], (hidden, weight))
    grads = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    torch.testing.assert_close(grads, expected)


def test_chunked_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2, 5\), got \(2, 4\)"):
        chunked(torch.zeros(2, 5, 8), torch.zeros(7, 8), torch.zeros(2, 4).long(), 7, 3)


@pytest.mark.gpu
def test_chunked_loss_compiled_under_autocast_has_the_gradients_of_the_eager_one():
    """Inductor of torch 2.11 got sums in place wrong, in autocast only."""
    hidden = torch.randn(2, 300, 64, device="cuda", requires_grad=True)
    weight = torch.randn(1152, 64, device="cuda", requires_grad=True)
    labels = torch.randint(0, 1100, (2, 300), device="cuda")

    def loss_of(hidden, weight):
        return chunked(hidden, weight, labels, 1100, 200)[0]

    with torch.autocast("cuda", torch.bfloat16):
        losses = [loss_of(hidden, weight), torch.compile(loss_of)(hidden, weight)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    eager, compiled = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    for got, expected in zip(compiled, eager, strict=True):
        assert (got - expected).norm() <= 0.01 * expected.norm()


def test_a_second_derivative_is_an_error():
    """What the forward made has none, and the rest of it would be a wrong one."""
    hidden, weight = torch.randn(1, 5, 16, requires_grad=True), torch.randn(9, 16)
    labels = torch.arange(5)[None]
    loss, _ = linear_next_token_loss(hidden, weight, labels, vocab_size=9, chunk_tokens=2)
    (gradient,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
