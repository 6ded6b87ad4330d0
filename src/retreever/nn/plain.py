"""Whether a layer is exactly the plain one, so that a kernel given its tensors computes the same as calling the layer.

Subclasses, wrappers, adapters, and layers with hooks or parametrizations, quantised, sharded or compiled, are not
plain: these are called as they are.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

from retreever.nn.blocks import AttentionBlock, FeedForward
from retreever.ops.aggregate.weights import LayerWeights, ProjectionWeights

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EPSILON = 1e-5  # of `nn.LayerNorm`, and of the kernels


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling `module` does what `kind` does with its parameters, and nothing else."""
    return (
        type(module) is kind
        and not any(getattr(module, hooks) for hooks in HOOKS)
        and "forward" not in vars(module)
        and getattr(module, "_compiled_call_impl", None) is None
        and all(parameter is None or type(parameter) is nn.Parameter for parameter in module._parameters.values())
        and not torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def plain_layer(block: nn.Module) -> LayerWeights | None:
    """The weights of a transformer layer whose parts are all plain; None otherwise, and where dropout is active."""
    if not is_plain(block, AttentionBlock):
        return None
    assert isinstance(block, AttentionBlock)
    feed = block.feed_forward
    covered = (block.residual, block.shared_norm) in (("pre", True), ("normalised", False))
    if not (covered and block.context_norm is None and is_plain(feed, FeedForward)):
        return None
    assert isinstance(feed, FeedForward)
    linears = (block.to_q, block.to_kv, block.to_out, feed.up, feed.down)
    norms = (block.norm, block.feed_norm)
    if not all(is_plain(part, nn.Linear) for part in linears) or not is_plain(feed.dropout, nn.Dropout):
        return None
    if (block.training and block.dropout) or (feed.dropout.training and feed.dropout.p):
        return None
    if not all(is_plain(part, nn.LayerNorm) and part.eps == EPSILON for part in norms):
        return None
    if block.to_q.bias is not None or block.to_kv.bias is not None:
        return None
    after = (block.to_out, block.feed_norm, feed.up, feed.down)
    tensors = [block.norm.weight, block.norm.bias, block.to_q.weight, block.to_kv.weight]
    tensors += [tensor for part in after for tensor in (part.weight, part.bias)]
    if any(tensor is None for tensor in tensors):
        return None
    return LayerWeights(*tensors, heads=block.heads, pre=block.residual == "pre")


def plain_projection(block: AttentionBlock) -> ProjectionWeights | None:
    """The weights by which `block` makes keys and values, if it has a norm for them and both parts are plain."""
    norm = block.norm if block.shared_norm else block.context_norm
    if not (is_plain(block, AttentionBlock) and is_plain(norm, nn.LayerNorm) and is_plain(block.to_kv, nn.Linear)):
        return None
    assert isinstance(norm, nn.LayerNorm)
    if block.to_kv.bias is not None or norm.eps != EPSILON or norm.weight is None or norm.bias is None:
        return None
    return ProjectionWeights(norm.weight, norm.bias, block.to_kv.weight)
