"""The options that each method's constructor refuses."""

import math

import pytest

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.trial_options import trial_of

TALKING = [name for name in METHODS if name != "local"]
PLAIN = [name for name in TALKING if not trial_of(METHODS[name]).biased]
REFUSED = [
    *(
        (name, {"deadline_s": value}, f"deadline of {value} s")
        for name in TALKING
        for value in (0, -1.0, math.nan, math.inf)
    ),
    *((name, {"codec": "topk:64/4096"}, "codec topk:64/4096 is biased") for name in PLAIN),
    *((name, {"codec": "topk:8/64+zstd"}, "is biased") for name in PLAIN),
    *(
        (name, {"codec": "int9"}, "codec 'int9' is not known; did you mean 'int")
        for name in TALKING
    ),
    *(
        (name, {"return_codec": "topk:1/2"}, "return codec topk:1/2 is biased")
        for name in ("ddp", "diloco")
    ),
    *(
        (name, {"period": value}, f"period of {value} steps")
        for name in ("diloco", "noloco")
        for value in (0, -3)
    ),
    ("diloco", {"feedback": 1.5}, "feedback of 1.5"),
    ("diloco", {"feedback": -0.1}, "feedback of -0.1"),
    ("diloco", {"feedback": math.nan}, "feedback of nan"),
    ("diloco", {"feedback": 0.9, "return_codec": "topk:1/2"}, "return codec topk:1/2 is biased"),
    ("noloco", {"alpha": 1.0}, "alpha=1.0"),
    ("noloco", {"alpha": math.nan}, "alpha=nan"),
    ("noloco", {"beta": 0.0}, "beta=0.0"),
    ("noloco", {"beta": math.nan}, "beta=nan"),
    ("noloco", {"beta": math.inf}, "beta=inf"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_an_option_that_cannot_train_is_refused_with_its_value(name, options, message):
    with pytest.raises(ValueError, match=message):
        method(name, **options)


@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
def test_a_biased_codec_is_welcome_with_feedback(beta):
    assert method("diloco", codec="topk:64/4096", feedback=beta).feedback == beta
