"""`fit` for people: DataLoaders and lists, best weights, folders, validation, calls of the model, DDP, chunks."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from retreever import Batch, InputError, ReTreever, TransformerCA, collate
from retreever.errors import ConfigError
from retreever.models.retreever import Draws
from retreever.train import TrainConfig, evaluate, fit
from retreever.train.protocols import Progress

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
CONFIG = TrainConfig(steps=6, batch=1, lr=1e-2, warmup=0, evaluate_every=2)


def rows(count: int, seed: int = 0) -> list[Batch]:
    """Lines with a random slope, contexts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        x, slope = torch.rand(1, 9 + index % 3, 1, generator=generator), torch.randn(1, 1, 1, generator=generator)
        found.append(Batch(x[:, :6], slope * x[:, :6], x[:, 6:], slope * x[:, 6:]))
    return found


def model(seed: int = 0, kind: Any = ReTreever) -> Any:
    torch.manual_seed(seed)
    return kind(**SIZES)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_list_and_a_data_loader_of_the_same_batches_train_alike() -> None:
    batches = [collate(rows(3, seed)) for seed in range(4)]
    loader = DataLoader([row for seed in range(4) for row in rows(3, seed)], batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
    plain = [(b.xc, b.yc, b.xt, b.yt, b.context_mask, b.target_mask) for b in batches]
    one, other, third = model(), model(), model()
    assert fit(one, batches, CONFIG) == [] and fit(other, loader, CONFIG) == [] and fit(third, plain, CONFIG) == []
    assert same(one, other) and same(one, third) and not same(one, model())


def test_batches_come_again_when_they_end_and_a_spent_generator_is_named() -> None:
    taken = []

    class Counted(list[Batch]):
        def __iter__(self) -> Any:
            taken.append(1)
            return super().__iter__()

    fit(model(), Counted(rows(2)), CONFIG)
    assert len(taken) == 3
    with pytest.raises(InputError, match=r"^data: expected batches in every pass"):
        fit(model(), iter(rows(2)), CONFIG)


def test_the_best_weights_are_kept() -> None:
    """Training towards one slope and validating on another gets worse, so the first look is the best."""
    batches, other = rows(4), rows(4, seed=9)
    far = [Batch(b.xc, b.yc, b.xt, b.yt + 50) for b in other]
    best, last, short = model(), model(), model()
    config = TrainConfig(steps=8, batch=1, lr=3e-2, warmup=0, schedule="constant", evaluate_every=2)
    history = fit(best, batches, config, validation=far)
    metrics = [record.metric for record in history]
    fit(last, batches, config, validation=far, keep="last")
    wanted = metrics.index(max(metrics))
    fit(short, batches, TrainConfig(**{**config.__dict__, "steps": 2 * (wanted + 1)}), keep="last")
    assert same(best, short) and (same(best, last) == (wanted == len(metrics) - 1))


def test_a_run_with_a_folder_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, stopped = model(), model()
    config = TrainConfig(steps=6, batch=1, lr=1e-2, warmup=0, evaluate_every=2, save_every=2)
    batches, far = rows(2), rows(2, 5)
    fit(whole, batches, config, validation=far, keep="last")

    def stop(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(stopped, batches, config, validation=far, folder=tmp_path / "run", watch=stop, keep="last")
    fresh = model(seed=3)  # its weights come from the checkpoint
    history = fit(fresh, batches, config, validation=far, folder=tmp_path / "run", keep="last")
    assert same(fresh, whole) and [record.step for record in history] == [2, 4, 6]


@pytest.mark.parametrize("saved", [3, 5, 7])  # in the first pass, at its end, in the second
@pytest.mark.parametrize("looks", [False, True])
def test_a_shuffled_loader_goes_on_where_it_stopped(tmp_path: Path, saved: int, looks: bool) -> None:
    """With and without validation; the rows of a pass come once each, and the passes in different orders."""
    seen: list[float] = []

    class Watched(list[Batch]):
        def __getitem__(self, index: Any) -> Any:
            seen.append(float(super().__getitem__(index).xc[0, 0, 0]))
            return super().__getitem__(index)

    config = TrainConfig(steps=11, batch=1, lr=1e-2, warmup=0, evaluate_every=4, save_every=saved)
    validation = rows(2, 5) if looks else None

    def run(net: Any, **more: Any) -> list[float]:
        seen.clear()
        loader = DataLoader(Watched(rows(5)), shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
        fit(net, loader, config, validation=validation, keep="last", **more)
        return seen[:]

    whole = model()
    order = run(whole)
    assert len(order) == 11 and len(set(order[:5])) == 5 and order[:5] != order[5:10]

    def halt(progress: Progress) -> None:
        if progress.step == saved + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model(), folder=tmp_path / "run", watch=halt)
    torch.rand(3)
    fresh = model(seed=3)
    again = run(fresh, folder=tmp_path / "run")
    assert again == order[(saved - 1) // 5 * 5 :] and same(fresh, whole)  # the pass again, up to where it was
    assert run(model(seed=4), folder=tmp_path / "run") == []  # a finished run stays as it is


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """Finished or not; kernels may differ, and folders of versions that did not say which model go on."""
    fit(model(), rows(2), CONFIG, folder=tmp_path / "run")
    for other in (ReTreever(**SIZES, order="given"), TransformerCA(**SIZES), ReTreever(**SIZES | {"heads": 4})):
        with pytest.raises(ConfigError, match=r"^resume: expected the settings of .*model="):
            fit(other, rows(2), CONFIG, folder=tmp_path / "run")
    fit(ReTreever(**SIZES, impl="reference"), rows(2), CONFIG, folder=tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    saved = json.loads(file.read_text())
    assert saved.pop("model")["kind"] == "ReTreever"
    file.write_text(json.dumps(saved))
    fit(model(), rows(2), CONFIG, folder=tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    with pytest.raises(ConfigError, match=r"^folder: expected a new folder or a run"):
        fit(model(), rows(2), CONFIG, folder=tmp_path / "mine")


def test_the_bar_shows_a_running_mean(capsys: pytest.CaptureFixture[str]) -> None:
    fit(model(), rows(2), CONFIG, progress=True)
    assert "step 6/6  loss " in capsys.readouterr().err
    fit(model(), rows(2), CONFIG)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": 5}, "data: expected a task, a DataLoader or an iterable"),
        ({"data": rows(1)[0]}, "data: expected a task, a DataLoader or an iterable"),
        ({"data": [3]}, "data: expected items that are a Batch or a tuple"),
        ({"validation": []}, "validation: expected at least one batch"),
        ({"keep": "all"}, "keep: expected one of best, last"),
        ({"folder": 3}, "folder: expected a path, got int"),
        ({"watch": 3}, "watch: expected a function of a step's progress, got int"),
        ({"progress": "x"}, "progress: expected True or False, got 'x'"),
        ({"validation": [replace(rows(1)[0], yt=rows(1)[0].yt[:, :1])]}, r"yt: expected shape \(b=1, m=3, dy\)"),
        ({"data": [(1, 2)]}, r"data: expected items that are a Batch or a tuple of tensors .*, got tuple \(int, int\)"),
        ({"validation": rows(1)[0]}, "validation: expected an iterable of batches, got Batch"),
        ({"metric": "accuracy"}, "metric: expected a function"),
        ({"model": nn.Linear(2, 2)}, "model: expected a model of this library"),
        ({"data": [rows(1)[0].rows(slice(0))]}, "data: expected batches of at least one row and one context point"),
        (
            {"data": [replace(rows(1)[0], xc=torch.rand(1, 0, 1), yc=torch.rand(1, 0, 1))]},
            "data: expected batches of at",
        ),
    ],
)
def test_what_is_no_data_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        fit(**{"model": model(), "data": rows(2), "config": CONFIG} | wrong)


def test_batches_of_one_s_own_are_scored_by_their_likelihood() -> None:
    net, batches = model(), rows(3)
    history = fit(net, batches, CONFIG, validation=batches, keep="last")
    assert evaluate(net, None, batches) == pytest.approx(history[-1].metric)
    with pytest.raises(InputError, match=r"^task: expected a task, or None"):
        evaluate(net, batches, batches)  # type: ignore[arg-type]


def test_the_width_that_is_wrong_is_named() -> None:
    batch, net = rows(1)[0], ReTreever(dim_x=2, **SIZES)
    with pytest.raises(InputError, match=r"^xc: expected shape \(b, n, dx=2\)"):
        net.loss(Batch(batch.xc, batch.yc, batch.xt.repeat(1, 1, 2), batch.yt))
    with pytest.raises(InputError, match=r"^yc: expected floats .* got torch.int64"):
        model().loss(Batch(batch.xc, batch.yc.long(), batch.xt, batch.yt))


@pytest.mark.parametrize("kind", [ReTreever, TransformerCA])
def test_calling_a_model_gives_losses_of_batches_and_predictions_of_points(kind: Any) -> None:
    net, batch = model(kind=kind).eval(), rows(1)[0]
    assert torch.equal(net(batch).total, net.loss(batch).total)
    assert torch.equal(net((batch.xc, batch.yc, batch.xt, batch.yt)).total, net.loss(batch).total)
    assert torch.equal(net(batch.xc, batch.yc, batch.xt).mean, net.predict(batch.xc, batch.yc, batch.xt).mean)
    with pytest.raises(InputError, match=r"^batch: expected items that are a Batch or a tuple .* got tuple \(Tensor\)"):
        net((batch.xc,))


def test_ddp_needs_no_wrapper(tmp_path: Path) -> None:
    """One process, gloo: the gradients are those without it."""
    net, batch, draws = model(), collate(rows(3)), Draws(torch.rand(3, 5, 2))
    draws = Draws(torch.rand(3, batch.xt.shape[1], net.draws_for(batch, torch.Generator()).noise.shape[2]))
    plain = copy.deepcopy(net)
    plain.loss(batch, draws).total.backward()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(net)(batch, draws).total.backward()
    finally:
        dist.destroy_process_group()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "head"), [(ReTreever, "gaussian"), (TransformerCA, "point"), (ReTreever, "categorical")]
)
def test_chunks_of_queries_are_answered_alike_and_without_gradients(kind: Any, head: Any) -> None:
    torch.manual_seed(0)
    net = kind(**SIZES, head=head, outputs=3).eval()
    xc, yc, xt = torch.rand(2, 9, 1), torch.rand(2, 9, 1), torch.rand(2, 11, 1)
    whole, parts = net.predict(xc, yc, xt), net.predict(xc, yc, xt, chunk=4)
    name = "logits" if head == "categorical" else "mean"
    torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    assert getattr(whole, name).requires_grad and not getattr(parts, name).requires_grad
    with pytest.raises(InputError, match=r"^chunk: expected an int >= 1"):
        net.predict(xc, yc, xt, chunk=0)


def test_many_queries_are_answered_in_chunks_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retreever.models.base.CHUNK", 4)
    net = model().eval()
    xc, xt = torch.rand(1, 9, 1), torch.rand(1, 11, 1)
    assert not net.predict(xc, xc, xt).mean.requires_grad and net.predict(xc, xc, xt[:, :4]).mean.requires_grad
    assert net.train().predict(xc, xc, xt).mean.requires_grad
