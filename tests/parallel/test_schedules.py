"""Schedules as data: every table that is made is valid, meets the laws of its paper, and can be shown to fail."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.builders import NAMES, SCHEDULES, from_orders, make_schedule
from jaxdist.parallel.pipeline.instructions import Loop
from jaxdist.parallel.pipeline.lowering import iterations
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule, divide_layers
from jaxdist.parallel.pipeline.simulate import Costs, held_chunks, in_flight, simulate, validate
from jaxdist.parallel.pipeline.text import draw, load, parse, parse_cell

checked = settings(derandomize=True, deadline=None, max_examples=60)
STAGES, MICROBATCHES, CHUNKS = st.integers(1, 12), st.integers(1, 24), st.integers(1, 4)


@st.composite
def made(draw_value) -> Schedule:
    name = draw_value(st.sampled_from(NAMES))
    chunks = draw_value(CHUNKS) if name == "interleaved" else None
    return make_schedule(name, draw_value(STAGES), draw_value(MICROBATCHES), chunks)


@st.composite
def travelling(draw_value) -> Schedule:
    """A schedule whose messages travel during a tick."""
    name = draw_value(st.sampled_from(NAMES))
    chunks = draw_value(CHUNKS) if name == "interleaved" else None
    return make_schedule(name, draw_value(STAGES), draw_value(MICROBATCHES), chunks, send_latency=2)


def bubble(schedule: Schedule) -> int:
    """Ticks above those of one stage's work."""
    return schedule.num_ticks - 3 * schedule.num_microbatches * schedule.num_chunks


def idle_inside(schedule: Schedule) -> int:
    """Idle ticks between a stage's first action and its last, over all stages."""
    count = 0
    for column in zip(*schedule.table, strict=True):
        ticks = [tick for tick, action in enumerate(column) if action is not None]
        count += ticks[-1] - ticks[0] + 1 - len(ticks)
    return count


# -------------------------------------------------------------------------------------------------- what is always so


@checked
@given(made())
def test_every_schedule_is_valid_and_complete(schedule):
    assert dataclasses.replace(schedule, table=[list(row) for row in schedule.table]) == schedule
    validate(schedule)
    actions = [action for row in schedule.table for action in row if action is not None]
    assert len(actions) == 3 * schedule.num_microbatches * schedule.num_parts
    assert all(any(row) for row in schedule.table)


@checked
@given(travelling())
def test_messages_that_travel_during_a_tick_are_a_tick_later(schedule):
    """Valid by a rule of its own; at no stage before its neighbour's next tick but one."""
    validate(schedule)
    actions = [action for row in schedule.table for action in row if action is not None]
    assert len(actions) == len(set(zip(actions, stages_of(schedule), strict=True)))
    assert len(actions) == 3 * schedule.num_microbatches * schedule.num_parts
    when = {
        (action.phase, action.microbatch, schedule.part(stage, action.chunk)): (tick, stage)
        for tick, row in enumerate(schedule.table)
        for stage, action in enumerate(row)
        if action is not None
    }
    for (phase, micro, part), (tick, stage) in when.items():
        source = {Phase.F: (phase, micro, part - 1), Phase.B: (phase, micro, part + 1)}.get(phase)
        if source in when:
            sent, sender = when[source]
            assert tick >= sent + (1 if sender == stage else 2)
    assert parse(draw(schedule)) == schedule
    plain = dataclasses.replace(schedule, send_latency=1)
    validate(plain)


def stages_of(schedule: Schedule) -> list[int]:
    return [stage for row in schedule.table for stage, action in enumerate(row) if action is not None]


def test_a_message_that_is_still_on_its_way_is_refused():
    with pytest.raises(ConfigError, match="F of micro-batch 0, chunk 0 of stage 0, which is there only after"):
        validate(dataclasses.replace(make_schedule("1f1b", 2, 4), send_latency=2))
    with pytest.raises(ConfigError, match="Use 1 or 2"):
        make_schedule("1f1b", 2, 4, send_latency=3)
    with pytest.raises(ConfigError, match="deadlock"):
        from_orders(
            Schedule("stuck", 2, 1, 1, "loop", send_latency=2), [[Action(Phase.B, 0, 0)], [Action(Phase.F, 0, 0)]]
        )


