"""The models compute what their papers say: every forward is recomputed here in another way."""

import math

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import ModelError
from autopar.models import build, gpt, llama, mlp
from autopar.models.output import next_token_loss

TINY = ["gpt2-tiny", "llama-tiny", "mlp-tiny", "gpt2-tiny:tied=false", "llama-tiny:kv_heads=4", "llama-tiny:tied=true"]


@pytest.mark.parametrize("name", TINY)
def test_loss_is_finite_and_every_parameter_has_a_gradient(name):
    model, inputs = build(name, batch=2, seq=16, device="cpu")
    output = model(**inputs)
    output.loss.backward()
    assert output.loss.ndim == 0 and math.isfinite(output.loss.item())
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", TINY)
def test_without_labels_there_is_no_loss(name):
    model, inputs = build(name, batch=2, seq=16, device="cpu")
    inputs.pop("labels", None), inputs.pop("target", None)
    assert model(**inputs).loss is None


@pytest.mark.parametrize("name, tied", [("gpt2-tiny", True), ("gpt2-tiny:tied=false", False), ("llama-tiny", False)])
def test_tied_head(name, tied):
    model, _ = build(name, batch=1, seq=8, device="cpu")
    embedding = model.wte if name.startswith("gpt") else model.embed_tokens
    assert (model.lm_head.weight is embedding.weight) is tied
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied


def test_next_token_loss_shifts_and_ignores():
    """The mean over positions 0 to S - 2 of the next token's negative log-probability, ignored labels left out."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    labels = torch.randint(7, (2, 5), generator=generator)
    labels[0, 3] = -100
    terms = [
        -logits[b, s].log_softmax(-1)[labels[b, s + 1]] for b in range(2) for s in range(4) if labels[b, s + 1] != -100
    ]
    assert len(terms) == 7
    torch.testing.assert_close(next_token_loss(logits, labels), torch.stack(terms).mean())


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_causal(name):
    """A later token changes no earlier logit, and the first position sees itself alone."""
    model, inputs = build(name, batch=1, seq=12, device="cpu")
    ids = inputs["input_ids"]
    other = ids.clone()
    other[:, 8] = (other[:, 8] + 1) % 256
    before, after = model(ids).logits, model(other).logits
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=0)
    assert (before[:, 8:] - after[:, 8:]).abs().amax(-1).min() > 0
    torch.testing.assert_close(model(ids[:, :1]).logits, before[:, :1])


def attend(q, k, v):
    """Causal softmax attention of one head in plain sums; q, k, v (S, D)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def test_gpt_recomputed_head_by_head():
    model, inputs = build("gpt2-tiny", batch=2, seq=10, device="cpu", dtype=torch.float64)
    config, weights = model.config, dict(model.named_parameters())
    width = config.hidden // config.heads

    def norm(x, name):
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + config.norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    logits = []
    for ids in inputs["input_ids"]:
        x = weights["wte.weight"][ids] + weights["wpe.weight"][:10]
        for i in range(config.layers):
            q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
            heads = [slice(h * width, (h + 1) * width) for h in range(config.heads)]
            x = x + linear(torch.cat([attend(q[:, h], k[:, h], v[:, h]) for h in heads], -1), f"h.{i}.attn.c_proj")
            y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + linear(y, f"h.{i}.mlp.c_proj")
        logits.append(norm(x, "ln_f") @ weights["wte.weight"].T)
    torch.testing.assert_close(model(**inputs).logits, torch.stack(logits))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama_recomputed_head_by_head(kv_heads):
    """Rotary positions as multiplication by complex numbers, and each query head with its own key and value head."""
    model, inputs = build(f"llama-tiny:kv_heads={kv_heads}", batch=2, seq=10, device="cpu", dtype=torch.float64)
    config, weights = model.config, dict(model.named_parameters())
    width = config.head_dim

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x):  # (S, D): feature i is the real and i + D/2 the imaginary part
        exponents = torch.arange(width // 2, dtype=torch.float64) * 2 / width
        angles = torch.arange(10)[:, None] * config.rope_theta**-exponents
        turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag], -1)

    logits = []
    for ids in inputs["input_ids"]:
        x = weights["embed_tokens.weight"][ids]
        for i in range(config.layers):
            y, layer = norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn"
            q, k, v = (y @ weights[f"{layer}.{p}_proj.weight"].T for p in "qkv")
            heads = []
            for h in range(config.heads):
                own, shared = slice(h * width, (h + 1) * width), h // (config.heads // kv_heads)
                kv = slice(shared * width, (shared + 1) * width)
                heads.append(attend(turn(q[:, own]), turn(k[:, kv]), v[:, kv]))
            x = x + torch.cat(heads, -1) @ weights[f"{layer}.o_proj.weight"].T
            y = norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (y @ weights[f"layers.{i}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"layers.{i}.mlp.down_proj.weight"].T
        logits.append(norm(x, "norm") @ weights["lm_head.weight"].T)
    torch.testing.assert_close(model(**inputs).logits, torch.stack(logits), rtol=1e-6, atol=1e-6)  # tables are fp32


def test_mlp_recomputed():
    model, inputs = build("mlp-tiny", batch=2, seq=3, device="cpu")
    x = inputs["x"]
    for block in model.blocks:
        x = F.gelu(x @ block.up.weight.T + block.up.bias) @ block.down.weight.T + block.down.bias
    output = model(**inputs)
    torch.testing.assert_close(output.logits, x)
    torch.testing.assert_close(output.loss, (x - inputs["target"]).square().mean())
    assert mlp.build(hidden=4, bias=False).blocks[0].up.bias is None


def test_equals_the_models_of_transformers():
    """The same weights under Hugging Face's names give the same logits and the same loss."""
    transformers = pytest.importorskip("transformers")
    ours, inputs = build("llama-tiny", batch=2, seq=16, device="cpu")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    renamed = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    expected, actual = theirs(**inputs), ours(**inputs)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mlp-tiny"])
def test_exports_as_one_graph(name):
    model, inputs = build(name, batch=2, seq=16)

    class Loss(torch.nn.Module):  # export takes tensors out only
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return self.model(**inputs).loss

    program = torch.export.export(Loss(), (), inputs, strict=False)
    assert any("loss" in str(node.target) for node in program.graph.nodes)
    assert not program.graph_signature.buffers


@pytest.mark.parametrize("module", [gpt, llama])
@pytest.mark.parametrize(
    "options", [dict(hidden=65), dict(layers=0), dict(heads=-4), dict(vocab=2.5), dict(hidden=True), dict(heads="four")]
)
def test_sizes_that_do_not_fit(module, options):
    with pytest.raises(ModelError):
        module.build(**(dict(hidden=64, heads=4, layers=1, vocab=16) | options))


def test_refusals_carry_the_numbers_and_a_remedy():
    with pytest.raises(ModelError, match="kv_heads=3 does not divide heads=8(.|\n)*kv_heads=2"):
        llama.Config(hidden=64, heads=8, kv_heads=3)
    with pytest.raises(ModelError, match="hidden / heads = 5 is odd"):
        llama.Config(hidden=20, heads=4)
    with pytest.raises(ModelError, match="ffn=0 is not a positive integer"):
        mlp.Config(ffn=0)


def test_default_widths():
    assert gpt.Config(hidden=64, heads=4).ffn == mlp.Config(hidden=64).ffn == 256
    assert llama.Config(hidden=4096, heads=32).ffn == 11008  # Llama 2 7B
    assert llama.Config(hidden=64, heads=4).kv_heads == 4
