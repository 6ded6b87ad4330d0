"""Tree attention on the CPU through Numba: CPU tensors of float32 or float64.

Plain tensors go straight to the compiled kernels: for one query the machinery of custom ops would take tens of times
longer than the search. Under torch.compile, with fake tensors and inside modes the custom ops are called.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retreever.ops.search.backward_numba import backward_nodes, backward_scores
from retreever.ops.search.forward_numba import forward
from retreever.ops.search.inputs import SearchInputs
from retreever.ops.search.lanes_numba import LANES
from retreever.ops.search.memory_numba import ROOM
from retreever.ops.search.single_numba import forward_single
from retreever.ops.search.threads_numba import Entries, share
from retreever.tree.plan import TreePlan

_SCHEMA = (
    "(Tensor q, Tensor keys, Tensor values, Tensor? node_mask, Tensor? noise, Tensor? choices,"
    " int branch, int depth, int block) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad_output, Tensor? grad_log_prob, Tensor? grad_entropy, Tensor q, Tensor keys, Tensor values,"
    " Tensor? node_mask, Tensor path, Tensor output, Tensor lse, int branch, int depth, int block)"
    " -> (Tensor, Tensor, Tensor)"
)
# Multiply-adds a thread must get before it is worth waking: it comes 25 us late and costs the caller 15 us.
GRAIN = 200_000
_FORWARD = Entries(forward, 11, 4, 4, 6)
_SINGLE = Entries(forward_single, 7, 4, 5)
_BACKWARD_SCORES = Entries(backward_scores, 13, 4, 4, 6)
_BACKWARD_NODES = Entries(backward_nodes, 7, 7)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# What code made by torch.compile allocates with takes half the time.
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _empty)
# Looked up once: on the way to one query every dot in a name counts.
_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_int64 = torch.int64


def search_numba(inputs: SearchInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, path, log_prob and entropy of every query."""
    q, keys, values, plan, node_mask, noise, choices = inputs
    if (
        _compiling()
        or not (type(q) is type(keys) is type(values) is Tensor)  # fake tensors, parameters, users' own classes
        or _dispatch_modes()
        or _transforms()
    ):
        return _forward_op(q, keys, values, node_mask, noise, choices, plan.branch, plan.depth, plan.block)[:4]
    if _grad_enabled() and (q.requires_grad or keys.requires_grad or values.requires_grad):
        return _Direct.apply(q, keys, values, node_mask, noise, choices, plan.branch, plan.depth, plan.block)[:4]
    if node_mask is None and noise is None and choices is None:
        found = _single(q, keys, values, plan)
        if found is not None:
            return found
    return _forward(None, q, keys, values, node_mask, noise, choices, plan.branch, plan.depth, plan.block)


