"""Settings of models, and the embedding, encoder and head made from them."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from retreever.arguments import check_choice, check_int, check_number, reject
from retreever.errors import ConfigError
from retreever.nn.blocks import RESIDUALS, Residual
from retreever.nn.embed import PointEmbed, SequenceEmbed, TokenEmbed
from retreever.nn.encoders import Encoder, make_encoder
from retreever.nn.heads import AnyHead, Head, make_head
from retreever.ops.backend import IMPLS, Impl

Inputs = Literal["points", "sequence", "tokens"]
INPUTS: tuple[Inputs, ...] = get_args(Inputs)


@dataclass(frozen=True)
class AnyConfig:
    """Settings that every model has.

    Attributes:
        dim_x: coordinates per point; for tokens the width of a query.
        dim_y: values per context point; for sequences the number of symbols, for tokens their width.
        outputs: values predicted per query, or classes; 0 means `dim_y`.
        inputs: "points" are (x, y) pairs; "sequence" is symbols at positions; "tokens" are vectors without coordinates,
            asked by queries that are vectors too.
        head: "gaussian", "bounded" (std at least 0.05), "floored" (at least 0.1), "categorical" or "point".
        dim: width of all tokens.
        heads: attention heads.
        impl: which kernels the whole model runs; "auto" takes the fastest available, "reference" none.
    """

    dim_x: int = 1
    dim_y: int = 1
    outputs: int = 0
    inputs: Inputs = "points"
    head: Head = "gaussian"
    dim: int = 64
    heads: int = 4
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        for name in ("dim_x", "dim_y", "dim", "heads"):
            check_int(name, getattr(self, name), 1)
        check_int("outputs", self.outputs, 0)
        check_choice("inputs", self.inputs, INPUTS)
        check_choice("impl", self.impl, IMPLS)

    @property
    def out(self) -> int:
        """Values or classes predicted per query."""
        return self.outputs or self.dim_y

    def points_only(self) -> None:
        """Raise `InputError` unless the inputs are points."""
        if self.inputs != "points":
            reject("inputs", "points, which is all this model takes", repr(self.inputs))


@dataclass(frozen=True)
class ModelConfig(AnyConfig):
    """Settings of the models of the paper; the defaults are its sizes.

    Attributes:
        encoder: "transformer", "identity", "local", "linformer" or "chordmixer".
        layers: encoder layers.
        hidden: width of feed-forward layers and of the head.
        dropout: in embeddings of sequences, encoder, aggregator and feed-forward.
        residual: form of the residual connections: "pre", "normalised", "doubled" or "none"; "auto" takes what trains
            best, "normalised" behind an encoder and "pre" without one.
        max_tokens: longest context of the encoders linformer and chordmixer.
        window: tokens that each sees in the encoder local: itself and those before it in leaf order.
        waves: random waves (Fourier features) that join the coordinates of points; 0 for none.
        frequency: of the fastest waves, in radians per unit of the coordinates.
    """

    encoder: Encoder = "transformer"
    layers: int = 6
    hidden: int = 128
    dropout: float = 0.0
    residual: Residual = "auto"  # type: ignore[assignment]  # replaced when the config is made
    max_tokens: int = 512
    window: int = 64
    waves: int = 0
    frequency: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.residual) == "auto":
            object.__setattr__(self, "residual", self.best_residual)
        check_int("layers", self.layers, 0)
        for name in ("hidden", "max_tokens", "window"):
            check_int(name, getattr(self, name), 1)
        check_int("waves", self.waves, 0)
        check_number("frequency", self.frequency)
        if self.waves and not self.frequency:
            reject("frequency", "a number > 0", self.frequency)
        if self.waves and self.inputs != "points":
            reject("waves", f"0, as {self.inputs} have no coordinates to add waves to", self.waves)
        check_number("dropout", self.dropout, below=1.0)
        check_choice("residual", self.residual, RESIDUALS)

    @property
    def best_residual(self) -> Residual:
        """The form that trains best (docs/defaults.md)."""
        return "pre" if self.encoder == "identity" else "normalised"


C = TypeVar("C", bound=AnyConfig)


def resolve(kind: type[C], config: C | None, fields: dict[str, Any]) -> C:
    """`config`, or a config made of the keyword arguments `fields`; giving both raises `ConfigError`."""
    if config is not None and fields:
        raise ConfigError(f"config: expected either a config or keyword arguments, got both ({', '.join(fields)})")
    if config is not None:
        if not isinstance(config, kind):
            raise ConfigError(f"config: expected a {kind.__name__}, got {type(config).__name__}")
        return config
    known = [field.name for field in fields_of(kind)]
    if unknown := [name for name in fields if name not in known]:
        raise ConfigError(f"{unknown[0]}: expected settings among {', '.join(known)}, got {', '.join(unknown)}")
    return kind(**fields)


def embedding(config: ModelConfig) -> PointEmbed | SequenceEmbed | TokenEmbed:
    """Embedding of context and queries."""
    if config.inputs == "tokens":
        return TokenEmbed(config.dim_y, config.dim_x, config.dim)
    if config.inputs == "sequence":
        return SequenceEmbed(config.dim_y, config.dim, config.hidden, config.dropout)
    return PointEmbed(config.dim_x, config.dim_y, config.dim, waves=config.waves, frequency=config.frequency)


def encoder(config: ModelConfig) -> nn.Module:
    """Encoder of the context."""
    return make_encoder(
        config.encoder,
        config.dim,
        config.heads,
        config.layers,
        config.hidden,
        layer_residual(config),
        config.dropout,
        config.max_tokens,
        config.impl,
        config.window,
    )


def layer_residual(config: ModelConfig) -> Residual:
    """Residuals of encoder layers and plain cross attention; "doubled" is for tree attention alone."""
    return "normalised" if config.residual == "doubled" else config.residual


def read_out(config: ModelConfig) -> dict[str, Any]:
    """Arguments of the `CrossAttention` behind an encoder."""
    return {
        "dim": config.dim,
        "heads": config.heads,
        "hidden": config.hidden,
        "residual": layer_residual(config),
        "dropout": config.dropout,
        "impl": config.impl,
    }


def head(config: ModelConfig) -> AnyHead:
    """The head, with a norm in front if residuals are pre-norm (the paper's code has none)."""
    return make_head(config.head, config.dim, config.hidden, config.out, norm=config.residual == "pre")
