"""What each family of training kernels is worth: one training step with and without it, beside torch.compile.

    python -m retreever.bench.ablation TASK DEVICE FILE [DATA]

times a step of one task (copy, gp, emnist, activity) in every variant, in turn, and writes a JSON file. A variant is
the search in plain torch or in its kernel, some families of layer kernels, and what of the model torch.compile gets:
nothing, the whole loss, its parts one by one, or encoder and read-out as two graphs ("split").
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retreever.bench.timing import Call, Limits, time_together
from retreever.cpu import numba_here
from retreever.models.retreever import ReTreever
from retreever.nn import blocks, dropout, fused_attention, fused_block, layer_norm
from retreever.recipes.options import RECIPES
from retreever.train.engine import Trainer
from retreever.tree import aggregate

FAMILIES = ("attention", "layer", "aggregation", "norm", "weights", "cpu rows")
ALL = frozenset(FAMILIES)


@torch.library.custom_op("retreever::attention_op", mutates_args=())
def attention_op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    class Ctx:
        def save_for_backward(self, *t: Any) -> None:
            self.saved = t

    ctx = Ctx()
    out = fused_attention.FusedAttention.forward(ctx, q, k, v, mask)
    return out, ctx.saved[5]


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    b, m, h, e = q.shape
    return q.new_empty(b, m, h, e), q.new_empty(b, h, m, dtype=torch.float32)


@torch.library.custom_op("retreever::attention_op_backward", mutates_args=())
def attention_op_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    class Ctx:
        saved_tensors = tuple(
            t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, mask, out, lse)
        )

    grads = fused_attention.FusedAttention.backward(Ctx(), g)
    return grads[0], grads[1], grads[2]


@attention_op_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _back(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    return *attention_op_backward(g, *ctx.saved_tensors), None


attention_op.register_autograd(_back, setup_context=_setup)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    if dropout == 0.0 and q.is_cuda and torch.is_grad_enabled():
        return attention_op(q, keys, values, mask)[0]
    chosen = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=chosen, dropout_p=dropout
    )
    return out.transpose(1, 2)


def plain_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    chosen = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=chosen, dropout_p=dropout
    )
    return out.transpose(1, 2)


def plain_weight_gradients(layers: Any, norm: Tensor | None = None) -> list[Tensor]:
    found = []
    for slope, source, bias in layers:
        found.append(slope.t() @ source)
        if bias:
            found.append(slope.sum(dim=0))
    return found if norm is None else [*found, norm.sum(dim=0)]


def build(model: nn.Module, families: frozenset[str], impl: str, compiled: str) -> nn.Module:
    """Switch the families of a model that are switched by attributes; compile its parts where wanted."""
    for module in model.modules():
        if isinstance(module, layer_norm.LayerNorm | dropout.Dropout):
            module.fused = "norm" in families
        if isinstance(module, blocks.FeedForward):
            module.fused = "norm" in families or "cpu rows" in families
        if isinstance(module, blocks.MLP):
            module.fused = "cpu rows" in families
        if isinstance(module, blocks.AttentionBlock):
            module.fused = "layer" in families
    for module in model.modules():
        if isinstance(module, aggregate.TransformerAggregator):
            module.fused = module.layer.fused = "aggregation" in families
    if isinstance(model, ReTreever):
        model.attention.impl = impl
    if compiled == "parts":
        _compile_parts(model)
    if compiled == "split":
        _compile_split(model)
    return model


def _compile_parts(model: Any) -> None:
    model.encoder.compile()
    model.attention.aggregator.compile()
    model.head.net.compile()
    model.embed.context = torch.compile(model.embed.context)
    model.embed.query = torch.compile(model.embed.query)
    block = model.attention.block
    block.start, block.key_values = torch.compile(block.start), torch.compile(block.key_values)
    block.finish = torch.compile(block.finish)


def _compile_split(model: Any) -> None:
    model.encode = torch.compile(model.encode)
    model.attention.with_leaves = torch.compile(model.attention.with_leaves)
    model.head.net.compile()


@contextmanager
def switched(families: frozenset[str], compiled: str) -> Iterator[None]:
    """The families that are switched globally."""
    from retreever.ops import api

    saved = (blocks.attention, api.attention, numba_here.numba_runs, blocks.drop)
    use = _attention if compiled and "attention" in families else fused_attention.attention
    if "attention" not in families:
        use = plain_attention
    blocks.attention = api.attention = use
    kernel: Any = None
    if torch.cuda.is_available():
        from retreever.nn import weight_kernel as kernel
        from retreever.tree import fused_level

        if not hasattr(kernel, "_own"):
            kernel._own = kernel.weight_gradients
        chosen = kernel._own if "weights" in families else plain_weight_gradients
        kernel.weight_gradients = fused_level.weight_gradients = chosen
    if "cpu rows" not in families:
        numba_here.numba_runs = lambda: False
    if "norm" not in families:
        blocks.drop = lambda x, p: F.dropout(x, p) if p else x
    try:
        yield
    finally:
        blocks.attention, api.attention, numba_here.numba_runs, blocks.drop = saved


def variants(device: str) -> dict[str, tuple[str, frozenset[str], str]]:
    """Backend of the search, families, what is compiled; by name."""
    none: frozenset[str] = frozenset()
    here = [f for f in FAMILIES if (f != "cpu rows" if device == "cuda" else f in ("aggregation", "norm", "cpu rows"))]
    found = {"plain": ("reference", none, ""), "search": ("auto", none, "")}
    for family in here:
        if family != "weights":  # a part of two others
            needed = {"weights"} if family in ("layer", "aggregation") else none
            found[f"search + {family}"] = ("auto", frozenset([family]) | needed, "")
    found["all"] = ("auto", ALL, "")
    found |= {f"all - {family}": ("auto", ALL - {family}, "") for family in here}
    for how in ("whole", "parts", "split"):
        found[f"plain, compiled {how}"] = ("reference", none, how)
        found[f"search, compiled {how}"] = ("auto", none, how)
        if device == "cuda":
            found[f"search + attention, compiled {how}"] = ("auto", frozenset(["attention"]), how)
    return found


def measure(task_name: str, device: str, file: Path, data: Path | None) -> None:
    """Time all variants and write the file; what fails to compile is in it with its error."""
    settings = RECIPES[task_name]()
    if task_name == "copy":
        small = device == "cpu"
        settings = replace(settings, n=64 if small else 256, batch=64 if small else 128)  # type: ignore[call-arg]
    elif device == "cpu":
        settings = replace(settings, batch=16)
    settings = settings.resolved()
    task = settings.make_task(data)
    methods: dict[str, list[Call]] = {}
    errors: dict[str, str] = {}
    for name, (impl, families, compiled) in variants(device).items():
        torch.manual_seed(0)
        model = build(settings.make_model().to(device), families, impl, compiled)
        trainer = Trainer(model, task, replace(settings.train_config(), compile=compiled == "whole"), device)  # type: ignore[arg-type]

        def step(trainer: Trainer = trainer, families: frozenset[str] = families, compiled: str = compiled) -> None:
            with switched(families, compiled):
                trainer.launch()

        started = time.time()
        try:
            step()
            step()
            methods[name] = [step]
        except Exception as error:
            errors[name] = f"{type(error).__name__} {error}"[:2000]
        print(
            f"{task_name}, {name}: {'failed' if name in errors else 'ready'}, {time.time() - started:.0f} s", flush=True
        )
    _take_turns(task_name)
    timings = time_together(methods, torch.device(device), "eager", Limits(41, 24 if device == "cuda" else 150))
    rows = {name: timing.to_json() for name, timing in timings.items()}
    found = {"task": task_name, "batch": settings.batch, "rows": rows, "errors": errors, "torch": torch.__version__}
    file.write_text(json.dumps(found, indent=1) + "\n")
    for name, timing in timings.items():
        print(f"{task_name:9s} {name:40s} {1e3 * timing.seconds:8.3f} ms")


def _take_turns(name: str) -> None:
    """With BARRIER=COUNT:FOLDER, wait until COUNT processes have compiled, then for the others to be timed."""
    if "BARRIER" not in os.environ:
        return
    count, folder = os.environ["BARRIER"].split(":")
    Path(folder, name).touch()
    limit = time.time() + 400
    while len(os.listdir(folder)) < int(count) and time.time() < limit:
        time.sleep(0.2)
    fcntl.flock(os.open(f"{folder}.lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


if __name__ == "__main__":
    where = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]), where)
