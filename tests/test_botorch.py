"""Models as BoTorch models: posteriors, batches, conditioning, fantasies, acquisition functions, optimisation."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("botorch", reason="optimisation needs botorch: pip install '.[botorch]'")

from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement, qUpperConfidenceBound
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models.transforms import Bilog, Log, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.testing import BotorchTestCase

from retreever import CNP, GRUD, NP, InputError, ReTreever, TransformerCA, load_pretrained
from retreever.botorch import ContextModel, to_botorch
from retreever.models.base import Model

TINY = {"dim": 16, "heads": 2, "layers": 1, "hidden": 16}
BOUNDS = torch.tensor([[-2.0], [2.0]], dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def a_model(kind: type = ReTreever, **settings: object) -> Model:
    torch.manual_seed(0)
    return kind(**TINY | {"impl": "reference"} | settings).eval()


def observed(*batch: int, n: int = 5, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = 4 * torch.rand(*batch, n, 1, generator=generator, dtype=torch.float64) - 2
    return x, torch.cat([(3 * x + shift).sin() for shift in range(outputs)], dim=-1)


class TestContextModel(BotorchTestCase):
    """With BoTorch's own test case, which turns all its warnings on."""

    def setUp(self) -> None:
        """Let only BoTorch's warnings on inputs pass, which it leaves out of its own tests too."""
        super().setUp()
        warnings.filterwarnings("error", module="retreever")

    def test_posteriors_have_the_shapes_and_moments_of_the_predictions(self) -> None:
        """For contexts and points with batch axes that are broadcast."""
        model = a_model()
        for context, points in [((), ()), ((), (3,)), ((2,), (2,)), ((2,), (3, 2)), ((2,), (1,)), ((1,), (4,))]:
            with self.subTest(context=context, points=points):
                x, y = observed(*context)
                new = torch.rand(*points, 4, 1, dtype=torch.float64)
                found = to_botorch(model, x, y).posterior(new)
                batch = torch.broadcast_shapes(context, points)
                assert found.mean.shape == found.variance.shape == (*batch, 4, 1) and found.mean.dtype == torch.float64
                flat = [part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:]) for part in (x, y, new)]
                dist = model.predict(*(part.float() for part in flat))
                self.assertAllClose(found.mean.reshape(-1, 4, 1), dist.mean.double(), atol=1e-5)
                self.assertAllClose(found.variance.reshape(-1, 4, 1), dist.variance.double(), atol=1e-5)
                assert found.rsample(torch.Size([7])).shape == (7, *batch, 4, 1)

    def test_points_of_a_batch_are_independent(self) -> None:
        x, y = observed()
        covariance = to_botorch(a_model(), x, y).posterior(observed(n=3)[0]).distribution.covariance_matrix
        self.assertAllClose(covariance, covariance.diagonal().diag())

    def test_several_outputs(self) -> None:
        x, y = observed(outputs=2)
        model = to_botorch(a_model(dim_y=2), x, y)
        new = observed(3, n=2)[0]
        both, second = model.posterior(new), model.posterior(new, output_indices=[1])
        assert model.num_outputs == 2 and both.mean.shape == (3, 2, 2)
        self.assertAllClose(second.mean, both.mean[..., 1:])
        weights = torch.tensor([1.0, -1.0], dtype=torch.float64)
        mixed = model.posterior(new, posterior_transform=ScalarizedPosteriorTransform(weights))
        self.assertAllClose(mixed.mean[..., 0], both.mean @ weights)

    def test_conditioning_equals_a_longer_context(self) -> None:
        x, y = observed(n=7)
        new = observed(n=3)[0]
        for transform in (None, Standardize(m=1)):
            grown = to_botorch(a_model(), x[:4], y[:4], transform).condition_on_observations(x[4:], y[4:])
            assert isinstance(grown, ContextModel) and grown.train_inputs[0].shape == (7, 1)
            if transform is None:
                whole = to_botorch(a_model(), x, y).posterior(new)
                self.assertAllClose(grown.posterior(new).mean, whole.mean)

    def test_fantasies_have_one_context_each(self) -> None:
        x, y = observed()
        sampler = SobolQMCNormalSampler(torch.Size([6]), seed=0)
        fantasies = to_botorch(a_model(), x, y, Standardize(m=1)).fantasize(observed(3, n=2)[0], sampler)
        assert fantasies.batch_shape == (6, 3) and fantasies.posterior(observed(n=4)[0]).mean.shape == (6, 3, 4, 1)

    def test_outcomes_are_transformed_and_back(self) -> None:
        """A model on standardised outcomes does not depend on their scale."""
        x, y = observed()
        one = to_botorch(a_model(), x, y, Standardize(m=1)).posterior(x)
        two = to_botorch(a_model(), x, 100 * y + 5, Standardize(m=1)).posterior(x)
        self.assertAllClose(two.mean, 100 * one.mean + 5, rtol=1e-4)
        self.assertAllClose(two.variance, 10_000 * one.variance, rtol=1e-4)

    def test_acquisition_functions_are_optimised(self) -> None:
        """By gradients; the model handed over keeps its dtype."""
        x, y = observed()
        for kind in (ReTreever, TransformerCA, CNP):
            network = a_model(kind) if kind is not CNP else CNP(dim=16)
            model = to_botorch(network, x, y)
            functions = [
                (LogExpectedImprovement(model, best_f=y.max()), 1),
                (qUpperConfidenceBound(model, beta=0.2), 2),
            ]
            if kind is ReTreever:
                functions.append((qLogExpectedImprovement(model, best_f=y.max()), 2))
            for function, q in functions:
                torch.manual_seed(0)
                options = {"maxiter": 5}
                found, value = optimize_acqf(function, BOUNDS, q=q, num_restarts=2, raw_samples=32, options=options)
                grid = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None, None].expand(-1, q, -1)
                assert found.shape == (q, 1) and bool((found.abs() <= 2).all())
                assert value >= function(grid).max() - 0.2
            assert next(network.parameters()).dtype == torch.float32


