"""LoRA: gradients against PEFT's own, what is attached and taken away again, what is refused."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import AdaptError, LoRA
from autopar.adapt import order
from autopar.adapt.parse import parse
from autopar.models import build

from .against_peft import CASES, case_of

pytest.importorskip("peft")

# benchmarks/adapt.py has every case on every mesh
CHOSEN = {
    "gpt2": [("dp=2,tp=2", "megatron")], "llama": [("dp=2,tp=2", "megatron_sp"), ("tp=3", "megatron")],
    "llama-dora": [("dp=4", "fsdp")], "bert": [("tp=3", "auto")], "vit": [("dp=2,tp=2", "auto")],
    "mixtral": [("dp=4", "fsdp")],
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_peft(case):
    found = case_of(case)
    for mesh, strategy in CHOSEN[case]:
        errors = found.errors(mesh, strategy)
        assert max(errors.values()) <= 1e-5, (mesh, strategy, max(errors, key=errors.get), max(errors.values()))


def llama(**options):
    return build("llama-tiny", batch=2, seq=8, device="cpu", **options)


def test_attached_and_taken_away():
    model, _ = llama()
    before = {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()}
    names = [n for n, _ in model.named_modules()]
    with order.attached(model, [LoRA(target_modules="all-linear", r=2)]):
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert trained and all(".lora_A.weight" in n or ".lora_B.weight" in n for n in trained)
    assert {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()} == before
    assert [n for n, _ in model.named_modules()] == names


def test_the_start_changes_nothing_and_is_the_same_everywhere():
    values = []
    for _ in range(2):
        model, _ = llama()
        order.attach(model, [LoRA(target_modules=["q_proj"], r=2)], "cpu", seed=5)
        values.append({n: p.detach() for n, p in model.named_parameters() if "lora_" in n})
        torch.rand(7)  # what else is drawn makes no difference
    a = [v for n, v in values[0].items() if "lora_A" in n]
    assert all(torch.equal(values[0][n], values[1][n]) for n in values[0])
    assert all(not v.any() for n, v in values[0].items() if "lora_B" in n)
    assert all(v.std() > 0.01 for v in a) and not torch.equal(a[0], a[1])


REFUSED = {
    "no such layer": (dict(target_modules=["q_prj"]), "no module of the model is called 'q_prj'(.|\n)*q_proj"),
    "no such expert": (dict(target_parameters=["experts.gate_up"]),
                       "no parameter of the model is called 'experts.gate_up'"),
    "rank above the layer's": (dict(target_modules=["q_proj"], r=1000), "r=1000 is above the rank(.|\n)*r at most"),
    "a norm": (dict(target_modules=r".*norm.*"), "embeddings are what LoRA adapts"),
    "no rank": (dict(target_modules=["q_proj"], r=0), "r=0"),
    "no target": (dict(), "no target_modules"),
    "no layer of that number": (dict(target_modules=["q_proj"], layers_to_transform=[0, 9]),
                                "no target lies in layer 9"),
    "layers of a pattern": (dict(target_modules=r".*q_proj", layers_to_transform=[0]), "goes with a list"),
    "an exception that is none": (dict(target_modules=["q_proj"], exclude_modules=["v_prj"]), "called 'v_prj'"),
    "a pattern for nothing": (dict(target_modules=["q_proj"], rank_pattern={"v_proj": 2}),
                              "nothing adapted is called 'v_proj'"),
    "a bad pattern": (dict(target_modules=["q_proj"], alpha_pattern={"(": 2}), "not a regular expression"),
    "no alpha": (dict(target_modules=["q_proj"], lora_alpha=0), "lora_alpha=0"),
    "alpha as text": (dict(target_modules=["q_proj"], lora_alpha="16"), "lora_alpha='16'"),
    "not a pattern": (dict(target_modules="*.q_proj"), "not a regular expression"),
    "all left out": (dict(target_modules=["q_proj"], exclude_modules=["q_proj"]), "leave no module"),
    "dropout of a parameter": (dict(target_parameters=["x"], lora_dropout=0.1), "neither dropout nor DoRA"),
    "a bias of no kind": (dict(target_modules=["q_proj"], bias="some"), "bias='some'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, message = REFUSED[case]
    model, batch = llama()
    with pytest.raises(AdaptError, match=message):
        autopar.plan(model, "dp=2", batch, adapt=[LoRA(**options)])
    assert not any("lora" in n for n, _ in model.named_parameters())


class Scored(torch.nn.Module):
    """Its weight goes into an einsum, beside which no adapter can stand."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.inner.weight).square().mean()


