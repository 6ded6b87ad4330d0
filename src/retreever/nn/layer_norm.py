"""Layer norm, trained by fused kernels on CUDA; everywhere else it is torch's own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retreever.nn.triton_here import triton_installed


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last axis; `fused = False` leaves gradients to torch everywhere."""

    fused = True

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        train = self.fused and x.is_cuda and torch.is_grad_enabled()
        if not train or torch.compiler.is_compiling() or not triton_installed():
            return super().forward(x)
        from retreever.nn.layer_norm_kernel import FusedLayerNorm, fits

        # Under autocast torch normalises in float32 and so does this.
        tokens = x.float() if torch.is_autocast_enabled("cuda") else x
        if not fits(tokens):
            return super().forward(x)
        function: Any = FusedLayerNorm
        normed: Tensor = function.apply(tokens, self.weight, self.bias, self.eps)
        return normed