def test_a_table_of_too_many_cells_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match=r"131,072.*160,000"):
        make_schedule("interleaved", 4, 20_000, 2)


@checked
@given(made())
def test_draw_and_parse_are_inverse(schedule):
    text = draw(schedule)
    assert parse(text) == schedule
    assert "hop=" not in text  # which the documented tables leave out
    assert draw(parse(text)) == text


@checked
@given(made())
def test_with_unit_costs_both_ways_of_waiting_take_the_ticks_of_the_table(schedule):
    assert simulate(schedule).makespan == schedule.num_ticks
    assert simulate(schedule, waiting="dependencies").makespan == schedule.num_ticks


@checked
@given(st.one_of(made(), travelling()), st.tuples(*[st.floats(0.25, 4)] * 3), st.floats(0, 1))
def test_lock_step_is_never_faster_than_dependencies(schedule, times, link):
    ticks = simulate(schedule, Costs(*times), link)
    dependencies = simulate(schedule, Costs(*times), link, waiting="dependencies")
    assert ticks.makespan >= dependencies.makespan - 1e-9
    assert ticks.busy == pytest.approx(dependencies.busy)


@checked
@given(made())
def test_order_of_each_stage_gives_the_table_back_or_a_shorter_one(schedule):
    orders = [[action for action in column if action] for column in zip(*schedule.table, strict=True)]
    again = from_orders(dataclasses.replace(schedule, table=()), orders)
    assert again.num_ticks <= schedule.num_ticks


@given(made())
@checked
def test_part_and_place_are_inverse(schedule):
    places = [schedule.place(part) for part in range(schedule.num_parts)]
    assert [schedule.part(*place) for place in places] == list(range(schedule.num_parts))
    for (stage, _), (following, _) in itertools.pairwise(places):
        distance = (following - stage) % schedule.num_stages
        assert distance in ({0, 1, schedule.num_stages - 1} if schedule.placement == "v" else {1 % schedule.num_stages})


@checked
@given(made())
def test_held_chunks_until_b_are_never_more_than_until_w(schedule):
    for until_b, until_w in zip(held_chunks(schedule, Phase.B), held_chunks(schedule), strict=True):
        assert all(b <= w for b, w in zip(until_b, until_w, strict=True))
    # The last action of the last tick holds its own chunk still.
    assert sum(held_chunks(schedule)[-1]) == sum(action is not None for action in schedule.table[-1])


# ------------------------------------------------------------------------------------------------ laws of the papers


@checked
@given(STAGES, MICROBATCHES)
def test_gpipe_and_1f1b(num_stages, num_microbatches):
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, num_stages, num_microbatches)
        assert schedule.num_ticks == 3 * (num_microbatches + num_stages - 1)
        result = simulate(schedule)
        assert result.idle_over_ideal == pytest.approx((num_stages - 1) / num_microbatches)
        assert result.idle_share == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))
    assert in_flight(schedule) == [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]
    assert in_flight(make_schedule("gpipe", num_stages, num_microbatches)) == [num_microbatches] * num_stages


@checked
@given(STAGES, st.integers(1, 4), CHUNKS)
def test_interleaved(num_stages, rounds, num_chunks):
    num_microbatches = rounds * num_stages
    schedule = make_schedule("interleaved", num_stages, num_microbatches, num_chunks)
    share = (num_stages - 1) / (num_chunks * num_microbatches + num_stages - 1)
    assert simulate(schedule).idle_share == pytest.approx(share)
    if num_stages > 1 and num_chunks > 1 and rounds > 1:
        # arXiv 2205.05198: the first stage holds 1 + (S-1)/(S v) times what it holds under 1F1B.
        assert in_flight(schedule)[0] == num_stages * num_chunks + num_stages - 1


@checked
@given(STAGES, MICROBATCHES)
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_1f1b(num_stages, num_microbatches):
    schedule = make_schedule("zb-h1", num_stages, num_microbatches)
    # The second term is the lower bound for fewer micro-batches than stages.
    assert bubble(schedule) == num_stages - 1 + max(0, num_stages - num_microbatches)
    assert max(in_flight(schedule)) <= min(num_microbatches, num_stages)


