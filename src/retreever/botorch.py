"""Models of this package as BoTorch models: `to_botorch(model, train_X, train_Y)`. Needs the extra `botorch`.

A trained model needs no fitting: observations are its context, and conditioning on more of them adds to it.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retreever.arguments import reject
from retreever.checks import check_finite, check_float, check_tensor
from retreever.errors import BackendError
from retreever.models.base import Model
from retreever.models.series.base import SeriesModel

try:
    from botorch.models.model import FantasizeMixin
    from botorch.models.model import Model as BotorchModel
    from botorch.models.transforms.outcome import OutcomeTransform
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator.operators import DiagLinearOperator
except ImportError as error:
    raise BackendError(f"botorch: expected the extra botorch (pip install 'retreever[botorch]'), got {error}") from None


def to_botorch(
    model: Model,
    train_X: Float[Tensor, "*batch n d"],
    train_Y: Float[Tensor, "*batch n m"],
    outcome_transform: Any | None = None,
) -> ContextModel:
    """A BoTorch model that predicts with `model` from the observations (train_X, train_Y).

    `posterior`, batches, `condition_on_observations`, `fantasize`, acquisition functions and `optimize_acqf` work.
    Points are predicted independently of each other: the joint posterior of a q-batch has a diagonal covariance. The
    standard deviation is that of an observation, noise included, whatever `observation_noise` says.

    Args:
        model: a trained model of points with a Gaussian head, for example `load_pretrained("gp")`.
        train_X: where observations were made, on the scale the model was trained on (-2 to 2 for "gp").
        train_Y: what was observed.
        outcome_transform: of BoTorch, applied to train_Y and undone in the posterior; `Standardize` brings observations
            to the scale the model was trained on.
    """
    _check(model, train_X, train_Y)
    if not isinstance(outcome_transform, OutcomeTransform | None):
        reject("outcome_transform", "an outcome transform of BoTorch, or None", repr(outcome_transform))
    try:
        own = deepcopy(outcome_transform)  # BoTorch changes its dtype
        found = ContextModel(deepcopy(model), train_X, train_Y, own)
    except RuntimeError as error:
        reject("outcome_transform", f"one for {train_Y.shape[-1]} outputs", error)
    check_finite("outcome_transform", found._values)
    return found


class ContextModel(BotorchModel, FantasizeMixin):
    """The BoTorch model that `to_botorch` returns, with the same arguments, which it does not check.

    The context is encoded when it is first needed, in the dtype of the weights; results have the dtype of the inputs.
    """

    likelihood = None  # noise is part of the predictions

    def __init__(
        self,
        model: Model,
        train_X: Float[Tensor, "*batch n d"],
        train_Y: Float[Tensor, "*batch n m"],
        outcome_transform: Any | None = None,
    ) -> None:
        super().__init__()
        self.predictor = model.eval()
        self.train_inputs = (train_X,)
        self.train_targets = train_Y
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform.train()
            train_Y = outcome_transform(train_Y)[0]
            outcome_transform.eval()
        self._values = train_Y
        self._memory: Any = None
        self._encoded_as: tuple[torch.dtype, torch.device] | None = None

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the observations."""
        return self.train_inputs[0].shape[:-2]

    @property
    def num_outputs(self) -> int:
        """Outputs of the model."""
        return self.train_targets.shape[-1]

    def posterior(
        self,
        X: Float[Tensor, "*batch q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any | None = None,
    ) -> Posterior:
        """Independent normals at the points `X`: q points and m outputs for every element of the batch."""
        self._check_points(X)
        if output_indices is not None and not _are_indices(output_indices, self.num_outputs):
            reject("output_indices", f"indices of {self.num_outputs} outputs", output_indices)
        mean, variance = self._moments(X)
        transform = getattr(self, "outcome_transform", None)
        if output_indices is not None:
            mean, variance = mean[..., output_indices], variance[..., output_indices]
            transform = transform and transform.subset_output(output_indices)
        found: Posterior = GPyTorchPosterior(_normal(mean, variance))
        if transform is not None:
            found = transform.untransform_posterior(found)
        return found if posterior_transform is None else posterior_transform(found)

    def condition_on_observations(
        self,
        X: Float[Tensor, "*batch k d"],
        Y: Float[Tensor, "*more k m"],
        **_: Any,
    ) -> ContextModel:
        """The model with further observations; batch shapes are broadcast, as those of fantasies."""
        self._check_points(X)
        _check_values("Y", Y, X.shape[-2], self.num_outputs)
        old_x, old_y = self.train_inputs[0], self.train_targets
        try:
            batch = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2], self.batch_shape)
        except RuntimeError:
            reject("Y", f"a batch that goes with {tuple(X.shape[:-2])}, that of X", tuple(Y.shape))
        x, y = (
            torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], dim=-2)
            for parts in ((old_x, X), (old_y, Y))
        )
        more = ContextModel(self.predictor, x, y)
        if hasattr(self, "outcome_transform"):  # as it was fitted: fantasies must not change the scale
            more.outcome_transform = self.outcome_transform
            more._values = self.outcome_transform(y)[0]
        return more

    def _check_points(self, x: Tensor) -> None:
        """Points must have the width of the observations, and batches that go with theirs."""
        _check_values("X", x, "n", self.train_inputs[0].shape[-1])
        try:
            torch.broadcast_shapes(x.shape[:-2], self.batch_shape)
        except RuntimeError:
            reject("X", f"a batch that goes with {tuple(self.batch_shape)}, that of the observations", tuple(x.shape))

    def _moments(self, x: Float[Tensor, "*batch q d"]) -> tuple[Tensor, Tensor]:
        """Means and variances (*batch, q, m). All points of a context are answered in one call."""
        batch = torch.broadcast_shapes(x.shape[:-2], self.batch_shape)
        q, d = x.shape[-2:]
        contexts = len(self.batch_shape)
        own = batch[len(batch) - contexts :]
        others = math.prod(batch[: len(batch) - contexts])
        rows = math.prod(own)
        # (others, rows, q, d) -> (rows, others * q, d): the axis of contexts first
        queries = x.expand(*batch, q, d).reshape(others, rows, q, d).transpose(0, 1).reshape(rows, others * q, d)
        weight = next(self.predictor.parameters())
        dist = self.predictor.answer(self._encoded(own), queries.to(weight))
        moments = (dist.mean, dist.variance)
        mean, variance = (
            part.to(x).reshape(rows, others, q, -1).transpose(0, 1).reshape(*batch, q, -1) for part in moments
        )
        return mean, variance

    def _encoded(self, batch: torch.Size) -> Any:
        """The prepared contexts, one per element of `batch`; kept if that is the batch shape of the observations."""
        weight = next(self.predictor.parameters())
        if batch == self.batch_shape and self._encoded_as == (weight.dtype, weight.device):
            return self._memory
        x, y = self.train_inputs[0], self._values
        n = x.shape[-2]
        flat = [part.expand(*batch, *part.shape[-2:]).reshape(-1, n, part.shape[-1]).to(weight) for part in (x, y)]
        wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
        with torch.set_grad_enabled(wanted):
            memory = self.predictor.encode(*flat)
        if batch == self.batch_shape and not wanted:
            self._memory, self._encoded_as = memory, (weight.dtype, weight.device)
        return memory


