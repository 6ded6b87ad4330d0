"""Texts of the cards on the tasks: use, limits, data and terms. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from retreever.data.catalogue import DATASETS


@dataclass(frozen=True)
class About:
    """Texts on one task."""

    title: str
    use: str  # what goes in and what comes out
    limits: str  # what the weights are not for
    terms: str  # of the data
    data: str = ""  # what the data are; empty where the exporter has to describe the files


GENERATED = "none: no data files were used"
ABOUT = {
    "copy": About(
        "Copy task: repeat a sequence backwards",
        "xc and xt are positions 0, 1, ... as floats (b, n, 1), yc symbols 0 to 11 (b, n): 0 starts a sequence, 1 ends "
        "it, 2 to 11 are the digits; predictions are over those 12 symbols.",
        "A demonstration of retrieval on synthetic sequences of the one length it was trained on; other lengths and "
        "other patterns are not answered correctly.",
        GENERATED,
        "generated: random digits from the seeds of the task",
    ),
    "gp": About(
        "Regression on functions drawn from Gaussian processes",
        "xc (b, n, 1) from -2 to 2 and yc (b, n, 1) with values of about -3 to 3; predictions are a mean and a "
        "standard deviation for each xt (b, m, 1). Rescale other data to these ranges first.",
        "Smooth functions of one input in that range, with 3 to 46 context points, length-scales from 0.1 to 0.6, "
        "values of standard deviation 0.1 to 1 (scores are lower on larger ones) and noise of 0.02; outside of it "
        "neither mean nor standard deviation means anything. On "
        "rougher functions (Matern 5/2) the score is lower, as the scores show.",
        GENERATED,
        "generated: functions of Gaussian processes from the seeds of the task",
    ),
    "emnist": About(
        "Completion of EMNIST digits",
        "xc (b, n, 2) are places (row, column) of pixels, each from -1 (top, left) to 1 (bottom, right), yc (b, n, 1) "
        "their grey values from -0.5 to 0.5; predictions are a mean and a standard deviation for each xt (b, m, 2). "
        "Bright ink, 0.5, on a dark ground, -0.5; upright, while the files of EMNIST hold images transposed; the digit "
        "in the middle, its longer side 20 to 24 of the 28 pixels.",
        "Handwritten digits of 28 x 28 pixels with 3 to 196 pixels given; a generative study, not a classifier, and "
        "nothing to judge a person's handwriting by. Expect less on other digits: 1.09 on those of MNIST (1.13 with "
        "all leaves), which are smaller and in other ink, against 1.40 (1.44) here; dark ink on a bright ground is not "
        "completed at all.",
        DATASETS["emnist"].terms,
    ),
    "activity": About(
        "Human Activity: which activity a person is at, at each of 50 moments",
        "xc and xt are times from 0 (b, 50, 1), yc (b, 50, 24) twelve coordinates of four body tags, zeros where "
        "unseen, and the mask that tells them apart; predictions are over eleven classes.",
        "Five people in one room with four body tags. On the paper's split, windows that overlap with test windows "
        "are trained on, so its accuracy is not one to expect on new recordings; not for monitoring people.",
        DATASETS["person_activity"].terms,
    ),
    "wheel": About(
        "Wheel bandit: rewards of five arms",
        "xc (b, n, 2) are contexts in the unit disc, yc (b, n, 5) the rewards of five arms, drawn from N(0, 1) where "
        "an arm was not played; predictions are a mean and a standard deviation of every arm for each xt (b, m, 2).",
        "Wheel bandits with rewards of 1.0, 1.2 and 50 alone.",
        GENERATED,
        "generated: wheel bandits from the seeds of the task",
    ),
}
NEVER = {"celeba": f"CelebA is for {DATASETS['celeba'].terms}, so nothing trained on it is given on"}
