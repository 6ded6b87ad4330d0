"""Taking over a trained `nn.MultiheadAttention`: the same projections under this library's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retreever.checks import reject
from retreever.nn.blocks import AttentionBlock


def multihead_arguments(attention: nn.MultiheadAttention) -> dict[str, Any]:
    """The settings of a bare attention block that computes what `attention` computes."""
    if not isinstance(attention, nn.MultiheadAttention):
        reject("attention", "an nn.MultiheadAttention", type(attention).__name__)
    if attention.kdim != attention.vdim:
        reject("attention", "kdim equal to vdim", f"kdim={attention.kdim}, vdim={attention.vdim}")
    if attention.bias_k is not None or attention.add_zero_attn:
        reject("attention", "no add_bias_kv and no add_zero_attn", "one of them")
    return {
        "dim": attention.embed_dim,
        "heads": attention.num_heads,
        "kdim": attention.kdim,
        "hidden": 0,
        "residual": "none",
        "dropout": attention.dropout,
        "bias": attention.in_proj_bias is not None,
    }


@torch.no_grad()
def copy_multihead(attention: nn.MultiheadAttention, block: AttentionBlock) -> None:
    """Copy the projections of `attention` into `block`."""
    dim = attention.embed_dim
    if attention.in_proj_weight is not None:
        q, kv = attention.in_proj_weight.split([dim, 2 * dim])
    else:
        assert attention.q_proj_weight is not None
        q, kv = attention.q_proj_weight, torch.cat([attention.k_proj_weight, attention.v_proj_weight])
    block.to_q.weight.copy_(q)
    block.to_kv.weight.copy_(kv)
    if attention.in_proj_bias is not None:
        block.to_q.bias.copy_(attention.in_proj_bias[:dim])
        block.to_kv.bias.copy_(attention.in_proj_bias[dim:])
    block.to_out.weight.copy_(attention.out_proj.weight)
    if attention.out_proj.bias is not None:
        block.to_out.bias.copy_(attention.out_proj.bias)
    else:
        block.to_out.bias.zero_()
