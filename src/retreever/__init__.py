"""retreever: cross attention that reads O(log n) tokens through a learned tree search.

Only the public names, imported when first used: importing the package does not import torch, and triton, numba and
matplotlib are imported only when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from retreever.version import __version__

if TYPE_CHECKING:
    from retreever.attention import TreeCrossAttention
    from retreever.batch import Batch, collate
    from retreever.cross_attention import CrossAttention
    from retreever.deploy.api import export
    from retreever.errors import BackendError, CheckpointError, ConfigError, DataError, InputError, RetreeverError
    from retreever.explanation import explain
    from retreever.fidelity import Fidelity
    from retreever.masses import mass_loss
    from retreever.models.bnp import BANP, BNP
    from retreever.models.cmanp import CMANP
    from retreever.models.cnp import CANP, CNP
    from retreever.models.lbanp import LBANP
    from retreever.models.np import ANP, NP
    from retreever.models.perceiver_io import PerceiverIO
    from retreever.models.random import RandomGuess
    from retreever.models.retreever import ReTreever
    from retreever.models.series.interpolate import IPNets, MTANDEnc
    from retreever.models.series.latent_ode import LatentODE, LatentODERNN
    from retreever.models.series.observed import context_of
    from retreever.models.series.ode_rnn import ODERNN
    from retreever.models.series.recurrent import GRUD, RNNDecay, RNNImpute
    from retreever.models.series.seft import SeFT
    from retreever.models.tnp import TNPD
    from retreever.models.transformer_ca import TransformerCA
    from retreever.objective import Loss, ObjectiveConfig
    from retreever.ops.frontier.api import Part, merge_parts
    from retreever.ops.search.api import full_attention, tree_attention
    from retreever.pretrained.load import load_pretrained
    from retreever.saving import load_model, save_model
    from retreever.scaler import Scaled, Scaler
    from retreever.search_loss import search_with_detours, tree_loss
    from retreever.sharded.tree import ShardedTree
    from retreever.tree.order import leaf_order
    from retreever.tree.plan import TreePlan
    from retreever.tree.value import Tree
    from retreever.tree_multihead import TreeMultihead

__all__ = [
    "ANP", "BANP", "BNP", "CANP", "CMANP", "CNP", "GRUD", "LBANP", "NP", "ODERNN", "TNPD", "BackendError", "Batch",
    "CheckpointError", "ConfigError", "CrossAttention", "DataError", "Fidelity", "IPNets", "InputError", "LatentODE",
    "LatentODERNN", "Loss", "MTANDEnc", "ObjectiveConfig", "Part", "PerceiverIO", "RNNDecay", "RNNImpute",
    "RandomGuess", "ReTreever", "RetreeverError", "Scaled", "Scaler", "SeFT", "ShardedTree", "TransformerCA", "Tree",
    "TreeCrossAttention", "TreeMultihead", "TreePlan", "__version__", "collate", "context_of", "explain", "export",
    "full_attention", "leaf_order", "load_model", "load_pretrained", "mass_loss", "merge_parts", "save_model",
    "search_with_detours", "tree_attention", "tree_loss",
]  # fmt: skip

_HOME = {
    "attention": ("TreeCrossAttention",),
    "cross_attention": ("CrossAttention",),
    "deploy.api": ("export",),
    "batch": ("Batch", "collate"),
    "errors": ("BackendError", "CheckpointError", "ConfigError", "DataError", "InputError", "RetreeverError"),
    "explanation": ("explain",),
    "fidelity": ("Fidelity",),
    "masses": ("mass_loss",),
    "models.bnp": ("BANP", "BNP"),
    "models.cmanp": ("CMANP",),
    "models.cnp": ("CANP", "CNP"),
    "models.lbanp": ("LBANP",),
    "models.np": ("ANP", "NP"),
    "models.perceiver_io": ("PerceiverIO",),
    "models.random": ("RandomGuess",),
    "models.retreever": ("ReTreever",),
    "models.series.interpolate": ("IPNets", "MTANDEnc"),
    "models.series.latent_ode": ("LatentODE", "LatentODERNN"),
    "models.series.observed": ("context_of",),
    "models.series.ode_rnn": ("ODERNN",),
    "models.series.recurrent": ("GRUD", "RNNDecay", "RNNImpute"),
    "models.series.seft": ("SeFT",),
    "models.tnp": ("TNPD",),
    "models.transformer_ca": ("TransformerCA",),
    "objective": ("Loss", "ObjectiveConfig"),
    "ops.frontier.api": ("Part", "merge_parts"),
    "ops.search.api": ("full_attention", "tree_attention"),
    "pretrained.load": ("load_pretrained",),
    "saving": ("load_model", "save_model"),
    "scaler": ("Scaled", "Scaler"),
    "search_loss": ("search_with_detours", "tree_loss"),
    "sharded.tree": ("ShardedTree",),
    "tree.order": ("leaf_order",),
    "tree.plan": ("TreePlan",),
    "tree.value": ("Tree",),
    "tree_multihead": ("TreeMultihead",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"retreever.{module}"), name)
    raise AttributeError(f"module 'retreever' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
