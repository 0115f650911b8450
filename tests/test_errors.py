import pytest

from autopar import errors
from autopar.errors import AutoparError, MemoryInfeasibleError, MeshError, nearest


def test_message_first_then_one_field_a_line():
    fields = dict(node="mm_1", source="model.py:7", shape=(8, 4), mesh="tp=3", fix="use tp=4")
    error = MeshError("axis 'tp' has 3 devices", **fields)
    assert str(error).splitlines() == [
        "axis 'tp' has 3 devices",
        "  node: mm_1",
        "  source: model.py:7",
        "  shape: (8, 4)",
        "  mesh: tp=3",
        "  fix: use tp=4",
    ]


def test_fields_left_out_are_not_printed():
    assert str(AutoparError("no such axis")) == "no such axis"


def test_every_error_is_an_autopar_error_with_a_docstring():
    own = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(own) > 10
    for error in own:
        assert issubclass(error, AutoparError) and error.__doc__
        with pytest.raises(AutoparError, match="message"):
            raise error("message", fix="a remedy")


def test_memory_error_carries_the_numbers():
    error = MemoryInfeasibleError("too little", missing_bytes=12, breakdown={"parameters": 20.0}, mesh="dp=2")
    assert (error.missing_bytes, error.breakdown) == (12, {"parameters": 20.0})
    assert "mesh: dp=2" in str(error)


@pytest.mark.parametrize(
    "word, expected",
    [("lama", "llama"), ("gpt-2", "gpt2"), ("zzz", "gpt2, llama, mlp")],
)
def test_nearest_names(word, expected):
    assert nearest(word, ["mlp", "llama", "gpt2"]) == expected
