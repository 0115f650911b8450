"""A layer of experts of transformers by itself, in fp64: no part of it computes in float32, as whole models do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar import LoRA
from autopar.adapt import order


class Mixture(nn.Module):
    """A router over four experts of 16 inputs and 8 hidden, two for each token: (b, s, 16) -> (b, s, 16). Stacks are
    (4, o, i) with the `kind` "mixtral", (4, i, o) with "gpt_oss". `bias`: of the first expert's logit."""

    def __init__(self, kind: str, bias: float = 0.0):
        super().__init__()
        import transformers
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        torch.manual_seed(0)
        of, config = (
            (MixtralExperts, transformers.MixtralConfig)
            if kind == "mixtral"
            else (GptOssExperts, transformers.GptOssConfig)
        )
        small = config(hidden_size=16, intermediate_size=8, num_local_experts=4, experts_implementation="eager")
        small.swiglu_alpha, small.swiglu_limit = 1.702, 7.0
        self.router, self.experts = nn.Linear(16, 4), of(small)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.5)
        with torch.no_grad():
            self.router.bias[0] += bias
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        y = self.experts(tokens, index, weights).view_as(x)
        return dict(loss=y.square().mean(), y=y)


def with_adapters(model: nn.Module) -> list:
    """Attach LoRA of rank 2 to the stacks of `model.experts`, filled with numbers, and return it."""
    stacks = [f"experts.{name}" for name, parameter in model.experts.named_parameters() if parameter.ndim == 3]
    adapters = order.checked([LoRA(r=2, target_modules=[], target_parameters=stacks)])
    order.attach(model, adapters, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return adapters
