from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from fleetx.boxes import Section, envs_box, overview_box
from fleetx.strategy import DistributedStrategy

TITLE = "DistributedStrategy Overview"


def expected(table):
    return dedent(table).strip("\n")


def test_the_guides_table_of_environments():
    envs = {
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:17901",
        "PADDLE_TRAINERS_NUM": 2,
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:17901,127.0.0.1:18846",
        "FLAGS_selected_gpus": "0",
        "PADDLE_TRAINER_ID": 0,
    }
    assert envs_box(envs) == expected("""
        +=======================================================================================+
        |                        Distributed Envs                      Value                    |
        +---------------------------------------------------------------------------------------+
        |                 PADDLE_CURRENT_ENDPOINT                 127.0.0.1:17901               |
        |                     PADDLE_TRAINERS_NUM                        2                      |
        |                PADDLE_TRAINER_ENDPOINTS         127.0.0.1:17901,127.0.0.1:18846       |
        |                     FLAGS_selected_gpus                        0                      |
        |                       PADDLE_TRAINER_ID                        0                      |
        +=======================================================================================+
    """)


def test_the_guides_overview_of_gradient_merge():
    section = Section("gradient_merge=True <-> gradient_merge_configs", {"k_steps": 4, "avg": True})
    assert overview_box(TITLE, [section]) == expected("""
        +==============================================================================+
        |                                                                              |
        |                         DistributedStrategy Overview                         |
        |                                                                              |
        +==============================================================================+
        |                gradient_merge=True <-> gradient_merge_configs                |
        +------------------------------------------------------------------------------+
        |                               k_steps                    4                   |
        |                                   avg                   True                 |
        +==============================================================================+
    """)


def test_the_guides_overview_of_amp_and_recompute():
    blocks = ["2a", "2b", "2c", "3a", "3b", "3c", "3d", "4a", "4b", "4c", "4d", "4e", "4f", "5a", "5b", "5c"]
    amp = {
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
    }
    recompute = {"checkpoints": [f"res{b}.add.output.5.tmp_0" for b in blocks], "enable_offload": False}
    sections = [
        Section("amp=True <-> amp_configs", amp),
        Section("recompute=True <-> recompute_configs", recompute),
    ]
    assert overview_box(TITLE, sections) == expected("""
        +==============================================================================+
        |                                                                              |
        |                         DistributedStrategy Overview                         |
        |                                                                              |
        +==============================================================================+
        |                           amp=True <-> amp_configs                           |
        +------------------------------------------------------------------------------+
        |                     init_loss_scaling                 32768.0                |
        |                    incr_every_n_steps                   1000                 |
        |               decr_every_n_nan_or_inf                    2                   |
        |                            incr_ratio                   2.0                  |
        |                            decr_ratio                   0.8                  |
        |              use_dynamic_loss_scaling                   True                 |
        +==============================================================================+
        |                     recompute=True <-> recompute_configs                     |
        +------------------------------------------------------------------------------+
        |                           checkpoints         res2a.add.output.5.tmp_0       |
        |                                               res2b.add.output.5.tmp_0       |
        |                                               res2c.add.output.5.tmp_0       |
        |                                               res3a.add.output.5.tmp_0       |
        |                                               res3b.add.output.5.tmp_0       |
        |                                               res3c.add.output.5.tmp_0       |
        |                                               res3d.add.output.5.tmp_0       |
        |                                               res4a.add.output.5.tmp_0       |
        |                                               res4b.add.output.5.tmp_0       |
        |                                               res4c.add.output.5.tmp_0       |
        |                                               res4d.add.output.5.tmp_0       |
        |                                               res4e.add.output.5.tmp_0       |
        |                                               res4f.add.output.5.tmp_0       |
        |                                               res5a.add.output.5.tmp_0       |
        |                                               res5b.add.output.5.tmp_0       |
        |                                               res5c.add.output.5.tmp_0       |
        |                        enable_offload                  False                 |
        +==============================================================================+
    """)


def test_the_guides_long_ratio_is_centred_as_the_guide_prints_it():
    row = overview_box(TITLE, [Section("amp", {"decr_ratio": 0.800000011920929})]).splitlines()[7]
    assert row == "|                            decr_ratio            0.800000011920929           |"