@checked
@given(STAGES, MICROBATCHES)
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(num_stages, num_microbatches):
    schedule = make_schedule("zb-v", num_stages, num_microbatches)
    assert max(in_flight(schedule)) <= 2 * num_stages
    if num_microbatches >= num_stages:
        assert bubble(schedule) == num_stages - 1
    if num_microbatches >= 2 * num_stages:
        assert idle_inside(schedule) == 0


@checked
@given(STAGES, MICROBATCHES)
def test_v_half_has_half_the_bubble_in_half_the_memory(num_stages, num_microbatches):
    schedule = make_schedule("v-half", num_stages, num_microbatches)
    assert max(in_flight(schedule)) <= num_stages + (1 if num_stages % 2 else 2)
    if num_microbatches > num_stages / 2:
        assert bubble(schedule) == 3 * (num_stages - 1) - (num_stages > 2)


@checked
@given(STAGES, MICROBATCHES)
def test_v_min_has_two_thirds_of_the_bubble_in_a_third_of_the_memory(num_stages, num_microbatches):
    schedule = make_schedule("v-min", num_stages, num_microbatches)
    assert max(in_flight(schedule)) <= 2 * math.ceil((num_stages + 2) / 3) <= 2 * num_stages / 3 + 8 / 3
    assert bubble(schedule) <= max(0, 4 * (num_stages - 1) + (1 if num_stages % 3 == 0 else -1))


def test_the_bubble_does_not_grow_with_the_micro_batches():
    for name in NAMES:
        few, many = make_schedule(name, 8, 16), make_schedule(name, 8, 64)
        assert bubble(few) == bubble(many), name
        assert name == "gpipe" or in_flight(few) == in_flight(many), name


# ------------------------------------------------------------------------------------------------------- planted faults


def changed(schedule: Schedule, entries: dict[tuple[int, int], Action | None]) -> Schedule:
    table = [list(row) for row in schedule.table]
    for (tick, stage), action in entries.items():
        table[tick][stage] = action
    return dataclasses.replace(schedule, table=tuple(map(tuple, table)))


def entries_of(schedule: Schedule) -> list[tuple[int, int, Action]]:
    return [
        (tick, stage, action)
        for tick, row in enumerate(schedule.table)
        for stage, action in enumerate(row)
        if action is not None
    ]


FAULTY = [make_schedule(name, 3, 4) for name in NAMES]
by_name = pytest.mark.parametrize("schedule", FAULTY, ids=lambda schedule: schedule.name)


@by_name
def test_missing_action_is_named(schedule):
    for tick, stage, action in entries_of(schedule):
        with pytest.raises(ConfigError, match=f"stage {stage}: {action} is missing"):
            validate(changed(schedule, {(tick, stage): None}))


@by_name
def test_doubled_action_is_named_with_both_ticks(schedule):
    for tick, stage, action in entries_of(schedule):
        last = schedule.num_ticks
        doubled = dataclasses.replace(schedule, table=(*schedule.table, (None,) * schedule.num_stages))
        with pytest.raises(ConfigError, match=f"tick {last}, stage {stage}: {action}: .* tick {tick}"):
            validate(changed(doubled, {(last, stage): action}))


def test_actions_wait_for_what_they_read():
    """With two stages: a B reads what its R (or its F) kept and the next stage's gradient, an R the input of its F."""
    schedule = make_schedule("1f1b", 2, 2, recompute=True)
    f, r, b, w = (Action(phase, 1, 0) for phase in (Phase.F, Phase.R, Phase.B, Phase.W))
    assert [schedule.inputs(1, action) for action in (f, r, b, w)] == [[(0, f)], [(1, f)], [(1, r)], [(1, b)]]
    assert schedule.inputs(0, f) == [] and schedule.inputs(0, b) == [(0, r), (1, w)]
    split = dataclasses.replace(schedule, fused_backward=False, recompute=False)
    assert split.inputs(0, b) == [(0, f), (1, b)]


def test_an_r_takes_as_long_as_an_f_unless_it_is_said_how_long():
    times = [Costs(2.0, 3.0, 4.0, again).of(Action(phase, 0, 0)) for again in (None, 5.0) for phase in Phase]
    assert times == [2.0, 3.0, 4.0, 2.0, 2.0, 3.0, 4.0, 5.0]