def test_points_drawn_one_after_another_keep_apart() -> None:
    """Each from the model that has seen what it expects of the last, as the documentation says."""
    x = torch.tensor([[-1.5], [0.0], [1.6]], dtype=torch.float64)
    model, drawn = to_botorch(load_pretrained("gp").set_reading("full"), x, (3 * x).sin()), []
    grid = torch.linspace(-2, 2, 401, dtype=torch.float64)[:, None]
    for _ in range(3):
        function = LogExpectedImprovement(model, best_f=(3 * x).sin().max())
        drawn.append(grid[function(grid[:, None]).argmax()])
        model = model.condition_on_observations(drawn[-1][None], model.posterior(drawn[-1][None]).mean.detach())
    places = torch.cat(drawn)
    assert torch.pdist(places[:, None]).min() > 0.1


def test_mixtures_of_functions_are_matched_by_their_moments() -> None:
    x, y = observed()
    assert to_botorch(NP(dim=16), x, y).posterior(x).variance.min() > 0


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (torch.zeros(2, 2), r"X: expected shape \(..., n, 1\), not empty, got \(2, 2\)"),
        (torch.zeros(2), "X: expected shape"),
        (torch.zeros(0, 1), "X: expected shape"),
        ([0.0], "X: expected shape .* got list"),
        (torch.zeros(2, 1, dtype=torch.int64), "X: expected a floating point dtype"),
        (torch.full((2, 1), torch.nan), "X: expected finite values"),
    ],
)
def test_points_that_do_not_fit_are_named(points: Any, said: str) -> None:
    x, y = observed()
    model = to_botorch(a_model(), x, y)
    with pytest.raises(InputError, match=f"^{said}"):
        model.posterior(points)
    with pytest.raises(InputError, match=r"^Y: expected shape \(..., 2, 1\), not empty, got"):
        model.condition_on_observations(x[:2], y[:3])
    for indices in ([7], [], [[0]], [False], [0.0], [-1]):
        with pytest.raises(InputError, match=r"^output_indices: expected indices of 1 outputs"):
            model.posterior(x, output_indices=indices)
    with pytest.raises(InputError, match=r"^Y: expected a batch that goes with \(3,\), that of X, got \(4, 2, 1\)"):
        model.condition_on_observations(x[:2].expand(3, -1, -1), y[:2].expand(4, -1, -1))
    with pytest.raises(InputError, match=r"^X: expected a batch that goes with \(3,\)"):
        to_botorch(a_model(), x.expand(3, -1, -1), y.expand(3, -1, -1)).posterior(x.expand(2, -1, -1))


