"""Hugging Face models on the kernels give what they give with eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flash_kernels import huggingface  # noqa: E402

SMALL = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64
    ),
    "bert": lambda: transformers.BertConfig(num_attention_heads=2, **SMALL),
    "llama": lambda: transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, **SMALL
    ),
    "mistral": lambda: transformers.MistralConfig(
        num_attention_heads=2, num_key_value_heads=1, sliding_window=5, **SMALL
    ),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    transformers.AttentionInterface.register("triton_attention", huggingface.attention)
    transformers.AttentionMaskInterface.register("triton_attention", huggingface.attention_mask)


def make_models(name):
    torch.manual_seed(0)
    make = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    eager = make.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    ours = make.from_config(CONFIGS[name](), attn_implementation="triton_attention").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_logits_and_gradients(name, padding):
    eager, ours = make_models(name)
    input_ids = torch.randint(60, (2, 11))
    keep_mask = torch.ones_like(input_ids)
    if padding is not None:
        keep_mask[0, slice(8, None) if padding == "right" else slice(0, 3)] = 0
    logits = []
    for model in (eager, ours):
        out = model(input_ids, attention_mask=keep_mask).logits[keep_mask.bool()]
        out.square().mean().backward()
        logits.append(out)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    for (label, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(
                b.grad, a.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=label: f"{n}: {m}"
            )


def test_generation_with_left_padding():
    eager, ours = make_models("llama")
    input_ids = torch.randint(60, (2, 7))
    keep_mask = torch.ones_like(input_ids)
    keep_mask[0, :3] = 0
    options = dict(attention_mask=keep_mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(input_ids, **options), eager.generate(input_ids, **options))


def test_mask_of_another_interface_is_refused():
    module = torch.nn.Module()
    module.is_causal = False
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="register flash_kernels.huggingface.attention_mask"):
        huggingface.attention(module, q, q, q, torch.ones(1, 1, 4, 4, dtype=torch.bool))


def test_sinks_are_refused():
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(NotImplementedError, match="does not serve s_aux"):
        huggingface.attention(torch.nn.Module(), q, q, q, None, s_aux=torch.zeros(2))