def test_a_layer_more_goes_to_the_later_of_the_middle_parts():
    assert [divide_layers(n, 4) for n in (4, 5, 6, 7, 8)] == [
        (1, 1, 1, 1),
        (1, 1, 2, 1),
        (1, 2, 2, 1),
        (1, 2, 2, 2),
        (2, 2, 2, 2),
    ]
    assert divide_layers(5, 3, last=2.0) == (2, 2, 1)


def test_embedding_and_head_run_on_the_stages_of_the_first_and_last_part():
    for name, head in (("1f1b", 1), ("interleaved", 1), ("zb-v", 0)):
        schedule = make_schedule(name, 2, 4)
        found = iterations(schedule, [1] * schedule.num_parts)
        assert [x > 0 for x in found[Loop.EMBED]] == [True, False]
        assert [x > 0 for x in found[Loop.HEAD]] == [head == 0, head == 1]


@by_name
def test_action_shifted_before_what_it_needs_is_named(schedule):
    """Each action is run at the very tick of an input: its own entry and the input's are swapped, or the rows shift."""
    for tick, stage, action in entries_of(schedule):
        for source, needed in schedule.inputs(stage, action):
            arrives = next(t for t, s, a in entries_of(schedule) if (s, a) == (source, needed))
            if source == stage:
                swapped = changed(schedule, {(tick, stage): needed, (arrives, stage): action})
                with pytest.raises(ConfigError, match=r"tick \d+, stage \d+: [FBW] of micro-batch \d+, chunk \d+: "):
                    validate(swapped)
            elif schedule.table[arrives][stage] is None:
                shifted = changed(schedule, {(tick, stage): None, (arrives, stage): action})
                with pytest.raises(ConfigError, match=f"tick {arrives}, stage {stage}: {action}: .*after tick"):
                    validate(shifted)


# ----------------------------------------------------------------------------------------------------------- simulation


@pytest.mark.parametrize("name", NAMES)
def test_r_runs_between_its_f_and_its_b(name):
    """For every micro-batch and chunk; it holds its residuals from there on: never more than without, and where a V is
    not in between less."""
    for stages, microbatches, send_latency in ((2, 5, 1), (4, 8, 1), (4, 8, 2), (3, 2, 1)):
        schedule = make_schedule(name, stages, microbatches, send_latency=send_latency, recompute=True)
        when = {
            (stage, action): tick
            for tick, row in enumerate(schedule.table)
            for stage, action in enumerate(row)
            if action is not None
        }
        again = [(stage, action) for stage, action in when if action.phase == Phase.R]
        assert len(again) == microbatches * schedule.num_parts and len(when) == 4 * len(again)
        for stage, action in again:
            f, r, b = (when[stage, action._replace(phase=phase)] for phase in (Phase.F, Phase.R, Phase.B))
            assert f < r < b
        assert parse(draw(schedule)) == schedule
        plain = make_schedule(name, stages, microbatches, send_latency=send_latency)
        assert max(in_flight(schedule)) <= max(in_flight(plain))
        # A tick is a unit again, where a B that runs the forward lasts two and lock-step makes the others wait.
        if send_latency == 1 and microbatches >= stages:
            assert simulate(schedule).makespan < simulate(plain, Costs(1, 2, 1)).makespan


def test_an_r_in_a_table_is_for_every_b():
    table = "0: F0 R0 B0 W0 F1 {} B1 W1"
    assert parse(table.format("R1")).recompute
    with pytest.raises(ConfigError, match="R of micro-batch 1, chunk 0 is missing"):
        parse(table.format("."))
    with pytest.raises(ConfigError, match="set recompute"):
        validate(dataclasses.replace(parse(table.format("R1")), recompute=False))
    with pytest.raises(ConfigError, match="R of micro-batch 0"):
        parse("0: F0 B0 R0 W0")


@checked
@given(STAGES, MICROBATCHES)
def test_interleaved_with_one_chunk_is_1f1b(num_stages, num_microbatches):
    interleaved = make_schedule("interleaved", num_stages, num_microbatches, 1)
    assert interleaved.table == make_schedule("1f1b", num_stages, num_microbatches).table


@by_name
def test_wrong_micro_batch_is_named(schedule):
    for tick, stage, action in entries_of(schedule):
        with pytest.raises(
            ConfigError, match=rf"stage {stage}: {action.phase.name} of micro-batch \d+, chunk {action.chunk}"
        ):
            validate(changed(schedule, {(tick, stage): action._replace(microbatch=(action.microbatch + 1) % 4)}))
        with pytest.raises(ConfigError, match=f"tick {tick}, stage {stage}: .*micro-batch .*, not 4"):
            validate(changed(schedule, {(tick, stage): action._replace(microbatch=4)}))


