"""All models of series, by their names on the command line."""

from __future__ import annotations

from retreever.models.series.base import SeriesModel
from retreever.models.series.interpolate import IPNets, MTANDEnc
from retreever.models.series.latent_ode import LatentODE, LatentODERNN
from retreever.models.series.ode_rnn import ODERNN
from retreever.models.series.recurrent import GRUD, RNNDecay, RNNImpute
from retreever.models.series.seft import SeFT

SERIES: dict[str, type[SeriesModel]] = {
    "rnn-impute": RNNImpute,
    "rnn-decay": RNNDecay,
    "grud": GRUD,
    "ip-nets": IPNets,
    "seft": SeFT,
    "ode-rnn": ODERNN,
    "latent-ode-rnn": LatentODERNN,
    "latent-ode": LatentODE,
    "mtand-enc": MTANDEnc,
}
