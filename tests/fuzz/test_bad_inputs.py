"""A few of the bad inputs that benchmarks/fuzz.py draws by the thousand; a failure prints seed and case."""

from __future__ import annotations

import pytest

from . import bad_inputs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family, cases",
    [
        ("planned", 30), ("mesh_text", 99), ("hardware_file", 40), ("command_line", 40), ("simulated_model", 9),
        ("compiled_model", 8),
    ],
)  # fmt: skip
def test_right_or_refused(family, cases):
    report = bad_inputs.run(cases, seed=3, families=[family])
    assert not report.wrong, "\n".join(report.wrong)
