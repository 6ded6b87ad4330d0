"""What users attach to a model counts, in training as in evaluation: wrappers, subclasses, hooks, adapters.

Kernels stand for layers only where these are exactly the plain ones. On a CPU most kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from retreever import Batch, PerceiverIO, ReTreever, TransformerCA, TreeCrossAttention
from retreever.models.retreever import Draws

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
# Sizes the kernels take: heads of 16, hidden layers that are multiples of the width.
# With "pre" every layer changes the output visibly, untrained as they are.
SIZES: dict[str, Any] = {"dim": 32, "heads": 2, "layers": 1, "hidden": 32, "residual": "pre"}
MODELS: dict[str, Callable[..., Any]] = {
    "transformer": lambda **more: ReTreever(**SIZES | more),
    "linformer": lambda **more: ReTreever(**SIZES | more, encoder="linformer", max_tokens=16),
    "chordmixer": lambda **more: ReTreever(**SIZES | more, encoder="chordmixer", max_tokens=16),
    "all tokens": lambda **more: TransformerCA(**SIZES | more),
    "perceiver": lambda **more: PerceiverIO(**SIZES | more, latents=3),
}
N, M = 7, 2
each_model = pytest.mark.parametrize("kind", MODELS)


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return MODELS[kind](**more)


def batch(device: str = "cpu") -> Batch:
    torch.manual_seed(1)
    xc, yc, xt, yt = (torch.randn(2, size, 1, device=device) for size in (N, N, M, M))
    return Batch(xc, yc, xt, yt)


def draws(device: str = "cpu") -> Draws:
    return Draws(torch.rand(2, M, 2, generator=torch.Generator().manual_seed(2)).to(device))


def outputs(model: Any, data: Batch, training: bool) -> Tensor:
    """What the model attends to, with the same path in training and in evaluation."""
    model.train(training)
    with torch.set_grad_enabled(training):
        memory = model.encode(data.xc, data.yc)
        if isinstance(model, ReTreever):
            return model.search(memory, data.xt, draws(data.xt.device.type).noise).output
        return model.answer(memory, data.xt).mean


def loss_and_gradients(model: Any, data: Batch) -> list[Tensor]:
    model.train().zero_grad()
    given = (draws(data.xt.device.type),) if isinstance(model, ReTreever) else ()
    loss = model.loss(data, *given).total
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max().clamp_min(1))))


def called(model: Any, data: Batch) -> list[str]:
    """Names of the submodules that are called, and so can be wrapped."""
    seen: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.add(name) or None)
        for name, module in model.named_modules()
        if name
    ]
    outputs(model, data, training=False)
    for handle in handles:
        handle.remove()
    return sorted(seen)


class Wrapper(nn.Module):
    """Someone's adapter: it calls the layer, changes what comes out, and hides the layer's attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.calls += 1
        out = self.inner(*inputs, **named)
        if not isinstance(out, Tensor):
            return out
        return out + 0.3 * torch.arange(out.shape[-1], device=out.device).sin()  # not undone by a norm


