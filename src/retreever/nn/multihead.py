"""Settings and weights of trained attention, for an `AttentionBlock` that computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retreever.arguments import reject
from retreever.nn.blocks import AttentionBlock


def multihead_arguments(attention: nn.MultiheadAttention) -> dict[str, Any]:
    """The settings of a bare attention block that computes what `attention` computes."""
    if not isinstance(attention, nn.MultiheadAttention):
        reject("attention", "an nn.MultiheadAttention", type(attention).__name__)
    if not attention.batch_first:
        reject("attention", "batch_first=True, since queries and context here are (b, n, d)", "batch_first=False")
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
    weights = dict(attention.named_parameters())
    if "in_proj_weight" in weights:
        q, kv = weights["in_proj_weight"][:dim], weights["in_proj_weight"][dim:]
    else:  # kdim differs from embed_dim
        q, kv = weights["q_proj_weight"], torch.cat([weights["k_proj_weight"], weights["v_proj_weight"]])
    block.to_q.weight.copy_(q)
    block.to_kv.weight.copy_(kv)
    if "in_proj_bias" in weights:
        block.to_q.bias.copy_(weights["in_proj_bias"][:dim])
        block.to_kv.bias.copy_(weights["in_proj_bias"][dim:])
    block.to_out.weight.copy_(weights["out_proj.weight"])
    block.to_out.bias.copy_(weights.get("out_proj.bias", torch.zeros_like(block.to_out.bias)))


def block_arguments(block: AttentionBlock) -> dict[str, Any]:
    """The settings of a module with a block like this one, without dropout."""
    return {
        "dim": block.dim,
        "heads": block.heads,
        "kdim": block.kdim,
        "hidden": 0 if block.feed_forward is None else block.feed_forward.down.in_features,
        "residual": block.residual,
        "bias": block.to_q.bias is not None,
        "impl": block.impl,
    }
