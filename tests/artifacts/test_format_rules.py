"""Formats: what the parts refuse, and strict reading from JSON data."""

import json
import re

import pytest
from hypothesis import given

from artifacts import (
    Center,
    Dense,
    Format,
    FormatError,
    LayerFormat,
    LowRank,
    PageShape,
    Rotate,
    Sketch,
    Sparse,
    Window,
)
from artifacts.errors import shown
from artifacts.format import from_json, to_json
from tests.artifacts.samples import kvquant, layer_formats

TOKEN = Dense(4, "token")
SHAPE = PageShape(64, 2, 128, "key")
REFUSED = {
    "bits": (lambda: Dense(5, "token"), r"bits=5 is not supported: allowed are 1, 2, 3, 4, 8"),
    "negative group": (lambda: Dense(4, "token", group=-32), r"dense\.group=-32 must be 0 .* or a positive number"),
    "bundle scales of tokens": (
        lambda: Dense(4, "token", scales="bundle"),
        r"scales=bundle needs axis=channel and group=0 .* not axis=token, group=0: set scales=online",
    ),
    "bundle scales of groups": (
        lambda: Dense(4, "channel", group=32, scales="bundle"),
        r"scales=bundle needs axis=channel and group=0 .* not axis=channel, group=32: set scales=online",
    ),
    "online scales of channels": (
        lambda: Dense(4, "channel"),
        r"axis=channel with scales=online needs a group of tokens \(group=32, say\).*scales=bundle",
    ),
    "head dimension": (lambda: TOKEN.check(PageShape(64, 2, 80, "key")), r"head dimension 80 is not a multiple of 32"),
    "tokens of a page": (
        lambda: Format(24, TOKEN).check(PageShape(24, 2, 128, "key")),
        r"pages of t=24 tokens are not stored in tiles of 16: take a multiple of 16",
    ),
    "group of channels": (
        lambda: Dense(4, "token", group=48).check(SHAPE),
        r"dense\.group=48 does not divide the head dimension 128",
    ),
    "group of tokens": (
        lambda: Dense(4, "channel", group=48).check(SHAPE),
        r"dense\.group=48 does not divide the page of 64 tokens",
    ),
    "no outliers": (
        lambda: Sparse(0, "token", "online"),
        r"fraction=0 must be above 0 and at most 0\.25; leave the part out",
    ),
    "too many outliers": (lambda: Sparse(0.26, "token", "online"), r"fraction=0\.26 must be above 0 and at most 0\.25"),
    "fraction is NaN": (lambda: Sparse(float("nan"), "token", "online"), r"fraction=nan must be above 0"),
    "calibrated tokens": (
        lambda: Sparse(0.01, "token", "bundle"),
        r"axis=token does not go with thresholds=bundle: thresholds of tokens are online",
    ),
    "online matrix": (
        lambda: Sparse(0.01, "matrix", "online"),
        r"axis=matrix does not go with thresholds=online: .* those of the matrix come from the bundle",
    ),
    "norm of channels": (
        lambda: Dense(2, "channel", 32, normalize="norm"),
        r"normalize=norm needs axis=head, not axis=channel",
    ),
    "groups of heads": (lambda: Dense(2, "head", 32), r"axis=head takes whole heads, not group=32: set axis=token"),
    "fit of 1 bit": (lambda: Dense(1, "token", codebook="uniform-fit"), r"uniform-fit has 2 to 4 bits, not 1: set"),
    "fit of 8 bits": (lambda: Dense(8, "token", codebook="uniform-fit"), r"has 2 to 4 bits, not 8: .* uniform with 8"),
    "lloyd without norm": (lambda: Dense(2, "token", 64, codebook="lloyd"), r"lloyd is made for vectors of norm 1"),
    "rotated before RoPE": (
        lambda: Format(64, Dense(2, "token", 64), domain="pre_rope", rotate=Rotate("haar")),
        r"does not commute with RoPE.*set domain=post_rope",
    ),
    "rank below one": (lambda: LowRank(0, 0), r"lowrank\.rank=0, .* at least 1, block_rank at most rank"),
    "block rank above rank": (
        lambda: LowRank(2, 3),
        r"block_rank=3: at least 1, block_rank at most rank",
    ),
    "rank above the head dimension": (
        lambda: LowRank(65, 2).check(PageShape(128, 2, 64, "key")),
        r"rank=65 is above what 128 tokens x 64 channels can have: 64 at most",
    ),
    "signs that fill no word": (lambda: Sketch(100), r"sketch\.m=100, .* multiples of 32, m at least 32"),
    "outlier channels without signs": (lambda: Sketch(64, outliers=4), r"outliers=4 .* both 0, or both above 0"),
    "more outlier channels than channels": (
        lambda: Sketch(64, outliers=64, outlier_m=32).check(PageShape(64, 2, 64, "key")),
        r"sketch\.outliers=64 must be below the head dimension 64",
    ),
    "sketched before RoPE": (
        lambda: Format(64, sketch=Sketch(64), domain="pre_rope"),
        r"sketch with domain=pre_rope: the query is projected once.*set domain=post_rope",
    ),
    "centred before RoPE": (
        lambda: Format(64, Dense(2, "token", 64), domain="pre_rope", center=Center()),
        r"center with domain=pre_rope.*softmax would see them",
    ),
    "sketched values": (
        lambda: LayerFormat(Format(64, TOKEN), Format(64, sketch=Sketch(64))),
        r"value\.sketch: a sketch estimates products with the query",
    ),
    "nothing at all": (lambda: Format(64), r"a part that covers every number: set dense, banded or sketch"),
    "hadamard of no power of two": (
        lambda: Rotate("hadamard").check(PageShape(64, 2, 96, "key")),
        r"needs a head dimension that is a power of two, not 96: use haar",
    ),
    "capacity below need": (lambda: Sparse(0.01, "matrix", "bundle", 0.9), r"capacity=0\.9 must lie between 1 and 8"),
    "capacity absurd": (lambda: Sparse(0.01, "matrix", "bundle", 8.5), r"capacity=8\.5 must lie between 1 and 8"),
    "blocks": (
        lambda: Sparse(0.01, "token", "online").check(PageShape(16, 2, 40, "key")),
        r"head dimension 40 is not a multiple of 16: tiles of 16 tokens need whole blocks of 256",
    ),
    "negative sinks": (lambda: Window(sinks=-1), r"window\.sinks=-1 must lie between 0 and 2147483647 tokens"),
    "endless window": (lambda: Window(recent=2**31), r"window\.recent=2147483648 must lie between 0 and 2147483647"),
    "empty page": (lambda: Format(0, TOKEN), r"page of t=0 tokens: must be at least 1"),
    "other page": (lambda: Format(128, TOKEN).check(SHAPE), r"pages of 128 tokens, the shape has 64"),
    "part does not fit": (lambda: Format(64, TOKEN).check(PageShape(64, 2, 80, "key")), r"head dimension 80"),
    "rotated values": (
        lambda: LayerFormat(Format(64, TOKEN), Format(64, TOKEN, domain="pre_rope")),
        r"value\.domain=pre_rope: values are not rotated; leave the domain out",
    ),
    "sinks differ": (
        lambda: LayerFormat(Format(64, TOKEN, window=Window(1)), Format(64, TOKEN)),
        r"key\.window\.sinks=1 and value\.window\.sinks=0 differ: .* set both the same",
    ),
    "shape without heads": (
        lambda: PageShape(64, 0, 128, "key"),
        r"h_kv=0, d=128, side='key'\): h_kv must be at least 1",
    ),
    "shape without tokens": (lambda: PageShape(0, 2, 128, "key"), r"t must be at least 1"),
    "shape without channels": (lambda: PageShape(64, 2, -1, "key"), r"d must be at least 1"),
    "shape beyond 32 bits": (
        lambda: PageShape(2**20, 16, 128, "key"),
        r"more than 2147483647 numbers: .* fewer tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(FormatError, match=message):
        make()


@pytest.mark.parametrize("sparse", [None, Sparse(0.01, "token", "online")])
def test_absent_parts_store_nothing(sparse):
    names = {field.name for field in Format(64, TOKEN, sparse).page_fields(SHAPE)}
    assert names == {"codes", "scale", "zero"} | ({"start", "index", "correction"} if sparse else set())


@given(layer_formats())
def test_json_round_trip(layer):
    data = json.loads(json.dumps(to_json(layer), allow_nan=False))
    assert None not in data["key"].values()
    assert from_json(LayerFormat, data, "formats[0]") == layer


def test_whole_numbers_count_as_floats():
    data = {"fraction": 0.01, "axis": "token", "thresholds": "online", "capacity": 2}
    assert type(from_json(Sparse, data, "sparse").capacity) is float


def kvquant_data(where=(), value=None):
    """A valid table with the entry at path `where` set to `value`."""
    data = to_json(kvquant(3))
    table = data
    for name in where[:-1]:
        table = table[name]
    if where:
        table[where[-1]] = value
    return data


MISTYPED = [
    (("key", "t"), r"formats\[0\]\.key\.t={} must be of type int", [True, 64.0, "64", None, [64], {}]),
    (
        ("key", "sparse", "fraction"),
        r"formats\[0\]\.key\.sparse\.fraction={} must be a finite number",
        [False, "0.01", None, [0.01], {}, float("nan"), float("inf"), -float("inf"), 10**400],
    ),
    (("key", "domain"), r"formats\[0\]\.key\.domain={}: allowed are pre_rope, post_rope", ["pre", 1, None, [], {}]),
    (("key", "window"), r"formats\[0\]\.key\.window must be a table of settings, not {}", [1, "w", None, [], True]),
    (("key", "sparse"), r"formats\[0\]\.key\.sparse must be a table of settings, not {}", [0, "w", [], False]),
    (("key", "dense", "codebook"), r"formats\[0\]\.key\.dense\.codebook={}: allowed are uniform, nf, nuq", [["nf"], 4]),
]


@pytest.mark.parametrize(
    "where, message, value", [(where, message, value) for where, message, values in MISTYPED for value in values]
)
def test_mistyped_entry(where, message, value):
    with pytest.raises(FormatError, match=message.format(re.escape(shown(value)))):
        from_json(LayerFormat, kvquant_data(where, value), "formats[0]")


def test_unknown_entry_lists_the_known_ones():
    with pytest.raises(FormatError, match=r"f\.key\.window\.sink is not a setting: known ones are sinks, recent"):
        from_json(LayerFormat, kvquant_data(("key", "window", "sink"), 1), "f")


def test_missing_entry_lists_the_required_ones():
    data = kvquant_data()
    del data["key"]["t"]
    with pytest.raises(FormatError, match=r"f\.key\.t is missing: t must be set"):
        from_json(LayerFormat, data, "f")


def test_refusal_of_a_part_says_where():
    with pytest.raises(FormatError, match=r"^f\.value\.dense: bits=7 is not supported"):
        from_json(LayerFormat, kvquant_data(("value", "dense", "bits"), 7), "f")


def test_absent_part_may_be_null():
    assert from_json(LayerFormat, kvquant_data(("key", "sparse"), None), "f").key.sparse is None