class Container(Wrapper):
    """A wrapper of something that has methods besides `forward`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def with_wrapper(model: Any, name: str) -> Wrapper:
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    inner = model.get_submodule(name)
    wrapper = Container(inner) if name == "attention" or name.startswith("distil") else Wrapper(inner)
    if isinstance(holder, nn.Sequential | nn.ModuleList):
        holder[int(child)] = wrapper
    else:
        setattr(holder, child, wrapper)
    return wrapper


def assert_alike(model: Any, plain: Any, data: Batch, tolerance: float = 1e-5) -> None:
    """Training, evaluation and plain torch agree, and so do losses and gradients."""
    trained, evaluated, exact = (
        outputs(*which) for which in ((model, data, True), (model, data, False), (plain, data, False))
    )
    assert close(trained, exact, tolerance) and close(evaluated, exact, tolerance)
    assert_gradients_alike(model, plain, data, tolerance)


def assert_gradients_alike(model: Any, plain: Any, data: Batch, tolerance: float) -> None:
    for ours, true in zip(loss_and_gradients(model, data), loss_and_gradients(plain, data), strict=True):
        assert close(ours, true, 10 * tolerance)


def wrap_each(kind: str, names: list[str], data: Batch, tolerance: float, whole: bool = True, **more: Any) -> None:
    """`whole` compares losses and gradients, too."""
    usual = outputs(make(kind, **more).to(data.xc.device), data, training=False)
    for name in names:
        model, plain = (make(kind, **m).to(data.xc.device) for m in (more, {"impl": "reference"}))
        wrapper, _ = with_wrapper(model, name), with_wrapper(plain, name)
        trained = outputs(model, data, training=True)
        assert wrapper.calls, f"{name} is bypassed in training"
        evaluated, exact = (outputs(each, data, training=False) for each in (model, plain))
        assert close(evaluated, exact, tolerance)
        if whole:
            assert close(trained, exact, tolerance)
            assert_gradients_alike(model, plain, data, tolerance)
        if not isinstance(wrapper, Container):
            assert not close(evaluated, usual), f"{name} changes nothing"


@each_model
def test_every_submodule_can_be_wrapped(kind: str) -> None:
    data = batch()
    names = called(make(kind), data)
    assert len(names) > 15
    heads = [name for name in names if name.startswith("head")]  # not seen by a search
    wrap_each(kind, [name for name in names if name not in heads], data, 1e-5)


@pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter")
def test_every_submodule_of_the_aggregator_can_be_wrapped_under_its_kernel() -> None:
    data = batch()
    names = called(make("transformer"), data)
    wrap_each("transformer", [name for name in names if "aggregator" in name], data, 1e-4, False, impl="triton")


@pytest.mark.gpu
@each_model
def test_every_submodule_can_be_wrapped_on_a_gpu(kind: str) -> None:
    data = batch("cuda")
    names = called(make(kind).cuda(), data)
    wrap_each(kind, [name for name in names if not name.startswith("head")], data, 1e-4)


IMPLS = ["auto"] + (["triton"] if INTERPRETING else [])
each_impl = pytest.mark.parametrize("impl", IMPLS)


class Shifted(nn.Linear):
    """A subclass that computes something else with the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1000


@each_impl
@pytest.mark.parametrize("place", ["attention.block", "attention.aggregator.layer", "encoder.layers.0"])
def test_a_subclass_of_linear_is_what_is_trained(impl: str, place: str) -> None:
    model, plain = make("transformer", impl=impl), make("transformer", impl="reference")
    for each in (model, plain):
        block = each.get_submodule(place)
        twin = Shifted(block.dim, block.dim)
        twin.load_state_dict(block.to_out.state_dict())
        block.to_out = twin
    assert_alike(model, plain, batch(), 1e-4)


@each_impl
def test_a_feed_forward_of_ones_own_is_what_is_trained(impl: str) -> None:
    model, plain = make("transformer", impl=impl), make("transformer", impl="reference")
    torch.manual_seed(3)
    for place in ("attention.block", "attention.aggregator.layer", "encoder.layers.0"):
        own = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 32))
        for each in (model, plain):
            each.get_submodule(place).feed_forward = copy.deepcopy(own)
    assert_alike(model, plain, batch(), 1e-4)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@each_impl
def test_parametrized_weights_are_what_is_trained(impl: str) -> None:
    model, plain = make("transformer", impl=impl), make("transformer", impl="reference")
    for each in (model, plain):
        for place in ("attention.aggregator.layer.to_q", "attention.aggregator.layer.norm", "encoder.layers.0.to_out"):
            parametrize.register_parametrization(each.get_submodule(place), "weight", Doubled())
    assert_alike(model, plain, batch(), 1e-4)
    assert not close(outputs(model, batch(), False), outputs(make("transformer"), batch(), False))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the first layers have no inputs with gradients