def _check(model: Model, x: Tensor, y: Tensor) -> None:
    if not isinstance(model, Model):
        reject("model", "a model of this package", type(model).__name__)
    if (inputs := model.config.inputs) != "points" or model.config.head in ("categorical", "point"):
        reject("model", "a model of points with a Gaussian head", f"inputs {inputs} and head {model.config.head}")
    if isinstance(model, SeriesModel):
        reject("model", "a model of points, not of time series", type(model).__name__)
    if model.config.out != model.config.dim_y:
        reject("model", "one whose outputs are those of its context", f"{model.config.dim_y} and {model.config.out}")
    _check_values("train_X", x, "n", model.config.dim_x)
    _check_values("train_Y", y, "n", model.config.out)
    if x.shape[:-1] != y.shape[:-1]:
        reject("train_Y", f"shape {(*x.shape[:-1], y.shape[-1])}", tuple(y.shape))
    check_tensor("train_X", x.reshape(-1, *x.shape[-2:]), "b n d")


def _check_values(name: str, value: Tensor, n: int | str, width: int) -> None:
    """Points or their values, at least one; `n` is how many, or "n" for any number."""
    good = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == width and value.numel()
    if not good or n not in ("n", value.shape[-2]):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        reject(name, f"shape (..., {n}, {width}), not empty", got)
    check_float(name, value)
    check_finite(name, value)


def _are_indices(found: object, count: int) -> bool:
    """Whether they say which of `count` outputs are wanted."""
    return isinstance(found, list | tuple) and bool(found) and all(type(i) is int and 0 <= i < count for i in found)


def _normal(mean: Float[Tensor, "*batch q m"], variance: Float[Tensor, "*batch q m"]) -> MultivariateNormal:
    """Independent normals; gpytorch takes one output and several in different classes."""
    normals = [
        MultivariateNormal(mean[..., index], DiagLinearOperator(variance[..., index]))
        for index in range(mean.shape[-1])
    ]
    return normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
