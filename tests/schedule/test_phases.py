from autopar.schedule.phases import actions_of, interleaved, one_stage, round_size


def order(phases, stages, m):
    return " ".join(map(str, actions_of(phases, stages, m)))


def test_a_phase_counts_its_micro_batches():
    assert order([(2, "F0"), (1, "F1 B1")], (3, 5), 9) == "3F0 3F1 5F0 5B0"


def test_whole_and_split_backwards_count_together_and_w_takes_the_oldest():
    assert order([(3, "F0"), (1, "B0 I0 I0 W W W")], (0,), 9) == "0F0 0F1 0F2 0B0 0I1 0I2 0W1 0W2"


def test_what_is_beyond_the_last_micro_batch_is_left_out():
    assert order(one_stage(2, 9, "B"), (0,), 2) == "0F0 0F1 0B0 0B1"
    assert order([(3, "F0"), (3, "I0 W")], (0,), 1) == "0F0 0I0 0W0"


def test_rounds():
    assert [round_size(4, m) for m in (1, 3, 4, 6, 8, 10, 11)] == [1, 3, 4, 6, 4, 5, 6]


def test_interleaved_as_megatron_has_it():
    """2 ranks, 2 stages each, 4 micro-batches, the last rank: one round ahead, then in pairs."""
    expected = "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert order(interleaved(1, 2, 4, 2, "B"), (1, 3), 4) == expected