def test_a_weight_in_another_op():
    with pytest.raises(AdaptError, match="inner.weight goes into .*(.|\n)*target_parameters"):
        autopar.plan(Scored(), "dp=2", {"x": torch.randn(4, 4)}, adapt=[LoRA(target_modules=["inner"], r=2)])


class Tripled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Model(torch.nn.Module):
    """Runs `first`, then a head whose weight `tied` shares."""

    def __init__(self, first, head=None, norm=None):
        super().__init__()
        self.first, self.head, self.norm = first, head or torch.nn.Linear(8, 8), norm or torch.nn.Identity()
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.head.weight

    def forward(self, x):
        return self.head(self.norm(self.first(x)) + self.tied(x)).square().mean()


class Frozen(torch.nn.Linear):
    """Its parameters never train."""

    def forward(self, x):
        return super().forward(x).detach()


MISUSED = {
    "a forward of its own": (Model(Tripled(8, 8)), dict(target_modules=["first"]),
                             "forward does more than the product"),
    "a tied module that trains": (Model(torch.nn.Linear(8, 8)), dict(target_modules=["first"],
                                                                     modules_to_save=["head"]), "tied"),
    "buffers that train": (
        Model(torch.nn.Linear(8, 8), norm=torch.nn.BatchNorm1d(8)),
        dict(target_modules=["first"], modules_to_save=["norm"]), "running_mean",
    ),
    "no gradient": (Model(Frozen(8, 8)), dict(target_parameters=["first.weight"]), "no gradient reaches 2 adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSED)
def test_what_would_go_wrong_silently(case):
    model, config, message = MISUSED[case]
    with pytest.raises(AdaptError, match=message):
        autopar.plan(model, "dp=2", {"x": torch.randn(4, 8)}, adapt=[LoRA(r=2, **config)])


def test_the_defaults_of_peft():
    config = LoRA(
        target_modules="all-linear", modules_to_save=None, target_parameters=None, rank_pattern=None, alpha_pattern=None
    )
    assert config == LoRA(target_modules="all-linear")


@pytest.mark.parametrize("adapt", ["lora", 3, [3], [LoRA(target_modules=["a"])] * 2, LoRA])
def test_not_adaptations(adapt):
    with pytest.raises(AdaptError):
        order.checked(adapt)


def test_text():
    found = parse(LoRA, "r=16, lora_alpha=32,target_modules=q_proj+v_proj,use_dora=true", lora_dropout=0.5)
    assert found == LoRA(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], use_dora=True, lora_dropout=0.5)
    assert parse(LoRA, "", target_modules="all-linear").target_modules == "all-linear"
    found = parse(LoRA, "target_modules=q_proj,layers_to_transform=0+1,init_lora_weights=gaussian,lora_alpha=1e1")
    assert (found.target_modules, found.layers_to_transform) == (["q_proj"], [0, 1])
    assert parse(LoRA, "target_modules=.*_proj").target_modules == ".*_proj"
    assert (found.init_lora_weights, found.lora_alpha) == ("gaussian", 10.0)
    for text, message in (("rank=3", "no 'rank'"), ("r", "no 'r'"), ("r=many", "a number"),
                          ("use_dora=1", "true or false"), ("rank_pattern=a", "in a program"),
                          ("layers_to_transform=a", "numbers")):  # fmt: skip
        with pytest.raises(AdaptError, match=message):
            parse(LoRA, text, target_modules=["q_proj"])
