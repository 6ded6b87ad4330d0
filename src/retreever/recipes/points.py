"""What the recipes with an encoder share: GP regression, image completion, human activity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from retreever.recipes.settings import Order, Settings

if TYPE_CHECKING:
    from retreever.recipes.build import AnyModel


@dataclass(frozen=True)
class PointSettings(Settings):
    """One run of a model with an encoder."""

    model: Literal["retreever", "transformer-ca", "perceiver-io"] = "retreever"
    """Tree cross attention, cross attention over all tokens, or Perceiver IO, behind the same kind of encoder."""
    layers: int = 6
    """Encoder layers."""
    dim: int = 64
    """Width of all tokens."""
    hidden: int = 128
    """Width of feed-forward layers."""
    dropout: float = 0.0
    """Dropout of all models."""
    residual: Literal["auto", "pre", "normalised"] = "auto"
    """Residuals around the norm, or on normalised inputs as in the paper's code; auto is what trains best: normalised,
    and around the norm for Perceiver IO."""
    order: Order = "kd"
    """How tokens are laid on the leaves."""
    axis: int = 0
    """The coordinate of --order axis."""

    dim_x: ClassVar[int] = 1
    dim_y: ClassVar[int] = 1
    outputs: ClassVar[int] = 0
    head: ClassVar[Literal["gaussian", "bounded", "categorical"]] = "gaussian"
    natural_order: ClassVar[Order] = "kd"
    largest: ClassVar[int]

    @property
    def variant(self) -> str:
        """Model, latents and what is unusual about the tree."""
        latents = f"-{self.latents}" if self.latents else ""
        axis = str(self.axis) if self.order == "axis" else ""
        order = f"-{self.order}{axis}" if self.order != self.natural_order else ""
        branch = f"-branch{self.branch}" if self.branch != 2 else ""
        return f"{self.model}{latents}{order}{branch}"

    def resolved(self) -> Self:
        """With `residual` said outright, too."""
        settings = super().resolved()
        if settings.residual != "auto":
            return settings
        around = settings.model == "perceiver-io" and settings.preset != "paper"
        return replace(settings, residual="pre" if around else "normalised")

    def make_model(self) -> AnyModel:
        """ReTreever, Transformer + Cross Attention or Perceiver IO."""
        from retreever.recipes.build import point_model

        return point_model(self.resolved())

    @property
    def context(self) -> int:
        """As the paper counts: one more than contexts ever have."""
        return self.largest


@dataclass(frozen=True)
class RegressionSettings(PointSettings):
    """One run on tasks of random size: GP regression, image completion."""

    sizes: Literal["each", "batch"] = "each"
    """A context size for each task trained on, or one for a whole batch as in the paper."""