def _single(q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """One query per row for a few rows, or None where that takes more than a straight walk."""
    b, m, h, e = q.shape
    strides = keys.stride()
    alike = strides == values.stride() and strides[3] == 1
    if not (m == 1 and alike and b <= LANES >= h and plan.tokens < ROOM and q.is_contiguous()):
        return None
    dtype, rows, ones, width = q.dtype, (b, 1), (1, 1), h * e
    output = _empty((b, 1, h, e), (width, width, e, 1), dtype)
    path, log_prob, entropy = _empty(rows, ones, _int64), _empty(rows, ones, dtype), _empty(rows, ones, dtype)
    tensors = (
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        output.data_ptr(),
        path.data_ptr(),
        log_prob.data_ptr(),
        entropy.data_ptr(),
    )
    entry, real = _SINGLE[dtype]
    entry(tensors, strides, (h, e, plan.branch, plan.depth, plan.block), b, 0, real)
    return output, path, log_prob, entropy


def _forward(
    lse: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    noise: Tensor | None,
    choices: Tensor | None,
    branch: int,
    depth: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, m, h, e = q.shape
    dtype, queries, rows = q.dtype, (b, m), (m, 1)
    if not q.is_contiguous():
        q = q.contiguous()
    if (key_strides := keys.stride())[3] != 1:
        key_strides = (keys := keys.contiguous()).stride()
    if (value_strides := values.stride())[3] != 1:
        value_strides = (values := values.contiguous()).stride()
    node_mask = None if node_mask is None else node_mask.contiguous()
    noise = None if noise is None else noise.to(dtype).contiguous()
    choices = None if choices is None else choices.to(dtype).contiguous()
    output, path = _empty((b, m, h, e), q.stride(), dtype), _empty(queries, rows, _int64)
    log_prob, entropy = _empty(queries, rows, dtype), _empty(queries, rows, dtype)
    tensors = (q, keys, values, node_mask, noise, choices, output, path, log_prob, entropy, lse)
    sizes, work = (m, h, e, branch, depth, block), b * m * h * e * (branch * depth + block)
    _run(_FORWARD, dtype, (_addresses(*tensors), key_strides, value_strides, sizes), b * -(-m // LANES), work, tensors)
    return output, path, log_prob, entropy


def _forward_with_lse(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lse = inputs[0].new_empty(inputs[0].shape[:3])
    output, path, log_prob, entropy = _forward(lse, *inputs)
    return output, path, log_prob, entropy, lse


def _run(
    entries: Entries, dtype: torch.dtype, arguments: tuple[Any, ...], items: int, work: int, alive: Sequence[Any]
) -> None:
    """Compute all items of a kernel, with as many threads as torch uses where the work pays for waking them."""
    entry, real = entries[dtype]
    helpers = 0 if work < 2 * GRAIN else min(torch.get_num_threads(), items, work // GRAIN) - 1
    if helpers < 1:
        entry(*arguments, items, 0, real)
    else:
        share(entry, real, arguments, items, helpers, alive)


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    # A list is quicker than a generator.
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def _backward(
    grad_output: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    node_mask: Tensor | None,
    path: Tensor,
    output: Tensor,
    lse: Tensor,
    branch: int,
    depth: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    b, m, h, e = q.shape
    q, grad_output, output, path, lse = (x.contiguous() for x in (q, grad_output, output, path, lse))
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    node_mask = None if node_mask is None else node_mask.contiguous()
    if grad_log_prob is not None or grad_entropy is not None:
        given = (grad_log_prob, grad_entropy)
        grad_log_prob, grad_entropy = (q.new_zeros(b, m) if x is None else x.contiguous() for x in given)
    tiles = -(-m // LANES)
    lanes = -(-h * min(m, LANES) // LANES) * LANES
    shares, slopes = q.new_empty(2, b * tiles, branch * depth + block, lanes)
    grads = torch.empty_like(q), keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    work = b * m * h * e * (branch * depth + block)
    read = (q, keys, values, node_mask, path, output, lse, grad_output, grad_log_prob, grad_entropy)
    written = (grads[0], shares, slopes)
    sizes = (m, h, e, branch, depth, block)
    _run(
        _BACKWARD_SCORES,
        q.dtype,
        (_addresses(*read, *written), keys.stride(), values.stride(), sizes),
        b * tiles,
        2 * work,
        [*read, *written],
    )
    used = (q, grad_output, path, shares, slopes, grads[1], grads[2])
    groups = max(1, min(h, 2 * torch.get_num_threads() // max(b, 1), work // GRAIN))
    _run(_BACKWARD_NODES, q.dtype, (_addresses(*used), (*sizes, groups)), b * groups, 2 * work, [*used])
    return grads


_forward_op = torch.library.custom_op(
    "retreever::tree_attention_numba", _forward_with_lse, mutates_args=(), schema=_SCHEMA
)
_backward_op = torch.library.custom_op(
    "retreever::tree_attention_numba_backward", _backward, mutates_args=(), schema=_BACKWARD_SCHEMA
)


@_forward_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    path = q.new_empty(q.shape[:2], dtype=torch.int64)
    return q.new_empty(q.shape), path, q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2]), q.new_empty(q.shape[:3])


@_backward_op.register_fake
def _(_grad_output: Tensor, _log_prob: Any, _entropy: Any, q: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, keys, values, node_mask, _, _, *ctx.sizes = inputs
    out, path, _, _, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(path, lse)
    ctx.save_for_backward(q, keys, values, node_mask, path, out, lse)


def _gradients(backward: Callable[..., Any], ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    output, _, log_prob, entropy, _ = grads
    saved = ctx.saved_tensors
    if output is None:
        output = torch.zeros_like(saved[0])
    return *backward(output, log_prob, entropy, *saved, *ctx.sizes), None, None, None, None, None, None


_forward_op.register_autograd(partial(_gradients, _backward_op), setup_context=_setup)


class _Direct(torch.autograd.Function):
    """The custom op without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward_with_lse(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # With create_graph the op goes into the graph: it has no derivative, and says so when one is asked for.
        return _gradients(_backward_op if torch.is_grad_enabled() else _backward, ctx, *grads)
