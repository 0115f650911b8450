import torch

import autopar
from tests.extension.library import gate, gate_backward

autopar.register_rule(gate, "... _, _ n -> ... n")
autopar.register_rule(gate_backward, "..., ... -> ...", linear=[0])
x, w = torch.randn(6, 5, 8).double(), torch.randn(8, 10).double()
autopar.check_rule(gate, x, w)
autopar.check_rule(gate_backward, torch.randn(6, 5, 10).double(), gate(x, w))