@each_impl
@each_model
def test_hooks_fire_in_training_and_in_evaluation(impl: str, kind: str) -> None:
    if impl == "triton" and kind != "transformer":
        pytest.skip("one model in the interpreter is enough")
    data, model = batch(), make(kind, impl=impl)
    names = called(make(kind), data)
    forward: set[str] = set()
    backward: set[str] = set()
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: forward.add(name) or None)
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_full_backward_hook(lambda *_, name=name: backward.add(name) or None)
    outputs(model, data, training=False)
    assert forward == {*names}
    forward.clear()
    loss_and_gradients(model, data)
    heads = {name for name in names if name.startswith("head")}
    assert {*names} <= forward | heads  # a loss calls the layers of a head, not the head
    layers = {n for n in names if isinstance(make(kind).get_submodule(n), nn.Linear | nn.LayerNorm)}
    assert layers <= backward


@each_impl
def test_hooks_on_all_modules_of_the_program_are_seen(impl: str) -> None:
    model, seen = make("transformer", impl=impl), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module) or None)
    try:
        outputs(model, batch(), training=False)
    finally:
        handle.remove()
    assert model.attention.aggregator.layer.to_q in seen


@each_impl
@each_model
def test_every_adapter_of_lora_is_trained(impl: str, kind: str) -> None:
    peft = pytest.importorskip("peft")
    if impl == "triton" and kind != "transformer":
        pytest.skip("one model in the interpreter is enough")
    data, model, plain = batch(), make(kind, impl=impl), make(kind, impl="reference")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for each in (model, plain):
        torch.manual_seed(4)
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        peft.inject_adapter_in_model(config, each)
    loss_and_gradients(model, data)
    adapters = {name: p for name, p in model.named_parameters() if "lora" in name}
    assert len(adapters) == 2 * len(names)
    assert [name for name, p in adapters.items() if p.grad is None or not p.grad.any()] == []
    assert_alike(model, plain, data, 1e-6 if impl == "auto" else 1e-4)  # gradients to ten times that


@pytest.mark.filterwarnings("ignore")  # torch is about to move this elsewhere
@each_model
def test_int8_models_predict(kind: str) -> None:
    model, data = make(kind).eval(), batch()
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert sum("quantized" in type(module).__module__ for module in small.modules()) > 10
    with torch.inference_mode():
        exact, rough = (each.predict(data.xc, data.yc, data.xt).mean for each in (model, small))
    assert float((exact - rough).abs().max()) < 0.2 * float(exact.abs().max() + 1)


@each_impl
@pytest.mark.parametrize("aggregator", ["transformer", "mean"])
def test_a_tree_can_be_built_under_activation_checkpointing(impl: str, aggregator: Any) -> None:
    torch.manual_seed(0)
    tca = TreeCrossAttention(32, 2, aggregator=aggregator, impl=impl)  # type: ignore[arg-type]
    context, query = torch.randn(2, N, 32, requires_grad=True), torch.randn(2, M, 32, requires_grad=True)
    mask = torch.arange(N) < torch.tensor([[N], [4]])
    noise = draws().noise

    def gradients(saving: bool) -> list[Tensor]:
        tree = checkpoint(tca.build, context, mask, use_reentrant=False) if saving else tca.build(context, mask)
        found = tca(query, tree, noise)
        loss = found.output.square().sum() + found.log_prob.sum()
        return list(
            torch.autograd.grad(loss, [context, query, *tca.parameters()], allow_unused=True, materialize_grads=True)
        )

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert close(one, other)


def test_a_whole_model_trains_under_activation_checkpointing() -> None:
    data, model = batch(), make("transformer")
    usual = loss_and_gradients(model, data)
    model.zero_grad()
    loss = checkpoint(model.loss, data, draws(), use_reentrant=False).total
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    assert all(close(one, other) for one, other in zip(found, usual, strict=True))
