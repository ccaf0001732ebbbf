"""Quantized embeddings and similarities, against values that sentence-transformers 6.2 has computed."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.text.quantization import PRECISIONS, codes, starts_and_steps
from jaxft.text.similarities import SIMILARITIES, similarity_name

# Nine components: the first one is constant, and the ninth one starts a second byte.
EMBEDDINGS = np.array(
    [
        [0.5, -0.25, 0.125, 0.0, 1.0, -1.0, 0.75, -0.5, 0.0625],
        [0.5, 0.5, -0.375, 0.25, -1.0, 1.0, 0.0, -0.125, -0.0625],
        [0.5, 0.0, 0.9, -0.3, 0.1, 0.2, -0.7, 0.6, 0.3],
    ],
    np.float32,
)
RANGES = np.array([[-0.5] * 9, [0.5] * 9], np.float32)
QUANTIZED = {
    "int8": [[-128, -128, -28, 11, 126, -128, 127, -128, -41], [-128, 127, -128, 127, -128, 126, -5, -42, -128],
             [-128, -43, 127, -128, 12, 25, -128, 127, 127]],
    "uint8": [[0, 0, 100, 139, 254, 0, 255, 0, 87], [0, 255, 0, 255, 0, 254, 123, 86, 0],
              [0, 85, 255, 0, 140, 153, 0, 255, 255]],
    "binary": [[42, 0], [84, -128], [45, 0]],
    "ubinary": [[170, 128], [212, 0], [173, 128]],
}  # fmt: skip
FULL = {  # EMBEDDINGS[:2] with EMBEDDINGS
    "cosine": [[1.0, -0.6368014812469482, -0.2096111923456192], [-0.6368014812469482, 1.0, -0.0647316575050354]],
    "dot": [[3.14453125, -1.86328125, -0.5437499284744263], [-1.86328125, 2.72265625, -0.1562499850988388]],
    "euclidean": [[0.0, -3.0973780155181885, -2.5242881774902344], [-3.0973780155181885, 0.0, -2.2748968601226807]],
    "manhattan": [[0.0, -6.75, -6.212500095367432], [-6.75, 0.0, -6.012500286102295]],
}
CONVERSIONS = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "rows of numpy": list,
    "rows of jax": lambda x: [jnp.asarray(row) for row in x] if x.ndim == 2 else jnp.asarray(x),
}


def equal(found, expected, precision):
    assert isinstance(found, np.ndarray) and found.dtype == PRECISIONS[precision]
    np.testing.assert_array_equal(found, expected)


# --- quantize_embeddings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_quantization_equals_sentence_transformers(precision, conversion):
    equal(jaxft.quantize_embeddings(CONVERSIONS[conversion](EMBEDDINGS), precision), QUANTIZED[precision], precision)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "float16"])
def test_codes_of_the_device_equal_those_of_the_host(precision):
    rng = np.random.default_rng(0)
    starts_steps = starts_and_steps(np.sort(rng.normal(size=(2, 300)), axis=0).astype(np.float32))
    values = rng.normal(size=(50, 300)).astype(np.float32)
    values[10:] = rng.integers(-3, 260, (40, 300)) * starts_steps[1] + starts_steps[0]  # the edges of steps
    for near in (values, np.nextafter(values, np.float32(9)), np.nextafter(values, np.float32(-9))):
        found = jax.jit(codes, static_argnums=1)(near, precision, starts_steps if "int8" in precision else None)
        equal(np.asarray(found), codes(near, precision, starts_steps if "int8" in precision else None), precision)


def test_ranges_and_calibration():
    expected = [[126, -65, 31, -1, 127, -128, 127, -128, 15], [126, 126, -97, 63, -128, 127, -1, -33, -17]]
    for ranges in (RANGES, jnp.asarray(RANGES), RANGES.tolist()):
        equal(jaxft.quantize_embeddings(EMBEDDINGS[:2], "int8", ranges=ranges), expected, "int8")
    equal(jaxft.quantize_embeddings(EMBEDDINGS[0], "int8", ranges=RANGES), expected[0], "int8")
    expected = [[0, 0, 100, 139, 255, 0, 255, 0, 87], [0, 254, 0, 255, 0, 255, 255, 0, 0]]
    calibration = EMBEDDINGS[1:]
    found = jaxft.quantize_embeddings(EMBEDDINGS[:2], "uint8", calibration_embeddings=calibration)
    equal(found, expected, "uint8")
    found = jaxft.quantize_embeddings(EMBEDDINGS[:2], "uint8", ranges=RANGES, calibration_embeddings=calibration)
    equal(found, jaxft.quantize_embeddings(EMBEDDINGS[:2], "uint8", ranges=RANGES), "uint8")  # ranges come first


@pytest.mark.parametrize("precision", ["float32", "float16", "binary", "ubinary"])
def test_precisions_without_ranges_ignore_them(precision):
    """sentence-transformers does, so that a script may pass them with every precision."""
    found = jaxft.quantize_embeddings(EMBEDDINGS, precision, ranges=RANGES, calibration_embeddings=EMBEDDINGS)
    np.testing.assert_array_equal(found, jaxft.quantize_embeddings(EMBEDDINGS, precision))


@pytest.mark.parametrize("kind", [np.int8, np.uint64, np.int64, list])
def test_ranges_may_be_integers(kind):
    ranges = np.array([[0] * 9, range(1, 10)])
    given = ranges.tolist() if kind is list else ranges.astype(kind)
    expected = jaxft.quantize_embeddings(EMBEDDINGS, "int8", ranges=ranges.astype(np.float32))
    np.testing.assert_array_equal(jaxft.quantize_embeddings(EMBEDDINGS, "int8", ranges=given), expected)


def test_matrices_of_a_list_share_their_ranges():
    for convert in (np.asarray, jnp.asarray):
        parts = [convert(EMBEDDINGS[:1]), convert(EMBEDDINGS[:0]), convert(EMBEDDINGS[1:])]
        for precision, expected in QUANTIZED.items():
            found = jaxft.quantize_embeddings(parts, precision)
            assert isinstance(found, list) and [len(part) for part in found] == [1, 0, 2]
            equal(np.concatenate(found), expected, precision)


def test_float64_is_quantized_in_float64():
    values = EMBEDDINGS.astype(np.float64) + 1e-12
    limits = np.stack([values.min(axis=0), values.max(axis=0)]).astype(np.float32)
    steps = (limits[1] - limits[0]) / np.float32(255)
    expected = np.clip(np.floor((values - limits[0]) / np.where(steps == 0, 1, steps)), 0, 255)
    equal(jaxft.quantize_embeddings(values, "uint8"), expected, "uint8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_quantized_in_float32(dtype):
    values = np.asarray(jnp.asarray(EMBEDDINGS, dtype))
    for precision in PRECISIONS:
        expected = jaxft.quantize_embeddings(values.astype(np.float32), precision)
        equal(jaxft.quantize_embeddings(values, precision), expected, precision)


def test_blocks_of_rows_equal_the_whole():
    values = np.random.default_rng(0).normal(size=(700, 1000)).astype(np.float32)  # several blocks
    limits = np.stack([values.min(axis=0), values.max(axis=0)])
    expected = np.clip(np.floor((values - limits[0]) / ((limits[1] - limits[0]) / 255)), 0, 255)
    equal(jaxft.quantize_embeddings(values, "uint8"), expected, "uint8")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantization_of_nothing(precision):
    width = 2 if precision.endswith("binary") else 9
    assert jaxft.quantize_embeddings(EMBEDDINGS[:0], precision).shape == (0, width)
    assert jaxft.quantize_embeddings(EMBEDDINGS[:0], precision).dtype == PRECISIONS[precision]
    assert jaxft.quantize_embeddings([], precision) == []


def test_ranges_of_few_rows_log_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "jaxft"):
        jaxft.quantize_embeddings(EMBEDDINGS, "int8", ranges=RANGES)
        jaxft.quantize_embeddings(EMBEDDINGS, "int8", calibration_embeddings=EMBEDDINGS)
        jaxft.quantize_embeddings(EMBEDDINGS, "binary")
        jaxft.quantize_embeddings(np.tile(EMBEDDINGS, (34, 1))[:100], "uint8")
        assert caplog.messages == []
        jaxft.quantize_embeddings(EMBEDDINGS, "uint8")
    assert caplog.messages == [
        "quantize_embeddings: uint8 ranges are computed from only 3 embeddings: pass ranges, or "
        "calibration_embeddings of more texts"
    ]


def with_value(value, dtype=np.float32):
    changed = EMBEDDINGS.astype(dtype)
    changed[1, 2] = value
    return changed


@pytest.mark.parametrize(
    ("embeddings", "precision", "options", "error", "message"),
    [
        (EMBEDDINGS, "int4", {}, ValueError, "precision must be one of float32, .*, ubinary, got 'int4'"),
        (EMBEDDINGS, None, {}, ValueError, "precision must be one of .*, got None"),
        (EMBEDDINGS[0], "int8", {}, ValueError, "int8 ranges of a single embedding say nothing"),
        (EMBEDDINGS[:1], "uint8", {}, ValueError, "uint8 ranges of a single embedding say nothing"),
        ([EMBEDDINGS[:1]], "uint8", {}, ValueError, "uint8 ranges of a single embedding say nothing"),
        (with_value(np.nan), "int8", {}, ValueError, r"embeddings must be finite, got nan at \[1, 2\]"),
        (with_value(np.inf), "binary", {}, ValueError, r"embeddings must be finite, got inf at \[1, 2\]"),
        (with_value(-np.inf), "ubinary", {}, ValueError, r"embeddings must be finite, got -inf at \[1, 2\]"),
        (with_value(1e6), "float16", {}, ValueError, "embeddings must fit float16, got 1000000.0"),
        (EMBEDDINGS.astype(np.int8), "binary", {}, TypeError, "embeddings must be floats, got int8"),
        (np.ones((2, 3, 4)), "binary", {}, ValueError, r"one or two axes, got the shape \(2, 3, 4\)"),
        (np.float32(1), "binary", {}, ValueError, r"one or two axes, got the shape \(\)"),
        ([EMBEDDINGS[0], EMBEDDINGS[0, :4]], "int8", {}, ValueError, "embeddings must be rows of one width"),
        ([EMBEDDINGS, EMBEDDINGS[:, :4]], "int8", {}, ValueError, r"embeddings must have one width, got \[4, 9\]"),
        (EMBEDDINGS, "int8", {"ranges": RANGES[:, :4]}, ValueError, r"ranges must have the shape .*, got \(2, 4\)"),
        (EMBEDDINGS, "int8", {"ranges": -RANGES}, ValueError, r"ranges\[0\] must not exceed .*, got 0.5 and -0.5"),
        (EMBEDDINGS, "int8", {"ranges": RANGES * np.inf}, ValueError, "ranges must be finite"),
        (EMBEDDINGS, "int8", {"ranges": RANGES > 0}, TypeError, "ranges must be numbers, got bool"),
        (EMBEDDINGS, "int8", {"ranges": [[0] * 9, [10**40] * 9]}, TypeError, "ranges must be numbers, got object"),
        (EMBEDDINGS, "int8", {"calibration_embeddings": EMBEDDINGS[:, :4]}, ValueError,
         r"calibration_embeddings must be \[n, 9\], got \(3, 4\)"),
        (EMBEDDINGS, "int8", {"calibration_embeddings": EMBEDDINGS[:0]}, ValueError,
         r"calibration_embeddings must be \[n, 9\], got \(0, 9\)"),
        (EMBEDDINGS, "int8", {"calibration_embeddings": with_value(np.nan)}, ValueError,
         "calibration_embeddings must be finite, got nan"),
    ],
)  # fmt: skip
def test_bad_quantization_is_refused(embeddings, precision, options, error, message):
    with pytest.raises(error, match=f"quantize_embeddings: .*{message}"):
        jaxft.quantize_embeddings(embeddings, precision, **options)


def test_floats_keep_values_that_are_not_finite():
    for precision in ("float32", "float16"):
        equal(jaxft.quantize_embeddings(with_value(np.nan), precision), with_value(np.nan, precision), precision)
        equal(jaxft.quantize_embeddings(with_value(np.inf), precision), with_value(np.inf, precision), precision)


# --- Similarities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_cosine_of_short_vectors_does_not_depend_on_their_length(conversion):
    convert, functions = CONVERSIONS[conversion], SIMILARITIES["cosine"]
    np.testing.assert_allclose(functions.full(convert(EMBEDDINGS[:2] * np.float32(1e-6)), convert(EMBEDDINGS)),
                               np.float32(FULL["cosine"]), rtol=1e-6, atol=2e-7)  # fmt: skip


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("name", FULL)
def test_similarities_equal_sentence_transformers(name, conversion):
    convert, functions = CONVERSIONS[conversion], SIMILARITIES[name]
    kind = jax.Array if "jax" in conversion else np.ndarray
    expected = np.array(FULL[name], np.float32)
    for a, b, values in (
        (EMBEDDINGS[:2], EMBEDDINGS, expected),
        (EMBEDDINGS[0], EMBEDDINGS, expected[:1]),
        (EMBEDDINGS[:2], EMBEDDINGS[1], expected[:, 1:2]),
        *([] if "rows" in conversion else [(EMBEDDINGS[:0], EMBEDDINGS, expected[:0])]),
    ):
        found = functions.full(convert(a), convert(b))
        assert isinstance(found, kind) and found.dtype == np.float32 and found.shape == values.shape
        np.testing.assert_allclose(found, values, rtol=1e-6, atol=2e-7)
    for a, b, values in (
        (EMBEDDINGS[:2], EMBEDDINGS[1:], [expected[0, 1], expected[1, 2]]),
        (EMBEDDINGS[0], EMBEDDINGS, expected[0]),
        (EMBEDDINGS[0], EMBEDDINGS[1], expected[0, 1]),
    ):
        found = functions.pairwise(convert(a), convert(b))
        assert found.dtype == np.float32 and found.shape == np.shape(values)
        np.testing.assert_allclose(found, values, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities_compute_in_float32(name):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 300)).astype(np.float16)
    exact = SIMILARITIES[name].full(a.astype(np.float32), b.astype(np.float32))
    for x, y in ((a, b), (jnp.asarray(a), b)):
        np.testing.assert_allclose(SIMILARITIES[name].full(x, y), exact, rtol=2e-6, atol=2e-6)
    integers = np.full((2, 8), 100, np.int8)  # sums that int8 does not hold
    for convert in (np.asarray, jnp.asarray):
        assert SIMILARITIES["dot"].full(convert(integers), integers).tolist() == [[80_000.0] * 2] * 2


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_zero_vectors_have_similarity_0(convert):
    assert SIMILARITIES["cosine"].full(convert(np.zeros((1, 4))), convert(np.ones((1, 4)))).tolist() == [[0.0]]
    assert SIMILARITIES["cosine"].pairwise(convert(np.zeros((1, 4))), convert(np.ones((1, 4)))).tolist() == [0.0]


def test_distances_do_not_cancel():
    a = np.full((40, 300), 10.0, np.float32)
    b = a + np.float32(2**-10)
    for convert in (np.asarray, jnp.asarray):
        np.testing.assert_allclose(
            SIMILARITIES["euclidean"].full(convert(a), convert(b)), -(300**0.5) / 1024, rtol=1e-6
        )


def test_bad_similarities_are_refused():
    full, pairwise = SIMILARITIES["cosine"]
    for function, a, b, error, message in (
        (full, EMBEDDINGS, EMBEDDINGS[:, :4], ValueError, r"the same width, got \(3, 9\) and \(3, 4\)"),
        (pairwise, EMBEDDINGS, EMBEDDINGS[:2], ValueError, r"the same shape, got \(3, 9\) and \(2, 9\)"),
        (full, EMBEDDINGS[None], EMBEDDINGS, ValueError, r"embeddings1 must have .* axes, got the shape \(1, 3, 9\)"),
        (full, EMBEDDINGS, ["a text"], TypeError, "embeddings2 must be an array of numbers, got list"),
        (full, None, EMBEDDINGS, ValueError, "embeddings1 must have one or two axes"),
    ):
        with pytest.raises(error, match=message):
            function(a, b)


def test_names_of_similarities():
    class Member:  # as sentence-transformers' SimilarityFunction.DOT_PRODUCT
        value = "dot"

    assert [similarity_name("f", "name", name) for name in ("cosine", "dot_product", Member)] == [
        "cosine",
        "dot",
        "dot",
    ]
    for name in ("maxsim", "Cosine", None, 3):
        with pytest.raises(ValueError, match="f: name must be one of cosine, dot, euclidean, manhattan, got"):
            similarity_name("f", "name", name)