def test_a_transform_that_is_used_again_leaves_earlier_models_alone() -> None:
    x, y = observed()
    shared = Standardize(m=1)
    model = to_botorch(a_model(), x, y, shared)
    before = model.posterior(x).mean
    to_botorch(a_model(), x, 100 * y, shared)
    assert torch.equal(model.posterior(x).mean, before)


def test_what_does_not_fit_is_named() -> None:
    x, y = observed()
    with pytest.raises(InputError, match=r"train_X: expected shape \(..., n, 1\), not empty, got \(5, 2\)"):
        to_botorch(a_model(), x.expand(-1, 2), y)
    with pytest.raises(InputError, match=r"train_Y: expected shape \(5, 1\), got \(4, 1\)"):
        to_botorch(a_model(), x, y[1:])
    with pytest.raises(InputError, match=r"train_Y: expected finite values"):
        to_botorch(a_model(), x, y / 0)
    with pytest.raises(InputError, match=r"train_X: expected shape \(..., n, 1\), not empty, got \(0, 1\)"):
        to_botorch(a_model(), x[:0], y[:0])
    with pytest.raises(InputError, match=r"model: expected a model of points with a Gaussian head, got .* head point"):
        to_botorch(ReTreever(head="point", dim=16, layers=0), x, y)
    with pytest.raises(InputError, match="model: expected a model of points, not of time series, got GRUD"):
        to_botorch(GRUD(), x, y)
    with pytest.raises(InputError, match="model: expected a model of points"):
        to_botorch(a_model(head="categorical", outputs=3), x, y)
    with pytest.raises(InputError, match="model: expected one whose outputs are those of its context, got 2 and 1"):
        to_botorch(a_model(dim_y=2, outputs=1), x, y)
    for transform, said in (
        ("standardize", "an outcome transform of BoTorch, or None, got 'standardize'"),
        (Standardize, "an outcome transform of BoTorch, or None, got <class"),
        (Standardize(m=2), "one for 1 outputs, got"),
        (Log(), "finite values, got"),  # of negative outcomes
    ):
        with pytest.raises(InputError, match=f"^outcome_transform: expected {said}"):
            to_botorch(a_model(), x, y, transform)


@pytest.mark.parametrize("kind", [Log, Bilog, Standardize])
def test_outputs_of_a_transformed_model_are_those_of_all(kind: type) -> None:
    """Also where a transform has no mean of its own: samples of one output are samples of it."""
    x, y = observed(outputs=2)
    model = to_botorch(a_model(dim_y=2), x, y + 3, kind(m=2) if kind is Standardize else kind())
    both, second = model.posterior(x), model.posterior(x, output_indices=[1])
    assert type(second) is type(both)
    torch.manual_seed(0)
    drawn = second.rsample(torch.Size([4000]))
    assert drawn.shape == (4000, 5, 1) and (kind is not Log or bool((drawn > 0).all()))
    means = [part.rsample(torch.Size([4000])).mean(dim=0)[:, -1] for part in (both, second)]
    torch.testing.assert_close(*means, rtol=0.2, atol=0.2)


def test_without_botorch_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["botorch"] = None
import retreever
try:
    import retreever.botorch
except retreever.BackendError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("botorch: expected the extra botorch (pip install 'retreever[botorch]')"), done.stderr