def test_fused_backward_means_that_w_follows_its_b():
    schedule = make_schedule("zb-h1", 3, 4)
    with pytest.raises(ConfigError, match=r"tick \d+, stage \d+: [BW] of micro-batch \d+"):
        validate(dataclasses.replace(schedule, fused_backward=True))
    apart = parse("F0 B0 . W0")
    with pytest.raises(ConfigError, match=r"tick 3, stage 0: W of micro-batch 0, chunk 0: .*at once, here at tick 2"):
        validate(dataclasses.replace(apart, fused_backward=True))


def test_deadlocked_orders_say_which_stage_waits_for_what():
    def order(cells):
        return [parse_cell(cell, "") for cell in cells.split()]

    mine = Schedule("mine", 2, 2, 1, "loop")
    first, last = "F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"
    assert from_orders(mine, [order(first), order(last)]).num_ticks == 8
    with pytest.raises(
        ConfigError,
        match=r"tick 1: deadlock: .*stage 0 with B of micro-batch 0, chunk 0 waits for B of micro-batch 0, chunk 0 of"
        " stage 1; stage 1 with F of micro-batch 1, chunk 0 waits for F of micro-batch 1, chunk 0 of stage 0",
    ):
        from_orders(mine, [order("F0 B0 W0 F1 B1 W1"), order("F1 B1 W1 F0 B0 W0")])
    with pytest.raises(ConfigError, match="stage 1, position 0 of its order: F of micro-batch 7"):
        from_orders(mine, [order(first), order("F7")])
    with pytest.raises(ConfigError, match="1 orders"):
        from_orders(mine, [order(first)])
    with pytest.raises(ConfigError, match="stage 1: F of micro-batch 0, chunk 0 is missing"):
        from_orders(dataclasses.replace(mine, num_microbatches=1), [order("F0"), []])
    with pytest.raises(ConfigError, match=r"stage 0: F of micro-batch 0, chunk 0: .*already"):
        from_orders(Schedule("mine", 1, 1, 1, "loop"), [order("F0 F0 B0 W0")])


