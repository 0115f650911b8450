"""Joint forward and backward graphs of tiny models, with real values of every node in node.meta["val"]."""

from __future__ import annotations

import torch
from torch import fx, nn

from autopar.frontend.export import differentiate, export
from autopar.ops.cross_entropy import cross_entropy
from autopar.passes.canonicalize.clean import clean
from autopar.passes.canonicalize.rewrite import canonicalize

ops = torch.ops.autopar


class Loss(nn.Module):
    """A Hugging Face model as a function of (ids, labels) to its loss."""

    def __init__(self, model: nn.Module, **kwargs):
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, ids, labels):
        return self.model(input_ids=ids, labels=labels, **self.kwargs).loss


class FusedBlock(nn.Module):
    """GPT with canonical ops: a fused query-key-value projection (in, 3 * out), as GPT-2's, and a fused gate and up."""

    def __init__(self, hidden=12, heads=3, vocab=24, bias=True):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Parameter(torch.randn(vocab, hidden))
        self.c_attn, self.c_bias = nn.Parameter(torch.randn(hidden, 3 * hidden)), nn.Parameter(torch.randn(3 * hidden))
        self.c_proj = nn.Parameter(torch.randn(hidden, hidden))
        self.gate_up = nn.Parameter(torch.randn(4 * hidden, hidden))
        self.down = nn.Parameter(torch.randn(hidden, 2 * hidden))

    def forward(self, ids, labels):
        x = ops.embedding(self.embedding, ids, -1, 0)  # (B, S, E)
        fused = ops.linear(x, self.c_attn.t()) + self.c_bias
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in fused.split(x.shape[-1], 2))
        out = ops.attention(q, k, v, None, True, None)[0]  # (B, H, S, D)
        x = x + ops.linear(out.transpose(1, 2).reshape(x.shape), self.c_proj)
        gate, up = ops.linear(x, self.gate_up).chunk(2, -1)
        x = x + ops.linear(nn.functional.silu(gate) * up, self.down)
        return cross_entropy(ops.linear(x, self.embedding), labels, -100, 1, x.dtype)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "mlp":
        return Mlp().double(), (torch.randn(4, 6).double(), torch.randn(4, 4).double())
    ids, labels = torch.randint(0, 24, (4, 6)), torch.randint(0, 24, (4, 6))
    if name == "fused":
        return FusedBlock().double(), (ids, labels)
    import transformers as hf

    sizes = dict(vocab_size=24, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=24, n_positions=16, n_embd=12, n_layer=1, n_head=2)
        model = Loss(hf.GPT2LMHeadModel(config), use_cache=False)
    elif name == "llama":
        config = hf.LlamaConfig(**sizes | {"num_attention_heads": 4, "hidden_size": 16}, num_key_value_heads=2)
        model = Loss(hf.LlamaForCausalLM(config), use_cache=False)
    else:
        model, labels = Loss(hf.BertForSequenceClassification(hf.BertConfig(**sizes))), torch.randint(0, 2, (4,))
    return model.double().eval(), (ids, labels)  # eval: no dropout; gradients are computed all the same


def joint_graph(name: str, canonical: bool = True) -> fx.Graph:
    """The joint graph of a tiny model, of canonical ops or of plain ATen."""
    model, inputs = build(name)
    exported = export(model, inputs)
    if canonical:
        canonicalize(exported.graph_module)
    captured = differentiate(exported)
    graph_module = clean(captured.graph_module) if canonical else captured.graph_module
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    given = {"input": dict(zip(captured.signature.tensor_names, inputs))}

    def value(node: fx.Node) -> torch.Tensor:
        role, fake = node.meta["role"], node.meta["val"]
        if role.kind == "tangent":
            return torch.ones(fake.shape, dtype=fake.dtype)
        return given.get(role.kind, named)[role.name].detach()

    Recorder(graph_module).run(*map(value, graph_module.graph.find_nodes(op="placeholder")))
    return graph_module.graph


class Recorder(fx.Interpreter):
    def run_node(self, node):
        result = super().run_node(node)
        if node.op != "output":
            node.meta["val"] = result.detach().clone() if isinstance(result, torch.Tensor) else result
        return result