def test_nothing_to_show_is_one_row():
    lines = overview_box(TITLE, [], nothing="every feature is off").splitlines()
    assert lines[4:] == [lines[0], f"|{'every feature is off':^78}|", lines[0]]


def test_a_section_without_rows_keeps_its_header():
    lines = overview_box(TITLE, [Section("empty", {})]).splitlines()
    assert [line.strip("|").strip() for line in lines[5:6]] == ["empty"]
    assert lines[6].startswith("+-")
    assert lines[7].startswith("+=")


def test_an_empty_list_leaves_the_value_blank():
    row = overview_box(TITLE, [Section("s", {"names": []})]).splitlines()[7]
    assert row == f"|{'names':>38}{'':40}|"


def test_the_box_grows_with_the_longest_text_wherever_it_stands():
    long = "x" * 100
    assert len(envs_box({"K": long}).splitlines()[0]) == 2 + 40 + 2 + 100
    assert len(envs_box({long: 1}).splitlines()[0]) == 2 + 100 + 2 + 45
    assert len(overview_box(TITLE, [Section("s", {"k": ["a", long]})]).splitlines()[0]) == 2 + 38 + 2 + 100
    assert len(overview_box(long, []).splitlines()[0]) == 2 + 100
    assert len(overview_box(TITLE, [Section(long, {})]).splitlines()[0]) == 2 + 100
    assert len(overview_box(TITLE, [], nothing=long).splitlines()[0]) == 2 + 100


def test_a_value_of_several_lines_stays_inside_the_box():
    lines = envs_box({"A": "one\ntwo", "B": "three"}).splitlines()
    assert [line.split() for line in lines[3:6]] == [
        ["|", "A", "one", "|"],
        ["|", "two", "|"],
        ["|", "B", "three", "|"],
    ]


values = st.text() | st.integers() | st.none() | st.lists(st.text(), max_size=4)
keys = st.text(st.characters(exclude_categories=("C", "Z")))


@given(st.lists(st.builds(Section, keys, st.dictionaries(keys, values, max_size=4)), max_size=3))
def test_every_line_of_any_box_is_equally_long(sections):
    lines = overview_box(TITLE, sections).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert all(line[0] == line[-1] and line[0] in "+|" for line in lines)
    assert lines[0] == lines[-1]


@given(st.dictionaries(keys, values, max_size=5))
def test_every_line_of_any_table_is_equally_long(envs):
    assert len({len(line) for line in envs_box(envs).split("\n")}) == 1


def body(strategy):
    return [line.strip("|").split() for line in str(strategy).splitlines()[5:] if line.startswith("|")]


def test_a_strategy_prints_the_guides_overview():
    configs = {"k_steps": 4, "avg": True}
    strategy = DistributedStrategy(gradient_merge=True, gradient_merge_configs=configs)
    assert str(strategy) == overview_box(TITLE, [Section("gradient_merge=True <-> gradient_merge_configs", configs)])


def test_a_strategy_shows_what_is_on_and_what_was_changed():
    assert body(DistributedStrategy()) == [["every", "feature", "is", "off"]]
    strategy = DistributedStrategy(
        recompute=True,
        recompute_configs={"checkpoints": ["layer1", "layer2"], "memory_budget": "30GiB"},
        fp16_allreduce=True,
        fuse_grad_size_in_MB=16,
        lamb_configs={"lamb_weight_decay": 0.5},
    )
    assert body(strategy) == [
        ["recompute=True", "<->", "recompute_configs"],
        ["checkpoints", "layer1"],
        ["layer2"],
        ["enable_offload", "False"],
        ["memory_budget", "30GiB"],
        ["communication", "and", "other", "settings"],
        ["fuse_grad_size_in_MB", "16"],
        ["fp16_allreduce", "True"],
    ]


def test_a_terminal_that_is_too_narrow_gets_a_list():
    strategy = DistributedStrategy(lars=True, lars_configs={"exclude_from_weight_decay": ["batch_norm", "bias"]})
    assert strategy.overview(80) == str(strategy)
    listed = strategy.overview(79).splitlines()
    assert listed[:2] == [TITLE, "lars=True <-> lars_configs"]
    at = listed.index("  exclude_from_weight_decay batch_norm")
    assert listed[at + 1] == "     bias"
    assert all(len(line) <= 40 for line in listed)
    assert DistributedStrategy().overview(40) == f"{TITLE}\nevery feature is off"
