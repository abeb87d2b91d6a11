"""Names and codecs: every name builds its codec, every codec has one name, and wrong names get a
useful answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.catalog import CODECS, codec
from farflock.compression.ecsq import Ecsq
from farflock.compression.floats import Half, Raw
from farflock.compression.fp4 import Fp4
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.lowrank import LowRank
from farflock.compression.sign import Sign
from farflock.compression.sparse2 import TopK2
from farflock.compression.topk import TopK
from farflock.compression.zstd import Zstd


@pytest.mark.parametrize("name", CODECS)
def test_a_key_is_the_name_of_what_it_builds(name):
    assert CODECS[name]().name == name
    assert codec(name) == CODECS[name]()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fp32", Raw()),
        ("bf16", Half("bf16")),
        ("int8", Int8(256)),
        ("int8:128", Int8(128)),
        ("int4:32", Int4(32)),
        ("topk:8/512", TopK(8, 512)),
        ("topk:8/512+zstd", Zstd(TopK(8, 512))),
        ("fp4:64", Fp4(64)),
        ("sign:4096", Sign(4096)),
        ("topk2:8/512", TopK2(8, 512)),
        ("ecsq:150", Ecsq(150)),
        ("lowrank:8", LowRank(8)),
    ],
)
def test_a_name_says_everything_about_its_codec(spec, expected):
    assert codec(spec) == expected
    assert codec(spec).name == spec


def test_a_default_number_is_left_out_of_the_name():
    assert codec("int8:256").name == "int8"
    assert codec("int4:64").name == "int4"
    assert codec("fp4:256").name == "fp4"
    assert codec("sign:256").name == "sign"


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("int9", "int8"),
        ("INT4", "int4"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("topk", "topk:64/4096"),
        ("topk2", "topk2:64/4096"),
        ("ecsq", "ecsq:100"),
        ("low-rank", "lowrank:4"),
        ("signs", "sign"),
        ("fp5", "fp4"),
        ("zstd", "bf16+zstd"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(spec, nearest):
    with pytest.raises(
        ValueError, match=f"{spec!r} is not known; did you mean '{nearest.replace('+', '.')}'"
    ):
        codec(spec)


MALFORMED = [
    *(
        "",
        "+zstd",
        "bf16+",
        "bf16+zstd+zstd",
        "bf16+gzip",
        "fp16:2",
        "topk:64",
        "topk:64/",
        "topk:64/4096/2",
    ),
    *(
        "int8:",
        "int8:-1",
        "int8: 8",
        "int8:08",
        "int8:1_0",
        "int8:٣",
        "int8:8\n",
        "int8:" + "9" * 5000,
        "x" * 100_000,
    ),
]


@pytest.mark.parametrize("spec", MALFORMED)
def test_a_malformed_name_is_refused_in_a_short_sentence(spec):
    with pytest.raises(ValueError, match="is not known; did you mean") as refusal:
        codec(spec)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "spec",
    [
        "int8:65537",
        "int8:99999",
        "int4:3",
        "int4:1",
        "topk:33/64",
        "topk:64/64",
        "topk:1/1",
        "topk:9/65537",
        "topk2:33/64",
        "topk2:9/65537",
        "fp4:3",
        "fp4:65538",
        "sign:65537",
        "ecsq:251",
        "lowrank:257",
        "ecsq:99999",
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_the_choice(spec):
    with pytest.raises(ValueError, match="is not allowed; choose"):
        codec(spec)


def test_a_half_precision_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'fp8' is not known; choose fp16 or bf16"):
        Half("fp8")


@given(
    st.text(max_size=30)
    | st.from_regex(r"(int[48]|topk2?|fp4|sign|ecsq|lowrank):[0-9/]{1,9}(\+zstd)?", fullmatch=True)
)
def test_any_text_is_a_codec_or_a_value_error(spec):
    try:
        built = codec(spec)
    except ValueError:
        return
    assert codec(built.name) == built


def test_only_what_drops_values_is_biased():
    dropping = ("sign", "topk:64/4096", "topk2:64/4096", "ecsq:100", "lowrank:4", "topk:8/512+zstd")
    assert all(codec(name).biased for name in dropping)
    assert not any(
        codec(name).biased for name in ("fp32", "fp16", "bf16", "int8", "int4", "fp4", "bf16+zstd")
    )