def test_asking_for_what_cannot_be_made():
    for arguments, message in {
        ("2f2b", 2, 2): "'2f2b': there is no schedule of that name. Use one of gpipe, 1f1b",
        ("1f1b", 0, 2): "0 stages",
        ("1f1b", 2, 0): "0 micro-batches",
        ("interleaved", 2, 2, 0): "0 chunks",
        ("1f1b", 2, 2, 2): "with 2 chunks a stage",
        ("zb-v", 2, 2, 3): "with 3 chunks a stage",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_schedule(*arguments)
    with pytest.raises(ConfigError, match="a V must go down"):
        validate(dataclasses.replace(make_schedule("1f1b", 1, 1), placement="v"))
    with pytest.raises(ConfigError, match="no placement of that name"):
        validate(dataclasses.replace(make_schedule("1f1b", 1, 1), placement="ring"))
    with pytest.raises(ConfigError, match=r"until <Phase\.F"):
        in_flight(make_schedule("1f1b", 1, 1), until=Phase.F)
    assert [kind.chunks for kind in SCHEDULES.values()] == [1, 1, 2, 1, 2, 2, 2]
    assert {name for name, kind in SCHEDULES.items() if kind.placement == "v"} == {"zb-v", "v-half", "v-min"}


def test_lock_step_trap_of_a_backward_of_two_units():
    """4 stages, 16 micro-batches, F = 1 and the whole backward = 2: textbook 57, one action a tick 72."""
    split = make_schedule("1f1b", 4, 16)
    assert simulate(split).makespan == 57
    # The same order of F and B with the weight gradients, here free, out of the way at the end.
    orders = [
        [action for action in column if action and action.phase != Phase.W] + [Action(Phase.W, m, 0) for m in range(16)]
        for column in zip(*split.table, strict=True)
    ]
    whole = from_orders(Schedule("whole backward", 4, 16, 1, "loop"), orders)
    assert simulate(whole, Costs(1, 2, 0), waiting="dependencies").makespan == 57
    assert simulate(whole, Costs(1, 2, 0), waiting="ticks").makespan == 72


@pytest.mark.parametrize("name", NAMES)
def test_stages_that_wait_in_pairs_are_between_lock_step_and_what_is_needed(name):
    """The three ways to wait, with actions of different times; both ends of a message that takes long wait for it."""
    for recompute, costs, link in itertools.product((False, True), (Costs(), Costs(1, 2, 1), Costs(2, 1, 3)), (0, 0.5)):
        schedule = make_schedule(name, 4, 8, recompute=recompute)
        ticks, pairs, needed = (
            simulate(schedule, costs, link, waiting).makespan for waiting in ("ticks", "pairs", "dependencies")
        )
        assert pairs <= ticks
        # A textbook's fused backward sends after its W, the executor after B.
        assert schedule.fused_backward or needed <= pairs
        late = make_schedule(name, 4, 8, send_latency=2, recompute=recompute)
        assert simulate(late, costs, link, "pairs").makespan == simulate(late, costs, link).makespan


def test_a_message_holds_up_its_two_ends_alone():
    """Stage 0 is slow once; stage 1 waits for its message, stage 2 does not."""
    schedule = parse("stages=3 microbatches=1\n0: F0 . . . . B0 W0\n1: . F0 . . B0 . W0\n2: . . F0 B0 W0 . .")
    pairs = simulate(schedule, [Costs(5, 1, 1), Costs(), Costs()], waiting="pairs")
    assert pairs.start[1].tolist() == [5, 5, 0] and pairs.end[2].tolist() == [5, 6, 7]
    assert simulate(schedule, [Costs(5, 1, 1), Costs(), Costs()]).start[1].tolist() == [5, 5, 5]


def test_a_table_written_by_hand(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# a V of one stage\nname=mine placement=v\n0: F0 f0 b0 w0 B0 W0  # turn, then back\n")
    schedule = load(path)
    assert (schedule.name, schedule.placement, schedule.num_chunks, schedule.num_microbatches) == ("mine", "v", 2, 1)
    assert schedule.table[1] == (Action(Phase.F, 0, 1),)
    assert parse("F0 F0:1 B0:1 W0:1 B0 W0") == dataclasses.replace(schedule, name="table", placement="loop")
    assert parse("F0 F0:1 F0:2 B0:2 W0:2 b0 w0 B0 W0").num_chunks == 3


def test_text_that_cannot_be_read_names_line_and_cell(tmp_path):
    for text, message in {
        "F0 G0": "line 1, tick 1, stage 0: 'G0'",
        "F0\nF0 f0:1": "line 2, tick 1, stage 1: 'f0:1'",
        "F0 F\u0661": "tick 1, stage 0",
        "1: F0": "line 1: '1:'",
        "stages=2\nF0 B0 W0": "stages=2: ",
        "chunks=two\nF0 B0 W0": "chunks=two",
        "colour=red\nF0": "'colour=red'",
        "fused=maybe\nF0": "'fused=maybe'",
        "microbatches=2\nF0 B0 W0": "F of micro-batch 1, chunk 0 is missing",
        "microbatches=0\nF0 B0 W0": "0 micro-batches",
        "placement=v chunks=3\nF0": "a V must go down",
        "# nothing": "have actions",
        ". .": "have actions",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.txt")


@checked
@given(st.integers(1, 40), st.integers(1, 12), st.floats(0, 6), st.floats(0, 6))
def test_layers_are_divided_with_the_least_largest_cost(num_layers, num_parts, first, last):
    if num_layers < num_parts:
        with pytest.raises(ConfigError, match=f"{num_layers} layers over {num_parts} parts"):
            divide_layers(num_layers, num_parts, first, last)
        return

    def most(layers):
        ends = [first] + [0.0] * (num_parts - 1)
        ends[-1] += last
        return max(n + end for n, end in zip(layers, ends, strict=True))

    layers = divide_layers(num_layers, num_parts, first, last)
    assert sum(layers) == num_layers and min(layers) >= 1
    # Moving a layer from the dearest part to any other is no better; for one cost a part that is the optimum.
    for source, target in itertools.permutations(range(num_parts), 2):
        if layers[source] > 1:
            moved = list(layers)
            moved[source] -= 1
            moved[target] += 1
            assert most(moved) >= most(layers) - 1e-9
